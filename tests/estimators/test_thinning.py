"""Thinning a Poisson sample: the law of what is left, its sum of r, and the least step that meets a budget."""

import itertools

import pytest
import torch
from scipy.stats import binomtest
from torch.testing import assert_close

from verkv.estimators import (
    MIN_INCLUSION_PROB,
    decode_inclusion_probs,
    inclusion_probabilities,
    poisson_sample,
    quantize_inclusion_probs,
)
from verkv.estimators.thinning import (
    PROTECTED,
    count_levels,
    draw_survivors,
    expected_rows,
    n_protected,
    surplus_levels,
    thin_counts,
    thin_levels,
    thinning_steps,
    variance_of_rows,
)

FLOAT64 = {"dtype": torch.float64}


def problem(n_tokens=200, budget=60.0, seed=0, n_certain=5, n_absent=3, heads=3, shared_dims=1):
    """Scores with a heavy tail, their solution, and its levels and surplus."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(heads, n_tokens, generator=generator, **FLOAT64).mul(2.0).exp()
    certain, absent = torch.zeros(heads, n_tokens, dtype=torch.bool), torch.zeros(heads, n_tokens, dtype=torch.bool)
    certain[:, :n_certain], absent[:, n_tokens - n_absent :] = True, True
    masks = {"certain": certain, "absent": absent}
    total = torch.tensor(budget * (heads if shared_dims == 2 else 1))
    r = inclusion_probabilities(scores, total, floor=MIN_INCLUSION_PROB, shared_dims=shared_dims, **masks)
    levels, rounded = quantize_inclusion_probs(r, absent=absent, shared_dims=shared_dims)
    surplus = surplus_levels(scores, r, levels, shared_dims=shared_dims, **masks)
    return scores, masks, r, levels, rounded, surplus


# --- the law ----------------------------------------------------------------------------------------------------------


def test_what_is_left_is_a_poisson_sample_by_enumeration():
    """Every draw of four tokens and every fall of the coins: the law of what is left is the product of r'."""
    levels = torch.tensor([0, 0, 5, 20], dtype=torch.uint8)
    surplus = torch.tensor([PROTECTED, 3, 0, 0], dtype=torch.uint8)
    steps = torch.tensor(9)
    lower, _ = thin_levels(levels, surplus, steps)
    r, thinned = decode_inclusion_probs(levels, torch.float64), decode_inclusion_probs(lower, torch.float64)
    stays = thinned / r
    law = {}
    for drawn in itertools.product((False, True), repeat=4):
        for coins in itertools.product((False, True), repeat=4):
            p = 1.0
            for i in range(4):
                p *= float(r[i] if drawn[i] else 1 - r[i]) * float(stays[i] if coins[i] else 1 - stays[i])
            left = tuple(a and b for a, b in zip(drawn, coins, strict=True))
            law[left] = law.get(left, 0.0) + p
    assert lower.tolist() == [0, 6, 14, 29] and float(thinned[1]) == pytest.approx(2 ** (-6 / 8))
    for left, p in law.items():
        expected = 1.0
        for i in range(4):
            expected *= float(thinned[i] if left[i] else 1 - thinned[i])
        assert p == pytest.approx(expected, abs=1e-12)


def test_frequencies_and_pairs_are_those_of_the_new_probabilities():
    levels = torch.tensor([0, 2, 8, 8], dtype=torch.uint8)
    surplus = torch.tensor([4, 0, 0, 0], dtype=torch.uint8)
    steps, generator = torch.full((4,), 10), torch.Generator().manual_seed(1)
    r = decode_inclusion_probs(levels, torch.float64)
    thinned = decode_inclusion_probs(thin_levels(levels, surplus, steps)[0], torch.float64)
    n, left = 4000, []
    for _ in range(n):
        drawn = poisson_sample(r, generator)
        kept = torch.zeros(4, dtype=torch.bool)
        kept[drawn] = draw_survivors(levels[drawn], surplus[drawn], steps[drawn], generator)
        left.append(kept)
    left = torch.stack(left)
    for i in range(4):
        assert binomtest(int(left[:, i].sum()), n, float(thinned[i])).pvalue > 1e-4
        for j in range(i):
            assert binomtest(int((left[:, i] & left[:, j]).sum()), n, float(thinned[i] * thinned[j])).pvalue > 1e-4


@pytest.mark.parametrize("shared_dims", [1, 2])
@pytest.mark.parametrize("steps", [1, 8, 30, 90])
def test_thinned_probabilities_are_those_of_a_smaller_budget(shared_dims, steps):
    """As if they had been solved for the smaller sum at once, to the width of the grid; the surplus makes it so."""
    scores, masks, _, levels, _, surplus = problem(shared_dims=shared_dims)
    lower, _ = thin_levels(levels, surplus, torch.tensor(steps))
    thinned = torch.where(masks["absent"], 0.0, decode_inclusion_probs(lower, torch.float64))
    total = thinned.sum() if shared_dims == 2 else thinned.sum(-1)
    again = inclusion_probabilities(scores, total, floor=MIN_INCLUSION_PROB, shared_dims=shared_dims, **masks)
    free = ~(masks["certain"] | masks["absent"])
    ratio = (thinned[free] / again[free]).log2().mul(8)
    assert ratio.abs().max() < 2.0
    no_surplus, _ = thin_levels(levels, torch.where(surplus == PROTECTED, surplus, 0), torch.tensor(steps))
    blind = decode_inclusion_probs(no_surplus, torch.float64)[free & (levels == 0)]
    if steps >= 8:  # without it, the best tokens lose as much as all others
        assert (blind < again[free & (levels == 0)] * 0.75).any()


def test_surplus_of_a_budget_that_pays_for_all():
    """All have r = 1; the lowest score has no surplus, and a score twice as high an octave."""
    scores = torch.tensor([[1.0, 2.0, 4.0, 0.0, 9.0]], **FLOAT64)
    none = torch.zeros(1, 5, dtype=torch.bool)
    absent = torch.tensor([[False, False, False, False, True]])
    levels = torch.zeros(1, 5, dtype=torch.uint8)
    r = torch.where(absent, 0.0, torch.ones(1, 5, **FLOAT64))
    assert surplus_levels(scores, r, levels, certain=none, absent=absent).tolist() == [[0, 8, 16, 0, 0]]


# --- sums -------------------------------------------------------------------------------------------------------------


def test_counts_know_the_sum_of_r_before_and_after():
    _, masks, _, levels, rounded, surplus = problem()
    is_token = ~masks["absent"]
    counts = count_levels(levels, surplus, is_token)
    assert counts.sum(-1).tolist() == is_token.sum(-1).tolist() and n_protected(counts).tolist() == [5, 5, 5]
    assert_close(expected_rows(counts), rounded.sum(-1))
    assert_close(variance_of_rows(counts), (rounded * (1 - rounded)).sum(-1))
    steps = torch.tensor([0, 7, 200])
    lower, left = thin_levels(levels, surplus, steps[:, None])
    thinned = torch.where(is_token, decode_inclusion_probs(lower, torch.float64), 0.0)
    assert torch.equal(thin_counts(counts, steps), count_levels(lower, left, is_token))
    assert_close(expected_rows(thin_counts(counts, steps)), thinned.sum(-1))
    twice = thin_counts(thin_counts(counts, torch.tensor([3, 3, 3])), torch.tensor([4, 4, 4]))
    assert torch.equal(twice, thin_counts(counts, torch.tensor([7, 7, 7])))


@pytest.mark.parametrize("target", [59.9, 40.0, 12.0, 5.5])
def test_steps_are_the_least_that_meet_the_target(target):
    _, masks, _, levels, _, surplus = problem()
    counts = count_levels(levels, surplus, ~masks["absent"])
    steps = thinning_steps(counts, torch.full((3,), target, **FLOAT64))
    assert (steps > 0).all()
    assert (expected_rows(thin_counts(counts, steps)) <= target * (1 + 1e-9)).all()
    assert (expected_rows(thin_counts(counts, steps - 1)) > target).all()


def test_nothing_is_thinned_where_there_is_room():
    _, masks, _, levels, rounded, surplus = problem()
    counts = count_levels(levels, surplus, ~masks["absent"])
    assert thinning_steps(counts, rounded.sum(-1)).tolist() == [0, 0, 0]
    levels, surplus = (torch.tensor([[x]], dtype=torch.uint8) for x in (0, 255))
    only_protected = count_levels(levels, surplus, torch.tensor([[True]]))
    assert expected_rows(thin_counts(only_protected, thinning_steps(only_protected, torch.zeros(1)))).tolist() == [1.0]
