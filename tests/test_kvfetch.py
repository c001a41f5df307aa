"""Algorithm 2 as a function: composed from the estimators, blind to the draw, one scale per row."""

import inspect

import pytest
import torch
from torch.testing import assert_close

from verkv import kvfetch
from verkv.estimators import binary_shrinkage, fetch_plan, optimal_shrinkage
from verkv.kvfetch import FetchConfig, decide, row_chunks

pytestmark = pytest.mark.usefixtures("each_way")

N, R, T = 3, 4, 50


def make_problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(N, R, T, generator=generator)
    tail_lse = torch.randn(N, R, generator=generator)
    r = torch.where(
        torch.rand(N, T, generator=generator) < 0.2, 1.0, torch.rand(N, T, generator=generator) * 0.9 + 0.05
    )
    return logits, tail_lse, r, r < 1


def decided(problem, **options):
    return decide(*problem, FetchConfig(**options))


@pytest.mark.parametrize("shrinkage", ["binary", "optimal"])
@pytest.mark.parametrize("epsilon", [0.02, 0.1, 0.5])
def test_decision_is_the_composition_of_the_estimators(shrinkage, epsilon):
    problem = make_problem()
    logits, tail_lse, r, residual = problem
    decision = decided(problem, epsilon=epsilon, delta=0.05, shrinkage=shrinkage)
    shrink = {"binary": binary_shrinkage, "optimal": optimal_shrinkage}[shrinkage]
    for unit in range(N):
        for row in range(R):  # any common scale will do; this one is the plain exponential
            weights = logits[unit, row].double().exp()
            denominator = weights.sum() + tail_lse[unit, row].double().exp()
            lam = shrink(weights, r[unit].double(), residual[unit])
            plan = fetch_plan(weights, r[unit].double(), lam, residual[unit], denominator, epsilon, 0.05)
            assert torch.equal(decision.promoted[unit, row], plan.promoted)
            assert decision.n_promoted[unit, row] == plan.n_promoted
            assert_close(decision.shrinkage[unit, row].double(), lam, atol=1e-5, rtol=0)
            assert_close(decision.error_bound[unit, row].double(), plan.error_bound, atol=0, rtol=1e-4)
            assert_close(decision.planned_bound[unit, row].double(), plan.planned_bound, atol=0, rtol=1e-4)
    assert (decision.planned_bound < epsilon).all()
    assert 0 < decision.n_promoted.sum() < N * R * T


@pytest.mark.parametrize("shrinkage", ["binary", "optimal"])
def test_long_rows_give_the_reference_in_linear_time(monkeypatch, shrinkage):
    """Their float32 plan may promote a few tokens more, never fewer."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(N, R, kvfetch.LEAST_FOR_LINEAR, generator=generator)
    tail_lse, r = (
        torch.randn(N, R, generator=generator),
        torch.rand(N, logits.shape[-1], generator=generator) * 0.9 + 0.05,
    )
    linear = decided((logits, tail_lse, r, r < 1), epsilon=0.05, shrinkage=shrinkage)
    monkeypatch.setattr(kvfetch, "LEAST_FOR_LINEAR", 2**30)
    sorting = decided((logits, tail_lse, r, r < 1), epsilon=0.05, shrinkage=shrinkage)
    more = linear.n_promoted - sorting.n_promoted
    assert (more >= 0).all() and (more <= 3).all() and (sorting.n_promoted > 20).all()
    assert ((linear.promoted ^ sorting.promoted).sum(-1) <= more + 2).all()  # equal drops may change places
    assert_close(linear.error_bound, sorting.error_bound, rtol=1e-3, atol=0)
    assert_close(linear.shrinkage, sorting.shrinkage)


def test_each_row_has_its_own_tolerance():
    problem = make_problem()
    epsilon = torch.linspace(0.02, 0.5, N * R).view(N, R)
    each = decide(*problem, FetchConfig(0.1), epsilon=epsilon)
    for unit in range(N):
        for row in range(R):
            alone = decided(problem, epsilon=float(epsilon[unit, row]))
            assert torch.equal(each.promoted[unit, row], alone.promoted[unit, row])


def test_unknown_weights_enter_with_their_moments():
    """E[w] in the denominator, E[w^2]^(1/2) everywhere else, and exact weights where they are known."""
    logits, tail_lse, r, residual = make_problem()
    unknown = residual & (torch.arange(T) % 2 == 0)
    variance = torch.linspace(0.0, 1.5, N * R).view(N, R)
    decision = decide(logits, tail_lse, r, residual, FetchConfig(0.1), unknown=unknown, logit_variance=variance)
    for unit in range(N):
        for row in range(R):
            exact, s = logits[unit, row].double().exp(), float(variance[unit, row])
            first = torch.where(unknown[unit], exact * torch.e ** (s / 2), exact)
            second = torch.where(unknown[unit], exact * torch.e**s, exact)
            denominator = first.sum() + tail_lse[unit, row].double().exp()
            lam = binary_shrinkage(second, r[unit].double(), residual[unit])
            plan = fetch_plan(second, r[unit].double(), lam, residual[unit], denominator, 0.1, 0.1)
            assert torch.equal(decision.promoted[unit, row], plan.promoted)
            assert_close(decision.error_bound[unit, row].double(), plan.error_bound, atol=0, rtol=1e-4)


def test_a_variance_too_large_for_any_bound_promotes_everything():
    """An overflowing moment must not pass for a certificate."""
    logits, tail_lse, r, residual = make_problem()
    for variance in (200.0, float("inf"), float("nan")):
        rows = torch.full((N, R), variance)
        decision = decide(logits, tail_lse, r, residual, FetchConfig(0.1), unknown=residual, logit_variance=rows)
        assert torch.equal(decision.promoted, residual[:, None].expand_as(decision.promoted))


def test_a_common_shift_changes_nothing():
    logits, tail_lse, r, residual = make_problem()
    base = decided((logits, tail_lse, r, residual), epsilon=0.1)
    for shift in (-300.0, 300.0):  # exp of either is out of float32's range
        moved = decided((logits + shift, tail_lse + shift, r, residual), epsilon=0.1)
        assert torch.equal(moved.promoted, base.promoted)
        assert_close(moved.error_bound, base.error_bound, rtol=1e-3, atol=0)


def test_tail_counts_in_the_denominator():
    logits, tail_lse, r, residual = make_problem()
    without = decided((logits, torch.full_like(tail_lse, -torch.inf), r, residual), epsilon=0.1)
    heavy = decided((logits, tail_lse + 30, r, residual), epsilon=0.1)
    assert (without.error_bound > decided((logits, tail_lse, r, residual), epsilon=0.1).error_bound).all()
    assert without.error_bound.isfinite().all()
    assert not heavy.promoted.any()


@pytest.mark.parametrize("gap", [-200.0, 200.0])
def test_context_and_tail_far_apart(gap):
    """exp(200) is out of float32's range: the scale must come from whichever is larger."""
    logits, tail_lse, r, residual = make_problem()
    decision = decided((logits + gap, tail_lse, r, residual), epsilon=0.1)
    assert decision.error_bound.isfinite().all() and decision.planned_bound.isfinite().all()
    alone = decided((logits, torch.full_like(tail_lse, -torch.inf), r, residual), epsilon=0.1)
    assert torch.equal(decision.promoted, alone.promoted if gap > 0 else torch.zeros_like(alone.promoted))


def test_absent_tokens_have_no_weight():
    logits, tail_lse, r, residual = make_problem()
    absent = torch.arange(T) < 7
    masked = decided((logits.masked_fill(absent, -torch.inf), tail_lse, r, residual & ~absent), epsilon=0.1)
    short = decided((logits[..., 7:], tail_lse, r[:, 7:], residual[:, 7:]), epsilon=0.1)
    assert torch.equal(masked.promoted[..., 7:], short.promoted) and not masked.promoted[..., :7].any()
    assert_close(masked.error_bound, short.error_bound)


def test_nothing_to_decide_without_a_residual_set():
    logits, tail_lse, r, _ = make_problem()
    decision = decided((logits, tail_lse, torch.ones_like(r), torch.zeros_like(r, dtype=torch.bool)), epsilon=0.1)
    assert not decision.promoted.any() and not decision.error_bound.any()
    assert (decision.shrinkage == 1).all()


def test_no_function_takes_the_draw():
    for function in (decide, row_chunks):
        assert not {"sampled", "resident", "codes"} & set(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    "options,match",
    [
        ({"epsilon": 0.0}, "epsilon must be > 0 and finite, got 0.0"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"shortlist": -1}, "shortlist must be an integer >= 0, got -1"),
        ({"shrinkage": "none"}, "shrinkage must be one of .*got 'none'"),
    ],
)
def test_options_out_of_range_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        FetchConfig(**options)


@pytest.mark.parametrize("n_rows", [1, 5, 64])
@pytest.mark.parametrize("pairs", [1, 1000, 10**9])
def test_chunks_cover_all_rows_once(monkeypatch, n_rows, pairs):
    monkeypatch.setattr(kvfetch, "MAX_PLANNED_PAIRS", pairs)
    chunks = row_chunks(n_units=2, n_rows=n_rows, n_tokens=50)
    assert [i for chunk in chunks for i in range(n_rows)[chunk]] == list(range(n_rows))
    assert all(2 * 50 * (c.stop - c.start) <= max(pairs, 100) for c in chunks)
