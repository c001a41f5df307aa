"""Inclusion probabilities against independent solvers, their one-byte grid, and the Poisson draw."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import binomtest

from verkv.estimators import (
    MIN_INCLUSION_PROB,
    decode_inclusion_probs,
    defensive_mixture,
    inclusion_probabilities,
    poisson_sample,
    quantize_inclusion_probs,
)

F64 = torch.float64
STEP = 2.0 ** (1 / 8)  # ratio of neighbouring levels of the one-byte grid


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def total(x):
    """Sum free of rounding."""
    return math.fsum(x.flatten().tolist())


def draw_scores(kind, n, seed=0, dtype=F64):
    uniform = torch.rand(n, generator=generator(seed), dtype=F64)
    scores = {
        "uniform": uniform,
        "softmax": (12 * uniform).softmax(-1),
        "power_law": uniform.clamp_min(1e-6) ** -2.0,
        "ties": (4 * uniform).floor() + 1,
        "huge_range": 10.0 ** (-30 * uniform),
        "some_zeros": torch.where(uniform < 0.3, 0.0, uniform),
        "denormal": 1e-310 * (1 + uniform),
    }[kind]
    return scores.to(dtype)


KINDS = ["uniform", "softmax", "power_law", "ties", "huge_range", "some_zeros", "denormal"]


def assert_solves(r, scores, budget, certain=None, absent=None, floor=0.0):
    """r = clip(c * score, floor, 1) for *one* c and sum(r) = budget, whatever found r; all tokens share the budget."""
    r, scores = r.flatten(), scores.flatten()
    certain = torch.zeros_like(r, dtype=torch.bool) if certain is None else certain.flatten()
    absent = torch.zeros_like(r, dtype=torch.bool) if absent is None else absent.flatten()
    assert abs(total(r) - budget) < 1e-9
    assert bool((r[absent] == 0).all())
    assert bool((r[certain & ~absent] == 1).all())

    free = ~(certain | absent)
    r, scores = r[free], scores[free]
    assert bool(((r >= floor) & (r <= 1)).all())
    positive = scores > 0
    if bool((r[positive] == 1).all()):  # c is infinite, and the tokens without a score share the rest
        rest = r[~positive]
        assert rest.numel() == 0 or float(rest.max() - rest.min()) < 1e-12
        return
    assert bool((r[~positive] == floor).all())
    if bool((r[positive] == floor).all()):  # c is zero
        return
    ratio = r[positive] / (scores[positive] / scores.max())
    r = r[positive]
    # A token inside the bounds tells c; one at r = 1 bounds c from below, one at the floor from above.
    c_at_least = ratio[(r > floor) | (floor == 0)].max()
    c_at_most = ratio[r < 1].min()
    assert float(c_at_least) <= float(c_at_most) * (1 + 1e-9)


def solve_by_sorting(scores, budget):
    """Eq. (3) read literally: the m largest scores get r = 1, m being the smallest that leaves no other r above 1."""
    scores = scores.numpy()
    order = np.argsort(-scores, kind="stable")
    falling = scores[order]
    rest = np.append(np.cumsum(falling[::-1])[::-1], 0.0)
    for m in range(len(falling)):
        if (budget - m) * falling[m] <= rest[m]:
            break
    r = np.ones_like(scores)
    r[order[m:]] = (budget - m) * (falling[m:] / rest[m])
    return torch.from_numpy(r)


class TestInclusionProbabilities:
    @pytest.mark.parametrize("n", [1, 63, 1000, 4097])
    @pytest.mark.parametrize("share", [0.02, 0.3, 0.69, 1.0])
    @pytest.mark.parametrize("kind", KINDS)
    def test_common_constant_and_exact_budget(self, kind, share, n):
        scores = draw_scores(kind, n)
        r = inclusion_probabilities(scores, share * n)
        assert r.dtype == F64
        assert_solves(r, scores, share * n)

    @pytest.mark.parametrize("n", [1, 63, 1000, 4097])
    @pytest.mark.parametrize("share", [0.02, 0.3, 0.69])
    @pytest.mark.parametrize("kind", ["uniform", "softmax", "power_law", "ties", "huge_range"])
    def test_equals_active_set_by_sorting(self, kind, share, n):
        scores = draw_scores(kind, n, seed=1)
        expected = solve_by_sorting(scores, share * n)
        torch.testing.assert_close(inclusion_probabilities(scores, share * n), expected, rtol=1e-10, atol=0)

    @pytest.mark.parametrize(
        ("scores", "budget", "expected"),
        [
            # R> sampling::inclusionprobabilities(c(1, 2, 3, 4, 20), 3)
            # 3 * 20 / 30 = 2 > 1, so the last is taken for certain; the others share 2: 2 * (1, 2, 3, 4) / 10.
            ([1, 2, 3, 4, 20], 3, [0.2, 0.4, 0.6, 0.8, 1.0]),
            # R> sampling::inclusionprobabilities(c(1, 1, 2, 8, 12), 3)
            # 3 / 24 * 12 and 3 / 24 * 8 reach 1; the others share 1: (1, 1, 2) / 4.
            ([1, 1, 2, 8, 12], 3, [0.25, 0.25, 0.5, 1.0, 1.0]),
            # R> sampling::inclusionprobabilities(c(1, 1, 6, 9), 2.5)
            # 2.5 * 9 / 17 = 1.32 is cut first; only then 1.5 * 6 / 8 = 1.125 exceeds 1; 0.5 is left for two.
            ([1, 1, 6, 9], 2.5, [0.25, 0.25, 1.0, 1.0]),
            # R> sampling::inclusionprobabilities(c(0, 1, 3), 1)   (warns of the zero, which keeps probability 0)
            ([0, 1, 3], 1, [0.0, 0.25, 0.75]),
        ],
        ids=["one_certain", "two_at_once", "one_after_the_other", "zero_score"],
    )
    def test_equals_r_sampling_package(self, scores, budget, expected):
        """What the R commands are defined to return, worked out by hand beside them; R itself is not run."""
        r = inclusion_probabilities(torch.tensor(scores, dtype=F64), budget)
        torch.testing.assert_close(r, torch.tensor(expected, dtype=F64), rtol=1e-14, atol=0)

    def test_certain_tokens_come_first_even_if_c_is_below_one(self):
        scores = torch.cat([torch.ones(4, dtype=F64), torch.full((96,), 0.5, dtype=F64)])
        certain = torch.arange(100) < 4
        r = inclusion_probabilities(scores, 10.0, certain=certain)
        # (10 - 4) / (96 * 0.5) = 0.125: a score of 1 alone would give the first four 10 / 52.
        assert bool((r[:4] == 1).all())
        torch.testing.assert_close(r[4:], torch.full((96,), 0.0625, dtype=F64), rtol=1e-14, atol=0)
        assert float(inclusion_probabilities(scores, 10.0)[0]) < 0.2

    def test_certain_token_may_have_score_zero(self):
        scores = torch.tensor([0.0, 1.0, 1.0], dtype=F64)
        r = inclusion_probabilities(scores, 2.0, certain=torch.tensor([True, False, False]))
        assert r.tolist() == [1.0, 0.5, 0.5]

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("floor", [MIN_INCLUSION_PROB, 0.01, 0.2])
    @pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
    def test_floor_with_exact_budget(self, kind, floor, share):
        """`share` is how far the budget lies between all tokens at the floor and all at 1."""
        n = 1000
        scores = draw_scores(kind, n, seed=2)
        certain = torch.arange(n) < 10
        budget = 10 + (n - 10) * (floor + share * (1 - floor))
        r = inclusion_probabilities(scores, budget, certain=certain, floor=floor)
        assert_solves(r, scores, budget, certain=certain, floor=floor)

    @pytest.mark.parametrize("kind", ["uniform", "softmax", "power_law", "huge_range"])
    def test_floor_equals_root_finding(self, kind):
        scores = draw_scores(kind, 500, seed=3)
        budget, floor = 120.0, 0.05
        tau = scores.numpy()
        log_c = brentq(
            lambda x: np.clip(np.exp(x) * tau, floor, 1).sum() - budget,
            -np.log(tau.max()) - 20,
            -np.log(tau.min()) + 20,
            xtol=1e-14,
            rtol=1e-14,
        )
        expected = torch.from_numpy(np.clip(np.exp(log_c) * tau, floor, 1))
        r = inclusion_probabilities(scores, budget, floor=floor)
        assert 0 < int((r == floor).sum()) < 500
        torch.testing.assert_close(r, expected, rtol=1e-9, atol=0)

    @pytest.mark.parametrize("n", [1, 3, 7, 1000])
    @pytest.mark.parametrize("floor", [0.1, 0.3])
    def test_budget_may_be_exactly_the_floor(self, n, floor):
        r = inclusion_probabilities(torch.arange(1, n + 1, dtype=F64), n * floor, floor=floor)
        torch.testing.assert_close(r, torch.full((n,), floor, dtype=F64), rtol=1e-12, atol=0)

    @pytest.mark.parametrize("kind", ["uniform", "ties", "huge_range", "some_zeros"])
    def test_budget_of_all_tokens_makes_all_certain(self, kind):
        assert bool((inclusion_probabilities(draw_scores(kind, 1000), 1000) == 1).all())

    def test_zero_scores_share_evenly(self):
        r = inclusion_probabilities(torch.zeros(8, dtype=F64), 2.0)
        assert r.tolist() == [0.25] * 8

    def test_fewer_positive_scores_than_budget(self):
        r = inclusion_probabilities(torch.tensor([5.0, 0.0, 0.0, 1.0, 0.0, 0.0], dtype=F64), 3.0)
        assert r.tolist() == [1.0, 0.25, 0.25, 1.0, 0.25, 0.25]

    def test_zero_budget_keeps_nothing(self):
        assert inclusion_probabilities(torch.tensor([1.0, 2.0]), 0.0).tolist() == [0.0, 0.0]

    @pytest.mark.parametrize("floor", [0.0, 0.03])
    @pytest.mark.parametrize("shared_dims", [1, 2, 3], ids=["per_head", "per_layer", "per_model"])
    def test_one_constant_over_the_shared_axes(self, shared_dims, floor):
        shape = (2, 3, 4, 50)  # batch, layers, heads, tokens
        scores = draw_scores("power_law", math.prod(shape), seed=4).reshape(shape)
        scores = scores * 10.0 ** torch.arange(4.0, dtype=F64)[:, None]  # heads on different scales
        n_shared = math.prod(shape[4 - shared_dims :])
        budget = 0.2 * n_shared
        r = inclusion_probabilities(scores, budget, floor=floor, shared_dims=shared_dims)
        assert r.shape == shape
        for group, group_scores in zip(r.reshape(-1, n_shared), scores.reshape(-1, n_shared), strict=True):
            assert_solves(group, group_scores, budget, floor=floor)
        if shared_dims > 1:  # heads compete: their sums differ
            assert float(r.sum(-1).std()) > 1

    @pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 3)])
    def test_budget_per_group(self, shape):
        scores = draw_scores("softmax", 2 * 3 * 40).reshape(2, 3, 40)
        if len(shape) == 1:  # one budget per sequence for all its heads
            budget = torch.tensor([5.0, 11.5])
            sums = inclusion_probabilities(scores, budget, shared_dims=2).sum((-2, -1))
        else:
            budget = torch.arange(1, 1 + math.prod(shape)).reshape(shape) * 2.5
            sums = inclusion_probabilities(scores, budget).sum(-1)
        torch.testing.assert_close(sums, budget.to(F64).expand(sums.shape), rtol=1e-12, atol=0)

    def test_absent_positions_get_zero_and_do_not_count(self):
        scores = draw_scores("power_law", 2 * 100).reshape(2, 100)
        absent = torch.arange(100) < torch.tensor([[0], [37]])  # left padding of the second row
        certain = torch.arange(100) >= 96
        r = inclusion_probabilities(scores, 20.0, certain=certain, absent=absent, floor=0.01)
        for row in range(2):
            assert_solves(r[row], scores[row], 20.0, certain=certain, absent=absent[row], floor=0.01)
        alone = inclusion_probabilities(scores[1, 37:], 20.0, certain=certain[37:], floor=0.01)
        torch.testing.assert_close(r[1, 37:], alone, rtol=1e-13, atol=0)

    def test_absent_wins_over_certain(self):
        both = torch.tensor([True, False, False])
        r = inclusion_probabilities(torch.ones(3), 1.0, certain=both, absent=both)
        assert r.tolist() == [0.0, 0.5, 0.5]

    def test_equal_scores_get_equal_probabilities(self):
        scores = draw_scores("ties", 1000)
        r = inclusion_probabilities(scores, 300.0)
        for score in scores.unique():
            assert len(r[scores == score].unique()) == 1

    @pytest.mark.parametrize("factor", [1e-300, 1e-12, 1e12, 1e300])
    def test_common_factor_cancels(self, factor):
        scores = 1 + draw_scores("uniform", 200)
        expected = inclusion_probabilities(scores, 150.0, floor=0.5)
        scaled = inclusion_probabilities(scores * factor, 150.0, floor=0.5)
        torch.testing.assert_close(scaled, expected, rtol=1e-12, atol=0)

    def test_sum_of_large_scores_does_not_overflow(self):
        scores = torch.full((10,), 1e308, dtype=F64)
        assert inclusion_probabilities(scores, 5.0).tolist() == [0.5] * 10

    @pytest.mark.parametrize("floor", [0.0, MIN_INCLUSION_PROB, 0.0123])
    def test_million_tokens(self, floor):
        scores = torch.rand(10**6, generator=generator(), dtype=F64) ** 40
        certain = torch.arange(10**6) < 100
        r = inclusion_probabilities(scores, 17_600.0, certain=certain, floor=floor)
        assert_solves(r, scores, 17_600.0, certain=certain, floor=floor)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_low_precision_scores_give_the_float64_solution_in_float32(self, dtype):
        scores = draw_scores("softmax", 4097, dtype=dtype)
        r = inclusion_probabilities(scores, 400.0, floor=MIN_INCLUSION_PROB)
        assert r.dtype == torch.float32
        expected = inclusion_probabilities(scores.double(), 400.0, floor=MIN_INCLUSION_PROB)
        torch.testing.assert_close(r, expected.float(), rtol=0, atol=0)
        assert abs(total(r) - 400) < 400 * 2.0**-24  # each token rounds by at most half a unit in the last place

    @pytest.mark.parametrize("budget", [-1.0, 1.9, 10.1, math.nan, math.inf, -math.inf])
    def test_impossible_budget_raises(self, budget):
        with pytest.raises(ValueError, match="budget"):
            inclusion_probabilities(torch.ones(10), budget, certain=torch.arange(10) < 2)

    def test_budget_below_the_floor_raises(self):
        with pytest.raises(ValueError, match=r"budget of 1.9 tokens.*floor"):
            inclusion_probabilities(torch.ones(10), 1.9, floor=0.2)

    def test_absent_positions_do_not_raise_the_largest_budget(self):
        absent = torch.arange(10) < 3
        assert total(inclusion_probabilities(torch.ones(10), 7.0, absent=absent)) == 7
        with pytest.raises(ValueError, match=r"budget of 7\.5 tokens is larger than the 7"):
            inclusion_probabilities(torch.ones(10), 7.5, absent=absent)

    def test_one_impossible_budget_among_many_raises(self):
        with pytest.raises(ValueError, match="budget of 11 "):
            inclusion_probabilities(torch.ones(3, 10), torch.tensor([5.0, 11.0, 10.0]))

    @pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf, -1e-9])
    def test_bad_score_raises(self, score):
        with pytest.raises(ValueError, match="scores"):
            inclusion_probabilities(torch.tensor([1.0, score, 1.0]), 1.0)

    def test_integer_scores_raise(self):
        with pytest.raises(ValueError, match=r"scores.*int64"):
            inclusion_probabilities(torch.tensor([1, 2]), 1.0)

    @pytest.mark.parametrize("floor", [-0.1, 1.0, 2.0, math.nan])
    def test_floor_out_of_range_raises(self, floor):
        with pytest.raises(ValueError, match="floor"):
            inclusion_probabilities(torch.ones(10), 10.0, floor=floor)

    @settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @given(
        scores=st.lists(st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-30, 1e6)), min_size=1, max_size=30),
        n_certain=st.integers(0, 3),
        n_absent=st.integers(0, 3),
        floor=st.sampled_from([0.0, MIN_INCLUSION_PROB, 0.05, 0.5]),
        share=st.floats(0.0, 1.0),
    )
    def test_any_problem(self, scores, n_certain, n_absent, floor, share):
        scores = torch.tensor(scores, dtype=F64)
        n = len(scores)
        certain, absent = torch.arange(n) < n_certain, torch.arange(n) >= n - n_absent
        least = int((certain & ~absent).sum()) + floor * int((~certain & ~absent).sum())
        budget = least + share * (int((~absent).sum()) - least)
        r = inclusion_probabilities(scores, budget, certain=certain, absent=absent, floor=floor)
        assert_solves(r, scores, budget, certain=certain, absent=absent, floor=floor)


class TestDefensiveMixture:
    def test_alpha_zero_is_the_identity(self):
        scores = draw_scores("power_law", 100)
        assert torch.equal(defensive_mixture(scores, 0.0), scores)

    def test_alpha_one_is_uniform(self):
        scores = torch.tensor([[0.0, 1.0, 5.0], [2.0, 2.0, 8.0]])
        assert defensive_mixture(scores, 1.0).tolist() == [[2.0] * 3, [4.0] * 3]

    @pytest.mark.parametrize("alpha", [0.05, 0.5, 1.0])
    def test_mean_is_preserved_and_the_floor_is_alpha_of_it(self, alpha):
        scores = draw_scores("power_law", 4 * 1000).reshape(4, 1000)
        mixed = defensive_mixture(scores, alpha)
        torch.testing.assert_close(mixed.mean(-1), scores.mean(-1), rtol=1e-12, atol=0)
        assert bool((mixed >= alpha * scores.mean(-1, keepdim=True) * (1 - 1e-12)).all())
        if alpha < 1:
            assert torch.equal(mixed.argsort(-1), scores.argsort(-1))

    def test_only_eligible_tokens_are_mixed(self):
        scores = torch.tensor([100.0, 0.0, 4.0])
        mixed = defensive_mixture(scores, 0.5, eligible=torch.tensor([False, True, True]))
        assert mixed.tolist() == [100.0, 1.0, 3.0]

    def test_no_eligible_token(self):
        scores = torch.tensor([1.0, 2.0])
        assert torch.equal(defensive_mixture(scores, 0.5, eligible=torch.zeros(2, dtype=torch.bool)), scores)

    @pytest.mark.parametrize("alpha", [-0.01, 1.01, math.nan])
    def test_alpha_out_of_range_raises(self, alpha):
        with pytest.raises(ValueError, match="alpha"):
            defensive_mixture(torch.ones(3), alpha)


def draw_probabilities(n, seed=0):
    """Over the whole range of the grid, and a few that are certain."""
    uniform = torch.rand(n, generator=generator(seed), dtype=F64)
    return torch.where(uniform < 0.05, 1.0, MIN_INCLUSION_PROB**uniform).clamp(MIN_INCLUSION_PROB, 1)


def largest_quantum(r):
    """The largest step of any token: from the level at or below its r to the next one, no more than r (2^(1/8) - 1)."""
    return float(torch.where(r < 1, r, 0.0).max()) * (STEP - 1)


class TestQuantize:
    @pytest.mark.parametrize("dtype", [F64, torch.float32])
    @pytest.mark.parametrize("n", [1, 63, 1000, 4097])
    def test_on_the_grid_next_to_the_input_and_sum_within_one_quantum(self, n, dtype):
        r = draw_probabilities(n).to(dtype)
        levels, rounded = quantize_inclusion_probs(r)
        assert (levels.dtype, rounded.dtype) == (torch.uint8, dtype)
        torch.testing.assert_close(rounded.double(), 2.0 ** (-levels.double() / 8), rtol=1e-7, atol=0)
        assert torch.equal(rounded, decode_inclusion_probs(levels, dtype))
        octaves = (levels.double() / 8 + r.double().log2()).abs()
        assert float(octaves.max()) < 1 / 8  # never past the neighbouring level
        lost = total(r) - total(rounded)
        assert -1e-7 * total(r) <= lost < largest_quantum(r)  # float32 holds the grid to 6e-8

    @pytest.mark.parametrize("n", [2, 10, 1000, 4097])
    @pytest.mark.parametrize("value", [0.3, 0.95, 0.011, MIN_INCLUSION_PROB * 1.04])
    def test_ties_are_split_to_keep_the_sum(self, n, value):
        r = torch.full((n,), value, dtype=F64)
        levels, rounded = quantize_inclusion_probs(r)
        assert len(levels.unique()) <= 2
        assert 0 <= total(r) - total(rounded) < largest_quantum(r) + 1e-12
        if n >= 1000:
            assert len(levels.unique()) == 2  # rounding all of them down would lose up to 8 % of the budget

    def test_certain_stays_certain(self):
        r = draw_probabilities(1000)
        levels, rounded = quantize_inclusion_probs(r)
        assert int((r == 1).sum()) > 10
        assert bool((rounded[r == 1] == 1).all() and (levels[r == 1] == 0).all())

    @pytest.mark.parametrize("dtype", [F64, torch.float32])
    def test_smallest_probability_is_the_last_level(self, dtype):
        levels, rounded = quantize_inclusion_probs(torch.full((5,), MIN_INCLUSION_PROB, dtype=dtype))
        assert levels.tolist() == [127] * 5
        torch.testing.assert_close(rounded.double(), torch.full((5,), 2.0 ** (-127 / 8), dtype=F64), rtol=1e-7, atol=0)

    @pytest.mark.parametrize("dtype", [F64, torch.float32])
    def test_grid_values_are_left_alone(self, dtype):
        """Each row: a thousand frequent tokens, whose float32 rounding adds up to a step of one rare token."""
        every = torch.arange(128, dtype=torch.uint8)
        frequent, rare = every[:16, None, None], every[None, 64:, None]
        levels = torch.cat([frequent.expand(16, 64, 1000), rare.expand(16, 64, 1)], dim=-1)
        again, rounded = quantize_inclusion_probs(decode_inclusion_probs(levels, dtype))
        assert torch.equal(again, levels)
        assert torch.equal(rounded, decode_inclusion_probs(levels, dtype))

    @pytest.mark.parametrize("dtype", [F64, torch.float32])
    def test_every_level_alone_is_left_alone(self, dtype):
        """Float32 rounds a level up or down; neither may move a token that has nobody to share its rounding with."""
        levels = torch.arange(128, dtype=torch.uint8)[:, None]  # each its own sum
        again, _ = quantize_inclusion_probs(decode_inclusion_probs(levels, dtype))
        assert torch.equal(again, levels)

    def test_grid_values_are_left_alone_among_others(self):
        r = torch.cat([torch.full((500,), 0.5, dtype=F64), draw_probabilities(500)])
        levels, _ = quantize_inclusion_probs(r)
        assert bool((levels[:500] == 8).all())

    @pytest.mark.parametrize("shared_dims", [1, 2, 3], ids=["per_head", "per_layer", "per_model"])
    def test_one_sum_over_the_shared_axes(self, shared_dims):
        shape = (2, 3, 4, 50)
        r = draw_probabilities(math.prod(shape)).reshape(shape)
        levels, rounded = quantize_inclusion_probs(r, shared_dims=shared_dims)
        assert levels.shape == rounded.shape == shape
        n_shared = math.prod(shape[4 - shared_dims :])
        for before, after in zip(r.reshape(-1, n_shared), rounded.reshape(-1, n_shared), strict=True):
            assert 0 <= total(before) - total(after) < largest_quantum(before)

    def test_absent_positions_take_no_part(self):
        r = draw_probabilities(2 * 200).reshape(2, 200)
        absent = torch.arange(200) < torch.tensor([[0], [77]])
        levels, rounded = quantize_inclusion_probs(torch.where(absent, 0.0, r), absent=absent)
        assert bool((rounded[absent] == 0).all() and (levels[absent] == 0).all())
        alone_levels, alone = quantize_inclusion_probs(r[1, 77:])
        assert torch.equal(levels[1, 77:], alone_levels)
        torch.testing.assert_close(rounded[1, 77:], alone, rtol=1e-15, atol=0)  # exp2 may differ in the last bit

    @pytest.mark.parametrize("value", [0.0, MIN_INCLUSION_PROB * 0.99, 1.001, -0.5, math.nan, math.inf])
    def test_out_of_range_raises(self, value):
        with pytest.raises(ValueError, match="inclusion_probs"):
            quantize_inclusion_probs(torch.tensor([0.5, value]))

    def test_composes_with_the_solver(self):
        scores = draw_scores("softmax", 4 * 4097).reshape(4, 4097)
        certain = torch.arange(4097) < 4
        r = inclusion_probabilities(scores, 1000.0, certain=certain, floor=MIN_INCLUSION_PROB, shared_dims=2)
        levels, rounded = quantize_inclusion_probs(r, shared_dims=2)
        assert bool((rounded[:, :4] == 1).all())
        assert 1000.0 - (STEP - 1) < total(rounded) <= 1000.0 + 1e-9
        assert int(levels.max()) == 127

    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @given(r=st.lists(st.floats(MIN_INCLUSION_PROB, 1.0), min_size=1, max_size=30))
    def test_any_probabilities(self, r):
        r = torch.tensor(r, dtype=F64)
        levels, rounded = quantize_inclusion_probs(r)
        assert -1e-7 * total(r) <= total(r) - total(rounded) <= largest_quantum(r) + 1e-12
        assert float((levels.double() / 8 + r.log2()).abs().max()) < 1 / 8
        assert torch.equal(rounded, decode_inclusion_probs(levels, F64))

    def test_decode_covers_every_level(self):
        levels = torch.arange(128, dtype=torch.uint8)
        decoded = decode_inclusion_probs(levels, F64)
        assert decoded[0] == 1
        assert float(decoded[127]) == MIN_INCLUSION_PROB
        torch.testing.assert_close(decoded[:-1] / decoded[1:], torch.full((127,), STEP, dtype=F64), rtol=1e-14, atol=0)


class TestPoissonSample:
    @pytest.mark.parametrize("dtype", [F64, torch.float32])
    @pytest.mark.parametrize("r", [MIN_INCLUSION_PROB, 0.003, 0.05, 0.5, 0.97])
    def test_frequency(self, r, dtype):
        n = 5_000_000 if r < 1e-3 else 200_000
        kept = int(poisson_sample(torch.full((n,), r, dtype=dtype), generator(7)).sum())
        assert binomtest(kept, n, r).pvalue > 1e-3
        wrong = 1.5 * r if r < 0.5 else r - 0.02  # the test has the power to see this
        assert binomtest(kept, n, wrong).pvalue < 1e-4

    def test_tokens_are_independent(self):
        n_draws, n_tokens = 40_000, 48
        r = torch.linspace(0.1, 0.9, n_tokens, dtype=F64)
        sampled = poisson_sample(r.expand(n_draws, -1), generator())
        centred = (sampled.double() - r) / (r * (1 - r)).sqrt()
        correlation = centred.T @ centred / n_draws  # standard deviation 1 / sqrt(n_draws) off the diagonal
        off_diagonal = correlation[~torch.eye(n_tokens, dtype=torch.bool)]
        assert float(off_diagonal.abs().max()) * math.sqrt(n_draws) < 4.5
        assert 0.9 < float(off_diagonal.std()) * math.sqrt(n_draws) < 1.1

    def test_rows_are_independent(self):
        r = torch.full((2, 3, 40_000), 0.3, dtype=F64)  # layers, heads
        centred = (poisson_sample(r, generator()).double() - 0.3).reshape(6, -1) / math.sqrt(0.21)
        correlation = centred @ centred.T / centred.shape[-1]
        assert float((correlation - torch.eye(6, dtype=F64)).abs().max()) < 4.5 / 200

    def test_sample_size_has_the_poisson_sampling_variance(self):
        r = draw_probabilities(300)
        size = poisson_sample(r.expand(20_000, -1), generator()).sum(-1).double()
        variance = float((r * (1 - r)).sum())
        assert abs(float(size.mean()) - float(r.sum())) < 4 * math.sqrt(variance / 20_000)
        assert abs(float(size.var()) / variance - 1) < 5 * math.sqrt(2 / 20_000)

    @pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
    def test_one_always_and_zero_never(self, dtype):
        assert bool(poisson_sample(torch.ones(1_000_000, dtype=dtype), generator()).all())
        assert not bool(poisson_sample(torch.zeros(1_000_000, dtype=dtype), generator()).any())

    def test_generator_determines_the_sample_and_advances(self):
        r = torch.full((2, 1000), 0.5)
        first_run, second_run = generator(3), generator(3)
        first, second = poisson_sample(r, first_run), poisson_sample(r, first_run)
        assert torch.equal(first, poisson_sample(r, second_run))
        assert torch.equal(second, poisson_sample(r, second_run))
        assert 800 < int((first != second).sum()) < 1200  # a fresh draw differs in half of the tokens
        assert not torch.equal(first, poisson_sample(r, generator(4)))

    def test_global_seed_plays_no_part(self):
        r = torch.full((1000,), 0.5)
        torch.manual_seed(0)
        state = torch.get_rng_state()
        first = poisson_sample(r, generator())
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(1)
        assert torch.equal(first, poisson_sample(r, generator()))

    @pytest.mark.parametrize("n", [1, 63, 1000, 4097])
    def test_shape_and_dtype(self, n):
        sampled = poisson_sample(torch.full((2, n), 0.5), generator())
        assert (sampled.shape, sampled.dtype) == ((2, n), torch.bool)
