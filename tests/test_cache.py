"""The cache inside a model: dense logits at r = 1 and at epsilon -> 0, generation, roll-back, batches, failures."""

import copy

import pytest
import torch
import transformers
from sealing import (
    CACHE,
    CROP_TAKES_REMOVED,
    certain_codes,
    forward,
    full_layers,
    lengths,
    n_absent,
    prompt_ids,
    sampled_codes,
    seal,
)
from torch.testing import assert_close
from transformers import Cache, DynamicCache
from transformers.cache_utils import QuantizedLayer, StaticLayer

from verkv.cache import SealedKV, VerKVCache, VerKVLayer, check_cache, layer_kinds, make_cache
from verkv.context import SealedContext
from verkv.kvfetch import FetchConfig
from verkv.sketches import ExactSketch, RopePairSketch
from verkv.window import WindowLayer

pytestmark = pytest.mark.usefixtures("each_way")

KINDS = ["llama", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma3", "ministral", "ministral3"]
N_CONTEXT, N_QUESTION, N_TOTAL = 80, 7, 90
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
NEARLY_ZERO = 1e-30  # epsilon: below every weight's share, so that the whole residual set is promoted

CACHES = {
    "dynamic": lambda config: DynamicCache(),
    "dynamic_of_config": lambda config: DynamicCache(config=config),
    "make_cache": make_cache,
}


def dense_logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, use_cache=False, **kwargs).logits


def prefilled(model, ids, cache=None, n_context=N_CONTEXT, **kwargs):
    cache = make_cache(model.config) if cache is None else cache
    forward(model, ids[:, :n_context], cache, **kwargs)
    return cache


def question_and_decoding(model, ids, cache):
    """Logits after a sealed context: a question pass, then one token at a time."""
    question = forward(model, ids[:, N_CONTEXT : N_CONTEXT + N_QUESTION], cache)
    steps = [forward(model, ids[:, i : i + 1], cache) for i in range(N_CONTEXT + N_QUESTION, N_TOTAL)]
    return torch.cat([question, *steps], dim=1)


# --- dense logits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("cache_kind", CACHES)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_certain_tokens_reproduce_dense_logits(tiny_model, kind, attn, cache_kind, batch):
    model, ids = tiny_model(kind, attn), prompt_ids(batch, N_TOTAL)
    expected = dense_logits(model, ids)
    cache = CACHES[cache_kind](model.config)
    assert_close(forward(model, ids[:, :N_CONTEXT], cache), expected[:, :N_CONTEXT], **TOLERANCE)
    seal(model, cache)
    assert all(cache.layers[i].sealed for i in full_layers(model))
    assert_close(question_and_decoding(model, ids, cache), expected[:, N_CONTEXT:], **TOLERANCE)
    assert lengths(cache) == [N_TOTAL] * len(cache.layers)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "ministral3"])
@pytest.mark.parametrize("fetching", [False, True], ids=["certain", "fetching"])
def test_left_padded_batch_reproduces_dense_logits(tiny_model, kind, attn, fetching):
    model, ids = tiny_model(kind, attn), prompt_ids(2, N_TOTAL)
    n_padding = torch.tensor([0, 23])
    mask = (torch.arange(N_TOTAL) >= n_padding[:, None]).long()
    ids = torch.where(mask.bool(), ids, 0)
    position_ids = (mask.cumsum(-1) - 1).clamp_min(0)
    expected = dense_logits(model, ids, attention_mask=mask, position_ids=position_ids)
    if kind != "ministral3":  # its query scale counts padding, in transformers 5.2
        assert_close(expected[1:, 23:], dense_logits(model, ids[1:, 23:]), **TOLERANCE)

    cache = make_cache(model.config)
    steps = [(0, N_CONTEXT), (N_CONTEXT, N_CONTEXT + N_QUESTION)]
    steps += [(i, i + 1) for i in range(N_CONTEXT + N_QUESTION, N_TOTAL)]
    for start, stop in steps:
        actual = forward(
            model, ids[:, start:stop], cache, attention_mask=mask[:, :stop], position_ids=position_ids[:, start:stop]
        )
        if start == 0:
            options = {"fetch": FetchConfig(NEARLY_ZERO), "sketch": RopePairSketch()} if fetching else {}
            seal(model, cache, sampled_codes if fetching else certain_codes, n_padding, **options)
            actual, wanted = actual[mask[:, :stop].bool()], expected[:, :stop][mask[:, :stop].bool()]
        else:
            wanted = expected[:, start:stop]
        assert_close(actual, wanted, **TOLERANCE)


@pytest.mark.parametrize("shortlist", [0, 5])
@pytest.mark.parametrize("sketch", [ExactSketch(), RopePairSketch()], ids=["exact", "rope_pair"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "ministral3"])
def test_tiny_epsilon_fetches_everything_and_reproduces_dense_logits(tiny_model, kind, sketch, shortlist):
    model, ids = tiny_model(kind), prompt_ids(2, N_TOTAL)
    cache = prefilled(model, ids)
    stats = seal(model, cache, sampled_codes, fetch=FetchConfig(NEARLY_ZERO, shortlist=shortlist), sketch=sketch)
    actual = question_and_decoding(model, ids, cache)
    assert_close(actual, dense_logits(model, ids)[:, N_CONTEXT:], **TOLERANCE)

    config, layers = model.config, full_layers(model)
    shape = (2, config.num_key_value_heads, N_CONTEXT)
    for records in stats.passes:
        assert [r.layer_idx for r in records] == layers
        for record in records:
            codes = sampled_codes(shape, seed=record.layer_idx)
            assert record.fetched == n_absent(codes) > 0
            n_residual = (codes & 0x7F > 0).sum((0, 2)).repeat_interleave(
                2
            ) * record.n_queries  # two query heads a KV head
            assert torch.equal(record.promoted, n_residual)
            assert torch.equal(record.fetching, record.decisions)
            assert (record.shortlisted > 0) == (shortlist > 0 and not sketch.is_oracle)
    assert stats.fetch_rate() == 1.0


def test_sampled_context_differs_from_dense(tiny_model):
    """Without fetching it must: otherwise the comparisons above compare dense with dense."""
    model, ids = tiny_model("llama"), prompt_ids(1, N_TOTAL)
    cache = prefilled(model, ids)
    seal(model, cache, sampled_codes, keep_host=False)
    difference = question_and_decoding(model, ids, cache) - dense_logits(model, ids)[:, N_CONTEXT:]
    assert difference.abs().max() > 0.1


def test_context_in_chunks_and_unsealed_layers(tiny_model):
    model, ids = tiny_model("qwen3"), prompt_ids(1, N_TOTAL)
    cache = prefilled(model, ids, DynamicCache(), n_context=33)
    forward(model, ids[:, 33:N_CONTEXT], cache)
    seal(model, cache, sealed_layers=[1, 3])
    assert [layer.sealed for layer in cache.layers] == [False, True, False, True]
    assert_close(question_and_decoding(model, ids, cache), dense_logits(model, ids)[:, N_CONTEXT:], **TOLERANCE)


@pytest.mark.real_model
@pytest.mark.slow
def test_demo_model_reproduces_dense_logits(demo_model):
    model, tokenizer = demo_model
    text = "The library of the town kept every letter that was sent from the harbour to the hills. " * 12
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :200]
    expected = dense_logits(model, ids)
    cache = prefilled(model, ids, n_context=190)
    stats = seal(model, cache, sampled_codes, fetch=FetchConfig(NEARLY_ZERO), sketch=RopePairSketch())
    actual = [forward(model, ids[:, 190:197], cache)] + [
        forward(model, ids[:, i : i + 1], cache) for i in (197, 198, 199)
    ]
    assert_close(torch.cat(actual, 1), expected[:, 190:], atol=2e-3, rtol=0.0)  # logits of up to 30
    assert stats.fetch_rate() == 1.0


# --- generation -------------------------------------------------------------------------------------------------------

GENERATION = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "prompt_lookup": {"prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize("mode", GENERATION)
@pytest.mark.parametrize("cache_kind", ["dynamic", "make_cache"])
@pytest.mark.parametrize("kind", ["llama", "ministral3"])
def test_generate_gives_the_tokens_of_the_dense_cache(tiny_model, kind, cache_kind, mode):
    model = tiny_model(kind)
    ids = prompt_ids(1, 24).repeat(1, 4)[
        :, :N_TOTAL
    ]  # repeats, so that prompt lookup finds candidates and rejects some
    options = {"max_new_tokens": 16, "do_sample": False, **GENERATION[mode]}
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, **{CACHE: DynamicCache()}, **options)
    if mode == "prompt_lookup":
        plain = prefilled(model, ids, DynamicCache())
        if model.generate(ids, attention_mask=mask, **{CACHE: plain}, **options).tolist() != expected.tolist():
            pytest.skip(
                f"transformers {transformers.__version__} gives other tokens with its own DynamicCache, too: its "
                f"assisted decoding processes a prompt again that the cache already holds"
            )

    cache = prefilled(model, ids, CACHES[cache_kind](model.config))
    seal(model, cache)
    if mode == "beams":
        cache.batch_repeat_interleave(3)
    actual = model.generate(ids, attention_mask=mask, **{CACHE: cache}, **options)
    assert actual.tolist() == expected.tolist()
    assert actual.shape[1] > N_TOTAL + 8
    assert cache.layers[-1].sealed


def test_generate_with_sliding_layers(tiny_model):
    model, ids = tiny_model("gemma3"), prompt_ids(1, N_TOTAL)
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **options)
    beams = model.generate(ids, num_beams=3, **options)
    cache = prefilled(model, ids)
    seal(model, cache)
    again = copy.deepcopy(cache)
    assert model.generate(ids, **{CACHE: cache}, **options).tolist() == expected.tolist()
    again.batch_repeat_interleave(3)
    assert model.generate(ids, **{CACHE: again}, num_beams=3, **options).tolist() == beams.tolist()


def test_beams_share_one_context(tiny_model):
    """A batch of identical prompts is sealed as one context for all of its rows."""
    model = tiny_model("llama")
    ids = prompt_ids(2, N_TOTAL).repeat_interleave(3, 0)
    ids[:, N_CONTEXT:] = prompt_ids(6, N_TOTAL - N_CONTEXT)
    cache = prefilled(model, ids)
    stats = seal(model, cache, sampled_codes, beams=3, fetch=FetchConfig(NEARLY_ZERO), sketch=RopePairSketch())
    assert_close(question_and_decoding(model, ids, cache), dense_logits(model, ids)[:, N_CONTEXT:], **TOLERANCE)
    assert stats.passes[0][0].fetched == n_absent(sampled_codes((2, 2, N_CONTEXT)))


# --- batches ----------------------------------------------------------------------------------------------------------


def repeat(cache, ids):
    cache.batch_repeat_interleave(2)
    return ids.repeat_interleave(2, 0)


def index_with(name, indices):
    def operate(cache, ids):
        getattr(cache, name)(torch.tensor(indices))
        return ids[torch.tensor(indices)]

    return operate


def repeat_then_reorder_within(cache, ids):
    return index_with("reorder_cache", [1, 0, 0, 1, 4, 4])(cache, repeat_thrice(cache, ids))


def repeat_thrice(cache, ids):
    cache.batch_repeat_interleave(3)
    return ids.repeat_interleave(3, 0)


def repeat_then_reorder_across(cache, ids):
    return index_with("reorder_cache", [4, 0, 2, 1, 5, 5])(cache, repeat_thrice(cache, ids))


def repeat_then_select(cache, ids):
    return index_with("batch_select_indices", [0, 3, 5])(cache, repeat_thrice(cache, ids))


BATCH_OPERATIONS = {
    "repeat": repeat,
    "reorder": index_with("reorder_cache", [1, 0]),
    "reorder_onto_one": index_with("reorder_cache", [1, 1]),
    "select": index_with("batch_select_indices", [1]),
    "select_more": index_with("batch_select_indices", [1, 0, 1]),
    "reorder_within_contexts": repeat_then_reorder_within,
    "reorder_across_contexts": repeat_then_reorder_across,
    "select_of_beams": repeat_then_select,
}
STATES = {
    "certain": (certain_codes, {}),
    "fetch_rope_pair": (
        sampled_codes,
        {"fetch": FetchConfig(NEARLY_ZERO, shortlist=4), "sketch": RopePairSketch(), "audit": True},
    ),
    "fetch_exact": (sampled_codes, {"fetch": FetchConfig(NEARLY_ZERO), "sketch": ExactSketch()}),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("operation", BATCH_OPERATIONS)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_batch_operations_give_what_dense_gives(tiny_model, kind, operation, state):
    model = tiny_model(kind)
    ids = prompt_ids(2, N_CONTEXT + 4)
    cache = prefilled(model, ids)
    make_codes, options = STATES[state]
    stats = seal(model, cache, make_codes, **options)
    forward(model, ids[:, N_CONTEXT:], cache)  # rows have their own tails
    ids = BATCH_OPERATIONS[operation](cache, ids)
    new = prompt_ids(len(ids), 3, seed=5)
    expected = dense_logits(model, torch.cat([ids, new], 1))[:, -3:]
    actual = torch.cat([forward(model, new[:, :2], cache), forward(model, new[:, 2:], cache)], 1)
    assert_close(actual, expected, **TOLERANCE)
    if options.get("audit"):
        assert stats.relative_errors("decode").max() < 1e-4
    assert [tuple(layer.keys.shape) for layer in cache.layers if isinstance(layer, VerKVLayer)] == [
        (len(ids), 2, N_CONTEXT + 7, 16)
    ] * len(full_layers(model))


def test_contexts_are_copied_only_when_rows_change_theirs(tiny_model):
    model = tiny_model("llama")
    cache = prefilled(model, prompt_ids(2, N_TOTAL))
    seal(model, cache)
    contexts = [layer.context for layer in cache.layers]
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([2, 0, 0, 5, 4, 3]))
    assert all(layer.context is context for layer, context in zip(cache.layers, contexts, strict=True))
    cache.reorder_cache(torch.tensor([3, 0, 0, 5, 4, 3]))
    assert not any(layer.context is context for layer, context in zip(cache.layers, contexts, strict=True))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_deepcopy_is_independent(tiny_model, kind):
    model, ids = tiny_model(kind), prompt_ids(1, N_TOTAL)
    cache = prefilled(model, ids)
    stats = seal(model, cache, sampled_codes, fetch=FetchConfig(NEARLY_ZERO), sketch=RopePairSketch())
    twin = copy.deepcopy(cache)
    expected = dense_logits(model, ids)[:, N_CONTEXT:]
    assert_close(question_and_decoding(model, ids, twin), expected, **TOLERANCE)
    assert lengths(cache) == [N_CONTEXT] * len(cache.layers)
    assert stats.n_passes == 0 and twin.stats.n_passes > 0
    assert_close(question_and_decoding(model, ids, cache), expected, **TOLERANCE)


def test_wrong_batch_is_refused_and_leaves_the_cache_usable(tiny_model):
    model, ids = tiny_model("llama"), prompt_ids(2, N_TOTAL)
    cache = prefilled(model, ids[:1])
    seal(model, cache)
    with pytest.raises(ValueError, match="past_key_values was sealed for"):
        forward(model, ids[:, N_CONTEXT:], cache)
    assert lengths(cache) == [N_CONTEXT] * 4
    assert_close(question_and_decoding(model, ids[:1], cache), dense_logits(model, ids[:1])[:, N_CONTEXT:], **TOLERANCE)


# --- cropping, roll-back, reset ---------------------------------------------------------------------------------------


def kvpress_rollback(cache, n_tokens):
    """As KVPress' pipeline takes an answer out of a cache."""
    for layer in cache.layers:
        layer.keys = layer.keys[:, :, :n_tokens]
        layer.values = layer.values[:, :, :n_tokens]


@pytest.mark.parametrize("length", [N_CONTEXT + 4, N_CONTEXT, -3, N_TOTAL + 5])
def test_crop_into_the_tail(tiny_model, length):
    model, ids = tiny_model("llama"), prompt_ids(1, N_TOTAL)
    cache = prefilled(model, ids)
    seal(model, cache)
    question_and_decoding(model, ids, cache)
    cache.crop(length)
    kept = min(N_TOTAL, length if length >= 0 else N_TOTAL + length)
    assert lengths(cache) == [kept] * 4
    other = prompt_ids(1, 3, seed=9)
    expected = dense_logits(model, torch.cat([ids[:, :kept], other], 1))[:, -3:]
    assert_close(forward(model, other, cache), expected, **TOLERANCE)


def test_crop_into_the_context_is_refused(tiny_model):
    model, ids = tiny_model("llama"), prompt_ids(1, N_TOTAL)
    cache = prefilled(model, ids)
    seal(model, cache)
    forward(model, ids[:, N_CONTEXT:], cache)
    with pytest.raises(ValueError, match=f"max_length={N_CONTEXT - 1}.*{N_CONTEXT} tokens"):
        cache.crop(N_CONTEXT - 1)
    assert lengths(cache) == [N_TOTAL] * 4


def test_crop_of_an_unsealed_cache(tiny_model):
    model, ids = tiny_model("llama"), prompt_ids(1, N_TOTAL)
    cache = prefilled(model, ids)
    cache.crop(50)
    assert lengths(cache) == [50] * 4
    cache.crop(-10)
    assert lengths(cache) == [40] * 4
    assert_close(forward(model, ids[:, 40:], cache), dense_logits(model, ids)[:, 40:], **TOLERANCE)
    cache.crop(0)
    assert lengths(cache) == [N_TOTAL if CROP_TAKES_REMOVED else 0] * 4


@pytest.mark.parametrize("rollback", [kvpress_rollback, lambda cache, n: cache.crop(n)], ids=["kvpress", "crop"])
@pytest.mark.parametrize("cache_kind", CACHES)
@pytest.mark.parametrize("kind", ["llama", "gemma3", "ministral3"])
def test_several_questions_about_one_context(tiny_model, kind, cache_kind, rollback):
    model = tiny_model(kind)
    context = prompt_ids(1, N_CONTEXT)
    cache = prefilled(model, context, CACHES[cache_kind](model.config))
    seal(model, cache, sampled_codes, fetch=FetchConfig(NEARLY_ZERO), sketch=RopePairSketch())
    for seed, n_tokens in ((1, 5), (2, 30), (1, 5)):  # the second is longer than the sliding window
        tokens = prompt_ids(1, n_tokens, seed)
        expected = dense_logits(model, torch.cat([context, tokens], 1))[:, N_CONTEXT:]
        actual = [forward(model, tokens[:, :-2], cache), forward(model, tokens[:, -2:-1], cache)]
        actual.append(forward(model, tokens[:, -1:], cache))
        assert_close(torch.cat(actual, 1), expected, **TOLERANCE)
        rollback(cache, N_CONTEXT)
        assert lengths(cache) == [N_CONTEXT] * len(cache.layers)


@pytest.mark.parametrize("cache_kind", CACHES)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_reset_gives_an_empty_cache_that_can_be_used_again(tiny_model, kind, cache_kind):
    model, ids = tiny_model(kind), prompt_ids(2, N_TOTAL, seed=3)
    cache = prefilled(model, prompt_ids(1, N_TOTAL), CACHES[cache_kind](model.config))
    seal(model, cache)
    forward(model, prompt_ids(1, 2), cache)
    cache.reset()
    assert lengths(cache) == [0] * len(cache.layers)
    assert not any(getattr(layer, "sealed", False) for layer in cache.layers)
    expected = dense_logits(model, ids)
    assert_close(forward(model, ids[:, :N_CONTEXT], cache), expected[:, :N_CONTEXT], **TOLERANCE)
    assert isinstance(cache.layers[full_layers(model)[0]].keys, torch.Tensor)
    seal(model, cache)
    assert_close(question_and_decoding(model, ids, cache), expected[:, N_CONTEXT:], **TOLERANCE)


def test_reset_of_a_verkv_cache_forgets_the_statistics(tiny_model):
    model = tiny_model("llama")
    cache = prefilled(model, prompt_ids(1, N_TOTAL))
    stats = seal(model, cache)
    assert cache.stats is stats
    cache.reset()
    assert cache.stats is None


# --- the stand-ins for keys and values --------------------------------------------------------------------------------


@pytest.fixture
def sealed_layer(tiny_model):
    model, ids = tiny_model("llama"), prompt_ids(2, N_TOTAL)
    cache = prefilled(model, ids)
    seal(model, cache)
    forward(model, ids[:, N_CONTEXT:], cache)
    return cache.layers[1]


def test_stand_in_describes_the_full_cache(sealed_layer):
    for stand_in in (sealed_layer.keys, sealed_layer.values):
        assert isinstance(stand_in, SealedKV)
        assert stand_in.shape == (2, 2, N_TOTAL, 16)
        assert stand_in.numel() == 2 * 2 * N_TOTAL * 16
        assert (stand_in.dtype, stand_in.device) == (torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("make", [lambda k: k[:, :, :5], lambda k: k[..., :5, :], lambda k: k[:, :, 0:5, :]])
def test_stand_in_can_be_sliced_to_a_prefix(sealed_layer, make):
    assert make(sealed_layer.keys).shape == (2, 2, 5, 16)
    assert make(sealed_layer.keys[:, :, :-1]).shape == (2, 2, 5, 16)


@pytest.mark.parametrize(
    "index",
    [
        0,
        slice(0, 5),
        ...,
        (0,),
        (slice(None), 0),
        (slice(None), slice(None), slice(1, 5)),
        (slice(None), slice(None), slice(0, 6, 2)),
        (slice(None), slice(None), 3),
        (slice(0, 1), slice(None), slice(0, 5)),
        (slice(None), slice(0, 1), slice(0, 5)),
        (slice(None), slice(None), slice(0, 5), slice(0, 8)),
        (..., slice(0, 5)),
        (slice(None), slice(None), torch.arange(5)),
        torch.arange(1),
    ],
    ids=str,
)
def test_other_slices_are_refused(sealed_layer, index):
    with pytest.raises(NotImplementedError, match=r"\[:, :, :n\]"):
        sealed_layer.keys[index]


def test_assigning_anything_else_is_refused(sealed_layer):
    other = copy.deepcopy(sealed_layer)
    for value in (torch.zeros(2, 2, 5, 16), None, other.keys):
        with pytest.raises(NotImplementedError, match="second press"):
            sealed_layer.keys = value
        with pytest.raises(NotImplementedError, match="second press"):
            sealed_layer.values = value
    assert sealed_layer.get_seq_length() == N_TOTAL


def test_stand_in_cannot_crop_the_context(sealed_layer):
    with pytest.raises(ValueError, match="cuts into the sealed context"):
        sealed_layer.keys = sealed_layer.keys[:, :, :10]


# --- failed and interrupted forward passes ----------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [0, -1], ids=["first_sealed", "last_sealed"])
@pytest.mark.parametrize("n_before", [0, 3], ids=["first_pass", "later_pass"])
@pytest.mark.parametrize("cache_kind", CACHES)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_failed_forward_is_rolled_back(tiny_model, monkeypatch, kind, cache_kind, n_before, failing):
    model, ids = tiny_model(kind), prompt_ids(1, N_TOTAL)
    cache = prefilled(model, ids, CACHES[cache_kind](model.config))
    stats = seal(model, cache)
    if n_before:
        forward(model, ids[:, N_CONTEXT : N_CONTEXT + n_before], cache)
    start = N_CONTEXT + n_before
    passes = stats.n_passes
    bad_layer = full_layers(model)[failing]
    attend = SealedContext.attend

    def fail(self, *args):
        if self.layer_idx == bad_layer:
            raise KeyboardInterrupt
        return attend(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(SealedContext, "attend", fail)
        for width in (2, 1):
            with pytest.raises(KeyboardInterrupt):
                forward(model, ids[:, start : start + width], cache)
            assert lengths(cache) == [start] * len(cache.layers)
            assert stats.n_passes == passes
    assert_close(forward(model, ids[:, start:], cache), dense_logits(model, ids)[:, start:], **TOLERANCE)
    assert stats.n_passes == passes + 1


@pytest.mark.parametrize("n_before", [0, 3], ids=["first_pass", "later_pass"])
@pytest.mark.parametrize("cache_kind", CACHES)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_interrupted_forward_is_noticed_and_can_be_cropped(tiny_model, kind, cache_kind, n_before):
    """An exception outside VerKV: some layers hold the pass, some do not."""
    model, ids = tiny_model(kind), prompt_ids(1, N_TOTAL)
    cache = prefilled(model, ids, CACHES[cache_kind](model.config))
    stats = seal(model, cache)
    if n_before:
        forward(model, ids[:, N_CONTEXT : N_CONTEXT + n_before], cache)
    start = N_CONTEXT + n_before

    def interrupt(module, args, output):
        raise KeyboardInterrupt

    handle = model.model.layers[2].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward(model, ids[:, start : start + 2], cache)
    handle.remove()
    for _ in range(2):  # also when it is tried again
        with pytest.raises(ValueError, match=rf"cache\.crop\({start}\)"):
            forward(model, ids[:, start : start + 1], cache)
    cache.crop(start)
    assert lengths(cache) == [start] * len(cache.layers)
    assert_close(forward(model, ids[:, start:], cache), dense_logits(model, ids)[:, start:], **TOLERANCE)
    assert all(len(records) == len(full_layers(model)) for records in stats.passes)


# --- sealing ----------------------------------------------------------------------------------------------------------


class Broken(RopePairSketch):
    def build(self, keys, queries=None, positions=None):
        raise ValueError("broken")


@pytest.mark.parametrize("cache_kind", CACHES)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_failed_sealing_brings_layers_back(tiny_model, monkeypatch, kind, cache_kind):
    model, ids = tiny_model(kind), prompt_ids(2, N_TOTAL)
    cache = prefilled(model, ids, CACHES[cache_kind](model.config))
    build, last = SealedContext.__init__, full_layers(model)[-1]

    def fail_late(self, keys, values, plan, layer_idx, stats):
        build(self, keys, values, plan, layer_idx, stats)
        if layer_idx == last:
            raise ValueError("broken")

    with monkeypatch.context() as patch, pytest.raises(ValueError, match="broken"):
        patch.setattr(SealedContext, "__init__", fail_late)
        seal(model, cache, sampled_codes)
    with pytest.raises(ValueError, match="broken"):
        seal(model, cache, sampled_codes, fetch=FetchConfig(), sketch=Broken())
    assert not any(getattr(layer, "sealed", False) for layer in cache.layers)
    assert lengths(cache) == [N_CONTEXT] * len(cache.layers)
    assert_close(question_and_decoding(model, ids, cache), dense_logits(model, ids)[:, N_CONTEXT:], **TOLERANCE)


def test_failed_sealing_without_a_host_copy_empties_the_cache(tiny_model, monkeypatch):
    model, ids = tiny_model("llama"), prompt_ids(1, N_TOTAL)
    cache = prefilled(model, ids, DynamicCache())
    build = SealedContext.__init__

    def fail(self, keys, values, plan, layer_idx, stats):
        if layer_idx == 3:
            raise MemoryError
        build(self, keys, values, plan, layer_idx, stats)

    monkeypatch.setattr(SealedContext, "__init__", fail)
    with pytest.raises(MemoryError):
        seal(model, cache, sampled_codes, keep_host=False)
    assert lengths(cache) == [0] * 4
    monkeypatch.undo()
    prefilled(model, ids, cache)
    seal(model, cache)
    assert_close(question_and_decoding(model, ids, cache), dense_logits(model, ids)[:, N_CONTEXT:], **TOLERANCE)


def test_unseal_restores_context_and_tail(tiny_model):
    model, ids = tiny_model("llama"), prompt_ids(1, N_TOTAL)
    cache = prefilled(model, ids)
    seal(model, cache, sampled_codes, fetch=FetchConfig(NEARLY_ZERO), sketch=RopePairSketch())
    cache.batch_repeat_interleave(2)
    new = prompt_ids(2, 4, seed=7)
    forward(model, new, cache)
    for layer in cache.layers:
        layer.unseal()
    after = prompt_ids(2, 3, seed=8)
    whole = torch.cat([ids[:, :N_CONTEXT].repeat(2, 1), new, after], 1)
    assert_close(forward(model, after, cache), dense_logits(model, whole)[:, -3:], **TOLERANCE)


def test_unseal_without_host_is_refused(tiny_model):
    model = tiny_model("llama")
    cache = prefilled(model, prompt_ids(1, N_TOTAL))
    seal(model, cache, keep_host=False)
    with pytest.raises(RuntimeError, match="no host copy"):
        cache.layers[0].unseal()


def test_sealing_frees_the_full_cache_and_its_graph(tiny_model):
    """Also when the prefill ran with gradients: nothing that is kept may hold the graph."""
    model, ids = tiny_model("llama"), prompt_ids(1, N_TOTAL)
    cache = make_cache(model.config)
    model(ids[:, :N_CONTEXT], **{CACHE: cache})
    seal(model, cache, sampled_codes, fetch=FetchConfig(0.1), sketch=RopePairSketch())
    for layer in cache.layers:
        assert layer._keys is None and layer._values is None
        tensors = [
            layer.context.host.keys,
            layer.context.host.values,
            layer.context.rows.keys,
            layer.context.rows.values,
        ]
        assert not any(t.requires_grad for t in [*tensors, *layer.context.sketch.tensors().values()])


def test_offloading_calls_do_nothing(sealed_layer):
    before = sealed_layer.get_seq_length()
    sealed_layer.offload()
    sealed_layer.prefetch()
    assert sealed_layer.get_seq_length() == before


# --- configs and foreign caches ---------------------------------------------------------------------------------------


def test_make_cache_follows_the_config(tiny_model):
    cache = make_cache(tiny_model("gemma3").config)
    assert isinstance(cache, VerKVCache)
    assert [type(layer) for layer in cache.layers] == [WindowLayer] * 5 + [VerKVLayer]
    assert cache.is_sliding == [True] * 5 + [False]
    assert [layer.sliding_window for layer in cache.layers[:5]] == [16] * 5
    windowed = tiny_model("mistral", sliding_window=16).config
    assert [type(layer) for layer in make_cache(windowed).layers] == [WindowLayer] * 4
    assert layer_kinds(windowed) == ["sliding_attention"] * 4
    assert layer_kinds(tiny_model("mistral").config) == ["full_attention"] * 4


@pytest.mark.parametrize("kind,cause", [("linear_attention", "model_type='minimax'"), ("mamba", r"type \['mamba'\]")])
def test_states_of_other_kinds_are_refused(kind, cause):
    class Config:
        layer_types = (kind, "full_attention")
        model_type = "minimax"
        sliding_window = None

        def get_text_config(self, decoder=False):
            return self

    with pytest.raises(NotImplementedError, match=cause):
        make_cache(Config())


@pytest.mark.skipif(
    not hasattr(Cache, "update_conv_state"), reason="this transformers runs hybrids, see test_hybrid.py"
)
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_hybrids_are_refused_on_newer_transformers(tiny_model, kind):
    config = tiny_model(kind).config
    with pytest.raises(NotImplementedError, match=r"need transformers 5\.2 to 5\.4"):
        make_cache(config)
    with pytest.raises(NotImplementedError, match="linear-attention layers"):
        check_cache(DynamicCache(config=config), layer_kinds(config))


def test_foreign_caches_are_refused(tiny_model):
    kinds = ["full_attention"] * 2
    with pytest.raises(NotImplementedError, match="has no layers"):
        check_cache(object(), kinds)

    class Quantised(QuantizedLayer):
        _quantize = _dequantize = None

    for layer in (StaticLayer(10), Quantised()):
        foreign = Cache(layers=[layer, layer])
        with pytest.raises(NotImplementedError, match=type(layer).__name__):
            check_cache(foreign, kinds)
        check_cache(foreign, ["sliding_attention"] * 2)  # none of VerKV's business
    offloading = DynamicCache()
    offloading.offloading = True
    with pytest.raises(NotImplementedError, match="offloading"):
        check_cache(offloading, kinds)
    check_cache(DynamicCache(), kinds)
    check_cache(make_cache(tiny_model("llama").config), ["full_attention"] * 4)
