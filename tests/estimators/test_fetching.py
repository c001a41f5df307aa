"""The drop of the bound against its definition, and the greedy plan against brute force over every k."""

import itertools
import math

import pytest
import torch

from verkv.estimators import (
    bernstein_certificate,
    binary_shrinkage,
    certificate_drop,
    fetch_plan,
    optimal_shrinkage,
)

F64 = torch.float64
DELTA = 0.1


def make_problem(kind, n, seed=0, shape=()):
    """Weights, inclusion probabilities, shrinkage, residual set and denominator."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(*shape, n, generator=g, dtype=F64).exp()
    r = 0.02 + 0.96 * torch.rand(*shape, n, generator=g, dtype=F64)
    residual = torch.ones(*shape, n, dtype=torch.bool)
    if kind == "heavy_tail":
        w = w**4
    elif kind == "dominant_weight":
        w[..., n // 2] = 1e6
    elif kind == "ties":
        w, r = torch.ones_like(w), torch.full_like(w, 0.25)
    elif kind == "tied_maximum":
        w[..., : (n + 1) // 2], r[..., : (n + 1) // 2] = 20.0, 0.1
    elif kind == "certain_tokens":
        r[..., 1::3] = 1.0
        residual = r < 1
    elif kind == "tiny_r":
        r = 2.0 ** (-15 * torch.rand(*shape, n, generator=g, dtype=F64) - 0.1)
    elif kind == "zero_weights":
        w[..., 1::2] = 0.0
    shrinkage = binary_shrinkage(w, r, residual) if kind == "binary" else torch.ones_like(w)
    if kind == "optimal":
        shrinkage = optimal_shrinkage(w, r, residual)
    return w, r, shrinkage, residual, w.sum(-1) + 0.5


KINDS = [
    "plain",
    "heavy_tail",
    "dominant_weight",
    "ties",
    "tied_maximum",
    "certain_tokens",
    "tiny_r",
    "zero_weights",
    "binary",
    "optimal",
]


def bound_of(problem, residual):
    w, r, shrinkage, _, denominator = problem
    return bernstein_certificate(w, r, shrinkage, residual, denominator, DELTA).error_bound


def direct_drop(problem):
    """g_i = eps(L) - eps(L without i), by evaluating both."""
    residual = problem[3]
    without = residual & ~torch.eye(len(residual), dtype=torch.bool)  # row i lacks token i
    return bound_of(problem, residual) - bound_of(problem, without)


def bounds_along(problem, order):
    """eps(L_g[k:]) for k = 0 ... |L|, each by a fresh evaluation."""
    rank = torch.empty_like(order).scatter(-1, order, torch.arange(len(order)))
    n_residual = int(problem[3].sum())
    return bound_of(problem, problem[3] & (rank >= torch.arange(n_residual + 1)[:, None]))


class TestCertificateDrop:
    @pytest.mark.parametrize("n", [1, 2, 3, 63, 500])
    @pytest.mark.parametrize("kind", KINDS)
    def test_equals_direct_difference(self, kind, n):
        problem = make_problem(kind, n)
        drop, bound = certificate_drop(*problem, DELTA), bound_of(problem, problem[3])
        assert drop.shape == (n,)
        torch.testing.assert_close(drop, direct_drop(problem), rtol=1e-9, atol=1e-14 * float(bound))

    @pytest.mark.parametrize("kind", KINDS)
    def test_not_negative_and_zero_outside_the_residual_set(self, kind):
        problem = make_problem(kind, 200)
        drop = certificate_drop(*problem, DELTA)
        assert bool((drop >= 0).all())
        assert bool((drop[~problem[3]] == 0).all())
        assert bool((drop[problem[3] & (problem[0] > 0)] > 0).all())

    def test_empty_residual(self):
        w, r, shrinkage, residual, denominator = make_problem("plain", 7)
        assert bool((certificate_drop(w, r, shrinkage, residual & False, denominator, DELTA) == 0).all())

    def test_only_token_takes_the_whole_bound(self):
        problem = make_problem("plain", 1)
        torch.testing.assert_close(
            certificate_drop(*problem, DELTA)[0], bound_of(problem, problem[3]), rtol=1e-14, atol=0
        )

    @pytest.mark.parametrize("n", [1000, 4097])
    def test_float32_does_not_cancel(self, n):
        """The difference of two float32 bounds is noise for all but the largest drops; the formula keeps its digits."""
        problem = make_problem("heavy_tail", n)
        single = [x.float() if x.is_floating_point() else x for x in problem]
        exact = certificate_drop(*(x.double() if x.is_floating_point() else x for x in single), DELTA)
        drop = certificate_drop(*single, DELTA)
        naive = direct_drop(single)
        relative = ((drop.double() - exact) / exact).abs()
        naive_relative = ((naive.double() - exact) / exact).abs()
        assert float(naive_relative.median()) > 0.1
        assert float(relative.max()) < 1e-4
        assert float(relative.median()) < 1e-6

    def test_batches_equal_single_rows(self):
        problem = make_problem("certain_tokens", 50, shape=(2, 3))
        batch = certificate_drop(*problem, DELTA)
        assert batch.shape == (2, 3, 50)
        for i in [(0, 0), (0, 2), (1, 1)]:
            row = certificate_drop(*(x[i] for x in problem), DELTA)
            torch.testing.assert_close(batch[i], row, rtol=1e-12, atol=1e-15)

    @pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, math.nan])
    def test_delta_out_of_range_raises(self, delta):
        with pytest.raises(ValueError, match="delta"):
            certificate_drop(*make_problem("plain", 5), delta)


class TestFetchPlan:
    @pytest.mark.parametrize("share", [1e-3, 0.03, 0.2, 0.5, 0.9, 0.999])
    @pytest.mark.parametrize("n", [1, 2, 3, 12, 63, 300])
    @pytest.mark.parametrize("kind", KINDS)
    def test_smallest_prefix_by_brute_force(self, kind, n, share):
        problem = make_problem(kind, n, seed=n)
        residual = problem[3]
        before = float(bound_of(problem, residual))
        epsilon = share * before
        order = torch.where(residual, certificate_drop(*problem, DELTA), -1.0).argsort(descending=True, stable=True)
        bounds = bounds_along(problem, order)
        smallest = next(k for k, bound in enumerate(bounds.tolist()) if bound < epsilon)

        plan = fetch_plan(*problem, epsilon, DELTA)
        assert int(plan.n_promoted) == smallest
        assert torch.equal(plan.promoted.nonzero().squeeze(-1), order[:smallest].sort().values)
        assert float(plan.error_bound) == pytest.approx(before, rel=1e-12)
        assert float(plan.planned_bound) == pytest.approx(float(bounds[smallest]), rel=1e-12, abs=1e-300)
        assert float(plan.planned_bound) < epsilon <= float(bounds[smallest - 1])
        assert float(plan.planned_bound) == pytest.approx(
            float(bound_of(problem, residual & ~plan.promoted)), rel=1e-12
        )

    @pytest.mark.parametrize("kind", [k for k in KINDS if "tie" not in k])
    @pytest.mark.parametrize("n", [12, 63])
    def test_promotes_the_largest_direct_drops(self, kind, n):
        problem = make_problem(kind, n, seed=1)
        drop = direct_drop(problem)
        plan = fetch_plan(*problem, 0.3 * float(bound_of(problem, problem[3])), DELTA)
        assert 0 < int(plan.n_promoted) < n
        assert not bool((plan.promoted & ~problem[3]).any())
        assert float(drop[plan.promoted].min()) > float(drop[problem[3] & ~plan.promoted].max())

    @pytest.mark.parametrize("kind", KINDS)
    def test_more_tolerance_promotes_fewer_and_nested_sets(self, kind):
        problem = make_problem(kind, 100)
        before = float(bound_of(problem, problem[3]))
        plans = [fetch_plan(*problem, share * before, DELTA) for share in (1e-6, 0.05, 0.2, 0.5, 0.8)]
        for tight, loose in itertools.pairwise(plans):
            assert int(tight.n_promoted) >= int(loose.n_promoted)
            assert not bool((loose.promoted & ~tight.promoted).any())
        assert int(plans[0].n_promoted) > int(plans[-1].n_promoted) > 0

    @pytest.mark.parametrize("dtype", [torch.float32, F64])
    @pytest.mark.parametrize("n", [1, 63, 1000, 4097])
    def test_tiny_epsilon_promotes_all_of_the_residual_set(self, n, dtype):
        problem = [x.to(dtype) if x.is_floating_point() else x for x in make_problem("certain_tokens", n)]
        plan = fetch_plan(*problem, 1e-30, DELTA)
        assert torch.equal(plan.promoted, problem[3])
        assert int(plan.n_promoted) == int(problem[3].sum())
        assert float(plan.planned_bound) == 0

    @pytest.mark.parametrize("epsilon", [1e3, 1e30])
    def test_huge_epsilon_promotes_nothing(self, epsilon):
        problem = make_problem("plain", 100)
        plan = fetch_plan(*problem, epsilon, DELTA)
        assert int(plan.n_promoted) == 0
        assert not bool(plan.promoted.any())
        assert float(plan.planned_bound) == float(plan.error_bound) > 0

    def test_empty_residual_promotes_nothing(self):
        w, r, shrinkage, residual, denominator = make_problem("plain", 10)
        plan = fetch_plan(w, r, shrinkage, residual & False, denominator, 1e-9, DELTA)
        assert int(plan.n_promoted) == int(plan.promoted.sum()) == 0
        assert float(plan.error_bound) == float(plan.planned_bound) == 0

    def test_bound_equal_to_epsilon_is_not_below_it(self):
        problem = make_problem("plain", 20)
        before = float(fetch_plan(*problem, 1.0, DELTA).error_bound)
        assert int(fetch_plan(*problem, before, DELTA).n_promoted) == 1
        assert int(fetch_plan(*problem, math.nextafter(before, math.inf), DELTA).n_promoted) == 0

    @pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
    def test_equal_tokens_have_a_closed_form(self, share):
        n, r = 1000, 0.25
        problem = make_problem("ties", n)
        l = math.log(2 / DELTA)
        b = (1 / r) * (1 - r) * l / 3
        bound = lambda k: (b + math.sqrt(b * b + 2 * (n - k) * (1 - r) / r * l)) / (n + 0.5)  # noqa: E731
        epsilon = share * bound(0)
        plan = fetch_plan(*problem, epsilon, DELTA)
        k = int(plan.n_promoted)
        assert bound(k) < epsilon <= bound(k - 1)
        assert int(plan.promoted.sum()) == k

    @pytest.mark.parametrize("kind", KINDS)
    def test_batches_equal_single_rows(self, kind):
        problem = make_problem(kind, 50, seed=8, shape=(2, 3))
        epsilon = 0.4 * float(bound_of(problem, problem[3]).mean())
        batch = fetch_plan(*problem, epsilon, DELTA)
        assert batch.promoted.shape == (2, 3, 50)
        assert batch.n_promoted.shape == batch.error_bound.shape == batch.planned_bound.shape == (2, 3)
        for i in [(b, h) for b in range(2) for h in range(3)]:
            row = fetch_plan(*(x[i] for x in problem), epsilon, DELTA)
            assert torch.equal(batch.promoted[i], row.promoted)
            assert torch.equal(batch.n_promoted[i], row.n_promoted)
            torch.testing.assert_close(batch.planned_bound[i], row.planned_bound, rtol=1e-12, atol=0)

    @pytest.mark.parametrize(("dtype", "margin"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
    @pytest.mark.parametrize("n", [1, 63, 1000, 4097])
    @pytest.mark.parametrize("kind", ["plain", "heavy_tail", "dominant_weight", "ties", "tiny_r", "binary"])
    def test_low_precision_plan_holds_in_float64(self, kind, n, dtype, margin):
        """The float64 bound at the low-precision plan is below epsilon up to rounding, and so is not one token less."""
        low = [x.to(dtype) if x.is_floating_point() else x for x in make_problem(kind, n)]
        high = [x.double() if x.is_floating_point() else x for x in low]
        epsilon = 0.3 * float(bound_of(high, high[3]))
        plan = fetch_plan(*low, epsilon, DELTA)
        assert float(bound_of(high, high[3] & ~plan.promoted)) < epsilon * (1 + margin)
        exact = fetch_plan(*high, epsilon * (1 - margin), DELTA)
        assert int(plan.n_promoted) <= int(exact.n_promoted)

    def test_last_tokens_bound_is_not_lost_beside_the_first(self):
        """With total minus prefix in float32 what remains after the giant would be zero, and its bound void."""
        w = torch.cat([torch.tensor([1e9]), torch.ones(1000)])
        problem = (w, torch.full_like(w, 0.1), torch.ones_like(w), w > 0, w.sum())
        remaining = float(bound_of([x.double() if x.is_floating_point() else x for x in problem], w == 1))
        assert int(fetch_plan(*problem, 1.01 * remaining, DELTA).n_promoted) == 1
        plan = fetch_plan(*problem, 0.99 * remaining, DELTA)
        assert 1 < int(plan.n_promoted) < 100

    @pytest.mark.parametrize("epsilon", [0.0, -0.1, math.nan])
    def test_epsilon_not_positive_raises(self, epsilon):
        with pytest.raises(ValueError, match="epsilon"):
            fetch_plan(*make_problem("plain", 5), epsilon, DELTA)

    @pytest.mark.parametrize("delta", [0.0, 1.0, math.nan])
    def test_delta_out_of_range_raises(self, delta):
        with pytest.raises(ValueError, match="delta"):
            fetch_plan(*make_problem("plain", 5), 0.1, delta)
