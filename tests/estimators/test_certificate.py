"""The certificate of Eq. (7): its terms, and that its bound fails no more often than delta, which half of it does."""

import inspect
import math

import pytest
import torch
from scipy.stats import binomtest

from verkv.estimators import (
    bernstein_certificate,
    binary_shrinkage,
    certificate_drop,
    fetch_plan,
    mean_squared_error,
    optimal_shrinkage,
    poisson_sample,
    shrinkage_estimate,
)

F64 = torch.float64
N_DRAWS = 10_000
SHRINKAGES = {
    "none": lambda w, r, residual: torch.ones_like(w),
    "binary": binary_shrinkage,
    "optimal": optimal_shrinkage,
}


def make_problem(n, seed=0, shape=()):
    """Weights, inclusion probabilities (a tenth of them 1), shrinkage, residual set and denominator."""
    g = torch.Generator().manual_seed(seed)
    w = (2 * torch.randn(*shape, n, generator=g, dtype=F64)).exp()
    r = (0.01 + 1.1 * torch.rand(*shape, n, generator=g, dtype=F64)).clamp(max=1)
    shrinkage = r + (1 - r) * torch.rand(*shape, n, generator=g, dtype=F64)
    return w, r, shrinkage, r < 1, w.sum(-1) + 0.5  # 0.5: tokens outside, the tail


def direct_bound(w, r, shrinkage, residual, denominator, delta):
    """Eq. (7) of one row, term by term in scalar arithmetic."""
    bias = variance = largest = 0.0
    for w_i, r_i, lambda_i, is_residual in zip(*(x.tolist() for x in (w, r, shrinkage, residual)), strict=True):
        if is_residual:
            bias += w_i * (1 - lambda_i)
            variance += lambda_i**2 * w_i**2 * (1 - r_i) / r_i
            largest = max(largest, lambda_i * w_i * r_i / r_i, lambda_i * w_i * (1 - r_i) / r_i)
    l = math.log(2 / delta)
    b = largest * l / 3
    return (bias + b + math.sqrt(b * b + 2 * variance * l)) / float(denominator), bias, variance, largest


class TestFormula:
    @pytest.mark.parametrize("delta", [0.5, 0.1, 0.05, 1e-6])
    @pytest.mark.parametrize("n", [1, 2, 63, 1000, 4097])
    def test_equals_direct_evaluation(self, n, delta):
        problem = make_problem(n, seed=n)
        certificate = bernstein_certificate(*problem, delta)
        bound, bias, variance, largest = direct_bound(*problem, delta)
        assert float(certificate.error_bound) == pytest.approx(bound, rel=1e-12)
        assert float(certificate.bias) == pytest.approx(bias, rel=1e-12)
        assert float(certificate.variance) == pytest.approx(variance, rel=1e-12)
        assert float(certificate.max_deviation) == pytest.approx(largest, rel=1e-12)

    def test_hand_computed(self):
        # l = ln 20 = 2.9957; beta = 4 * 0.5; V = 4 * 3 + 9 * 1; b = max(2 * 3, 3 * 1); B = 2 l; D = 10.
        w, r = torch.tensor([4.0, 3.0, 3.0], dtype=F64), torch.tensor([0.25, 0.5, 1.0], dtype=F64)
        shrinkage = torch.tensor([0.5, 1.0, 1.0], dtype=F64)
        certificate = bernstein_certificate(w, r, shrinkage, r < 1, w.sum(), delta=0.1)
        assert (float(certificate.bias), float(certificate.variance), float(certificate.max_deviation)) == (2, 21, 6)
        expected = (2 + 5.99146 + math.sqrt(35.8977 + 125.8208)) / 10
        assert float(certificate.error_bound) == pytest.approx(expected, rel=1e-5)

    def test_bias_and_variance_are_those_of_the_mean_squared_error(self):
        w, r, shrinkage, residual, denominator = make_problem(100, shape=(3,))
        certificate = bernstein_certificate(w, r, shrinkage, residual, denominator, 0.1)
        error = mean_squared_error(w, r, shrinkage, residual)
        torch.testing.assert_close(certificate.bias.square() + certificate.variance, error, rtol=1e-13, atol=0)

    @pytest.mark.parametrize("n", [1, 63])
    def test_bound_is_zero_on_empty_residual(self, n):
        w, r, shrinkage, _, denominator = make_problem(n)
        certificate = bernstein_certificate(w, r, shrinkage, torch.zeros(n, dtype=torch.bool), denominator, 0.1)
        for value in (certificate.error_bound, certificate.bias, certificate.variance, certificate.max_deviation):
            assert float(value) == 0

    def test_tokens_outside_the_residual_set_are_not_read(self):
        w, r, shrinkage, residual, denominator = make_problem(100)
        poison = lambda x: torch.where(residual, x, torch.nan)  # noqa: E731
        clean = bernstein_certificate(w, r, shrinkage, residual, denominator, 0.1)
        poisoned = bernstein_certificate(poison(w), poison(r), poison(shrinkage), residual, denominator, 0.1)
        assert torch.equal(clean.error_bound, poisoned.error_bound)

    @pytest.mark.parametrize("scale", [1e-12, 1e12])
    def test_common_scale_cancels(self, scale):
        w, r, shrinkage, residual, denominator = make_problem(100)
        bound = bernstein_certificate(w, r, shrinkage, residual, denominator, 0.1).error_bound
        scaled = bernstein_certificate(scale * w, r, shrinkage, residual, scale * denominator, 0.1).error_bound
        torch.testing.assert_close(scaled, bound, rtol=1e-13, atol=0)

    def test_falls_with_the_denominator_and_rises_as_delta_falls(self):
        *problem, denominator = make_problem(100)
        bounds = [float(bernstein_certificate(*problem, denominator, delta).error_bound) for delta in (0.9, 0.1, 1e-3)]
        assert bounds == sorted(bounds) and len(set(bounds)) == 3
        doubled = bernstein_certificate(*problem, 2 * denominator, 0.1).error_bound
        assert float(doubled) == pytest.approx(bounds[1] / 2, rel=1e-15)

    def test_batches_equal_single_rows(self):
        problem = make_problem(100, shape=(2, 3))
        batch = bernstein_certificate(*problem, 0.1)
        assert batch.error_bound.shape == (2, 3)
        for i in [(0, 0), (0, 2), (1, 1)]:
            row = bernstein_certificate(*(x[i] for x in problem), 0.1)
            torch.testing.assert_close(batch.error_bound[i], row.error_bound, rtol=1e-14, atol=0)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("n", [1, 63, 1000, 4097])
    def test_low_precision(self, n, dtype):
        w, r, shrinkage, residual, denominator = (
            x.to(dtype) if x.is_floating_point() else x for x in make_problem(n, seed=3)
        )
        residual = residual & (r < 1)  # rounding may have made a token certain
        bound = bernstein_certificate(w, r, shrinkage, residual, denominator, 0.1).error_bound
        assert bound.dtype == torch.float32  # sums over tokens are taken in float32 at least
        exact = direct_bound(w, r, shrinkage, residual, denominator, 0.1)[0]
        assert float(bound) == pytest.approx(exact, rel=1e-5 if dtype == torch.float32 else 1e-2)

    @pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, 2.0, math.nan])
    def test_delta_out_of_range_raises(self, delta):
        with pytest.raises(ValueError, match="delta"):
            bernstein_certificate(*make_problem(5), delta)


@pytest.mark.parametrize(
    "function",
    [optimal_shrinkage, binary_shrinkage, mean_squared_error, bernstein_certificate, certificate_drop, fetch_plan],
)
def test_what_must_not_depend_on_the_draw_cannot_see_it(function):
    parameters = inspect.signature(function).parameters
    assert not {"sampled", "generator"} & set(parameters)
    assert not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values())


def equal_tokens():
    """Many equal tokens with small r beside ten certain ones: V dominates and the error is close to Gaussian.

    At delta = 0.1 the bound is sqrt(2 ln 20) = 2.45 standard deviations, and a little more for B, which about 1 % of
    draws exceed; about 20 % exceed half of it.
    """
    w = torch.cat([torch.full((10,), 5.0, dtype=F64), torch.ones(400, dtype=F64)])
    return w, torch.cat([torch.ones(10, dtype=F64), torch.full((400,), 0.2, dtype=F64)])


def unequal_tokens():
    """Lognormal weights, r proportional to a noisy view of them."""
    g = torch.Generator().manual_seed(0)
    w = (0.5 * torch.randn(400, generator=g, dtype=F64)).exp()
    noisy = w * (0.3 * torch.randn(400, generator=g, dtype=F64)).exp()
    return w, (0.1 * noisy).clamp(max=1)


def rare_tokens():
    """Few tokens with tiny r, which shrinkage gives up, beside many that are sampled often: bias dominates."""
    w = torch.cat([torch.ones(40, dtype=F64), torch.full((200,), 0.5, dtype=F64), torch.full((4,), 50.0, dtype=F64)])
    r = torch.cat([torch.full((40,), 0.01, dtype=F64), torch.full((200,), 0.5, dtype=F64), torch.ones(4, dtype=F64)])
    return w, r


def heavy_tokens():
    """The equal tokens, and twelve heavy ones with the same r that a plan will want to have exact."""
    w, r = equal_tokens()
    return torch.cat([w, torch.linspace(10, 40, 12, dtype=F64)]), torch.cat([r, torch.full((12,), 0.2, dtype=F64)])


def count_failures(w, r, shrinkage, residual, *bounds, seed=0):
    """How many of N_DRAWS samples miss the denominator by more than each bound (relative)."""
    sampled = poisson_sample(r.expand(N_DRAWS, -1), torch.Generator().manual_seed(seed))
    error = (shrinkage_estimate(w, r, shrinkage, sampled, residual) - w.sum()).abs() / w.sum()
    return [int((error > bound).sum()) for bound in bounds]


def is_rejected(failures, delta, level=1e-6):
    """Whether so many failures contradict a failure probability of delta."""
    return binomtest(failures, N_DRAWS, delta, alternative="greater").pvalue < level


COVERAGE = [
    (equal_tokens, "none"),
    (unequal_tokens, "none"),
    (equal_tokens, "binary"),
    (equal_tokens, "optimal"),
    (rare_tokens, "binary"),
]


# With the tolerance as a share of the bound before anything is promoted, so that some tokens are.
PLANNED = [
    (heavy_tokens, "none", 0.15),
    (heavy_tokens, "none", 0.08),
    (heavy_tokens, "binary", 0.15),
    (heavy_tokens, "optimal", 0.15),
    (rare_tokens, "binary", 0.5),
]


class TestCoverage:
    """Each problem is tight enough for the same test to reject half of the bound, so passing it means something."""

    @pytest.mark.parametrize("upper_share", [None, 0.7], ids=["both", "sided"])
    @pytest.mark.parametrize("delta", [0.05, 0.1])
    @pytest.mark.parametrize(("problem", "shrinkage"), COVERAGE)
    def test_bound_holds_and_half_of_it_does_not(self, problem, shrinkage, delta, upper_share):
        w, r = problem()
        residual = r < 1
        shrinkage = SHRINKAGES[shrinkage](w, r, residual)
        bound = bernstein_certificate(w, r, shrinkage, residual, w.sum(), delta, upper_share).error_bound
        failures, failures_of_half = count_failures(w, r, shrinkage, residual, bound, bound / 2)
        assert not is_rejected(failures, delta, level=1e-2)
        assert is_rejected(failures_of_half, delta)

    @pytest.mark.parametrize("upper_share", [None, 0.7], ids=["both", "sided"])
    @pytest.mark.parametrize("delta", [0.05, 0.1])
    @pytest.mark.parametrize("shrinkage", SHRINKAGES.values(), ids=SHRINKAGES)
    @pytest.mark.parametrize("problem", [equal_tokens, unequal_tokens, rare_tokens, heavy_tokens])
    def test_bound_holds_for_every_shrinkage(self, problem, shrinkage, delta, upper_share):
        w, r = problem()
        residual = r < 1
        shrinkage = shrinkage(w, r, residual)
        bound = bernstein_certificate(w, r, shrinkage, residual, w.sum(), delta, upper_share).error_bound
        (failures,) = count_failures(w, r, shrinkage, residual, bound, seed=1)
        assert not is_rejected(failures, delta, level=1e-2)

    def test_problems_have_shrunk_and_kept_tokens(self):
        w, r = equal_tokens()
        assert int((binary_shrinkage(w, r, r < 1) < 1).sum()) == 3
        assert bool((optimal_shrinkage(w, r, r < 1)[10:] < 1).all())
        w, r = rare_tokens()
        assert int((binary_shrinkage(w, r, r < 1) < 1).sum()) == 40
        optimal = optimal_shrinkage(w, r, r < 1)
        assert bool((optimal[:40] < 1).all() and (optimal[40:] == 1).all())

    def test_leaving_out_the_bias_is_rejected(self):
        w, r = rare_tokens()
        residual = r < 1
        shrinkage = binary_shrinkage(w, r, residual)
        certificate = bernstein_certificate(w, r, shrinkage, residual, w.sum(), 0.1)
        without_bias = certificate.error_bound - certificate.bias / w.sum()
        (failures,) = count_failures(w, r, shrinkage, residual, without_bias)
        assert is_rejected(failures, 0.1)


class TestSidedBound:
    """Each side of the error has a bound and a part of delta of its own."""

    @pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.95])
    @pytest.mark.parametrize("n", [1, 2, 63, 1000])
    def test_equals_direct_evaluation(self, n, share):
        w, r, shrinkage, residual, denominator = make_problem(n, seed=n)
        bound = bernstein_certificate(w, r, shrinkage, residual, denominator, 0.1, share).error_bound
        bias = variance = above = below = 0.0
        for w_i, r_i, l_i, is_residual in zip(*(x.tolist() for x in (w, r, shrinkage, residual)), strict=True):
            if is_residual:
                bias += w_i - l_i * w_i
                variance += (l_i * w_i) ** 2 * (1 - r_i) / r_i
                above, below = max(above, l_i * w_i / r_i - l_i * w_i), max(below, l_i * w_i)
        log_above, log_below = math.log(1 / (share * 0.1)), math.log(1 / ((1 - share) * 0.1))
        upper = above * log_above / 3 + math.sqrt((above * log_above / 3) ** 2 + 2 * variance * log_above)
        lower = below * log_below / 3 + math.sqrt((below * log_below / 3) ** 2 + 2 * variance * log_below)
        assert float(bound) == pytest.approx(max(upper, bias + lower) / float(denominator), rel=1e-12)

    def test_never_above_both_sides_at_once_with_equal_parts(self):
        problem = make_problem(200, shape=(20,))
        both = bernstein_certificate(*problem, 0.1).error_bound
        sided = bernstein_certificate(*problem, 0.1, 0.5).error_bound
        assert bool((sided <= both * (1 + 1e-12)).all()) and bool((sided < 0.99 * both).any())

    @pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
    @pytest.mark.parametrize("seed", range(8))
    def test_each_side_keeps_its_part_of_delta_over_all_draws(self, seed, share):
        """All 2^12 draws with their probabilities, at deltas large enough for failures to be among them."""
        w, r, shrinkage, residual, _ = make_problem(12, seed)
        draws = torch.cartesian_prod(*[torch.tensor([False, True])] * 12)
        probability = torch.where(draws, r, 1 - r).prod(-1)
        error = shrinkage_estimate(w, r, shrinkage, draws, residual) - w.sum()
        for delta in (0.9, 0.5, 0.1):
            bound = bernstein_certificate(w, r, shrinkage, residual, w.sum(), delta, share).error_bound * w.sum()
            assert float(probability[error > bound].sum()) <= share * delta
            assert float(probability[-error > bound].sum()) <= (1 - share) * delta

    @pytest.mark.parametrize("share", [0.0, 1.0, -0.5, math.nan])
    def test_share_out_of_range_raises(self, share):
        with pytest.raises(ValueError, match="upper_share"):
            bernstein_certificate(*make_problem(5), 0.1, share)
        with pytest.raises(ValueError, match="upper_share"):
            fetch_plan(*make_problem(5), 0.1, 0.1, share)


class TestCoverageAfterPlanning:
    """Plan before the draw, make the promoted tokens exact, draw, estimate: Theorem 2."""

    @pytest.mark.parametrize("delta", [0.05, 0.1])
    @pytest.mark.parametrize(("problem", "shrinkage", "share"), PLANNED)
    def test_tolerance_holds_and_half_of_it_does_not(self, problem, shrinkage, share, delta):
        w, r = problem()
        residual = r < 1
        shrinkage = SHRINKAGES[shrinkage](w, r, residual)
        before = float(bernstein_certificate(w, r, shrinkage, residual, w.sum(), delta).error_bound)
        epsilon = share * before
        plan = fetch_plan(w, r, shrinkage, residual, w.sum(), epsilon, delta)
        assert 0 < int(plan.n_promoted) < int(residual.sum())
        assert float(plan.planned_bound) < epsilon < before

        remaining = residual & ~plan.promoted
        failures, failures_of_half = count_failures(w, r, shrinkage, remaining, epsilon, epsilon / 2)
        assert not is_rejected(failures, delta, level=1e-2)
        assert is_rejected(failures_of_half, delta)

    def test_tolerance_does_not_hold_without_promoting(self):
        w, r = heavy_tokens()
        residual, ones = r < 1, torch.ones_like(w)
        epsilon = 0.15 * float(bernstein_certificate(w, r, ones, residual, w.sum(), 0.1).error_bound)
        (failures,) = count_failures(w, r, ones, residual, epsilon)
        assert is_rejected(failures, 0.1)

    def test_promoting_everything_leaves_no_error(self):
        w, r = heavy_tokens()
        residual, ones = r < 1, torch.ones_like(w)
        plan = fetch_plan(w, r, ones, residual, w.sum(), 1e-12, 0.1)
        (failures,) = count_failures(w, r, ones, residual & ~plan.promoted, 1e-13)
        assert failures == 0
