"""Chernoff's bound: never above Bernstein's, exact failure probabilities, and a plan that no smaller set can match."""

import inspect
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from verkv.estimators import (
    bernstein_certificate,
    binary_shrinkage,
    chernoff_bound,
    chernoff_fetch_plan,
    fetch_plan,
    optimal_shrinkage,
    output_certificate,
    poisson_sample,
    shrinkage_estimate,
)

F64 = torch.float64
DELTA = 0.1
SHRINKAGES = {
    "none": lambda w, r, residual: torch.ones_like(w),
    "binary": binary_shrinkage,
    "optimal": optimal_shrinkage,
}


def make_problem(n, seed=0, spread=1.0, least=0.02, rule="none", outside=0.5, shape=()):
    """Weights, inclusion probabilities (some of them 1), shrinkage, residual set and denominator."""
    g = torch.Generator().manual_seed(seed)
    w = (spread * torch.randn(*shape, n, generator=g, dtype=F64)).exp()
    r = (least + 1.1 * torch.rand(*shape, n, generator=g, dtype=F64) ** 2).clamp(max=1)
    residual = r < 1
    return w, r, SHRINKAGES[rule](w, r, residual), residual, w.sum(-1) + outside


def all_draws(r):
    draws = torch.tensor(list(itertools.product([False, True], repeat=len(r))))
    return draws, torch.where(draws, r, 1 - r).prod(-1)


def cost_by_hand(problem, s):
    """(1 - lambda) w + psi / s of each token, in scalar arithmetic."""
    costs = []
    for w, r, shrinkage, is_residual in zip(*(x.tolist() for x in problem[:4]), strict=True):
        a = shrinkage * w
        up = math.log(r * math.exp(s * a * (1 - r) / r) + (1 - r) * math.exp(-s * a)) if is_residual else 0.0
        down = math.log(r * math.exp(-s * a * (1 - r) / r) + (1 - r) * math.exp(s * a)) if is_residual else 0.0
        costs.append(w * (1 - shrinkage) + max(up, down) / s if is_residual else 0.0)
    return torch.tensor(costs, dtype=F64)


class TestBound:
    @settings(max_examples=150, deadline=None)
    @given(
        st.integers(1, 60), st.integers(0, 2**31), st.sampled_from([0.0, 1.0, 3.0]),
        st.sampled_from([1e-5, 0.02, 0.9]), st.sampled_from(sorted(SHRINKAGES)), st.sampled_from([0.01, 0.1, 0.5]),
    )  # fmt: skip
    def test_never_above_bernstein(self, n, seed, spread, least, rule, delta):
        problem = make_problem(n, seed, spread, least, rule)
        bound = chernoff_bound(*problem, delta)
        assert float(bound) <= float(bernstein_certificate(*problem, delta).error_bound)
        distances = torch.rand(n, dtype=F64)
        certificate = output_certificate(*problem, distances, delta / 0.9)  # its numerator gets delta
        with_distances = chernoff_bound(*problem, delta, distances)
        bernstein = certificate.error_bound * (1 - certificate.denominator_bound)
        if float(certificate.denominator_bound) < 1:
            assert float(with_distances) <= float(bernstein) * (1 + 1e-12)

    def test_first_tilt_alone_is_not_above_bernstein(self):
        """The proof of Bernstein's form from the moments: the same tilt gives no more."""
        for seed in range(20):
            problem = make_problem(40, seed, 2.0)
            c = bernstein_certificate(*problem, DELTA)
            t = float(c.error_bound * problem[4])
            s = t / (float(c.variance) + float(c.max_deviation) * t / 3)
            by_hand = math.log(2 / DELTA) / s + float(cost_by_hand(problem, s).sum())
            assert by_hand <= t

    def test_is_clearly_below_where_one_token_deviates_most(self):
        w = torch.cat([torch.full((1,), 30.0, dtype=F64), torch.ones(500, dtype=F64)])
        r = torch.cat([torch.full((1,), 0.3, dtype=F64), torch.full((500,), 0.2, dtype=F64)])
        problem = (w, r, torch.ones_like(w), r < 1, w.sum())
        assert float(chernoff_bound(*problem, DELTA)) < 0.85 * float(bernstein_certificate(*problem, DELTA).error_bound)

    @pytest.mark.parametrize("delta", [0.3, 0.1, 0.05])
    @pytest.mark.parametrize("rule", SHRINKAGES)
    @pytest.mark.parametrize("least", [0.02, 0.3])
    def test_failure_probability_by_enumeration(self, least, rule, delta):
        for seed in range(6):
            problem = make_problem(9, seed, 0.7, least, rule)
            w, r, shrinkage, residual, denominator = problem
            draws, probability = all_draws(r)
            estimate = shrinkage_estimate(w, r, shrinkage, draws, residual)
            errors = (estimate - w.sum()).abs() / denominator
            assert float(probability[errors > chernoff_bound(*problem, delta)].sum()) <= delta
            values = torch.randn(9, 3, generator=torch.Generator().manual_seed(seed), dtype=F64)
            sums = torch.where(residual, torch.where(draws, shrinkage / r, 0.0) - 1, 0.0) * w @ values
            bound = chernoff_bound(*problem, delta, values.norm(dim=-1))
            assert float(probability[sums.norm(dim=-1) / denominator > bound].sum()) <= delta

    @pytest.mark.parametrize("delta", [0.05, 0.1])
    @pytest.mark.parametrize("rule", ["none", "binary"])
    def test_coverage_where_half_of_it_is_rejected(self, rule, delta):
        w, r = torch.ones(400, dtype=F64), torch.full((400,), 0.2, dtype=F64)
        residual = r < 1
        shrinkage = SHRINKAGES[rule](w, r, residual)
        bound = chernoff_bound(w, r, shrinkage, residual, w.sum(), delta)
        sampled = poisson_sample(r.expand(10_000, -1), torch.Generator().manual_seed(0))
        errors = (shrinkage_estimate(w, r, shrinkage, sampled, residual) - w.sum()).abs() / w.sum()
        pvalue = lambda b: binomtest(int((errors > b).sum()), 10_000, delta, alternative="greater").pvalue  # noqa: E731
        assert pvalue(bound) > 1e-2
        assert pvalue(bound / 2) < 1e-6

    def test_zero_on_an_empty_residual_set_and_where_nothing_weighs(self):
        w, r, shrinkage, residual, denominator = make_problem(10)
        assert float(chernoff_bound(w, r, shrinkage, residual & False, denominator, DELTA)) == 0
        assert float(chernoff_bound(w, r, shrinkage, residual, denominator, DELTA, 0 * w)) == 0

    def test_batches_equal_single_rows(self):
        problem = make_problem(40, shape=(2, 3))
        batch = chernoff_bound(*problem, DELTA)
        for i in [(0, 0), (1, 2)]:
            torch.testing.assert_close(batch[i], chernoff_bound(*(x[i] for x in problem), DELTA), rtol=1e-12, atol=0)

    @pytest.mark.parametrize("least", [2.0**-15.9, 0.02])
    def test_float32(self, least):
        low = [x.float() if x.is_floating_point() else x for x in make_problem(4000, 0, 2.0, least)]
        high = [x.double() if x.is_floating_point() else x for x in low]
        assert float(chernoff_bound(*low, DELTA)) == pytest.approx(float(chernoff_bound(*high, DELTA)), rel=1e-4)

    @pytest.mark.parametrize("delta", [0.0, 1.0, math.nan])
    def test_delta_out_of_range_raises(self, delta):
        with pytest.raises(ValueError, match="delta"):
            chernoff_bound(*make_problem(5), delta)


class TestPlan:
    @pytest.mark.parametrize("rule", SHRINKAGES)
    @pytest.mark.parametrize("epsilon", [0.05, 0.3, 1.0])
    @pytest.mark.parametrize("seed", range(4))
    def test_no_smaller_set_meets_the_bound(self, seed, epsilon, rule):
        """Over all subsets: the greedy plan is the best there is at this tilt."""
        problem = make_problem(10, seed, rule=rule)
        residual, denominator = problem[3], float(problem[4])
        plan = chernoff_fetch_plan(*problem, epsilon, DELTA)
        s = 1.75 * math.log(2 / DELTA) / (epsilon * denominator)
        costs = cost_by_hand(problem, s)
        fewest = len(costs)
        for subset in itertools.product([False, True], repeat=10):
            promoted = torch.tensor(subset) & residual
            left = residual & ~promoted
            bound = (math.log(2 / DELTA) / s + float(costs[left].sum())) / denominator if bool(left.any()) else 0.0
            if bound < epsilon:
                fewest = min(fewest, int(promoted.sum()))
            if torch.equal(promoted, plan.promoted):
                assert float(plan.planned_bound) == pytest.approx(bound, rel=1e-9, abs=1e-15)
        assert int(plan.n_promoted) == int(plan.promoted.sum()) == fewest
        assert float(plan.planned_bound) < epsilon

    @pytest.mark.parametrize("rule", SHRINKAGES)
    @pytest.mark.parametrize("epsilon", [0.02, 0.1, 0.3])
    def test_certificate_confirms_the_plan(self, epsilon, rule):
        w, r, shrinkage, residual, denominator = make_problem(800, 3, rule=rule)
        plan = chernoff_fetch_plan(w, r, shrinkage, residual, denominator, epsilon, DELTA)
        left = residual & ~plan.promoted
        assert float(chernoff_bound(w, r, shrinkage, left, denominator, DELTA)) < epsilon * 1.02
        assert (
            0
            < int(plan.n_promoted)
            < int(fetch_plan(w, r, shrinkage, residual, denominator, epsilon, DELTA).n_promoted)
        )

    @pytest.mark.parametrize("epsilon", [0.02, 0.1, 0.3])
    def test_float32_plan_holds_in_float64(self, epsilon):
        low = [x.float() if x.is_floating_point() else x for x in make_problem(3000, 1, 2.0, 2.0**-15.9)]
        w, r, shrinkage, residual, denominator = (x.double() if x.is_floating_point() else x for x in low)
        plan = chernoff_fetch_plan(*low, epsilon, DELTA)
        exact = chernoff_fetch_plan(
            w, r, shrinkage, residual & ~plan.promoted, denominator, epsilon * (1 + 1e-5), DELTA
        )
        assert int(exact.n_promoted) == 0
        assert int(plan.n_promoted) > 0

    def test_tiny_and_huge_epsilon_and_empty_residual_set(self):
        w, r, shrinkage, residual, denominator = make_problem(60)
        everything = chernoff_fetch_plan(w, r, shrinkage, residual, denominator, 1e-30, DELTA)
        assert torch.equal(everything.promoted, residual) and float(everything.planned_bound) == 0
        nothing = chernoff_fetch_plan(w, r, shrinkage, residual, denominator, 1e6, DELTA)
        assert int(nothing.n_promoted) == 0
        empty = chernoff_fetch_plan(w, r, shrinkage, residual & False, denominator, 0.1, DELTA)
        assert int(empty.n_promoted) == 0 and float(empty.error_bound) == 0

    def test_broadcasts_and_is_blind(self):
        w, _, _, _, denominator = make_problem(30, shape=(2, 3))
        _, r, _, residual, _ = make_problem(30, shape=(2, 1))
        plan = chernoff_fetch_plan(w, r, torch.ones_like(w), residual, denominator, 0.2, DELTA)
        row = chernoff_fetch_plan(
            w[1, 2], r[1, 0], torch.ones(30, dtype=F64), residual[1, 0], denominator[1, 2], 0.2, DELTA
        )
        assert torch.equal(plan.promoted[1, 2], row.promoted)
        for function in (chernoff_bound, chernoff_fetch_plan):
            assert not {"sampled", "generator"} & set(inspect.signature(function).parameters)

    def test_nan_weight_is_promoted(self):
        w, r, shrinkage, residual, denominator = make_problem(20, least=0.3)
        w[7], r[7], residual[7] = math.nan, 0.5, True
        assert bool(chernoff_fetch_plan(w, r, shrinkage, residual, denominator, 0.5, DELTA).promoted[7])

    @pytest.mark.parametrize(("name", "value"), [("epsilon", 0.0), ("delta", 1.0), ("tilt", 1.0), ("tilt", math.nan)])
    def test_out_of_range_raises(self, name, value):
        with pytest.raises(ValueError, match=name):
            chernoff_fetch_plan(*make_problem(5), **({"epsilon": 0.1, "delta": 0.1} | {name: value}))
