"""The bound on the output's error: exact failure probabilities, coverage, distances, byte codes, the plan."""

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
    certificate_drop,
    decode_norms,
    encode_norms,
    mean_squared_error,
    optimal_shrinkage,
    output_certificate,
    output_fetch_plan,
    poisson_sample,
    relative_output_bound,
    value_distances,
    value_norms,
)

F64 = torch.float64
DELTA = 0.1
N_DRAWS = 10_000
SHRINKAGES = {
    "none": lambda w, r, residual: torch.ones_like(w),
    "binary": binary_shrinkage,
    "optimal": optimal_shrinkage,
}


def exact_output(w, values):
    return (w[..., None] * values).sum(-2) / w.sum(-1)[..., None]


def output_errors(w, r, shrinkage, residual, values, sampled):
    """||o^ - o|| of every draw (rows of ``sampled``); infinite where nothing is left to estimate from."""
    estimated = torch.where(residual, torch.where(sampled, shrinkage * w / r, 0.0), w)
    estimate = estimated @ values / estimated.sum(-1, keepdim=True)
    return torch.nan_to_num((estimate - exact_output(w, values)).norm(dim=-1), nan=math.inf)


def distances_of(w, values, centre, known=None):
    """The distances a cache would use: coded norms, exact values of known tokens."""
    norms = decode_norms(encode_norms(value_norms(values, centre))).double()
    if known is None:
        return value_distances(norms, w, w.sum(-1))
    known_sum = torch.where(known, w, 0.0) @ (values - centre)
    return value_distances(norms, w, w.sum(-1), known=known, known_sum=known_sum)


def true_distances(w, values):
    return (values - exact_output(w, values)).norm(dim=-1)


# --- norms in a byte ------------------------------------------------------------------------------------------------


class TestNormCodes:
    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.floats(0, 2.0**99, width=32), min_size=1, max_size=40))
    def test_never_rounds_down(self, norms):
        norms = torch.tensor(norms)
        decoded = decode_norms(encode_norms(norms))
        assert bool((decoded >= norms).all())
        assert bool((decoded[norms == 0] == 0).all())

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("n_channels", [1, 64, 512])
    def test_norm_in_float64_is_not_above_the_decoded_one(self, dtype, n_channels):
        """The norm itself is rounded, too: against float64 arithmetic on the stored values."""
        g = torch.Generator().manual_seed(0)
        values = (torch.randn(3, 2000, n_channels, generator=g) * 3).to(dtype)
        centre = values.float().mean(-2)
        exact = (values.double() - centre.double()[:, None]).norm(dim=-1)
        decoded = decode_norms(encode_norms(value_norms(values, centre)))
        assert bool((decoded.double() >= exact).all())

    @pytest.mark.parametrize("tail", [0.1, 0.5, 1.0, 1.5])
    def test_loses_little_however_heavy_the_tail(self, tail):
        norms = (tail * torch.randn(4, 5000, generator=torch.Generator().manual_seed(1))).exp()
        decoded = decode_norms(encode_norms(norms))
        top, low = norms.amax(-1, keepdim=True), norms.quantile(0.01, dim=-1, keepdim=True)
        above = norms > low
        assert float((decoded / norms)[above].max()) < float((top / low).max()) ** (1.2 / 254)
        assert bool((decoded <= 1.1 * low.expand_as(norms))[~above].all())
        linear = (norms / top * 255).ceil() / 255 * top
        excess = lambda coded: float((coded / norms - 1)[above].mean())  # noqa: E731
        assert excess(decoded) < excess(linear) * (1.01 if tail < 0.5 else 0.5)

    def test_one_byte_a_token_and_two_floats_a_head(self):
        coded = encode_norms(torch.rand(2, 3, 100))
        assert coded.codes.dtype == torch.uint8 and coded.codes.shape == (2, 3, 100)
        assert coded.top.shape == coded.step.shape == (2, 3)

    @pytest.mark.parametrize("value", [0.0, 1e-42, 1.0, 65504.0, 3e38])
    @pytest.mark.parametrize("n", [0, 1, 5])
    def test_equal_norms(self, value, n):
        norms = torch.full((n,), value)
        decoded = decode_norms(encode_norms(norms))
        assert bool((decoded >= norms).all())
        assert value > 1e38 or value < 1e-38 or bool((decoded <= 1.001 * norms).all())

    @pytest.mark.parametrize("poison", [math.nan, math.inf])
    def test_head_that_is_not_finite_decodes_to_infinity_and_leaves_others_alone(self, poison):
        norms = torch.tensor([[1.0, poison, 0.0], [1.0, 2.0, 0.0]])
        decoded = decode_norms(encode_norms(norms))
        assert bool((decoded[0] == math.inf).all())
        assert torch.equal(decoded[1], decode_norms(encode_norms(norms[1])))


# --- distances from the output --------------------------------------------------------------------------------------


@st.composite
def attention_rows(draw):
    """Weights, values, any centre, a set of known tokens."""
    n, d = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread, far = draw(st.sampled_from([0.0, 1.0, 8.0])), draw(st.sampled_from([0.0, 1.0, 100.0]))
    w = (spread * torch.randn(n, generator=g, dtype=F64)).exp()
    values = torch.randn(n, d, generator=g, dtype=F64) * torch.rand(n, 1, generator=g, dtype=F64) ** 4
    centre = far * torch.randn(d, generator=g, dtype=F64)
    known = torch.rand(n, generator=g) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    return w, values, centre, known


class TestValueDistances:
    @settings(max_examples=300, deadline=None)
    @given(attention_rows())
    def test_not_below_the_distance(self, row):
        w, values, centre, known = row
        truth = true_distances(w, values)
        slack = 1e-12 * (truth + centre.norm())
        assert bool((distances_of(w, values, centre) >= truth - slack).all())
        assert bool((distances_of(w, values, centre, known) >= truth - slack).all())

    @settings(max_examples=100, deadline=None)
    @given(attention_rows(), st.floats(0, 3))
    def test_inflation_pays_for_weights_that_are_off(self, row, eta):
        w, values, centre, known = row
        off = torch.rand(len(w), generator=torch.Generator().manual_seed(7), dtype=F64) * 2 * eta - eta
        sketch = w * torch.where(known, 0.0, off).exp()
        norms = value_norms(values, centre)
        known_sum = torch.where(known, w, 0.0) @ (values - centre)
        bounds = value_distances(
            norms, sketch, sketch.sum(), known=known, known_sum=known_sum, inflation=math.exp(2 * eta)
        )
        truth = true_distances(w, values)
        assert bool((bounds >= truth - 1e-12 * (truth + centre.norm())).all())

    @settings(max_examples=100, deadline=None)
    @given(attention_rows())
    def test_largest_norm_holds_for_any_weights(self, row):
        w, values, centre, _ = row
        norms = value_norms(values, centre)
        bounds = value_distances(norms, w.flip(0), w.sum() * 1e9, inflation=math.inf, largest=norms.max())
        truth = true_distances(w, values)
        assert bool((bounds >= truth - 1e-12 * (truth + centre.norm())).all())

    def test_largest_norm_caps_the_offset_and_no_more(self):
        w, norms = torch.ones(4, dtype=F64), torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64)
        for inflation, offset in [(1.0, 2.5), (1.2, 3.0), (5.0, 4.0)]:
            bounds = value_distances(norms, w, w.sum(), inflation=inflation, largest=norms.max())
            torch.testing.assert_close(bounds, norms + offset)

    def test_known_values_and_a_near_centre_tighten(self):
        g = torch.Generator().manual_seed(0)
        w, values = torch.rand(200, generator=g, dtype=F64), torch.randn(200, 16, generator=g, dtype=F64)
        known = torch.arange(200) < 150
        far, near = torch.zeros(16, dtype=F64) + 5, exact_output(w, values)
        assert float(distances_of(w, values, far, known).sum()) < float(distances_of(w, values, far).sum())
        assert float(distances_of(w, values, near).sum()) < float(distances_of(w, values, far).sum())

    def test_all_known_and_centre_at_the_output_is_exact(self):
        g = torch.Generator().manual_seed(0)
        w, values = torch.rand(9, generator=g, dtype=F64), torch.randn(9, 4, generator=g, dtype=F64)
        centre = exact_output(w, values)
        bounds = value_distances(
            value_norms(values, centre),
            w,
            w.sum(),
            known=torch.ones(9, dtype=torch.bool),
            known_sum=w @ (values - centre),
        )
        torch.testing.assert_close(bounds, true_distances(w, values), rtol=1e-12, atol=1e-14)

    def test_tokens_outside_enter_through_known_sum(self):
        g = torch.Generator().manual_seed(0)
        w, values = torch.rand(20, generator=g, dtype=F64), torch.randn(20, 4, generator=g, dtype=F64)
        norms = value_norms(values, torch.zeros(4, dtype=F64))
        tail_sum = w[15:] @ values[15:]
        bounds = value_distances(norms[:15], w[:15], w.sum(), known_sum=tail_sum)
        assert bool((bounds >= true_distances(w, values)[:15]).all())
        expected = norms[:15] + (tail_sum.norm() + (w * norms)[:15].sum()) / w.sum()
        torch.testing.assert_close(bounds, expected, rtol=1e-12, atol=0)

    def test_bad_arguments_raise(self):
        ones = torch.ones(3)
        with pytest.raises(ValueError, match="inflation"):
            value_distances(ones, ones, ones.sum(), inflation=0.9)
        with pytest.raises(ValueError, match="largest"):
            value_distances(ones, ones, ones.sum(), inflation=math.inf)
        with pytest.raises(ValueError, match="known_sum"):
            value_distances(ones, ones, ones.sum(), known=ones > 0)


# --- the steps of the proof -------------------------------------------------------------------------------------------


class TestProof:
    """Each line of ``docs/output_bound.md``, section 1, in numbers."""

    @pytest.mark.parametrize("shrinkage", SHRINKAGES.values(), ids=SHRINKAGES)
    def test_error_is_a_sum_over_the_residual_set(self, shrinkage):
        w, r, values = small_problem("plain", 9, 3, 0)
        residual = r < 1
        coefficients = shrinkage(w, r, residual)
        draws, _ = all_draws(r)
        factor = torch.where(residual, torch.where(draws, coefficients / r, 0.0), 1.0)
        estimate = (factor * w) @ values / (factor @ w)[:, None]
        centred = values - exact_output(w, values)
        expected = torch.where(residual, factor - 1, 0.0) * w @ centred / (factor @ w)[:, None]
        torch.testing.assert_close(estimate - exact_output(w, values), expected, rtol=1e-10, atol=1e-12)

    @settings(max_examples=200, deadline=None)
    @given(st.integers(1, 6), st.floats(0.01, 5), st.floats(0.0, 3.0), st.integers(0, 2**31))
    def test_one_step_of_cosh(self, d, s, offset, seed):
        """E cosh(s |x + X|) <= cosh(s |x|) E(exp(s |X|) - s |X|) for any X of mean zero, here on four points."""
        g = torch.Generator().manual_seed(seed)
        points, probability = torch.randn(4, d, generator=g, dtype=F64), torch.rand(4, generator=g, dtype=F64)
        probability = probability / probability.sum()
        points = points - probability @ points
        x = offset * torch.randn(d, generator=g, dtype=F64)
        left = probability @ (s * (x + points).norm(dim=-1)).cosh()
        norms = s * points.norm(dim=-1)
        assert float(left) <= float((s * x.norm()).cosh() * (probability @ (norms.exp() - norms))) * (1 + 1e-12)

    def test_exponential_remainder(self):
        y = torch.linspace(1e-3, 2.999, 3000, dtype=F64)
        remainder = (torch.expm1(y) - y) / y.square()
        assert bool((remainder.diff() > 0).all())
        assert bool((remainder <= 0.5 / (1 - y / 3)).all())

    @pytest.mark.parametrize("delta", [0.5, 0.1, 0.01])
    def test_bound_inverts_the_tail(self, delta):
        w, r, values = small_problem("heavy_certain", 10, 3, 0)
        c = output_certificate(w, r, torch.ones_like(w), r < 1, w.sum(), true_distances(w, values), delta)
        t = float(c.error_bound * (1 - c.denominator_bound) * w.sum())
        tail = 2 * math.exp(-(t**2) / (2 * (float(c.variance) + float(c.max_deviation) * t / 3)))
        assert float(c.bias) == 0 and tail == pytest.approx(0.9 * delta)


# --- the certificate ------------------------------------------------------------------------------------------------


def small_problem(kind, n, d, seed):
    """A row of at most ten tokens, the last two of them certain unless ``kind`` says otherwise."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(n, generator=g, dtype=F64).exp()
    r = 0.02 + 0.96 * torch.rand(n, generator=g, dtype=F64)
    values = torch.randn(n, d, generator=g, dtype=F64)
    if kind != "nothing_certain":
        r[-2:] = 1.0
        w[-1] = 0.3 * n
    if kind == "heavy_certain":
        w[-1] = 100.0 * n
    elif kind == "one_direction":
        values = torch.where(torch.arange(n)[:, None] % 2 == 0, 1.0, -1.0) * values[:1]
        w[:-2], r[:-2] = 1.0, 0.5
    elif kind == "rare":
        r[:-2] = 0.05
    elif kind == "frequent":
        r[:-2] = 0.9
    return w, r, values


def all_draws(r):
    """Every outcome of the draw with its probability."""
    draws = torch.tensor(list(itertools.product([False, True], repeat=len(r))))
    return draws, torch.where(draws, r, 1 - r).prod(-1)


KINDS = ["plain", "nothing_certain", "heavy_certain", "one_direction", "rare", "frequent"]


class TestEnumeration:
    """The exact failure probability over all 2^n draws."""

    @pytest.mark.parametrize("delta", [0.3, 0.1, 0.05])
    @pytest.mark.parametrize("shrinkage", SHRINKAGES.values(), ids=SHRINKAGES)
    @pytest.mark.parametrize("d", [1, 2, 8])
    @pytest.mark.parametrize("kind", KINDS)
    def test_failure_probability_is_at_most_delta(self, kind, d, shrinkage, delta):
        for seed in range(4):
            w, r, values = small_problem(kind, 8 + seed % 3, d, seed)
            residual = r < 1
            draws, probability = all_draws(r)
            coefficients = shrinkage(w, r, residual)
            errors = output_errors(w, r, coefficients, residual, values, draws)
            g = torch.Generator().manual_seed(seed)
            centre = torch.randn(d, generator=g, dtype=F64)
            for distances in (true_distances(w, values), distances_of(w, values, centre, ~residual)):
                tighter = output_certificate(w, r, coefficients, residual, w.sum(), distances, delta, form="chernoff")
                c = output_certificate(w, r, coefficients, residual, w.sum(), distances, delta)
                assert float(tighter.error_bound) <= float(c.error_bound)
                assert float(probability[errors > tighter.error_bound].sum()) <= delta
                assert float(probability[errors > c.error_bound].sum()) <= delta
                # and each half of the argument by itself
                estimate = torch.where(residual, torch.where(draws, coefficients * w / r, 0.0), w).sum(-1)
                short = estimate < (1 - c.denominator_bound) * w.sum()
                assert float(probability[short].sum()) <= 0.1 * delta

    def test_some_bounds_are_finite_and_near_the_error(self):
        """Otherwise the test above would say nothing."""
        w, r, values = small_problem("heavy_certain", 10, 1, 0)
        residual, ones = r < 1, torch.ones_like(w)
        draws, probability = all_draws(r)
        errors = output_errors(w, r, ones, residual, values, draws)
        bound = output_certificate(w, r, ones, residual, w.sum(), true_distances(w, values), 0.3).error_bound
        assert float(probability[errors > bound / 4].sum()) > 0.3

    @pytest.mark.parametrize("d", [1, 3])
    def test_variance_and_bias_are_those_of_the_linearised_error(self, d):
        """E ||sum||^2 = V_o + ||bias||^2 at the true distances, and ||bias|| <= beta_o."""
        w, r, values = small_problem("plain", 9, d, 1)
        residual = r < 1
        shrinkage = optimal_shrinkage(w, r, residual)
        draws, probability = all_draws(r)
        centred = values - exact_output(w, values)
        factor = torch.where(residual, torch.where(draws, shrinkage / r, 0.0) - 1, 0.0)
        sums = (factor * w) @ centred
        bias = -torch.where(residual, (1 - shrinkage) * w, 0.0) @ centred
        c = output_certificate(w, r, shrinkage, residual, w.sum(), true_distances(w, values), DELTA)
        second_moment = float((probability * sums.square().sum(-1)).sum())
        assert second_moment == pytest.approx(float(c.variance + bias.square().sum()), rel=1e-12)
        torch.testing.assert_close((probability[:, None] * sums).sum(0), bias, rtol=1e-10, atol=1e-12)
        assert float(bias.norm()) <= float(c.bias) * (1 + 1e-12)


class TestFormula:
    def test_equals_direct_evaluation(self):
        w, r, values = small_problem("heavy_certain", 10, 3, 2)
        residual = r < 1
        shrinkage = optimal_shrinkage(w, r, residual)
        d, big_d = true_distances(w, values), float(w.sum())
        c = output_certificate(w, r, shrinkage, residual, w.sum(), d, 0.1, denominator_share=0.2)
        bias = variance = deviation = bias_d = variance_d = deviation_d = 0.0
        for i in range(8):
            w_i, r_i, s_i, d_i = (float(x[i]) for x in (w, r, shrinkage, d))
            bias, bias_d = bias + w_i * (1 - s_i) * d_i, bias_d + w_i * (1 - s_i)
            variance += s_i**2 * w_i**2 * d_i**2 * (1 - r_i) / r_i
            variance_d += s_i**2 * w_i**2 * (1 - r_i) / r_i
            deviation = max(deviation, s_i * w_i / r_i * max(r_i, 1 - r_i) * d_i)
            deviation_d = max(deviation_d, s_i * w_i)
        l_n, l_d = math.log(2 / 0.08), math.log(1 / 0.02)
        b_n, b_d = deviation * l_n / 3, deviation_d * l_d / 3
        eps_d = (bias_d + b_d + math.sqrt(b_d**2 + 2 * variance_d * l_d)) / big_d
        numerator = bias + b_n + math.sqrt(b_n**2 + 2 * variance * l_n)
        assert (float(c.bias), float(c.variance), float(c.max_deviation)) == pytest.approx((bias, variance, deviation))
        assert float(c.denominator_bound) == pytest.approx(eps_d, rel=1e-12)
        assert float(c.error_bound) == pytest.approx(numerator / ((1 - eps_d) * big_d), rel=1e-12)

    def test_denominator_bound_is_below_the_two_sided_one(self):
        w, r, _ = small_problem("plain", 10, 1, 0)
        ones, residual = torch.ones_like(w), r < 1
        c = output_certificate(w, r, ones, residual, w.sum(), ones, 0.1, denominator_share=0.5)
        assert float(c.denominator_bound) < float(
            bernstein_certificate(w, r, ones, residual, w.sum(), 0.05).error_bound
        )

    @pytest.mark.parametrize("scale", [1e-6, 1e6])
    def test_scales_with_the_values_and_not_with_the_weights(self, scale):
        w, r, values = small_problem("heavy_certain", 10, 2, 0)
        ones, residual = torch.ones_like(w), r < 1
        d = true_distances(w, values)
        c = output_certificate(w, r, ones, residual, w.sum(), d, DELTA)
        of_values = output_certificate(w, r, ones, residual, w.sum(), scale * d, DELTA)
        of_weights = output_certificate(scale * w, r, ones, residual, scale * w.sum(), d, DELTA)
        assert 0 < float(c.error_bound) < math.inf
        torch.testing.assert_close(of_values.error_bound, scale * c.error_bound, rtol=1e-12, atol=0)
        torch.testing.assert_close(of_weights.error_bound, c.error_bound, rtol=1e-12, atol=0)

    def test_tokens_outside_the_residual_set_are_not_read(self):
        w, r, values = small_problem("heavy_certain", 10, 2, 0)
        residual, big_d, d = r < 1, w.sum(), true_distances(w, values)
        poison = lambda x: torch.where(residual, x, torch.nan)  # noqa: E731
        clean = output_certificate(w, r, torch.ones_like(w), residual, big_d, d, DELTA)
        poisoned = output_certificate(
            poison(w), poison(r), poison(torch.ones_like(w)), residual, big_d, poison(d), DELTA
        )
        assert torch.equal(clean.error_bound, poisoned.error_bound)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("delta", 0.0),
            ("delta", 1.0),
            ("denominator_share", 0.0),
            ("denominator_share", 1.0),
            ("denominator_share", math.nan),
        ],
    )
    def test_out_of_range_raises(self, name, value):
        w, r, values = small_problem("plain", 5, 1, 0)
        arguments = {"delta": 0.1, name: value}
        with pytest.raises(ValueError, match=name):
            output_certificate(w, r, torch.ones_like(w), r < 1, w.sum(), true_distances(w, values), **arguments)


# --- coverage -------------------------------------------------------------------------------------------------------


def opposite_values(d, n=400):
    """Many equal tokens, their values at +u and -u, so that all the variance is in one direction and d_i is exact."""
    w = torch.cat([torch.full((2,), 1.0 * n, dtype=F64), torch.ones(n, dtype=F64)])
    r = torch.cat([torch.ones(2, dtype=F64), torch.full((n,), 0.2, dtype=F64)])
    values = torch.zeros(n + 2, d, dtype=F64)
    values[:, -1] = torch.where(torch.arange(n + 2) % 2 == 0, 1.0, -1.0)
    return w, r, values, torch.zeros(d, dtype=F64)


def far_from_output(d):
    """Certain tokens hold the output on one side of the centre, the sampled ones lie on the other: d_i from the norms
    and the known sum is nearly exact."""
    w = torch.cat([torch.full((1,), 8000.0, dtype=F64), torch.ones(400, dtype=F64)])
    r = torch.cat([torch.ones(1, dtype=F64), torch.full((400,), 0.2, dtype=F64)])
    values = torch.zeros(401, d, dtype=F64)
    values[0, 0], values[1:, 0] = 1.0, -1.0
    return w, r, values, torch.zeros(d, dtype=F64)


def many_directions(d):
    """Gaussian values: the bound is looser, for it does not know the directions."""
    g = torch.Generator().manual_seed(0)
    w = torch.cat([torch.full((1,), 300.0, dtype=F64), (0.5 * torch.randn(400, generator=g, dtype=F64)).exp()])
    r = (0.1 * w * (0.3 * torch.randn(401, generator=g, dtype=F64)).exp()).clamp(max=1)
    return w, r, torch.randn(401, d, generator=g, dtype=F64), torch.zeros(d, dtype=F64)


def rare_and_shrunk(d):
    """Few tokens with tiny r on one side, which shrinkage gives up: the bias dominates."""
    w = torch.cat([torch.ones(40, dtype=F64), torch.full((200,), 0.5, dtype=F64), torch.full((4,), 100.0, dtype=F64)])
    r = torch.cat([torch.full((40,), 0.01, dtype=F64), torch.full((200,), 0.5, dtype=F64), torch.ones(4, dtype=F64)])
    values = torch.zeros(244, d, dtype=F64)
    values[:40, 0], values[40:240, 0] = 1.0, torch.where(torch.arange(200) % 2 == 0, 0.1, -0.1).double()
    return w, r, values, torch.zeros(d, dtype=F64)


def count_failures(w, r, shrinkage, residual, values, *bounds, seed=0):
    sampled = poisson_sample(r.expand(N_DRAWS, -1), torch.Generator().manual_seed(seed))
    errors = output_errors(w, r, shrinkage, residual, values, sampled)
    return [int((errors > bound).sum()) for bound in bounds]


def is_rejected(failures, delta, level=1e-6):
    return binomtest(failures, N_DRAWS, delta, alternative="greater").pvalue < level


class TestCoverage:
    @pytest.mark.parametrize("delta", [0.05, 0.1])
    @pytest.mark.parametrize("d", [1, 8])
    @pytest.mark.parametrize(
        ("problem", "shrinkage", "uses_norms"),
        [(opposite_values, "none", False), (opposite_values, "binary", False), (far_from_output, "none", True),
         (far_from_output, "optimal", True), (rare_and_shrunk, "binary", False)],
    )  # fmt: skip
    def test_bound_holds_and_half_of_it_does_not(self, problem, shrinkage, uses_norms, d, delta):
        w, r, values, centre = problem(d)
        residual = r < 1
        shrinkage = SHRINKAGES[shrinkage](w, r, residual)
        distances = distances_of(w, values, centre, ~residual) if uses_norms else true_distances(w, values)
        bound = output_certificate(w, r, shrinkage, residual, w.sum(), distances, delta).error_bound
        failures, failures_of_half = count_failures(w, r, shrinkage, residual, values, bound, bound / 2)
        assert not is_rejected(failures, delta, level=1e-2)
        assert is_rejected(failures_of_half, delta)

    @pytest.mark.parametrize("delta", [0.05, 0.1])
    @pytest.mark.parametrize("shrinkage", SHRINKAGES.values(), ids=SHRINKAGES)
    @pytest.mark.parametrize("problem", [opposite_values, far_from_output, many_directions, rare_and_shrunk])
    def test_bound_from_coded_norms_holds(self, problem, shrinkage, delta):
        w, r, values, centre = problem(4)
        residual = r < 1
        shrinkage = shrinkage(w, r, residual)
        distances = distances_of(w, values, centre, ~residual)
        bound = output_certificate(w, r, shrinkage, residual, w.sum(), distances, delta).error_bound
        (failures,) = count_failures(w, r, shrinkage, residual, values, bound, seed=1)
        assert not is_rejected(failures, delta, level=1e-2)

    def test_leaving_out_the_offset_is_rejected(self):
        """||v - c|| alone is no bound of ||v - o||."""
        w, r, values, _ = far_from_output(2)
        residual, ones = r < 1, torch.ones_like(w)
        norms = value_norms(values, torch.tensor([-0.6, 0.0], dtype=F64))
        bound = output_certificate(w, r, ones, residual, w.sum(), norms, DELTA).error_bound
        (failures,) = count_failures(w, r, ones, residual, values, bound)
        assert is_rejected(failures, DELTA)

    @pytest.mark.parametrize("delta", [0.05, 0.1])
    def test_denominator_bound_holds_and_half_of_it_does_not(self, delta):
        """The share of the failure probability that it gets, here half of it, is all it may use."""
        w, r, values, _ = opposite_values(1)
        residual, ones = r < 1, torch.ones_like(w)
        c = output_certificate(w, r, ones, residual, w.sum(), true_distances(w, values), 2 * delta, 0.5)
        sampled = poisson_sample(r.expand(N_DRAWS, -1), torch.Generator().manual_seed(0))
        estimate = torch.where(residual, torch.where(sampled, w / r, 0.0), w).sum(-1)
        shortfall = 1 - estimate / w.sum()
        assert not is_rejected(int((shortfall > c.denominator_bound).sum()), delta, level=1e-2)
        assert is_rejected(int((shortfall > c.denominator_bound / 2).sum()), delta)

    def test_estimate_of_everything_exact_has_no_error(self):
        w, r, values, _ = many_directions(3)
        none = torch.zeros_like(r, dtype=torch.bool)
        assert count_failures(w, r, torch.ones_like(w), none, values, 1e-13) == [0]
        assert float(mean_squared_error(w, r, torch.ones_like(w), none)) == 0


# --- the plan -------------------------------------------------------------------------------------------------------


def plan_problem(kind, n, seed=0, shape=()):
    """Weights, inclusion probabilities, shrinkage, residual set, denominator and distances."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(*shape, n, generator=g, dtype=F64).exp()
    r = 0.02 + 0.96 * torch.rand(*shape, n, generator=g, dtype=F64)
    distances = 0.2 + torch.rand(*shape, n, generator=g, dtype=F64)
    outside = 0.5
    if kind == "heavy_tail":
        w = w**4
    elif kind == "ties":
        w, r, distances = torch.ones_like(w), torch.full_like(w, 0.25), torch.ones_like(w)
    elif kind == "certain_tokens":
        r[..., 1::3] = 1.0
    elif kind == "zero_weights":
        w[..., 1::2] = 0.0
    elif kind == "zero_distances":
        distances[..., 1::2] = 0.0
    elif kind == "opposed":  # what matters for the output does not matter for the denominator
        distances = 1.0 / w.square()
    elif kind == "all_exact_but_few":
        outside = 100.0 * n
    residual = r < 1
    shrinkage = binary_shrinkage(w, r, residual) if kind == "binary" else torch.ones_like(w)
    if kind == "optimal":
        shrinkage = optimal_shrinkage(w, r, residual)
    return w, r, shrinkage, residual, w.sum(-1) + outside, distances


FORMS = ["bernstein", "chernoff"]
PLAN_KINDS = [
    "plain", "heavy_tail", "ties", "certain_tokens", "zero_weights", "zero_distances", "opposed", "all_exact_but_few",
    "binary", "optimal",
]  # fmt: skip


def certificate_of(problem, residual):
    w, r, shrinkage, _, denominator, distances = problem
    return output_certificate(w, r, shrinkage, residual, denominator, distances, DELTA)


class TestPlan:
    @pytest.mark.parametrize("cap", [0.05, 0.5, 1.0])
    @pytest.mark.parametrize("share", [0.01, 0.2, 0.8])
    @pytest.mark.parametrize("n", [1, 2, 12, 63, 300])
    @pytest.mark.parametrize("kind", PLAN_KINDS)
    def test_smallest_prefix_by_brute_force(self, kind, n, share, cap):
        problem = plan_problem(kind, n, seed=n)
        w, r, shrinkage, residual, denominator, distances = problem
        # The order is that of the drop of the numerator's bound: Eq. (9) with w d for w.
        drop = certificate_drop(w * distances, r, shrinkage, residual, denominator, 0.9 * DELTA)
        order = torch.where(residual, drop, -1.0).argsort(descending=True, stable=True)
        rank = torch.empty_like(order).scatter(-1, order, torch.arange(n))
        along = certificate_of(problem, residual & (rank >= torch.arange(int(residual.sum()) + 1)[:, None]))
        finite = along.error_bound[torch.isfinite(along.error_bound)]
        epsilon, scale = share * float(finite.max()) / 3 + 1e-12, torch.tensor(3.0, dtype=F64)
        meets = (along.error_bound < epsilon * scale) & (along.denominator_bound < cap)
        smallest = meets.tolist().index(True)

        plan = output_fetch_plan(*problem, epsilon, scale, DELTA, max_denominator_bound=cap)
        assert int(plan.n_promoted) == int(plan.promoted.sum()) == smallest
        assert torch.equal(plan.promoted.nonzero().squeeze(-1), order[:smallest].sort().values)
        after = certificate_of(problem, residual & ~plan.promoted)
        for planned, direct in [
            (plan.error_bound, along.error_bound[0]),
            (plan.denominator_bound, along.denominator_bound[0]),
            (plan.planned_bound, after.error_bound),
            (plan.planned_denominator_bound, after.denominator_bound),
        ]:
            torch.testing.assert_close(planned, direct, rtol=1e-9, atol=1e-12)
        assert float(plan.planned_bound) < epsilon * scale and float(plan.planned_denominator_bound) < cap

    @pytest.mark.parametrize("cap", [0.05, 0.5])
    @pytest.mark.parametrize("epsilon", [0.02, 0.1, 0.5])
    @pytest.mark.parametrize("kind", PLAN_KINDS)
    def test_chernoff_plan_by_hand(self, kind, epsilon, cap):
        """The bound at the plan's tilt is met by the promoted set, not by it without its cheapest token."""
        problem = plan_problem(kind, 60)
        w, r, shrinkage, residual, denominator, distances = problem
        plan = output_fetch_plan(
            *problem, epsilon, torch.tensor(2.0), DELTA, max_denominator_bound=cap, form="chernoff"
        )
        l = math.log(2 / (0.9 * DELTA))
        s = 1.75 * l / (epsilon * 2.0 * denominator)
        a = torch.where(residual, shrinkage * w * distances, 0.0)
        moment = lambda x: (s * x).exp() - 1 - s * x  # noqa: E731
        psi = torch.log1p(r * moment(a * (1 - r) / r) + (1 - r) * moment(a))
        cost = torch.where(residual, w * (1 - shrinkage) * distances + psi / s, 0.0)

        def bounds(left):
            of_denominator = certificate_of(problem, left).denominator_bound
            numerator = (l / s + cost[left].sum()) / denominator if bool(left.any()) else 0.0
            return float(numerator / (1 - of_denominator)) if of_denominator < 1 else math.inf, float(of_denominator)

        bound, of_denominator = bounds(residual & ~plan.promoted)
        assert bound < 2 * epsilon and of_denominator < cap
        assert float(plan.planned_bound) == pytest.approx(bound, rel=1e-6, abs=1e-12)
        if bool((cost[plan.promoted] > 0).any()):
            cheapest = torch.where(plan.promoted & (cost > 0), cost, math.inf).argmin()
            kept = cost[residual & ~plan.promoted].tolist()
            assert float(cost[cheapest]) >= max([*kept, 0.0]) * (1 - 1e-9)
            one_less = plan.promoted.clone()
            one_less[cheapest] = False
            bound, of_denominator = bounds(residual & ~one_less)
            promotes_for_the_cap = bool((cost[plan.promoted] == 0).any())
            assert bound >= 2 * epsilon * (1 - 1e-9) or of_denominator >= cap or promotes_for_the_cap

    def test_chernoff_promotes_fewer(self):
        for seed in range(5):
            problem = plan_problem("plain", 500, seed)
            counts = [
                int(output_fetch_plan(*problem, 0.05, torch.tensor(1.0), DELTA, form=form).n_promoted) for form in FORMS
            ]
            assert 0 < counts[1] < counts[0]

    def test_cap_binds_where_the_output_does_not(self):
        problem = plan_problem("opposed", 100)
        loose = output_fetch_plan(*problem, 1e6, torch.tensor(1.0), DELTA, max_denominator_bound=1.0)
        tight = output_fetch_plan(*problem, 1e6, torch.tensor(1.0), DELTA, max_denominator_bound=0.05)
        assert int(tight.n_promoted) > int(loose.n_promoted)
        assert float(tight.planned_denominator_bound) < 0.05 <= float(loose.planned_denominator_bound)

    @pytest.mark.parametrize("kind", PLAN_KINDS)
    def test_more_tolerance_promotes_fewer_and_nested_sets(self, kind):
        problem = plan_problem(kind, 100)
        plans = [
            output_fetch_plan(*problem, epsilon, torch.tensor(1.0), DELTA) for epsilon in (1e-6, 0.03, 0.1, 0.5, 5)
        ]
        for tight, loose in itertools.pairwise(plans):
            assert int(tight.n_promoted) >= int(loose.n_promoted)
            assert not bool((loose.promoted & ~tight.promoted).any())

    def test_nothing_to_promote_where_the_residual_set_is_empty(self):
        w, r, shrinkage, residual, denominator, distances = plan_problem("plain", 10)
        for scale in (1.0, 0.0):
            plan = output_fetch_plan(
                w, r, shrinkage, residual & False, denominator, distances, 0.1, torch.tensor(scale), DELTA
            )
            assert int(plan.n_promoted) == int(plan.promoted.sum()) == 0
            assert float(plan.error_bound) == float(plan.planned_bound) == float(plan.planned_denominator_bound) == 0

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("scale", [0.0, -1.0, math.nan])
    def test_scale_without_meaning_promotes_everything(self, form, scale):
        problem = plan_problem("certain_tokens", 50)
        plan = output_fetch_plan(*problem, 0.5, torch.tensor(scale), DELTA, form=form)
        assert torch.equal(plan.promoted, problem[3])
        assert int(plan.n_promoted) == int(problem[3].sum())
        assert float(plan.planned_bound) == float(plan.planned_denominator_bound) == 0

    @pytest.mark.parametrize("form", FORMS)
    def test_scales_and_rows_of_a_batch_are_independent(self, form):
        problem = plan_problem("plain", 60, shape=(2, 3))
        scale = torch.rand(2, 3, generator=torch.Generator().manual_seed(0), dtype=F64) + 0.2
        batch = output_fetch_plan(*problem, 0.2, scale, DELTA, form=form)
        assert batch.promoted.shape == (2, 3, 60)
        for i in [(b, h) for b in range(2) for h in range(3)]:
            row = output_fetch_plan(*(x[i] for x in problem), 0.2, scale[i], DELTA, form=form)
            assert torch.equal(batch.promoted[i], row.promoted)
            for name in ("n_promoted", "error_bound", "denominator_bound", "planned_bound"):
                torch.testing.assert_close(getattr(batch, name)[i], getattr(row, name), rtol=1e-12, atol=0)

    @pytest.mark.parametrize("form", FORMS)
    def test_inputs_broadcast_over_query_rows(self, form):
        """r and the residual set per KV head, weights per query row, as the caller has them."""
        w, _, _, _, denominator, distances = plan_problem("plain", 40, shape=(2, 3))
        _, r, _, residual, _, _ = plan_problem("certain_tokens", 40, shape=(2, 1))
        shrinkage = binary_shrinkage(w, r, residual)
        plan = output_fetch_plan(
            w, r, shrinkage, residual, denominator, distances, 0.2, torch.ones(2, 1), DELTA, form=form
        )
        assert plan.n_promoted.shape == (2, 3)
        assert torch.equal(plan.promoted.sum(-1), plan.n_promoted)
        rows = [w[1, 2], r[1, 0], shrinkage[1, 2], residual[1, 0], denominator[1, 2], distances[1, 2]]
        row = output_fetch_plan(*rows, 0.2, torch.tensor(1.0), DELTA, form=form)
        assert torch.equal(plan.promoted[1, 2], row.promoted)

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("poisoned", ["weights", "distances"])
    @pytest.mark.parametrize("poison", [math.nan, math.inf])
    def test_what_is_not_finite_is_promoted(self, form, poisoned, poison):
        w, r, shrinkage, residual, denominator, distances = plan_problem("plain", 20)
        (w if poisoned == "weights" else distances)[7] = poison
        plan = output_fetch_plan(
            w, r, shrinkage, residual, denominator, distances, 0.5, torch.tensor(1.0), DELTA, form=form
        )
        assert bool(plan.promoted[7])
        assert not bool((plan.error_bound < 1e9).any())
        assert float(plan.planned_bound) < 0.5

    @pytest.mark.parametrize("form", FORMS)
    def test_denominator_that_is_nan_promotes_everything(self, form):
        problem = list(plan_problem("plain", 20))
        problem[4] = problem[4] * math.nan
        assert bool(output_fetch_plan(*problem, 0.5, torch.tensor(1.0), DELTA, form=form).promoted.all())

    @pytest.mark.parametrize("form", FORMS)
    def test_equal_values_need_no_promotion_but_for_the_denominator(self, form):
        w, r, shrinkage, residual, denominator, distances = plan_problem("all_exact_but_few", 50)
        plan = output_fetch_plan(
            w, r, shrinkage, residual, denominator, 0 * distances, 1e-9, torch.tensor(1.0), DELTA, form=form
        )
        assert int(plan.n_promoted) == 0 and float(plan.planned_bound) < 1e-9
        assert form == "chernoff" or float(plan.error_bound) == 0

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("scale", [6e4, 1e-30])
    def test_float16_magnitudes_and_underflowing_weights_stay_finite(self, form, scale):
        g = torch.Generator().manual_seed(0)
        values = (torch.randn(300, 64, generator=g) * 6e4).clamp(-65504, 65504).half()
        w, r = torch.rand(300, generator=g), 2.0 ** (-15.9 * torch.rand(300, generator=g))
        w = w * (1e-30 if scale < 1 else 1.0)
        w[0], r[0] = 1.0, 1.0
        norms = decode_norms(encode_norms(value_norms(values, values.float().mean(0))))
        known_sum = w[:1] @ (values[:1].float() - values.float().mean(0))
        distances = value_distances(norms, w, w.sum(), known=r == 1, known_sum=known_sum)
        plan = output_fetch_plan(
            w, r, torch.ones_like(w), r < 1, w.sum(), distances, 0.1, torch.tensor(6e4), DELTA
        )  # fmt: skip
        assert torch.isfinite(distances).all() and torch.isfinite(plan.planned_bound)
        assert float(plan.planned_bound) < 6e3
        assert (int(plan.n_promoted) == 0) == (scale < 1)

    @pytest.mark.parametrize("kind", ["plain", "heavy_tail", "binary", "certain_tokens"])
    def test_float32_plan_holds_in_float64(self, kind):
        low = [x.float() if x.is_floating_point() else x for x in plan_problem(kind, 1000)]
        high = [x.double() if x.is_floating_point() else x for x in low]
        epsilon = 0.1
        plan = output_fetch_plan(*low, epsilon, torch.tensor(1.0), DELTA)
        assert 0 < int(plan.n_promoted) < int(low[3].sum())
        assert float(certificate_of(high, high[3] & ~plan.promoted).error_bound) < epsilon * (1 + 1e-5)
        exact = output_fetch_plan(*high, epsilon * (1 - 1e-5), torch.tensor(1.0, dtype=F64), DELTA)
        assert int(plan.n_promoted) <= int(exact.n_promoted)

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("delta", [0.05, 0.1])
    def test_tolerance_holds_after_planning_and_half_of_it_does_not(self, form, delta):
        """Plan, make the promoted exact, draw, estimate."""
        w, r, values, _ = opposite_values(3, n=1600)
        w, r = torch.cat([w, torch.linspace(5, 20, 20, dtype=F64)]), torch.cat([r, torch.full((20,), 0.2, dtype=F64)])
        values = torch.cat([values, values[:20]])
        residual, ones = r < 1, torch.ones_like(w)
        distances = true_distances(w, values)
        epsilon = 0.25 * float(output_certificate(w, r, ones, residual, w.sum(), distances, delta).error_bound)
        plan = output_fetch_plan(w, r, ones, residual, w.sum(), distances, epsilon, torch.tensor(1.0), delta, form=form)
        assert 0 < int(plan.n_promoted) < int(residual.sum())
        left = residual & ~plan.promoted
        failures, failures_of_half = count_failures(w, r, ones, left, values, epsilon, epsilon / 2)
        assert not is_rejected(failures, delta, level=1e-2)
        assert is_rejected(failures_of_half, delta)

    @pytest.mark.parametrize(
        ("name", "value"),
        [("epsilon", 0.0), ("epsilon", math.nan), ("delta", 1.0), ("denominator_share", 1.0),
         ("max_denominator_bound", 0.0), ("max_denominator_bound", 1.5), ("max_denominator_bound", math.nan),
         ("form", "hoeffding")],
    )  # fmt: skip
    def test_out_of_range_raises(self, name, value):
        arguments = {"epsilon": 0.1, "scale": torch.tensor(1.0), "delta": 0.1, name: value}
        with pytest.raises(ValueError, match=name):
            output_fetch_plan(*plan_problem("plain", 5), **arguments)


@pytest.mark.parametrize("function", [value_distances, output_certificate, output_fetch_plan])
def test_what_must_not_depend_on_the_draw_cannot_see_it(function):
    parameters = inspect.signature(function).parameters
    assert not {"sampled", "generator"} & set(parameters)
    assert not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values())


class TestRelativeBound:
    def test_holds_for_every_output_within_the_bound(self):
        g = torch.Generator().manual_seed(0)
        estimate = torch.randn(1000, 3, generator=g, dtype=F64)
        error = torch.rand(1000, generator=g, dtype=F64) * 2 * estimate.norm(dim=-1)
        direction = torch.nn.functional.normalize(torch.randn(1000, 3, generator=g, dtype=F64), dim=-1)
        direction[::2] = torch.nn.functional.normalize(estimate[::2], dim=-1)  # half of them at the worst place
        output = estimate - error[:, None] * direction
        relative = relative_output_bound(error, estimate.norm(dim=-1))
        assert bool((relative >= error / output.norm(dim=-1) * (1 - 1e-9)).all())
        tight = torch.isfinite(relative[::2])
        torch.testing.assert_close(relative[::2][tight], (error / output.norm(dim=-1))[::2][tight], rtol=1e-6, atol=0)
        assert torch.equal(torch.isinf(relative), error >= estimate.norm(dim=-1))

    def test_edges(self):
        bound = torch.tensor([0.0, 0.0, 0.0, 1.0, math.inf, math.nan, 1.0])
        norm = torch.tensor([0.0, 2.0, math.nan, 1.0, 1.0, 1.0, math.nan])
        expected = torch.tensor([0.0, 0.0, math.inf, math.inf, math.inf, math.inf, math.inf])
        assert torch.equal(relative_output_bound(bound, norm), expected)
