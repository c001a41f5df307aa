"""Bad scores and bad numbers: ties, zeros, huge and hidden values, underflow, the smallest r, 10^6 tokens."""

import math

import pytest
import torch
from press_helpers import SHORT, decode, full_layers, inclusion_probs, is_resident, prefill, random_ids
from torch import Tensor

from verkv.cache import make_cache
from verkv.context import SealedContext, SealPlan
from verkv.estimators import (
    MIN_INCLUSION_PROB,
    bernstein_certificate,
    binary_shrinkage,
    fetch_plan,
    horvitz_thompson,
    inclusion_probabilities,
    optimal_shrinkage,
    quantize_inclusion_probs,
)
from verkv.kvfetch import FetchConfig
from verkv.sketches import ExactSketch, RopePairSketch
from verkv.stats import FetchStats
from verkv.tiers import RESIDENT_BIT

N_TOKENS, N_LAYERS, N_HEADS, DIM = 80, 4, 2, 16
QUANTUM = 1 - 2 ** (-1 / 8)  # largest step of one token's r
PRESSES = ("poissoncomp", "verkv")


def make_press(name, **options):
    """Here and not at the top: what needs no press runs without KVPress, on newer transformers."""
    from kvpress import KnormPress

    from verkv import KVzipPress, PoissonCompPress, VerKVPress

    if name == "kvzip":
        return KVzipPress(0.5)
    options = {"compression_ratio": 0.5, **SHORT, **options}
    if name == "poissoncomp":
        return PoissonCompPress(KnormPress(), **options)
    return VerKVPress(KnormPress(), **{"sketch": "rope_pair", **options})


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture(scope="module")
def context(model):
    """Keys and values of a prompt, and the dense logits of a question."""
    cache = prefill(model, random_ids(1, N_TOKENS))
    tensors = [(layer.keys, layer.values) for layer in cache.layers]
    return tensors, decode(model, random_ids(1, 5, seed=3), cache)


def cache_of(model, context):
    cache = make_cache(model.config)
    for i, (keys, values) in enumerate(context[0]):
        cache.update(keys, values, i)
    return cache


# --- scores -----------------------------------------------------------------------------------------------------------

SHAPE = (1, N_HEADS, N_TOKENS)


def few_positive(seed):
    """Fewer positive scores than the budget has tokens."""
    scores = torch.zeros(SHAPE)
    scores[..., 20:25] = torch.rand(5, generator=seeded(seed))
    return scores


SCORES = {
    "ties": lambda seed: torch.full(SHAPE, 0.25),
    "two_values": lambda seed: (torch.rand(SHAPE, generator=seeded(seed)) > 0.5).float(),
    "zeros": lambda seed: torch.zeros(SHAPE),
    "few_positive": few_positive,
    "negative": lambda seed: -torch.rand(SHAPE, generator=seeded(seed)),
    "mixed_signs": lambda seed: torch.randn(SHAPE, generator=seeded(seed)),
    "huge": lambda seed: torch.rand(SHAPE, generator=seeded(seed)) * 3e38,
    "huge_negative": lambda seed: -torch.rand(SHAPE, generator=seeded(seed)) * 3e38,
    "tiny": lambda seed: torch.rand(SHAPE, generator=seeded(seed)) * 1e-40,
    "many_orders": lambda seed: 10.0 ** (-35 * torch.rand(SHAPE, generator=seeded(seed))),
    "one_large": lambda seed: torch.full(SHAPE, 1e-30).index_fill(-1, torch.tensor([40]), 1.0),
    "half": lambda seed: torch.rand(SHAPE, generator=seeded(seed)).half(),
    "bfloat16": lambda seed: torch.rand(SHAPE, generator=seeded(seed)).bfloat16(),
}


def plans_of(press):
    """What a press decides, recorded on its way to the cache."""
    plans, make = {}, press._plans

    def recording(*args):
        made, notes = make(*args)
        plans.update(made)
        return made, notes

    press._plans = recording
    return plans


@pytest.mark.parametrize("scope", ["head", "layer", "model"])
@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("name", PRESSES)
def test_any_finite_scores_meet_the_budget(model, context, name, kind, scope):
    """r is read back from the codes: its sum is what was paid for, to one step of one token's r per budget."""
    from verkv.presses.budget import LayerGeometry, token_budget

    press, cache = make_press(name, budget_scope=scope), cache_of(model, context)
    plans = plans_of(press)
    press.seal(model, cache, {i: SCORES[kind](i) for i in range(N_LAYERS)})
    assert full_layers(cache) == list(range(N_LAYERS))
    codes = torch.stack([plans[i].codes for i in range(N_LAYERS)], 1)[0]  # (L, Hkv, T)
    r = inclusion_probs(codes)
    fetches = name == "verkv"
    budget = token_budget(
        torch.tensor([N_TOKENS]),
        torch.tensor([12]),
        0.5,
        LayerGeometry(N_HEADS, DIM, DIM, 4),
        RopePairSketch() if fetches else None,
        bytes_per_token=int(fetches),
        floor=MIN_INCLUSION_PROB,
    ).item()
    sums = {"head": r.sum(-1), "layer": r.sum((1, 2)), "model": r.sum()}[scope]
    share = {"head": 1, "layer": N_HEADS, "model": N_HEADS * N_LAYERS}[scope] * budget
    assert (sums <= share + 1e-9).all() and (sums > share - QUANTUM).all()
    for ends in (slice(0, 4), slice(N_TOKENS - 8, None)):
        assert (codes[..., ends] == RESIDENT_BIT).all()
    assert (r >= MIN_INCLUSION_PROB * (1 - 1e-12)).all()
    assert is_resident(codes)[r == 1.0].all()
    logits = decode(model, random_ids(1, 5, seed=3), cache)
    assert logits.isfinite().all()


@pytest.mark.parametrize("kind", SCORES)
def test_any_finite_scores_can_be_evicted_by(model, context, kind):
    """Ties are broken by position; exactly the budget is kept, sinks among it."""
    press, cache = make_press("kvzip"), cache_of(model, context)
    plans = plans_of(press)
    press.seal(model, cache, {i: SCORES[kind](i) for i in range(N_LAYERS)})
    kept = is_resident(torch.stack([plans[i].codes for i in range(N_LAYERS)], 1))
    budget = (0.5 * N_TOKENS * 2 * DIM * 4 - 8 * 3 / 2) / (2 * DIM * 4 + 1)
    assert kept.sum() == math.floor(budget * N_HEADS * N_LAYERS)
    assert kept[..., :4].all()
    assert decode(model, random_ids(1, 5, seed=3), cache).isfinite().all()


@pytest.mark.parametrize("kind", SCORES)
def test_any_finite_scores_give_dense_logits_when_all_is_fetched(model, context, kind):
    press, cache = make_press("verkv", epsilon=1e-9), cache_of(model, context)
    press.seal(model, cache, {i: SCORES[kind](i) for i in range(N_LAYERS)})
    logits = decode(model, random_ids(1, 5, seed=3), cache)
    torch.testing.assert_close(logits, context[1], atol=2e-4, rtol=0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [(0, 0, 0), (0, 1, 40), (0, 1, N_TOKENS - 1)], ids=["sink", "middle", "window"])
@pytest.mark.parametrize("name", [*PRESSES, "kvzip"])
def test_one_bad_score_is_refused_and_the_cache_stays_exact(model, context, name, where, value):
    press = make_press(name)
    cache, scores = cache_of(model, context), {i: SCORES["half"](i).float() for i in range(N_LAYERS)}
    scores[2][where] = value
    with pytest.raises(ValueError, match="scores of layer 2 hold NaN or infinite"):
        press.seal(model, cache, scores)
    assert full_layers(cache) == []
    assert torch.equal(decode(model, random_ids(1, 5, seed=3), cache), context[1])


# --- logits of one sealed layer ---------------------------------------------------------------------------------------

T, TAIL, GROUP, SCALING = 200, 3, 2, 0.25
SKETCHES = {"rope_pair": RopePairSketch(), "exact": ExactSketch()}


def exact_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention in float64; (1, Hq, Tq, d)."""
    n_queries, n_keys = query.shape[2], keys.shape[2]
    spread = lambda t: t.double().repeat_interleave(GROUP, 1)  # noqa: E731
    logits = query.double() @ spread(keys).mT * SCALING
    hidden = torch.ones(n_queries, n_keys, dtype=torch.bool).triu(n_keys - n_queries + 1)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1) @ spread(values)


def problem(scale, dtype=torch.float32, n_queries=2, seed=0):
    """Query, keys and values whose logits reach plus and minus ``scale``."""
    generator = seeded(seed)
    keys, values = (torch.randn(1, N_HEADS, T + TAIL, DIM, generator=generator) for _ in range(2))
    query = torch.randn(1, N_HEADS * GROUP, n_queries, DIM, generator=generator)
    largest = (query @ keys.repeat_interleave(GROUP, 1).mT * SCALING).abs().max()
    factor = (scale / largest).sqrt()
    return (query * factor).to(dtype), (keys * factor).to(dtype), values.to(dtype)


def attend(query, keys, values, codes, audit=True, **options):
    """Output, and the record of the pass."""
    stats = FetchStats("test", sealed_layers=(0,), record_bounds="fetch" in options)
    plan = SealPlan(codes, torch.zeros(1, dtype=torch.int64), audit=audit, **options)
    context = SealedContext(keys[:, :, :T], values[:, :, :T], plan, 0, stats)
    output = context.attend(query, keys[:, :, T:], values[:, :, T:], None, SCALING)
    return output, stats.passes[0][0]


def drawn(level, seed=1):
    """Codes of one level; every third token is resident."""
    resident = torch.arange(T) % 3 == 0
    return (level + RESIDENT_BIT * resident).to(torch.uint8).expand(1, N_HEADS, T)


@pytest.mark.parametrize("sketch", SKETCHES)
@pytest.mark.parametrize("scale", [1.0, 100.0, 1e4, 1e5])
@pytest.mark.parametrize("shrinkage", ["binary", "optimal"])
def test_huge_logits_with_everything_fetched(sketch, scale, shrinkage):
    query, keys, values = problem(scale)
    fetch = FetchConfig(1e-30, shortlist=T, shrinkage=shrinkage)  # all weights are planned exactly
    output, record = attend(query, keys, values, drawn(19), fetch=fetch, sketch=SKETCHES[sketch])
    expected = exact_attention(query, keys, values)
    # Logits of 1e4 have an absolute error of 1e4 * 2^-23 times a few, and so have weights a relative one.
    torch.testing.assert_close(output.double(), expected, atol=max(1e-5, 2e-6 * scale), rtol=0.0)
    assert record.error_bound.isfinite().all() and record.relative_error.isfinite().all()
    assert record.output_error.isfinite().all()


@pytest.mark.parametrize("level", [1, 19, 127])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e5])
@pytest.mark.parametrize("config", ["sample_only", "epsilon_1", "epsilon_0.05", "optimal"])
def test_huge_logits_are_finite_at_every_tolerance(config, scale, level):
    query, keys, values = problem(scale)
    options = {
        "sample_only": {},
        "epsilon_1": {"fetch": FetchConfig(1.0, shortlist=8), "sketch": RopePairSketch()},
        "epsilon_0.05": {"fetch": FetchConfig(0.05, shortlist=8), "sketch": RopePairSketch()},
        "optimal": {"fetch": FetchConfig(0.05, shortlist=8, shrinkage="optimal"), "sketch": ExactSketch()},
    }[config]
    output, record = attend(query, keys, values, drawn(level), **options)
    assert output.isfinite().all() and output.abs().max() <= values.abs().max() * (1 + 1e-5)  # a weighted mean
    assert not record.relative_error.isnan().any()
    if config != "sample_only":
        assert record.error_bound.isfinite().all() and (record.error_bound >= 0).all()


def test_weights_that_underflow():
    """One logit of 1e4 above all others: their weights are 0, nothing is fetched, and the output is its value."""
    query, keys, values = problem(1.0, n_queries=1)
    query, keys = torch.zeros_like(query), torch.zeros_like(keys)
    query[..., 0] = 100.0
    keys[..., T + 1, 0] = 400.0  # in the tail; 100 * 400 / 4
    for sketch in SKETCHES.values():
        fetch = FetchConfig(0.05, shortlist=0)
        output, record = attend(query, keys, values, drawn(127), fetch=fetch, sketch=sketch)
        torch.testing.assert_close(output, values[:, :, T + 1 : T + 2].repeat_interleave(GROUP, 1), atol=1e-6, rtol=0)
        assert record.fetched == 0 and int(record.promoted.sum()) == 0
        assert (record.error_bound == 0).all() and (record.relative_error == 0).all()


def test_a_large_logit_at_an_absent_token_is_fetched():
    """The same, but the token that decides was not drawn and had the smallest r there is."""
    query, keys, values = problem(1.0, n_queries=1)
    query, keys = torch.zeros_like(query), torch.zeros_like(keys)
    query[..., 0] = 100.0
    keys[..., 100, 0] = 400.0
    assert not is_resident(drawn(127))[..., 100].any()
    for sketch in SKETCHES.values():
        output, record = attend(query, keys, values, drawn(127), fetch=FetchConfig(0.05, shortlist=0), sketch=sketch)
        torch.testing.assert_close(output, values[:, :, 100:101].repeat_interleave(GROUP, 1), atol=1e-6, rtol=0)
        assert record.fetched == N_HEADS and record.promoted.tolist() == [1] * N_HEADS * GROUP
        assert (record.relative_error < 1e-6).all()


@pytest.mark.parametrize("sketch", SKETCHES)
def test_smallest_r_with_all_drawn_is_dense(sketch):
    """Every token has r = 2^-15.875 and was drawn: fetched weights replace weights of 60,000, and nothing is read."""
    query, keys, values = problem(3.0)
    codes = torch.full((1, N_HEADS, T), 127 | RESIDENT_BIT, dtype=torch.uint8)
    fetch = FetchConfig(1e-30, shortlist=T)
    output, record = attend(query, keys, values, codes, fetch=fetch, sketch=SKETCHES[sketch])
    assert record.fetched == 0
    torch.testing.assert_close(output.double(), exact_attention(query, keys, values), atol=1e-5, rtol=0.0)


def test_smallest_r_without_fetching_weighs_60000():
    query, keys, values = problem(3.0, n_queries=1)
    codes = drawn(127)
    output, record = attend(query, keys, values, codes)
    resident = torch.cat([is_resident(codes), torch.ones(1, N_HEADS, TAIL, dtype=torch.bool)], -1)
    log_weight = torch.where(torch.arange(T + TAIL) < T, 15.875 * math.log(2.0), 0.0)
    logits = query.double() @ keys.double().repeat_interleave(GROUP, 1).mT * SCALING + log_weight
    logits = logits.masked_fill(~resident.repeat_interleave(GROUP, 1)[:, :, None], -torch.inf)
    expected = logits.softmax(-1) @ values.double().repeat_interleave(GROUP, 1)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0.0)
    exact = (query.double() @ keys.double().repeat_interleave(GROUP, 1).mT * SCALING).logsumexp(-1)
    error = (logits.logsumexp(-1) - exact).expm1().abs()
    torch.testing.assert_close(record.relative_error.double(), error, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("level", [1, 127])
@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("sketch", SKETCHES)
def test_sums_are_finite_in_half_precision(dtype, level, scale, sketch):
    """D, V and b at r = 2^-15.875 are far beyond float16's 65,504: they are float32, whatever the cache is."""
    query, keys, values = problem(scale, dtype)
    for epsilon in (1e-9, 0.05, 1.0):
        fetch = FetchConfig(epsilon, shortlist=8)
        output, record = attend(query, keys, values, drawn(level), fetch=fetch, sketch=SKETCHES[sketch])
        assert output.dtype == dtype and output.isfinite().all()
        assert record.error_bound.dtype == torch.float32 and record.error_bound.isfinite().all()
        assert record.relative_error.isfinite().all() and record.output_error.isfinite().all()
    weights, r = torch.full((3, 1000), 200.0, dtype=dtype), torch.tensor(2.0 ** (-level / 8))
    residual, ones = torch.ones(3, 1000, dtype=torch.bool), torch.ones(3, 1000)
    denominator = horvitz_thompson(weights, r, residual, residual)
    certificate = bernstein_certificate(weights, r, ones, residual, denominator, 0.1)
    parts = [denominator, certificate.error_bound, certificate.bias, certificate.variance, certificate.max_deviation]
    assert all(part.dtype == torch.float32 and part.isfinite().all() for part in parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3", "qwen3_5"])
def test_bounds_of_half_precision_models_are_finite(tiny_model, kind, dtype):
    model = tiny_model(kind).to(dtype)
    press = make_press("verkv", compression_ratio=0.6, audit=True, record_bounds=True)
    cache = prefill(model, random_ids(1, N_TOKENS), press, cache=make_cache(model.config))
    for n_new in (6, 1, 1):
        assert decode(model, random_ids(1, n_new, seed=n_new), cache).isfinite().all()
    assert press.stats.bounds().isfinite().all() and (press.stats.bounds() >= 0).all()
    assert press.stats.relative_errors().isfinite().all() and press.stats.output_errors().isfinite().all()


# --- 10^6 tokens ------------------------------------------------------------------------------------------------------

MILLION = 10**6


@pytest.fixture(scope="module")
def million():
    """Weights over 25 orders of magnitude, r in the form it is kept in, and what the budget was."""
    generator = seeded(5)
    weights = (6.0 * torch.randn(MILLION, generator=generator, dtype=torch.float64)).exp()
    weights = weights / weights.max()
    noise = (0.5 * torch.randn(MILLION, generator=generator, dtype=torch.float64)).exp()
    budget = MILLION / 16
    r = inclusion_probabilities(weights.sqrt() * noise, budget, floor=MIN_INCLUSION_PROB)
    levels, rounded = quantize_inclusion_probs(r)
    return weights, levels, rounded, budget


def test_sum_of_a_million_quantised_probabilities(million):
    _, levels, r, budget = million
    assert budget - QUANTUM < r.sum() <= budget + 1e-6
    from_codes = torch.exp2(-levels.double() / 8).sum()
    assert budget - QUANTUM < from_codes <= budget + 1e-6
    assert (levels > 0).any() and (levels == 0).any()


@pytest.mark.parametrize("rule", [binary_shrinkage, optimal_shrinkage], ids=["binary", "optimal"])
def test_plan_for_a_million_tokens_in_float32(million, rule):
    """Against float64: a few tokens more at most, and never so few that the tolerance is missed."""
    weights, _, r, _ = million
    residual = r < 1.0
    shrinkage = rule(weights, r, residual)
    arguments = weights, r, shrinkage, residual, weights.sum()
    bound = bernstein_certificate(*arguments, delta=0.1).error_bound.item()
    for epsilon in (bound / 3, bound / 100, bound * 1e-4, bound * 1e-8):
        expected = fetch_plan(*arguments, epsilon=epsilon, delta=0.1)
        plan = fetch_plan(*(t if t.dtype == torch.bool else t.float() for t in arguments), epsilon=epsilon, delta=0.1)
        k, k_expected = int(plan.n_promoted), int(expected.n_promoted)
        assert 0 < k_expected < residual.sum()
        assert abs(k - k_expected) <= 2 + 1e-4 * k_expected
        after = bernstein_certificate(weights, r, shrinkage, residual & ~plan.promoted, weights.sum(), delta=0.1)
        assert after.error_bound < epsilon * (1 + 1e-5)
        # The bound of what remains is not the difference of large sums: it is right also where it is tiny.
        torch.testing.assert_close(plan.planned_bound.double(), after.error_bound, rtol=1e-4, atol=0.0)
        assert plan.planned_bound < epsilon
