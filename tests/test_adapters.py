"""PEFT adapters on the model: a press on the wrapper or on the model inside compresses the adapted model's cache."""

import contextlib
import itertools
import warnings

import pytest
import torch
from kvpress import KnormPress, KVPressTextGenerationPipeline, SnapKVPress
from kvpress.presses.fastkvzip_press import FastKVzipGate
from press_helpers import SHORT, full_layers, leftovers, prefill, random_ids
from sealing import lengths, seal
from torch.testing import assert_close
from transformers import AutoTokenizer, DynamicCache

from verkv import FastKVzipPress, KVzipPress, PoissonCompPress, VerKVPress, make_cache
from verkv.demo_model import demo_model_path

peft = pytest.importorskip("peft", reason="needs PEFT: pip install peft")

N_CONTEXT, WIDTHS = 80, (4, 1, 1, 3)
EXACT = {"epsilon": 1e-9, "shortlist": 4, "seed": 0, **SHORT}
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
KINDS = ["llama", "qwen3", "gemma3", "qwen3_5"]


class ByteTokenizer:
    """Enough of a tokenizer for KVzip's replay with a vocabulary of 256."""

    chat_template = None

    def encode(self, text, return_tensors="pt", add_special_tokens=False):
        return torch.tensor([[3 + byte % 250 for byte in text.encode()[::8]]])


def kvzip(ratio=0.0):
    return KVzipPress(ratio, tokenizer=ByteTokenizer(), chunk_size=30)


def gates(config):
    group = config.num_attention_heads // config.num_key_value_heads
    sizes = config.hidden_size, config.num_key_value_heads, group
    return [FastKVzipGate(i, *sizes, torch.float32) for i in range(config.num_hidden_layers)]


SCORERS = {
    "knorm": lambda config: KnormPress(),
    "kvzip": lambda config: kvzip(),
    "fastkvzip": lambda config: FastKVzipPress(gates=gates(config)),
}


def lora(**options):
    """A LoRA adapter that is not zero, as after training."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": PROJECTIONS, "init_lora_weights": False, **options}
    return peft.LoraConfig(task_type="CAUSAL_LM", **options)


def adapt(model, config=None):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return peft.get_peft_model(model, config or lora()).eval()


@pytest.fixture
def llama(tiny_model):
    return adapt(tiny_model("llama"))


INSIDE = {  # what a press may be given, and a forward pass may be made with
    "wrapper": lambda wrapper: wrapper,
    "tuner": lambda wrapper: wrapper.base_model,
    "model": lambda wrapper: wrapper.base_model.model,
}


def ids():
    return random_ids(1, N_CONTEXT)


def tokens():
    return random_ids(1, sum(WIDTHS), seed=7)


@torch.no_grad()
def dense(model, context=None):
    """Logits of all tokens behind the context, in one pass without a cache."""
    context = ids() if context is None else context
    return model(torch.cat([context, tokens()], 1), use_cache=False).logits[:, N_CONTEXT:]


@torch.no_grad()
def logits(model, cache):
    return torch.cat([model(part, past_key_values=cache).logits for part in tokens().split(WIDTHS, 1)], 1)


@torch.no_grad()
def compressed(forward, press, target, cache=None):
    """A cache prefilled with one model in the block of another."""
    cache = DynamicCache() if cache is None else cache
    with press(target):
        forward(ids(), past_key_values=cache)
    return cache


# --- logits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("kind", KINDS)
def test_dense_logits_of_the_adapted_model(tiny_model, kind, scorer):
    plain = dense(tiny_model(kind))
    wrapper = adapt(tiny_model(kind))
    expected = dense(wrapper)
    assert (expected - plain).abs().max() > 0.1  # the adapter does something
    press = VerKVPress(SCORERS[scorer](wrapper.config), 0.4, **EXACT)
    cache = compressed(wrapper, press, wrapper, make_cache(wrapper.config))
    assert press.stats.sealed_layers == tuple(full_layers(cache)) != ()
    for _ in range(2):  # two questions
        assert_close(logits(wrapper, cache), expected, **TOLERANCE)
        cache.crop(N_CONTEXT)
    assert leftovers(wrapper) == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_resident(tiny_model, kind):
    wrapper = adapt(tiny_model(kind))
    cache = prefill(wrapper.get_base_model(), ids(), cache=make_cache(wrapper.config))
    seal(wrapper.get_base_model(), cache)
    assert_close(logits(wrapper, cache), dense(wrapper), **TOLERANCE)


@pytest.mark.parametrize("forward", ["wrapper", "tuner", "model", "backbone"])
@pytest.mark.parametrize("target", INSIDE)
def test_any_part_may_be_called_in_the_block_of_any(llama, target, forward):
    """The backbone alone, as KVPress' pipeline calls it, went uncompressed in a wrapper's block, without a word."""
    call = llama.get_base_model().model if forward == "backbone" else INSIDE[forward](llama)
    press = VerKVPress(SnapKVPress(window_size=4), 0.4, **EXACT)
    cache = compressed(call, press, INSIDE[target](llama))
    assert press.stats.sealed_layers == (0, 1, 2, 3)
    assert_close(logits(llama, cache), dense(llama), **TOLERANCE)


@pytest.mark.parametrize("press_class", [PoissonCompPress, KVzipPress])
def test_lossy_presses(llama, press_class):
    caches = []
    for _ in range(2):
        press = kvzip(0.5) if press_class is KVzipPress else PoissonCompPress(KnormPress(), 0.5, **SHORT)
        caches.append(compressed(llama, press, llama))
        assert press.stats.sealed_layers == (0, 1, 2, 3)
        assert press.memory_report().resident_share < 0.6
    found = [logits(llama, cache) for cache in caches]
    assert torch.equal(*found) and (found[0] - dense(llama)).abs().max() > 0.1


# --- merging, switching -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scorer", SCORERS)
def test_scores_are_those_of_the_merged_model(tiny_model, scorer):
    """A replay that ran without the adapter would score another model."""
    wrapper = adapt(tiny_model("llama"))
    merged = adapt(tiny_model("llama")).merge_and_unload()
    codes = []
    for model in (wrapper, merged):
        torch.manual_seed(0)
        press = PoissonCompPress(SCORERS[scorer](model.config), 0.5, **SHORT)
        cache = compressed(model, press, model)
        codes.append(torch.cat([layer.context.rows.codes for layer in cache.layers]).tolist())
    assert len(codes[0]) == len(codes[1])
    different = sum(a != b for a, b in zip(*codes, strict=True))
    assert different <= 0.02 * len(codes[0])  # merging rounds, so that single levels move


@pytest.mark.parametrize("way", ["prefill_merged", "decode_merged"])
def test_adapters_are_merged_between_prefill_and_question(llama, way):
    expected, press = dense(llama), VerKVPress(KnormPress(), 0.4, **EXACT)
    if way == "prefill_merged":
        llama.merge_adapter()
    cache = compressed(llama, press, llama)
    llama.unmerge_adapter() if way == "prefill_merged" else llama.merge_adapter()
    assert_close(logits(llama, cache), expected, **TOLERANCE)


def test_merged_for_good(tiny_model):
    wrapper = adapt(tiny_model("llama"))
    expected, merged = dense(wrapper), wrapper.merge_and_unload()
    cache = compressed(merged, VerKVPress(KnormPress(), 0.4, **EXACT), merged)
    assert_close(logits(merged, cache), expected, **TOLERANCE)


@torch.no_grad()
def test_adapters_are_switched_after_sealing(llama):
    """The context is what the first adapter made of it, the question is the second's: as with a dense cache."""
    llama.add_adapter("second", lora(r=2))
    expected, cache = [], prefill(llama.get_base_model(), ids())
    sealed = compressed(llama, VerKVPress(KnormPress(), 0.4, **EXACT), llama)
    for adapter in ("second", "default", None):
        for result in (expected, found := []):
            here = cache if result is expected else sealed
            if adapter is not None:
                llama.set_adapter(adapter)
            with llama.disable_adapter() if adapter is None else contextlib.nullcontext():
                result.append(llama(tokens(), past_key_values=here).logits)
            here.crop(N_CONTEXT)
        assert_close(found[-1], expected[-1], **TOLERANCE)
    assert min((a - b).abs().max() for a, b in itertools.pairwise(expected)) > 0.01


def test_adapters_that_transformers_adds_itself(tiny_model):
    """``model.add_adapter``: there is no wrapper."""
    model = tiny_model("llama")
    plain = dense(model)
    model.add_adapter(lora())
    assert (dense(model) - plain).abs().max() > 0.1
    cache = compressed(model, VerKVPress(kvzip(), 0.4, **EXACT), model)
    assert_close(logits(model, cache), dense(model), **TOLERANCE)


# --- generate ---------------------------------------------------------------------------------------------------------

MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.5},
    "beams": {"do_sample": False, "num_beams": 3},
    "prompt_lookup": {"do_sample": False, "prompt_lookup_num_tokens": 2},
}


def generate(model, **options):
    prompt = ids()
    prompt[:, -6:] = prompt[:, 10:16]  # its end was seen before, so that prompt lookup has something to propose
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "min_new_tokens": 8, **options}
    torch.manual_seed(5)
    return model.generate(input_ids=prompt, **options).tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("target", ["wrapper", "model"])
def test_generate_gives_the_tokens_of_the_dense_cache(llama, target, mode):
    """``wrapper.generate`` calls the model inside: hooks on the wrapper would not see prompt lookup's candidates."""
    expected = generate(llama, **MODES[mode])
    press, cache = VerKVPress(SnapKVPress(window_size=4), 0.4, **EXACT), DynamicCache()
    with press(INSIDE[target](llama)):
        assert generate(llama, past_key_values=cache, **MODES[mode]) == expected
    assert press.stats.sealed_layers == (0, 1, 2, 3) and press.stats.n_passes > 0
    assert cache.layers[0].context.n_tokens == N_CONTEXT and set(lengths(cache)) == {N_CONTEXT + 7}
    assert leftovers(llama) == [] and generate(llama, **MODES[mode]) == expected


ADAPTERS = {
    "dora": lambda: lora(use_dora=True),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        init_ia3_weights=False,
        task_type="CAUSAL_LM",
    ),
    "prompt_tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"),
}


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_other_adapters(tiny_model, adapter):
    wrapper = adapt(tiny_model("llama"), ADAPTERS[adapter]())
    press, expected = VerKVPress(KnormPress(), 0.4, **EXACT), generate(wrapper)
    assert expected != generate(tiny_model("llama"))
    with press(wrapper):
        assert generate(wrapper) == expected
    assert press.stats.sealed_layers == (0, 1, 2, 3)


def test_pipeline_of_kvpress(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    wrapper = adapt(tiny_model("llama", vocab_size=49152, eos_token_id=49151))
    pipeline = KVPressTextGenerationPipeline(model=wrapper, tokenizer=tokenizer)
    text = "The lighthouse keeper counted the ships that passed before dawn and wrote each name in a book. " * 4
    options = {"questions": ["Who counted?", "What is in the book?", "Who counted?"], "max_new_tokens": 6}
    press = VerKVPress(KVzipPress(tokenizer=tokenizer), 0.4, **EXACT)
    assert pipeline(text, press=press, **options) == pipeline(text, **options)
    assert press.stats.sealed_layers == (0, 1, 2, 3) and press.stats.n_passes == 18


# --- what is refused, or left as it is --------------------------------------------------------------------------------


def test_blocks_on_wrapper_and_model_are_nested(llama):
    press, other = VerKVPress(KnormPress(), 0.4, **EXACT), PoissonCompPress(KnormPress(), 0.4, **SHORT)
    nested = pytest.raises(NotImplementedError, match="another VerKV press is active on this model")
    with press(llama), nested, other(llama.get_base_model()):
        pass
    assert leftovers(llama) == []


def test_virtual_tokens_are_kept_and_nothing_is_compressed(tiny_model):
    """Prefix tuning fills the cache before the prefill, so there is no empty one to start from."""
    config = peft.PrefixTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM")
    wrapper = adapt(tiny_model("llama"), config)
    press = VerKVPress(KnormPress(), 0.4, **EXACT)
    with pytest.warns(UserWarning, match="past_key_values held 5 tokens before") as warned, press(wrapper):
        found = generate(wrapper)
    assert found == generate(wrapper) and press.stats is None and len(warned) == 1


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
def test_prompt_tuning_cannot_be_replayed(tiny_model):
    wrapper = adapt(tiny_model("llama"), ADAPTERS["prompt_tuning"]())
    press = VerKVPress(kvzip(), 0.4, **EXACT)
    with pytest.raises(ValueError, match="KVzip repeats the prompt and needs input_ids"), press(wrapper):
        generate(wrapper)
    assert leftovers(wrapper) == []


def test_attention_that_is_replaced_is_refused_by_name(tiny_model):
    """Adaption prompts put a module of their own in place of the attention."""
    config = peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM")
    wrapper = adapt(tiny_model("llama"), config)
    press = VerKVPress(KnormPress(), 0.4, **EXACT)
    with pytest.raises(NotImplementedError, match="has no layers with self_attn"), press(wrapper):
        generate(wrapper)
    assert leftovers(wrapper) == []


def test_models_without_adapters_are_used_as_they_are(tiny_model):
    model = tiny_model("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = compressed(model, VerKVPress(KnormPress(), 0.4, **EXACT), model)
    assert_close(logits(model, cache), dense(model), **TOLERANCE)
