"""Models with linear-attention layers: the repaired forward pass, the ways back of states, sealed layers beside."""

import copy
import functools
import importlib
import subprocess
import sys
import threading

import pytest
import torch
import transformers
from kvpress import KeyDiffPress, KnormPress, KVPressTextGenerationPipeline
from press_helpers import SHORT, left_padded, leftovers, positions
from sealing import certain_codes, forward, full_layers, lengths, prompt_ids, sampled_codes, seal
from torch.testing import assert_close
from transformers import AutoTokenizer, Cache, DynamicCache

from verkv import KVzipPress, PoissonCompPress, VerKVPress, make_cache
from verkv.cache import VerKVCache, VerKVHybridCache, VerKVLayer
from verkv.context import SealedContext
from verkv.demo_model import demo_model_path
from verkv.hybrid import LinearLayer
from verkv.kvfetch import FetchConfig
from verkv.rotary import rotary_dim
from verkv.sketches import RopePairSketch
from verkv.window import LogicalKV

KINDS = ["qwen3_5", "qwen3_next"]
N_CONTEXT, N_TOTAL = 80, 98
STEPS = [(0, 80), (80, 87), (87, 88), (88, 93), (93, 94), (94, 98)]  # several tokens also after single ones
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
FETCH_ALL = {"fetch": FetchConfig(1e-30, shortlist=4), "sketch": RopePairSketch()}
STATES = {"certain": (certain_codes, {}), "fetching": (sampled_codes, FETCH_ALL)}
EXACT = {"epsilon": 1e-9, **SHORT}


def dense_logits(model, ids, **kwargs):
    """One pass without a cache."""
    with torch.no_grad():
        return model(ids, use_cache=False, **kwargs).logits


def own_cache(model):
    """The cache transformers would make."""
    module = sys.modules[type(model).__module__]
    name = type(model).__name__.replace("ForCausalLM", "DynamicCache")
    return getattr(module, name)(config=model.config)


def delta_net(model):
    """The first linear-attention layer."""
    return model.model.layers[0].linear_attn


def prefilled(model, ids, n_context=N_CONTEXT):
    cache = make_cache(model.config)
    forward(model, ids[:, :n_context], cache)
    return cache


def sealed(model, ids, state="fetching"):
    cache = prefilled(model, ids)
    make_codes, options = STATES[state]
    seal(model, cache, make_codes, **options)
    return cache


def states(cache):
    """Copies of all linear states."""
    return [(s.conv.clone(), s.recurrent.clone(), s.length) for s in (layer.state for layer in linear(cache))]


def linear(cache):
    return [layer for layer in cache.layers if isinstance(layer, LinearLayer)]


def kvpress_rollback(cache, n_tokens):
    """As KVPress' pipeline takes an answer out of a cache."""
    for layer in cache.layers:
        layer.keys = layer.keys[:, :, :n_tokens]
        layer.values = layer.values[:, :, :n_tokens]


# --- the repair -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "qwen3_5_moe"])
@pytest.mark.parametrize("batch", [1, 2])
def test_second_pass_continues_the_first(tiny_model, kind, batch):
    """And without the repair it does not: transformers' own cache is as it was."""
    model, ids = tiny_model(kind, initializer_range=0.05), prompt_ids(batch, 40)
    expected = dense_logits(model, ids)[:, 30:]
    for cache, repaired in ((make_cache(model.config), True), (own_cache(model), False)):
        forward(model, ids[:, :30], cache)
        error = (forward(model, ids[:, 30:], cache) - expected).abs().max()
        assert error < 1e-5 if repaired else error > 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("widths", [(1, 1, 2, 1, 30), (2, 3, 2, 1, 1), (70, 70, 3), (3, 1, 64, 65)], ids=str)
def test_any_split_into_passes(tiny_model, kind, widths):
    """Shorter than the convolution's kernel, and across chunks of 64."""
    model, ids = tiny_model(kind, initializer_range=0.05), prompt_ids(2, sum(widths))
    cache = make_cache(model.config)
    logits = [forward(model, part, cache) for part in ids.split(widths, dim=1)]
    assert_close(torch.cat(logits, 1), dense_logits(model, ids), atol=1e-5, rtol=0.0)
    assert lengths(cache) == [sum(widths)] * 4


def test_fast_convolution_is_used_where_there_is_one(tiny_model):
    model, ids = tiny_model("qwen3_5"), prompt_ids(1, 40)
    expected, calls = dense_logits(model, ids), []

    def fast(net, x, weight, bias, activation, seq_idx):
        calls.append(x.shape[-1])
        return torch.nn.functional.silu(net.conv1d(x)[..., : x.shape[-1]])

    for layer in model.model.layers[::2]:
        layer.linear_attn.causal_conv1d_fn = functools.partial(fast, layer.linear_attn)
    cache = prefilled(model, ids, 30)
    assert_close(forward(model, ids[:, 30:], cache), expected[:, 30:], **TOLERANCE)
    assert calls == [30, 30, 14, 14]  # the kernel's four remembered inputs before the ten new ones


def test_repair_is_made_once_and_only_when_needed(tiny_model):
    model = tiny_model("qwen3_5")
    make_cache(model.config)
    repaired = type(delta_net(model)).forward
    make_cache(model.config)
    with VerKVPress(KnormPress(), 0.5)(model):
        pass
    assert type(delta_net(model)).forward is repaired
    assert not hasattr(repaired.__wrapped__, "__wrapped__")
    code = """
        import verkv.hybrid, verkv.cache, verkv.presses
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet as Net
        before = Net.forward
        assert not hasattr(before, "__wrapped__")
        from transformers import LlamaConfig, Qwen3_5TextConfig
        verkv.make_cache(LlamaConfig())
        assert Net.forward is before
        verkv.make_cache(Qwen3_5TextConfig())
        assert Net.forward is not before
    """
    subprocess.run([sys.executable, "-c", "\n".join(line.strip() for line in code.splitlines())], check=True)


def test_layer_that_kept_its_unrepaired_function_is_noticed(tiny_model):
    """As hooks for several devices do: they store the function that was there."""
    model, ids = tiny_model("qwen3_5"), prompt_ids(1, 10)
    cache, net = make_cache(model.config), delta_net(model)
    net.forward = functools.partial(type(net).forward.__wrapped__, net)
    with pytest.raises(RuntimeError, match=r"make_cache\(config\) once before the model is loaded"):
        forward(model, ids, cache)


def test_two_threads_on_one_model(tiny_model):
    model = tiny_model("qwen3_5")
    ids = [prompt_ids(1, 90, seed) for seed in range(4)]
    expected = [dense_logits(model, row) for row in ids]
    actual = [None] * len(ids)

    def run(i):
        cache = make_cache(model.config)
        actual[i] = torch.cat([forward(model, part, cache) for part in ids[i].split(9, dim=1)], 1)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(ids))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for logits, wanted in zip(actual, expected, strict=True):
        assert_close(logits, wanted, **TOLERANCE)


# --- dense logits after sealing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_sealed_context_reproduces_dense_logits(tiny_model, kind, attn, batch, state):
    model, ids = tiny_model(kind, attn), prompt_ids(batch, N_TOTAL)
    cache = sealed(model, ids, state)
    logits = [forward(model, ids[:, start:stop], cache) for start, stop in STEPS[1:]]
    assert_close(torch.cat(logits, 1), dense_logits(model, ids)[:, N_CONTEXT:], **TOLERANCE)
    assert [getattr(layer, "sealed", None) for layer in cache.layers] == [None, True] * 2
    assert lengths(cache) == [N_TOTAL] * 4
    assert (cache.stats.fetch_rate() == 1.0) == (state == "fetching")


def test_sampled_context_differs_from_dense(tiny_model):
    """Otherwise the comparison above compares dense with dense."""
    model, ids = tiny_model("qwen3_5"), prompt_ids(1, N_TOTAL)
    cache = prefilled(model, ids)
    seal(model, cache, sampled_codes, keep_host=False)
    difference = forward(model, ids[:, N_CONTEXT:], cache) - dense_logits(model, ids)[:, N_CONTEXT:]
    assert difference.abs().max() > 0.02


def test_context_in_chunks(tiny_model):
    model, ids = tiny_model("qwen3_5"), prompt_ids(1, N_TOTAL)
    cache = make_cache(model.config)
    for part in ids[:, :N_CONTEXT].split(33, dim=1):
        forward(model, part, cache)
    seal(model, cache)
    expected = dense_logits(model, ids)
    for _ in range(2):  # and back to the end of the last chunk
        for start, stop in STEPS[1:]:
            assert_close(forward(model, ids[:, start:stop], cache), expected[:, start:stop], **TOLERANCE)
        cache.crop(N_CONTEXT)


def test_sealing_frees_the_graph_of_a_prefill_with_gradients(tiny_model):
    model, ids = tiny_model("qwen3_5"), prompt_ids(1, N_TOTAL)
    cache = make_cache(model.config)
    model(ids[:, :N_CONTEXT], past_key_values=cache)
    seal(model, cache)
    assert not any(t.requires_grad for layer in linear(cache) for t in (layer.state.conv, layer.state.recurrent))


def test_prefill_in_inference_mode_and_decoding_without(tiny_model):
    model, ids = tiny_model("qwen3_5"), prompt_ids(1, N_TOTAL)
    cache = make_cache(model.config)
    with torch.inference_mode():
        model(ids[:, :N_CONTEXT], past_key_values=cache)
    seal(model, cache)
    for start, stop in STEPS[1:]:
        assert_close(forward(model, ids[:, start:stop], cache), dense_logits(model, ids)[:, start:stop], **TOLERANCE)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_left_padded_batch_gives_every_row_what_it_gets_alone(tiny_model, kind, attn, state):
    """transformers masks the padding of these models in batches of more than one row, in the first pass."""
    model = tiny_model(kind, attn)
    rows = [prompt_ids(1, N_TOTAL), prompt_ids(1, N_TOTAL - 23, seed=2)]
    ids, mask = left_padded(rows)
    position_ids, n_padding = positions(mask), torch.tensor([0, 23])
    cache, logits = make_cache(model.config), []
    for start, stop in STEPS:
        kwargs = {"attention_mask": mask[:, :stop], "position_ids": position_ids[:, start:stop]}
        logits.append(forward(model, ids[:, start:stop], cache, **kwargs))
        if start == 0:
            make_codes, options = STATES[state]
            seal(model, cache, make_codes, n_padding, **options)
    logits = torch.cat(logits, 1)
    for i, row in enumerate(rows):
        assert_close(logits[i : i + 1, n_padding[i] :], dense_logits(model, row), **TOLERANCE)


# --- ways back --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rollback", [kvpress_rollback, VerKVCache.crop], ids=["kvpress", "crop"])
@pytest.mark.parametrize("state", [*STATES, "unsealed"])
@pytest.mark.parametrize("kind", KINDS)
def test_several_questions_about_one_context(tiny_model, kind, state, rollback):
    model, context = tiny_model(kind), prompt_ids(1, N_CONTEXT)
    cache = prefilled(model, context) if state == "unsealed" else sealed(model, context, state)
    before = states(cache)
    for seed, n_tokens in ((1, 5), (2, 30), (1, 5)):
        tokens = prompt_ids(1, n_tokens, seed)
        expected = dense_logits(model, torch.cat([context, tokens], 1))[:, N_CONTEXT:]
        widths = (n_tokens - 2, 1, 1)
        logits = [forward(model, part, cache) for part in tokens.split(widths, dim=1)]
        assert_close(torch.cat(logits, 1), expected, **TOLERANCE)
        rollback(cache, N_CONTEXT)
        assert lengths(cache) == [N_CONTEXT] * 4
        assert_close(states(cache), before, atol=0.0, rtol=0.0)


def test_way_back_before_the_last_pass_and_to_nothing(tiny_model):
    model, ids = tiny_model("qwen3_5"), prompt_ids(1, N_TOTAL)
    cache = prefilled(model, ids)
    forward(model, ids[:, 80:87], cache)
    forward(model, ids[:, 87:88], cache)
    for length in (87, -7):  # the second: back to the context
        cache.crop(length)
    assert lengths(cache) == [N_CONTEXT] * 4
    assert_close(forward(model, ids[:, 80:], cache), dense_logits(model, ids)[:, 80:], **TOLERANCE)
    cache.crop(0)
    assert lengths(cache) == [0] * 4 and not cache.has_previous_state
    assert_close(forward(model, ids, cache), dense_logits(model, ids), **TOLERANCE)


@pytest.mark.parametrize("state", [*STATES, "unsealed"])
def test_forgotten_states_are_refused_and_nothing_is_changed(tiny_model, state):
    model, ids = tiny_model("qwen3_5"), prompt_ids(1, N_TOTAL)
    cache = prefilled(model, ids) if state == "unsealed" else sealed(model, ids, state)
    for start, stop in STEPS[1:4]:
        forward(model, ids[:, start:stop], cache)
    for length in (85, 40, -1, -20):
        with pytest.raises(ValueError, match=r"it can go back to 0 or 80 or 88 tokens"):
            cache.crop(length)
    with pytest.raises(ValueError, match=r"keeps no state of 85 tokens"):
        cache.layers[0].keys = cache.layers[0].keys[:, :, :85]
    with pytest.raises(NotImplementedError, match="cannot be replaced"):
        cache.layers[0].values = torch.zeros(1)
    with pytest.raises(NotImplementedError, match="has only states"):
        cache.layers[0].update(torch.zeros(1), torch.zeros(1))
    cache.crop(N_TOTAL)
    assert isinstance(cache.layers[0].values, LogicalKV)
    assert lengths(cache) == [93] * 4
    assert_close(forward(model, ids[:, 93:], cache), dense_logits(model, ids)[:, 93:], **TOLERANCE)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", KINDS)
def test_reset_gives_an_empty_cache_that_can_be_used_again(tiny_model, kind, state):
    model, ids = tiny_model(kind), prompt_ids(2, N_TOTAL, seed=3)
    cache = sealed(model, prompt_ids(1, N_TOTAL), state)
    forward(model, prompt_ids(1, 2), cache)
    cache.reset()
    assert lengths(cache) == [0] * 4 and not cache.has_previous_state and cache.stats is None
    assert all(
        [sibling for _, sibling in layer._siblings] == cache.layers for layer in cache.layers
    )  # half a forward pass is still noticed
    assert sum(cache.memory_report().device_uncharged.values()) == 0
    expected = dense_logits(model, ids)
    assert_close(forward(model, ids[:, :N_CONTEXT], cache), expected[:, :N_CONTEXT], **TOLERANCE)
    seal(model, cache, STATES[state][0], **STATES[state][1])
    for start, stop in STEPS[1:]:
        assert_close(forward(model, ids[:, start:stop], cache), expected[:, start:stop], **TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_deepcopy_is_independent(tiny_model, kind):
    model, ids = tiny_model(kind), prompt_ids(1, N_TOTAL)
    cache = sealed(model, ids)
    twin = copy.deepcopy(cache)
    expected, before = dense_logits(model, ids), states(cache)
    for used in (twin, cache):
        for start, stop in STEPS[1:]:
            assert_close(forward(model, ids[:, start:stop], used), expected[:, start:stop], **TOLERANCE)
        if used is twin:
            assert lengths(cache) == [N_CONTEXT] * 4
            assert_close(states(cache), before, atol=0.0, rtol=0.0)


def test_two_caches_interleaved_on_one_model(tiny_model):
    model, ids = tiny_model("qwen3_5"), [prompt_ids(1, N_TOTAL, seed) for seed in (1, 2)]
    caches = [sealed(model, row) for row in ids]
    for start, stop in STEPS[1:]:
        for row, cache in zip(ids, caches, strict=True):
            expected = dense_logits(model, row)[:, start:stop]
            assert_close(forward(model, row[:, start:stop], cache), expected, **TOLERANCE)


# --- batches and generation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", KINDS)
def test_batch_operations_move_states_and_ways_back(tiny_model, kind, state):
    model, ids = tiny_model(kind), prompt_ids(2, N_CONTEXT + 4)
    cache = sealed(model, ids, state)
    forward(model, ids[:, N_CONTEXT : N_CONTEXT + 2], cache)
    forward(model, ids[:, N_CONTEXT + 2 :], cache)
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([4, 0, 2, 1, 5, 5]))
    cache.batch_select_indices(torch.tensor([0, 1, 5]))
    ids = ids[[1, 0, 1]]
    new = prompt_ids(3, 3, seed=5)
    expected = dense_logits(model, torch.cat([ids, new], 1))[:, -3:]
    twin = copy.deepcopy(cache)
    actual = torch.cat([forward(model, new[:, :2], cache), forward(model, new[:, 2:], cache)], 1)
    assert_close(actual, expected, **TOLERANCE)
    for n_kept in (N_CONTEXT + 2, N_CONTEXT):  # before the last pass, and the context's end
        twin.crop(n_kept)
        expected = dense_logits(model, torch.cat([ids[:, :n_kept], new], 1))[:, -3:]
        assert_close(forward(model, new, copy.deepcopy(twin)), expected, **TOLERANCE)


def test_batch_operations_on_an_empty_cache(tiny_model):
    cache = make_cache(tiny_model("qwen3_5").config)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([0]))
    assert lengths(cache) == [0] * 4


MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 2.0},
    "beams": {"do_sample": False, "num_beams": 3},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("when", ["after", "inside"])
@pytest.mark.parametrize("kind", KINDS)
def test_generate_gives_the_tokens_of_the_dense_cache(tiny_model, kind, when, mode):
    model, ids = tiny_model(kind), prompt_ids(1, N_TOTAL)
    options = {"max_new_tokens": 16, "eos_token_id": None, "attention_mask": torch.ones_like(ids), **MODES[mode]}
    torch.manual_seed(1)
    expected = model.generate(ids, **options)  # transformers' cache: one prefill, then token by token
    press = VerKVPress(KnormPress(), 0.5, **EXACT)
    if when == "after":
        cache = sealed(model, ids)
        cache.batch_repeat_interleave(options.get("num_beams", 1))
        torch.manual_seed(1)
        actual = model.generate(ids, past_key_values=cache, **options)
    else:
        torch.manual_seed(1)
        with press(model):
            actual = model.generate(ids, past_key_values=make_cache(model.config), **options)
        assert press.stats.sealed_layers == (1, 3)
    assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize("state", [*STATES, "unsealed"])
def test_prompt_lookup_is_refused_by_transformers(tiny_model, state):
    model, ids = tiny_model("qwen3_5"), prompt_ids(1, N_TOTAL)
    cache = prefilled(model, ids) if state == "unsealed" else sealed(model, ids, state)
    with pytest.raises(ValueError, match="stateful"):
        model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=2)


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [1, 3])
@pytest.mark.parametrize("n_before", [0, 3], ids=["first_pass", "later_pass"])
@pytest.mark.parametrize("kind", KINDS)
def test_failed_forward_is_rolled_back(tiny_model, monkeypatch, kind, n_before, failing):
    model, ids = tiny_model(kind), prompt_ids(1, N_TOTAL)
    cache = sealed(model, ids, "certain")
    start = N_CONTEXT + n_before
    if n_before:
        forward(model, ids[:, N_CONTEXT:start], cache)
    before, attend = states(cache), SealedContext.attend

    def fail(self, *args):
        if self.layer_idx == failing:
            raise KeyboardInterrupt
        return attend(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(SealedContext, "attend", fail)
        for width in (2, 1):
            with pytest.raises(KeyboardInterrupt):
                forward(model, ids[:, start : start + width], cache)
            assert lengths(cache) == [start] * 4
            assert_close(states(cache), before, atol=0.0, rtol=0.0)
    assert_close(forward(model, ids[:, start:], cache), dense_logits(model, ids)[:, start:], **TOLERANCE)


@pytest.mark.parametrize("where", ["layers.2.mlp", "layers.2.linear_attn.out_proj", "layers.0.linear_attn.out_proj"])
@pytest.mark.parametrize("state", [*STATES, "unsealed"])
@pytest.mark.parametrize("width", [1, 2])
def test_interrupted_forward_is_noticed_and_can_be_cropped(tiny_model, where, state, width):
    """An exception outside VerKV: some layers hold the pass, some do not. A layer's own state is whole."""
    model, ids = tiny_model("qwen3_5"), prompt_ids(1, N_TOTAL)
    cache = prefilled(model, ids) if state == "unsealed" else sealed(model, ids, state)
    start = N_CONTEXT + 3
    forward(model, ids[:, N_CONTEXT:start], cache)
    before = states(cache)

    def interrupt(module, args, output):
        raise KeyboardInterrupt

    handle = model.model.get_submodule(where).register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward(model, ids[:, start : start + width], cache)
    handle.remove()
    if where.startswith("layers.2"):
        for _ in range(2):  # also when it is tried again
            with pytest.raises(ValueError, match=rf"cache\.crop\({start}\)"):
                forward(model, ids[:, start : start + 1], cache)
        cache.crop(start)
    assert lengths(cache) == [start] * 4
    assert_close(states(cache), before, atol=0.0, rtol=0.0)
    assert_close(forward(model, ids[:, start:], cache), dense_logits(model, ids)[:, start:], **TOLERANCE)


@pytest.mark.parametrize("press_class", [PoissonCompPress, VerKVPress])
def test_failed_prefill_leaves_an_empty_cache(tiny_model, press_class):
    model, ids = tiny_model("qwen3_5"), prompt_ids(1, N_TOTAL)
    cache = make_cache(model.config)

    def interrupt(module, args, output):
        raise KeyboardInterrupt

    handle = model.model.layers[2].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), press_class(KnormPress(), 0.5, **SHORT)(model):
        forward(model, ids, cache)
    handle.remove()
    assert lengths(cache) == [0] * 4 and leftovers(model) == []
    assert_close(forward(model, ids, cache), dense_logits(model, ids), **TOLERANCE)


def test_failed_sealing_brings_layers_back(tiny_model):
    class Broken(RopePairSketch):
        def build(self, keys, queries=None, positions=None):
            raise ValueError("broken")

    model, ids = tiny_model("qwen3_5"), prompt_ids(1, N_TOTAL)
    cache = prefilled(model, ids)
    with pytest.raises(ValueError, match="broken"):
        seal(model, cache, sampled_codes, fetch=FetchConfig(), sketch=Broken())
    assert_close(forward(model, ids[:, 80:], cache), dense_logits(model, ids)[:, 80:], **TOLERANCE)


# --- presses ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model_path())


@pytest.fixture(scope="module")
def pipelines(tiny_model, tokenizer):
    """KVPress' pipeline over tiny models with SmolLM2's vocabulary."""
    return {
        kind: KVPressTextGenerationPipeline(
            model=tiny_model(kind, vocab_size=49152, eos_token_id=49151), tokenizer=tokenizer
        )
        for kind in KINDS
    }


CONTEXT = "The lighthouse keeper counted the ships that passed before dawn and wrote each name in a narrow book. " * 6
QUESTIONS = ["Who counted the ships?", "What is in the book, and how narrow is it?", "Who counted the ships?"]
SCORERS = {
    "knorm": lambda tokenizer: KnormPress(),
    "keydiff": lambda tokenizer: KeyDiffPress(),
    "kvzip": lambda tokenizer: KVzipPress(tokenizer=tokenizer, chunk_size=50),
}


def ask(pipeline, press, questions=QUESTIONS):
    cache = make_cache(pipeline.model.config)
    return pipeline(CONTEXT, questions=questions, press=press, cache=cache, max_new_tokens=6)["answers"]


def answers_without_a_cache(pipeline):
    """Greedy decoding from scratch at every step."""
    inputs = pipeline.preprocess(CONTEXT, QUESTIONS, answer_prefix="", max_context_length=4096)
    answers = []
    for question in inputs["questions_ids"]:
        ids = torch.cat([inputs["context_ids"], question], 1)
        n_prompt = ids.shape[1]
        for _ in range(6):
            ids = torch.cat([ids, dense_logits(pipeline.model, ids)[:, -1:].argmax(-1)], 1)
        answers.append(pipeline.tokenizer.decode(ids[0, n_prompt:], skip_special_tokens=True))
    return answers


@pytest.mark.parametrize("kind", KINDS)
def test_questions_through_kvpress_pipeline(pipelines, tokenizer, kind):
    """The first question is asked again last. Without a press the cache is the dense baseline's."""
    pipeline = pipelines[kind]
    expected = answers_without_a_cache(pipeline)
    assert expected[0] == expected[2] != expected[1]
    assert ask(pipeline, None) == expected
    for make_scorer in SCORERS.values():
        press = VerKVPress(make_scorer(tokenizer), 0.6, **EXACT)
        assert ask(pipeline, press) == expected
        assert press.stats.sealed_layers == (1, 3) and press.stats.n_passes == 18
    assert ask(pipeline, VerKVPress(KnormPress(), 0.0)) == expected  # not sealed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alone", [False, True], ids=["poissoncomp", "kvzip"])
def test_lossy_presses_keep_the_context_between_questions(pipelines, tokenizer, kind, alone):
    press = KVzipPress(0.5, tokenizer=tokenizer)
    press = press if alone else PoissonCompPress(press, 0.6, **SHORT)
    answers = ask(pipelines[kind], press)
    assert answers[0] == answers[2]
    assert ask(pipelines[kind], press, QUESTIONS[1:2]) == answers[1:2]
    assert press.stats.sealed_layers == (1, 3)


@pytest.mark.parametrize("chunk_size", [2048, 30])
@pytest.mark.parametrize("kind", KINDS)
def test_replay_leaves_the_cache_as_it_was(pipelines, tokenizer, kind, chunk_size):
    model, ids = pipelines[kind].model, tokenizer(CONTEXT, return_tensors="pt").input_ids
    cache = prefilled(model, ids, ids.shape[1])
    before = states(cache), [layer.keys.clone() for layer in cache.layers[1::2]]
    source = KVzipPress(tokenizer=tokenizer, chunk_size=chunk_size).source()
    source.prepare(model)
    with torch.no_grad():
        scores = source.after_prefill(model, cache, ids, None)
    assert sorted(scores) == [1, 3]
    assert all(score.shape == (1, 2, ids.shape[1]) and score.max() > 0 for score in scores.values())
    assert_close((states(cache), [layer.keys for layer in cache.layers[1::2]]), before, atol=0.0, rtol=0.0)
    assert lengths(cache) == [ids.shape[1]] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_replay_of_a_left_padded_batch_scores_rows_as_alone(pipelines, tokenizer, kind):
    model = pipelines[kind].model
    rows = [tokenizer(text, return_tensors="pt").input_ids for text in (CONTEXT[:400], CONTEXT[100:380])]
    ids, mask = left_padded(rows)
    cache = make_cache(model.config)
    forward(model, ids, cache, attention_mask=mask, position_ids=positions(mask))
    before = states(cache)
    source = KVzipPress(tokenizer=tokenizer, chunk_size=30).source()
    source.prepare(model)
    with torch.no_grad():
        together = source.after_prefill(model, cache, ids, mask)
        for i, row in enumerate(rows):
            alone = source.after_prefill(model, prefilled(model, row, row.shape[1]), row, None)
            for layer, scores in alone.items():
                assert_close(together[layer][i : i + 1, :, -row.shape[1] :], scores, atol=1e-4, rtol=1e-3)
    assert_close(states(cache), before, atol=0.0, rtol=0.0)


def test_memory_report_counts_states_but_does_not_charge_them(tiny_model):
    model, ids = tiny_model("qwen3_5"), prompt_ids(1, N_TOTAL)
    cache = sealed(model, ids)
    state = sum(layer.state.conv.nbytes + layer.state.recurrent.nbytes for layer in linear(cache))
    report = cache.memory_report()
    assert report.device_uncharged["linear_states"] == state > 0
    assert report.full_bytes == 2 * 2 * 2 * N_CONTEXT * 32 * 4 and "unsealed" not in report.device
    forward(model, ids[:, 80:87], cache)
    assert cache.memory_report().device_uncharged["linear_states"] == 2 * state  # `before` is the context
    forward(model, ids[:, 87:88], cache)
    assert cache.memory_report().device_uncharged["linear_states"] == 3 * state


def test_rotated_channels():
    config = transformers.Qwen3NextConfig()
    assert (config.head_dim, rotary_dim(config)) == (256, 64)
    assert rotary_dim(transformers.Qwen3_5Config()) == rotary_dim(transformers.Qwen3_5TextConfig()) == 64
    given = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}
    assert rotary_dim(transformers.Qwen3_5TextConfig(head_dim=128, rope_parameters=given)) == 64


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["own", "own_with_a_prompt", "dynamic", "dynamic_of_config", "none"])
@pytest.mark.parametrize("press_class", [PoissonCompPress, VerKVPress, KVzipPress])
@pytest.mark.parametrize("kind", KINDS)
def test_other_caches_are_refused_before_the_prefill(tiny_model, tokenizer, kind, press_class, make):
    model, ids = tiny_model(kind), prompt_ids(1, N_TOTAL)
    caches = {
        "own": own_cache(model),
        "own_with_a_prompt": own_cache(model),
        "dynamic": DynamicCache(),
        "dynamic_of_config": DynamicCache(config=model.config),
        "none": None,
    }
    press = KVzipPress(0.5, tokenizer=tokenizer) if press_class is KVzipPress else press_class(KnormPress(), 0.5)
    forward(model, ids[:, :5], caches["own_with_a_prompt"])
    advice = r"past_key_values is .*; pass verkv\.make_cache\(model\.config\)"

    def run(*args):
        pytest.fail("the prefill has begun")

    handle = model.model.layers[0].register_forward_pre_hook(run)
    with pytest.raises(NotImplementedError, match=advice), press(model):
        forward(model, ids, caches[make])
    with pytest.raises(NotImplementedError, match=advice), press(model):
        model.generate(ids, past_key_values=caches[make], max_new_tokens=2)
    handle.remove()
    assert leftovers(model) == []
    if make == "none":
        with pytest.raises(NotImplementedError, match=advice), press(model):
            model.generate(ids, max_new_tokens=2)


def test_pipeline_without_a_cache_is_refused(pipelines):
    with pytest.raises(NotImplementedError, match=r"is a DynamicCache.*make_cache\(model\.config\)"):
        pipelines["qwen3_5"](CONTEXT, question="Who?", press=VerKVPress(KnormPress(), 0.5))


def test_newer_transformers_are_refused(tiny_model, monkeypatch):
    monkeypatch.setattr(Cache, "update_conv_state", lambda self: None, raising=False)
    model = tiny_model("qwen3_5")
    with pytest.raises(NotImplementedError, match=r"transformers 5\.2 to 5\.4"):
        make_cache(model.config)
    with pytest.raises(NotImplementedError, match=r"transformers 5\.2 to 5\.4"), VerKVPress(KnormPress(), 0.5)(model):
        pass


def test_make_cache_follows_the_config(tiny_model):
    model = tiny_model("qwen3_5")
    cache = make_cache(model.config)
    assert isinstance(cache, VerKVHybridCache) and isinstance(cache, VerKVCache)
    assert [type(layer) for layer in cache.layers] == [LinearLayer, VerKVLayer] * 2
    assert full_layers(model) == [1, 3]
    assert len(cache) == len(cache.conv_states) == len(cache.recurrent_states) == 4
    assert cache.conv_states[0] is None and cache.recurrent_states[1] is None
    assert not cache.is_initialized and not cache.is_compileable and cache.get_max_cache_shape() == -1
    assert importlib.import_module("verkv").make_cache is make_cache
