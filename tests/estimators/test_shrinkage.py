"""Shrinkage coefficients against generic optimisers, brute force and the optimality conditions of Theorem 1."""

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear, minimize

from verkv.estimators import binary_shrinkage, mean_squared_error, optimal_shrinkage

F64 = torch.float64


def make_problem(kind, n, seed=0):
    """Weights (the largest is 1), inclusion probabilities and residual set."""
    g = torch.Generator().manual_seed(seed)
    normal, uniform = torch.randn(n, generator=g, dtype=F64), torch.rand(n, generator=g, dtype=F64)
    w, r = normal.exp(), 0.02 + 0.96 * uniform
    residual = torch.ones(n, dtype=torch.bool)
    if kind == "heavy_tail":
        w = (4 * normal).exp()
    elif kind == "ties":
        w, r = 1 + (3 * uniform).floor(), torch.full_like(w, 0.2)
    elif kind == "all_equal":
        w, r = torch.ones_like(w), torch.full_like(w, 0.05)
    elif kind == "tiny_r":
        r = 10.0 ** (-4.7 * uniform) * 0.9
    elif kind == "near_one":
        r = 1 - 10.0 ** (-6 * uniform) * 0.9
    elif kind == "dominant_weight":
        w[n // 2] = 1e4
    elif kind == "zero_weights":
        w[1::3] = 0.0
    elif kind == "certain_tokens":
        r[1::3] = 1.0
        residual = r < 1
    elif kind == "promoted_tokens":
        residual = torch.arange(n) % 10 < 7
    return w / w.max(), r, residual


KINDS = [
    "plain",
    "heavy_tail",
    "ties",
    "all_equal",
    "tiny_r",
    "near_one",
    "dominant_weight",
    "zero_weights",
    "certain_tokens",
    "promoted_tokens",
]


def assert_fixed_point(w, r, residual, shrinkage, tolerance):
    """Theorem 1: lambda = clip(beta / u, r, 1) on the residual set with beta = sum w (1 - lambda)."""
    w, r, shrinkage = w.double(), r.double(), shrinkage.double()
    beta = (w * (1 - shrinkage))[residual].sum(-1)
    active = residual & (w > 0)
    spread = w * (1 - r) / r
    expected = torch.where(active, torch.maximum((beta / spread).clamp(max=1), r), 1.0)
    torch.testing.assert_close(shrinkage, expected, rtol=0, atol=tolerance)


class TestOptimalShrinkage:
    @pytest.mark.parametrize("n", [1, 2, 63, 1000, 4097])
    @pytest.mark.parametrize("kind", KINDS)
    def test_fixed_point(self, kind, n):
        for seed in range(3):
            w, r, residual = make_problem(kind, n, seed)
            shrinkage = optimal_shrinkage(w, r, residual)
            assert bool(((shrinkage >= r) & (shrinkage <= 1))[residual].all())
            assert bool((shrinkage[~residual] == 1).all())
            assert_fixed_point(w, r, residual, shrinkage, 1e-10)

    @pytest.mark.parametrize("kind", [k for k in KINDS if k != "zero_weights"])
    @pytest.mark.parametrize("n", [1, 2, 5, 30])
    def test_equals_bounded_least_squares(self, kind, n):
        """Eq. (6) is a squared norm in lambda, so an active-set solver for bounded least squares minimises it too."""
        for seed in range(4):
            w, r, residual = make_problem(kind, n, seed)
            active = residual & (r < 1)
            wa, ra = w[active].numpy(), r[active].numpy()
            # Unknowns y = w lambda (columns of one scale): rows sum(y) - sum(w) and y sqrt((1 - r) / r).
            matrix = np.vstack([np.ones_like(wa), np.diag(np.sqrt((1 - ra) / ra))])
            target = np.concatenate([[wa.sum()], np.zeros_like(wa)])
            # Columns scaled to unit norm, or the smallest weights are lost beside the largest.
            scale = wa / np.linalg.norm(matrix * wa, axis=0)
            upper = wa / scale
            solution = lsq_linear(
                matrix * scale, target, (ra * upper, upper), method="bvls", tol=1e-15, max_iter=10_000
            )
            expected = torch.from_numpy(solution.x * scale / wa)
            torch.testing.assert_close(optimal_shrinkage(w, r, residual)[active], expected, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("zero_weights", "near_one")])
    @pytest.mark.parametrize("n", [1, 5, 30])
    @pytest.mark.parametrize("start", ["at_r", "at_one", "between"])
    def test_equals_generic_minimiser_from_any_start(self, kind, n, start):
        w, r, residual = make_problem(kind, n, seed=11)
        active = residual & (r < 1)
        w, r, residual = w[active], r[active], residual[active]
        shrinkage = optimal_shrinkage(w, r, residual)
        smallest = mean_squared_error(w, r, shrinkage, residual)

        def relative_error_and_gradient(x):
            x = torch.tensor(x, dtype=F64, requires_grad=True)
            error = mean_squared_error(w, r, x, residual) / smallest
            error.backward()
            return error.item(), x.grad.numpy()

        first = {"at_r": r, "at_one": torch.ones_like(r), "between": (1 + r) / 2}[start].numpy()
        found = minimize(
            relative_error_and_gradient,
            first,
            jac=True,
            method="L-BFGS-B",
            bounds=[(float(low), 1.0) for low in r],
            options={"ftol": 1e-15, "gtol": 1e-10, "maxiter": 20_000, "maxfun": 50_000, "maxcor": 30},
        )
        assert 1 - 1e-12 <= found.fun < 1 + 1e-6  # the minimiser gets there, and no lower

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("n", [1, 12, 200])
    def test_every_other_choice_is_worse_by_strong_convexity(self, kind, n):
        """At the minimiser the error grows by at least the quadratic form of the difference: it is the only one."""
        w, r, residual = make_problem(kind, n, seed=5)
        best = optimal_shrinkage(w, r, residual)
        smallest = mean_squared_error(w, r, best, residual)
        g = torch.Generator().manual_seed(0)
        far = r + (1 - r) * torch.rand(500, n, generator=g, dtype=F64)
        near = best + 1e-2 * (far - best)
        corners = torch.where(torch.rand(500, n, generator=g) < 0.5, r, torch.ones_like(r))
        for other in (far, near, corners):
            step = torch.where(residual, w * (other - best), 0.0)
            growth = step.sum(-1).square() + (step.square() * (1 - r) / r).sum(-1)
            excess = mean_squared_error(w, r, other, residual) - smallest
            assert bool((excess >= growth - 1e-12 * (smallest + growth)).all())

    @pytest.mark.parametrize("n", [1, 12, 1000])
    @pytest.mark.parametrize("kind", KINDS)
    def test_never_worse_than_the_simple_choices(self, kind, n):
        for seed in range(3):
            w, r, residual = make_problem(kind, n, seed)
            smallest = mean_squared_error(w, r, optimal_shrinkage(w, r, residual), residual)
            for other in (binary_shrinkage(w, r, residual), torch.ones_like(w), r):
                assert float(smallest) <= float(mean_squared_error(w, r, other, residual)) * (1 + 1e-13)

    def test_strictly_better_than_binary_somewhere(self):
        w, r, residual = make_problem("all_equal", 8)
        binary = mean_squared_error(w, r, binary_shrinkage(w, r, residual), residual)
        assert float(mean_squared_error(w, r, optimal_shrinkage(w, r, residual), residual)) < 0.9 * float(binary)

    @pytest.mark.parametrize(
        ("r", "expected"),
        # n tokens of weight 1: beta = n (1 - lambda) and lambda = beta r / (1 - r), unless that is below r.
        [(0.25, 0.25), (0.5, 0.5), (0.9, 0.9)],
    )
    def test_one_token_is_shrunk_to_its_probability(self, r, expected):
        shrinkage = optimal_shrinkage(torch.ones(1, dtype=F64), torch.tensor([r], dtype=F64), torch.tensor([True]))
        assert float(shrinkage) == pytest.approx(expected, rel=1e-15)

    @pytest.mark.parametrize(("n", "r"), [(2, 0.05), (10, 0.05), (100, 0.05), (1000, 0.3)])
    def test_equal_tokens_have_a_closed_form(self, n, r):
        w = torch.full((n,), 3.0, dtype=F64)
        shrinkage = optimal_shrinkage(w, torch.full_like(w, r), w > 0)
        odds = r / (1 - r)
        torch.testing.assert_close(shrinkage, torch.full_like(w, n * odds / (1 + n * odds)), rtol=1e-13, atol=0)

    @pytest.mark.parametrize("n", [1, 63])
    def test_empty_residual_gives_ones(self, n):
        w, r, _ = make_problem("plain", n)
        assert bool((optimal_shrinkage(w, r, torch.zeros(n, dtype=torch.bool)) == 1).all())
        assert bool((optimal_shrinkage(w, torch.ones_like(r), torch.zeros(n, dtype=torch.bool)) == 1).all())

    @pytest.mark.parametrize("dtype", [torch.float32, F64])
    def test_zero_weights_give_ones(self, dtype):
        w = torch.zeros(2, 5, dtype=dtype)
        r = torch.full((5,), 0.3, dtype=dtype)
        assert bool((optimal_shrinkage(w, r, torch.ones(5, dtype=torch.bool)) == 1).all())

    @pytest.mark.parametrize("function", [optimal_shrinkage, binary_shrinkage])
    def test_weights_that_underflow_stay_in_range(self, function):
        tiny = 2.0**-149  # the smallest positive float32; times 1 - r it rounds to zero
        shrinkage = function(torch.tensor([tiny, tiny]), torch.tensor([0.7, 0.9]), torch.tensor([True, True]))
        assert bool(((shrinkage >= torch.tensor([0.7, 0.9])) & (shrinkage <= 1)).all())

    @pytest.mark.parametrize("function", [optimal_shrinkage, binary_shrinkage])
    def test_common_scale_of_the_weights_cancels(self, function):
        w, r, residual = make_problem("heavy_tail", 200)
        torch.testing.assert_close(function(w * 1e9, r, residual), function(w, r, residual), rtol=1e-12, atol=0)

    @pytest.mark.parametrize("function", [optimal_shrinkage, binary_shrinkage])
    def test_batches_equal_single_rows(self, function):
        g = torch.Generator().manual_seed(1)
        w = torch.randn(2, 4, 100, generator=g, dtype=F64).mul(2).exp()  # kv heads, query heads
        r = 0.02 + 0.9 * torch.rand(2, 1, 100, generator=g, dtype=F64)
        residual = torch.rand(1, 1, 100, generator=g) < 0.8
        batch = function(w, r, residual)
        assert batch.shape == w.shape
        for kv, q in [(0, 0), (0, 3), (1, 2)]:
            row = function(w[kv, q], r[kv, 0], residual[0, 0])
            torch.testing.assert_close(batch[kv, q], row, rtol=1e-13, atol=0)

    @pytest.mark.parametrize("n", [1, 63, 1000, 4097])
    @pytest.mark.parametrize("kind", ["plain", "heavy_tail", "tiny_r", "ties", "certain_tokens"])
    def test_float32(self, kind, n):
        w, r, residual = (x.float() if x.is_floating_point() else x for x in make_problem(kind, n))
        shrinkage = optimal_shrinkage(w, r, residual)
        assert shrinkage.dtype == torch.float32
        assert bool(((shrinkage >= r) & (shrinkage <= 1))[residual].all())
        assert_fixed_point(w, r, residual, shrinkage, 1e-5)
        exact = optimal_shrinkage(w.double(), r.double(), residual)
        error, smallest = (mean_squared_error(w.double(), r.double(), x.double(), residual) for x in (shrinkage, exact))
        assert float(error) <= float(smallest) * (1 + 1e-9)  # at a minimum the coefficients' rounding counts squared

    @pytest.mark.parametrize("function", [optimal_shrinkage, binary_shrinkage])
    def test_bfloat16(self, function):
        w, r, residual = (x.bfloat16() if x.is_floating_point() else x for x in make_problem("heavy_tail", 1000))
        shrinkage = function(w, r, residual)
        assert shrinkage.dtype == torch.float32
        assert bool(((shrinkage >= r) & (shrinkage <= 1))[residual].all())
        exact = function(w.double(), r.double(), residual)
        error, smallest = (mean_squared_error(w.double(), r.double(), x.double(), residual) for x in (shrinkage, exact))
        assert float(error) <= float(smallest) * 1.01


class TestBinaryShrinkage:
    @pytest.mark.parametrize("n", [1, 2, 12, 63, 300])
    @pytest.mark.parametrize("kind", KINDS)
    def test_best_prefix_by_brute_force(self, kind, n):
        for seed in range(3):
            w, r, residual = make_problem(kind, n, seed)
            shrinkage = binary_shrinkage(w, r, residual)
            assert bool(((shrinkage == r) | (shrinkage == 1)).all())
            assert bool((shrinkage[~residual] == 1).all())

            spread = torch.where(residual, w * (1 - r) / r, -1.0)
            rank = spread.argsort(descending=True, stable=True).argsort()
            prefixes = torch.where((rank < torch.arange(n + 1)[:, None]) & residual, r, torch.ones_like(r))  # (n+1, n)
            errors = mean_squared_error(w, r, prefixes, residual)
            error = mean_squared_error(w, r, shrinkage, residual)
            assert float(error) <= float(errors.min()) * (1 + 1e-13)

    @pytest.mark.parametrize("kind", KINDS)
    def test_each_step_changes_the_error_by_a_times_two_beta_minus_u(self, kind):
        w, r, residual = make_problem(kind, 40, seed=2)
        gain, spread = w * (1 - r), w * (1 - r) / r
        order = torch.where(residual, spread, -1.0).argsort(descending=True)[: int(residual.sum())]
        shrinkage, beta = torch.ones_like(w), torch.zeros((), dtype=F64)
        for i in order:
            before = mean_squared_error(w, r, shrinkage, residual)
            shrinkage[i] = r[i]
            after = mean_squared_error(w, r, shrinkage, residual)
            change = gain[i] * (2 * beta - spread[i])
            torch.testing.assert_close(after - before, change, rtol=1e-10, atol=1e-12 * float(before + after))
            beta = beta + gain[i]

    def test_stops_where_the_error_stops_falling(self):
        # u = 19 each: shrink while 19 > 2 * 0.95 k, that is ten tokens.
        w = torch.ones(100, dtype=F64)
        shrinkage = binary_shrinkage(w, torch.full_like(w, 0.05), w > 0)
        assert int((shrinkage < 1).sum()) == 10

    def test_dominant_weight_is_shrunk_first(self):
        w = torch.ones(50, dtype=F64)
        w[17] = 100.0
        shrinkage = binary_shrinkage(w, torch.full_like(w, 0.3), w > 0)
        assert (shrinkage < 1).nonzero().tolist() == [[17]]

    def test_zero_weights_and_empty_residual_give_ones(self):
        r = torch.full((5,), 0.3)
        assert bool((binary_shrinkage(torch.zeros(5), r, torch.ones(5, dtype=torch.bool)) == 1).all())
        assert bool((binary_shrinkage(torch.ones(5), r, torch.zeros(5, dtype=torch.bool)) == 1).all())

    @pytest.mark.parametrize("n", [1, 63, 1000, 4097])
    @pytest.mark.parametrize("kind", ["plain", "heavy_tail", "tiny_r", "ties"])
    def test_float32(self, kind, n):
        w, r, residual = (x.float() if x.is_floating_point() else x for x in make_problem(kind, n))
        shrinkage = binary_shrinkage(w, r, residual)
        exact = binary_shrinkage(w.double(), r.double(), residual)
        error, smallest = (mean_squared_error(w.double(), r.double(), x.double(), residual) for x in (shrinkage, exact))
        assert float(error) <= float(smallest) * (1 + 1e-6)


class TestMeanSquaredError:
    """Its meaning, the average over all draws, is shown in test_denominator.py."""

    def test_hand_computed(self):
        w, r = torch.tensor([1.0, 2.0, 5.0], dtype=F64), torch.tensor([0.5, 0.2, 1.0], dtype=F64)
        shrinkage = torch.tensor([0.5, 0.75, 1.0], dtype=F64)
        # bias 0.5 + 0.5, variance 0.25 * 1 + 2.25 * 4
        assert float(mean_squared_error(w, r, shrinkage, r < 1)) == pytest.approx(1.0 + 9.25, rel=1e-15)

    def test_zero_on_empty_residual(self):
        w, r, _ = make_problem("plain", 10)
        assert float(mean_squared_error(w, r, r, torch.zeros(10, dtype=torch.bool))) == 0
