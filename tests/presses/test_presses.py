"""What a press refuses, what it leaves behind when something fails, and what its draws depend on."""

import contextlib
import copy
import weakref
from dataclasses import dataclass

import pytest
import torch
from kvpress import AdaKVPress, ComposedPress, KnormPress, RandomPress, ScorerPress, SnapKVPress, ThinKPress
from press_helpers import (
    SHORT,
    decode,
    full_layers,
    is_resident,
    left_padded,
    leftovers,
    positions,
    prefill,
    random_ids,
)
from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM, StaticCache
from transformers.cache_utils import DynamicLayer

import verkv.cache
from verkv import FastKVzipPress, KVzipPress, PoissonCompPress, VerKVPress, make_cache, record_queries
from verkv.context import SealedContext
from verkv.presses.prompt import left_padding, shared_prompts

pytestmark = pytest.mark.usefixtures("each_way")

PRESSES = [PoissonCompPress, VerKVPress]


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture
def ids():
    return random_ids(1, 100)


@pytest.fixture
def question():
    return random_ids(1, 5, seed=7)


def codes(cache):
    return torch.stack([cache.layers[i].context.codes for i in full_layers(cache)])


def assert_exact(model, ids, cache, question):
    """The cache holds the prompt as if no press had been there."""
    assert full_layers(cache) == []
    assert torch.equal(decode(model, question, cache), decode(model, question, prefill(model, ids)))


# --- failures leave everything usable ---------------------------------------------------------------------------------


@dataclass
class BrokenPress(ScorerPress):
    """Scores with one bad value in one layer."""

    value: float = float("nan")
    layer: int = 2

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        scores = keys.norm(dim=-1) / 100
        if module.layer_idx == self.layer:
            scores[0, 1, 50] = self.value
        return scores


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("press_class", PRESSES)
def test_scores_that_are_not_finite(model, ids, question, press_class, value):
    cache = DynamicCache()
    with pytest.raises(ValueError, match="scores of layer 2 hold NaN or infinite"):
        prefill(model, ids, press_class(BrokenPress(value=value), 0.5, **SHORT), cache=cache)
    assert leftovers(model) == []
    assert_exact(model, ids, cache, question)


def test_scores_of_padding_may_be_anything(model):
    padded, mask = left_padded([random_ids(1, 49), random_ids(1, 100)])  # the bad value is at 50, padding of row 0
    cache = prefill(model, padded, PoissonCompPress(BrokenPress(), 0.5, **SHORT), attention_mask=mask)
    assert len(full_layers(cache)) == 4


@pytest.mark.parametrize("make", [lambda config: DynamicCache(), make_cache], ids=["dynamic", "verkv"])
def test_sealing_that_fails_midway_brings_all_layers_back(model, ids, question, monkeypatch, make):
    _fail_at_layer(3, monkeypatch)
    cache = make(model.config)
    with pytest.raises(RuntimeError, match="no memory"):
        prefill(model, ids, VerKVPress(KnormPress(), 0.5, **SHORT), cache=cache)
    assert leftovers(model) == []
    assert_exact(model, ids, cache, question)


@pytest.mark.parametrize("make", [lambda config: DynamicCache(), make_cache], ids=["dynamic", "verkv"])
def test_sealing_without_a_host_copy_that_fails_midway_empties_the_cache(model, ids, question, monkeypatch, make):
    """Evicted rows are gone, so the context cannot come back; half of it must not stay either."""
    _fail_at_layer(2, monkeypatch)
    cache = make(model.config)
    with pytest.raises(RuntimeError, match="no memory"):
        prefill(model, ids, PoissonCompPress(KnormPress(), 0.5, **SHORT), cache=cache)
    assert leftovers(model) == []
    assert [layer.get_seq_length() for layer in cache.layers] == [0] * 4
    assert_exact(model, ids, prefill(model, ids, cache=cache), question)


def _fail_at_layer(index, monkeypatch):
    class Failing(SealedContext):
        def __init__(self, keys, values, plan, layer_idx, stats):
            if layer_idx == index:
                raise RuntimeError("no memory")
            super().__init__(keys, values, plan, layer_idx, stats)

    monkeypatch.setattr(verkv.cache, "SealedContext", Failing)


@pytest.mark.parametrize("press_class", PRESSES)
def test_press_works_again_after_a_failure(model, ids, press_class, monkeypatch):
    press = press_class(KnormPress(), 0.5, **SHORT)
    first = prefill(model, ids, press)
    with monkeypatch.context() as patch:
        _fail_at_layer(1, patch)
        with pytest.raises(RuntimeError, match="no memory"):
            prefill(model, ids, press)
    again = prefill(model, ids, press)
    for a, b in zip(first.layers, again.layers, strict=True):
        assert torch.equal(a.context.rows.keys, b.context.rows.keys)


@dataclass
class FailingPress(ScorerPress):
    """Fails in the third layer, when two layers of the cache hold the prompt already."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        if module.layer_idx == 2:
            raise RuntimeError("out of luck")
        return keys.norm(dim=-1)


@pytest.mark.parametrize("make", [DynamicCache, None], ids=["DynamicCache", "make_cache"])
@pytest.mark.parametrize("caught_inside", [False, True])
def test_half_a_prefill_is_taken_back(model, ids, question, make, caught_inside):
    cache = make() if make is not None else make_cache(model.config)
    press = PoissonCompPress(FailingPress(), 0.5, **SHORT)
    with contextlib.suppress(RuntimeError), press(model):
        try:
            model.model(ids, past_key_values=cache)
        except RuntimeError:
            if not caught_inside:
                raise
            press_again = torch.no_grad()(model.model)
            with pytest.raises(
                RuntimeError, match="out of luck"
            ):  # a prefill again, not a question about half a prompt
                press_again(ids, past_key_values=cache)
    assert cache.get_seq_length() == 0 and leftovers(model) == []
    assert torch.equal(decode(model, ids, cache), decode(model, ids, DynamicCache()))


def test_padding_mask_of_another_shape_is_refused(model, ids):
    mask = torch.ones(1, 1, 100, 100, dtype=torch.bool).tril()
    with (
        pytest.raises(NotImplementedError, match="attention_mask"),
        PoissonCompPress(KnormPress(), 0.5, **SHORT)(model),
    ):
        model.model(ids, attention_mask=mask, past_key_values=DynamicCache())


def test_a_layers_full_copy_is_freed_before_the_next_is_sealed(model, ids, monkeypatch):
    """So the peak is the full cache plus one layer."""
    cache, originals, alive = prefill(model, ids), [], []
    for layer in cache.layers:
        originals.append((weakref.ref(layer.keys), weakref.ref(layer.values)))
    del layer
    build = SealedContext.__init__

    def counting(self, *args, **kwargs):
        alive.append(sum(reference() is not None for pair in originals for reference in pair))
        build(self, *args, **kwargs)

    monkeypatch.setattr(SealedContext, "__init__", counting)
    scores = {i: torch.rand(1, 2, 100) for i in range(4)}
    VerKVPress(KnormPress(), 0.5, **SHORT).seal(model, cache, scores)
    assert alive == [8, 6, 4, 2]


def test_error_inside_the_block_removes_the_hooks(model):
    with pytest.raises(KeyError), VerKVPress(SnapKVPress(), 0.5)(model):
        assert leftovers(model) != []
        raise KeyError
    assert leftovers(model) == []


def test_error_while_entering_removes_the_hooks(model):
    """The model does not have the layout that the press expects."""
    attention = model.model.layers[2].self_attn
    del model.model.layers[2].self_attn
    with pytest.raises(NotImplementedError, match="self_attn"), VerKVPress(SnapKVPress(), 0.5)(model):
        pass
    model.model.layers[2].self_attn = attention
    assert leftovers(model) == []


def test_rotary_embeddings_that_were_there_stay(model, ids):
    own = model.model.rotary_emb
    model.model.layers[1].self_attn.rotary_emb = own
    prefill(model, ids, VerKVPress(SnapKVPress(window_size=4), 0.5, **SHORT))
    assert leftovers(model) == ["model.layers.1.self_attn.rotary_emb"]
    assert model.model.layers[1].self_attn.rotary_emb is own


@pytest.mark.parametrize("press_class", PRESSES)
def test_no_cache_to_compress(model, ids, press_class):
    press = press_class(KnormPress(), 0.5, **SHORT)
    with pytest.raises(ValueError, match="use_cache=True"), torch.no_grad(), press(model):
        model.model(input_ids=ids, use_cache=False)
    assert leftovers(model) == []


def test_memory_report_without_a_cache(model, ids):
    press = VerKVPress(KnormPress(), 0.5, **SHORT)
    with pytest.raises(ValueError, match="no cache to report on"):
        press.memory_report()
    assert press.stats is None
    prefill(model, ids, press)  # the cache is freed at once
    with pytest.raises(ValueError, match="has been freed"):
        press.memory_report()
    assert press.stats.sealed_layers == (0, 1, 2, 3)


# --- caches and models that cannot be sealed --------------------------------------------------------------------------


class QuantisingLayer(DynamicLayer):
    """Stands for transformers' quantised layers, which are dynamic ones too."""


def _quantised(model):
    return verkv.cache.Cache(layers=[QuantisingLayer() for _ in range(4)])


def _static(model):
    return StaticCache(config=model.config, max_cache_len=200)


def _offloading(model):
    cache = DynamicCache()
    cache.offloading = True  # transformers builds one only where there are device streams
    return cache


def _without_layers(model):
    class Legacy:
        def get_seq_length(self):
            return 0

    return Legacy()


@pytest.mark.parametrize("press_class", [*PRESSES, lambda press, *args, **kw: FastKVzipPress(0.0)])
@pytest.mark.parametrize("make", [_quantised, _static, _offloading, _without_layers])
def test_unsupported_cache_is_refused_before_the_prefill(model, ids, make, press_class):
    ran = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda *args: ran.append(1))
    with pytest.raises(NotImplementedError, match=r"past_key_values.*DynamicCache"):
        prefill(model, ids, press_class(KnormPress(), 0.5, **SHORT), cache=make(model))
    handle.remove()
    assert not ran and leftovers(model) == []


def test_soft_capped_attention_is_refused(ids):
    config = Gemma2Config(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        layer_types=["full_attention"] * 2,
    )
    model = Gemma2ForCausalLM(config).eval()
    press = VerKVPress(KnormPress(), 0.5, **SHORT)
    with pytest.raises(NotImplementedError, match="attn_logit_softcapping=50"):
        prefill(model, ids, press)
    with pytest.raises(NotImplementedError, match="attn_logit_softcapping"):
        press.seal(model, prefill(model, ids), {})
    assert leftovers(model) == []


@pytest.mark.parametrize("inner", [None, object(), "snapkv", KnormPress, 0.5], ids=lambda i: type(i).__name__)
@pytest.mark.parametrize("press_class", PRESSES)
def test_inner_press_without_scores_is_refused(press_class, inner):
    with pytest.raises(NotImplementedError, match=r"press=.*KVzipPress\(\)"):
        press_class(inner, 0.5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ThinKPress(key_channel_compression_ratio=0.5),
        lambda: ComposedPress([KnormPress(), SnapKVPress()]),
        lambda: PoissonCompPress(KnormPress(), 0.5),
    ],
    ids=["think", "composed", "ours"],
)
def test_kvpress_press_without_scores_is_refused(make):
    inner = make()
    with pytest.raises(NotImplementedError, match=f"press={type(inner).__name__}"):
        VerKVPress(inner, 0.5)


def test_kvzip_plus_is_refused():
    from kvpress import KVzipPress as KVPressKVzipPress

    with pytest.raises(NotImplementedError, match="kvzip_plus_normalization"):
        VerKVPress(KVPressKVzipPress(0.5, kvzip_plus_normalization=True))


@pytest.mark.parametrize("hidden", [slice(90, 100), slice(40, 50)], ids=["right", "middle"])
def test_mask_that_hides_other_than_leading_tokens(model, ids, question, hidden):
    mask = torch.ones(1, 100, dtype=torch.long)
    mask[0, hidden] = 0
    cache = DynamicCache()
    with pytest.raises(NotImplementedError, match=r"attention_mask may hide only leading tokens.*left"):
        prefill(model, ids, VerKVPress(KnormPress(), 0.5, **SHORT), cache=cache, attention_mask=mask)
    assert full_layers(cache) == [] and leftovers(model) == []


def test_mask_that_hides_a_whole_row():
    with pytest.raises(ValueError, match="attention_mask hides all tokens of a row"):
        left_padding(torch.tensor([[1, 1], [0, 0]]), 2, 2)


# --- seal() with scores that are there already ------------------------------------------------------------------------


def knorm_scores(cache):
    return {i: (-layer.keys.norm(dim=-1)).softmax(-1) for i, layer in enumerate(cache.layers)}


def test_seal_equals_the_context_manager(model, ids, question):
    press = VerKVPress(KnormPress(), 0.5, **SHORT)
    with record_queries(model) as queries:
        by_hand = prefill(model, ids)
    press.seal(model, by_hand, knorm_scores(by_hand), queries=queries)
    cache = prefill(model, ids, press)
    assert torch.equal(codes(by_hand), codes(cache))
    assert torch.equal(decode(model, question, by_hand), decode(model, question, cache))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scores: scores.pop(1), "scores of layer 1 are missing"),
        (lambda scores: scores.update({2: scores[2][..., :-1]}), r"layer 2 have shape \(1, 2, 99\).*\(1, 2, 100\)"),
        (lambda scores: scores.update({0: scores[0][:, :1]}), "layer 0 have shape"),
    ],
)
def test_seal_checks_the_scores(model, ids, question, change, message):
    cache = prefill(model, ids)
    scores = knorm_scores(cache)
    change(scores)
    with pytest.raises(ValueError, match=message):
        VerKVPress(KnormPress(), 0.5, **SHORT).seal(model, cache, scores)
    assert_exact(model, ids, cache, question)


def test_seal_twice_is_refused(model, ids):
    press = VerKVPress(KnormPress(), 0.5, **SHORT)
    cache = prefill(model, ids)
    scores = knorm_scores(cache)
    press.seal(model, cache, scores)
    with pytest.raises(ValueError, match="sealed already"):
        press.seal(model, cache, scores)


# --- other presses at the same time -----------------------------------------------------------------------------------


def test_a_press_that_prunes_later_in_the_same_layer_is_noticed(model, ids):
    """Ours is entered first, so its hooks see all tokens, and then the other press takes half of them away."""
    cache = DynamicCache()
    with pytest.raises(ValueError, match=r"have shape \(1, 2, 100\), the cache needs \(1, 2, 50\)"), torch.no_grad():  # noqa: SIM117
        with VerKVPress(KnormPress(), 0.5, **SHORT)(model), KnormPress(0.5)(model):
            model.model(input_ids=ids, past_key_values=cache)
    assert full_layers(cache) == []
    assert [name for name in leftovers(model) if "hook" in name] == []


def test_a_press_that_prunes_first_is_composed_with(model, ids, question):
    """The other press is entered first: what it leaves is compressed, and nothing else is in the cache."""
    exact = VerKVPress(KnormPress(), 0.5, epsilon=1e-9, **SHORT)
    pruned = prefill(model, ids, KnormPress(0.4))
    cache = DynamicCache()
    with torch.no_grad(), KnormPress(0.4)(model), exact(model):
        model.model(input_ids=ids, past_key_values=cache)
    assert cache.get_seq_length() == pruned.get_seq_length() == 60
    assert full_layers(cache) == [0, 1, 2, 3]
    torch.testing.assert_close(
        decode(model, question, cache, position_ids=torch.arange(100, 105)[None]),
        decode(model, question, pruned, position_ids=torch.arange(100, 105)[None]),
        atol=1e-4,
        rtol=1e-4,
    )


def test_replayed_scores_do_not_fit_a_cache_that_was_pruned(tiny_model, demo_tokenizer):
    model = tiny_model("llama", vocab_size=49152)
    cache = DynamicCache()
    with pytest.raises(ValueError, match="scores of layer 0 have shape"), torch.no_grad():  # noqa: SIM117
        with KnormPress(0.4)(model), VerKVPress(KVzipPress(tokenizer=demo_tokenizer), 0.5, **SHORT)(model):
            model.model(input_ids=random_ids(1, 100), past_key_values=cache)
    assert full_layers(cache) == []


@pytest.fixture(scope="module")
def demo_tokenizer():
    from transformers import AutoTokenizer

    from verkv.demo_model import demo_model_path

    return AutoTokenizer.from_pretrained(demo_model_path())


def test_a_press_over_a_sealed_cache_is_refused(model, ids, question):
    """A KVPress press entered after sealing does not prune in a later pass, and cannot assign keys."""
    cache = prefill(model, ids, VerKVPress(KnormPress(), 0.5, **SHORT))
    with pytest.raises(NotImplementedError, match="second press"):
        cache.layers[0].keys = torch.zeros(1, 2, 50, 16)
    with KnormPress(0.5)(model):
        logits = decode(model, question, cache)
    assert cache.get_seq_length() == 105
    again = prefill(model, ids, VerKVPress(KnormPress(), 0.5, **SHORT))
    assert torch.equal(logits, decode(model, question, again))


def test_two_of_our_presses(model, ids):
    """One at a time: the replay of one would be taken for the prefill of the other."""
    outer, inner = VerKVPress(KnormPress(), 0.5, **SHORT), PoissonCompPress(KnormPress(), 0.5, **SHORT)
    with pytest.raises(NotImplementedError, match="another VerKV press is active"), outer(model), inner(model):
        raise AssertionError("not reached")
    assert leftovers(model) == []
    prefill(model, ids, inner, cache=DynamicCache())  # and the model is free again
    assert inner.stats.sealed_layers


def test_composed_press_only_warns(model, ids, question):
    press = VerKVPress(KnormPress(), 0.5, **SHORT)
    cache = DynamicCache()
    with pytest.warns(UserWarning, match="VerKVPress compresses only as the outermost press"):
        prefill(model, ids, ComposedPress([press]), cache=cache)
    assert_exact(model, ids, cache, question)


@pytest.mark.parametrize(
    "inner",
    [
        KnormPress(0.25),
        SnapKVPress(0.25, window_size=4),
        AdaKVPress(KnormPress(0.25)),
        RandomPress(0.25, seed=3),
        FastKVzipPress(0.25),
        KVzipPress(0.25),
    ],
    ids=lambda p: type(p).__name__,
)
@pytest.mark.parametrize("press_class", PRESSES)
def test_inner_press_is_not_changed(tiny_model, demo_tokenizer, press_class, inner):
    from kvpress.presses.fastkvzip_press import FastKVzipGate

    model = tiny_model("llama", vocab_size=49152)
    if isinstance(inner, KVzipPress):
        inner.tokenizer = demo_tokenizer
    if isinstance(inner, FastKVzipPress):
        inner.gates = [FastKVzipGate(i, 64, 2, 2, torch.float32) for i in range(4)]
    before = copy.copy(vars(inner))
    press = press_class(inner, 0.5, **SHORT)
    cache = prefill(model, random_ids(1, 100), press)
    assert len(full_layers(cache)) == 4
    assert vars(inner) == before and press.press is inner


@dataclass
class StatefulPress(ScorerPress):
    """Remembers the model and counts its calls, as some of KVPress' presses do."""

    model: object = None
    n_calls: int = 0

    def post_init_from_model(self, model):
        self.model = model

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        self.n_calls += 1
        return -keys.norm(dim=-1)


@pytest.mark.parametrize("wrap", [lambda press: press, AdaKVPress], ids=["plain", "adakv"])
def test_state_of_the_inner_press_is_not_touched(model, ids, wrap):
    inner = StatefulPress()
    cache = prefill(model, ids, VerKVPress(wrap(inner), 0.5, **SHORT))
    assert len(full_layers(cache)) == 4
    assert inner.model is None and inner.n_calls == 0


# --- draws ------------------------------------------------------------------------------------------------------------


def rows(cache):
    return [layer.context.rows.keys for layer in cache.layers]


@pytest.mark.parametrize("press_class", PRESSES)
def test_same_seed_same_sample(model, ids, press_class):
    press = press_class(KnormPress(), 0.5, seed=3, **SHORT)
    first, again = rows(prefill(model, ids, press)), rows(prefill(model, ids, press))
    other = rows(prefill(model, ids, press_class(KnormPress(), 0.5, seed=4, **SHORT)))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("press_class", PRESSES)
def test_without_a_seed_draws_differ(model, ids, press_class):
    press = press_class(KnormPress(), 0.5, seed=None, **SHORT)
    torch.manual_seed(0)
    first = rows(prefill(model, ids, press))
    torch.manual_seed(0)  # not from torch's global generator either
    second = rows(prefill(model, ids, press))
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_draws_leave_the_global_generator_alone(model, ids):
    state = torch.get_rng_state()
    prefill(model, ids, VerKVPress(KnormPress(), 0.5, **SHORT))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("scope", ["head", "layer", "model"])
def test_layers_heads_and_contexts_are_drawn_independently(model, scope):
    """With equal scores everywhere, equal draws of two units would mean that a generator was started anew."""
    ids = random_ids(2, 200)
    cache = prefill(model, ids)
    scores = {i: torch.full((2, 2, 200), 0.5) for i in range(4)}
    press = VerKVPress(KnormPress(), 0.5, budget_scope=scope, **SHORT)
    press.seal(model, cache, scores)
    draws = is_resident(codes(cache))[..., 4:-8].flatten(0, 1)  # (L * B * Hkv, T), r about 0.45
    agreement = (draws[:, None] == draws[None]).double().mean(-1)
    others = agreement[~torch.eye(len(draws), dtype=torch.bool)]
    assert others.max() < 0.75  # 188 tokens: 0.51 expected, 0.036 standard deviation
    assert 0.45 < others.mean() < 0.57


def test_protected_tokens_are_always_resident(model):
    padded, mask = left_padded([random_ids(1, 80), random_ids(1, 100, seed=2)])
    press = VerKVPress(KnormPress(), 0.6, n_sink=6, n_local=10)
    cache = prefill(model, padded, press, attention_mask=mask, position_ids=positions(mask))
    own = codes(cache).unflatten(1, (2, 2))
    assert (own[:, 0, :, :20] == 0).all()
    for row, first in ((0, 20), (1, 0)):
        assert (own[:, row, :, first : first + 6] == 0x80).all() and (own[:, row, :, -10:] == 0x80).all()
        assert ((own[:, row, :, first + 6 : -10] & 0x7F) > 0).any()


def test_templates_prefix_is_protected(tiny_model, demo_tokenizer):
    model = tiny_model("llama", vocab_size=49152)
    press = VerKVPress(KVzipPress(tokenizer=demo_tokenizer), 0.5, **SHORT)
    cache = prefill(model, random_ids(1, 150), press)
    assert (codes(cache)[..., :24] == 0x80).all()  # SmolLM2's has 24 tokens
    assert (codes(cache)[..., 24:30] != 0x80).any()


def test_scores_beyond_one_become_a_softmax(model, ids):
    """Key norms are negative: inclusion follows their softmax, as the paper says."""
    press = PoissonCompPress(KnormPress(), 0.5, budget_scope="head", n_sink=0, n_local=0)
    cache = prefill(model, ids)
    press.seal(model, cache, {i: -layer.keys.norm(dim=-1) for i, layer in enumerate(cache.layers)})
    other = prefill(model, ids)
    press.seal(model, other, knorm_scores(other))
    assert all(torch.equal(a, b) for a, b in zip(rows(cache), rows(other), strict=True))


def test_alpha_raises_the_smallest_probabilities(model, ids):
    smallest = []
    for alpha in (0.0, 0.5):
        cache = prefill(model, ids, VerKVPress(KnormPress(), 0.5, alpha=alpha, **SHORT))
        smallest.append((codes(cache) & 0x7F).max().item())
    assert smallest[1] < smallest[0]


def test_adakv_shares_the_budget_of_a_layer(model, ids):
    def totals(press):
        levels = codes(prefill(model, ids, press)) & 0x7F
        return torch.exp2(-levels.double() / 8).sum(-1)  # (L, Hkv)

    per_head = totals(VerKVPress(KnormPress(), 0.5, **SHORT))
    shared = totals(VerKVPress(AdaKVPress(KnormPress()), 0.5, **SHORT))
    overruled = totals(VerKVPress(AdaKVPress(KnormPress()), 0.5, budget_scope="head", **SHORT))
    assert (per_head[:, 0] - per_head[:, 1]).abs().max() < 0.2
    assert (shared[:, 0] - shared[:, 1]).abs().max() > 2
    assert torch.equal(per_head, overruled)
    assert (shared.sum(1) - per_head.sum(1)).abs().max() < 0.5


# --- batch rows with the same prompt ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows_", "n"),
    [
        ([1], 1),
        ([1, 1, 1], 3),
        ([1, 1, 2, 2], 2),
        ([1, 2, 1, 2], 1),
        ([1, 1, 2], 1),
        ([1, 1, 1, 1, 2, 2], 1),
        ([1, 1, 1, 1], 4),
    ],
)
def test_shared_prompts(rows_, n):
    prompts = torch.tensor(rows_)[:, None].expand(-1, 5)
    assert shared_prompts(prompts, None) == n
    assert shared_prompts(prompts, torch.ones_like(prompts)) == n


def test_rows_that_differ_in_padding_only_are_no_shared_prompt():
    prompts = torch.zeros(2, 5, dtype=torch.long)
    mask = torch.ones_like(prompts)
    mask[0, 0] = 0
    assert shared_prompts(prompts, mask) == 1
    assert shared_prompts(None, mask) == 1
