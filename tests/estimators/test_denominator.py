"""The denominator estimators over *all* draws: expectations are finite sums, not simulations."""

import itertools
import math

import pytest
import torch

from verkv.estimators import (
    binary_shrinkage,
    horvitz_thompson,
    mean_squared_error,
    optimal_shrinkage,
    shrinkage_estimate,
)

F64 = torch.float64


def make_problem(kind, n=10):
    """Weights and inclusion probabilities; at r = 1 a token is certain."""
    g = torch.Generator().manual_seed(n)
    w = torch.randn(n, generator=g, dtype=F64).exp()
    r = 0.05 + 0.9 * torch.rand(n, generator=g, dtype=F64)
    if kind == "certain_tokens":
        r[::3] = 1.0
    elif kind == "all_certain":
        r[:] = 1.0
    elif kind == "tiny_r":
        r = 10.0 ** (-5 * torch.rand(n, generator=g, dtype=F64)) * 0.9
    elif kind == "dominant_weight":
        w[n // 2] = 1e3
    elif kind == "ties":
        w[:], r[:] = 1.0, 0.25
    elif kind == "zero_weights":
        w[::2] = 0.0
    return w, r


KINDS = ["plain", "certain_tokens", "all_certain", "tiny_r", "dominant_weight", "ties", "zero_weights"]
SHRINKAGES = {
    "none": lambda w, r, residual: torch.ones_like(w),
    "full": lambda w, r, residual: r,
    "halfway": lambda w, r, residual: (1 + r) / 2,
    "binary": binary_shrinkage,
    "optimal": optimal_shrinkage,
}


def all_draws(r):
    """Each of the 2^n samples with its probability under independent Bernoulli draws: (2^n, n), (2^n,)."""
    sampled = torch.tensor(list(itertools.product([False, True], repeat=len(r))))
    return sampled, torch.where(sampled, r, 1 - r).prod(-1)


@pytest.mark.parametrize("n", [1, 2, 10, 12])
def test_probabilities_of_all_draws_sum_to_one(n):
    _, probability = all_draws(make_problem("plain", n)[1])
    assert len(probability) == 2**n
    assert math.isclose(math.fsum(probability.tolist()), 1.0, rel_tol=1e-13)


@pytest.mark.parametrize("n", [1, 10, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_horvitz_thompson_is_unbiased(kind, n):
    w, r = make_problem(kind, n)
    sampled, probability = all_draws(r)
    estimates = horvitz_thompson(w, r, sampled, r < 1)
    assert estimates.shape == (2**n,)
    torch.testing.assert_close((probability * estimates).sum(), w.sum(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [1, 10, 12])
@pytest.mark.parametrize("shrinkage", SHRINKAGES.values(), ids=SHRINKAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_shrinkage_estimate_has_the_stated_bias_and_mean_squared_error(kind, shrinkage, n):
    w, r = make_problem(kind, n)
    residual = r < 1
    shrinkage = shrinkage(w, r, residual)
    sampled, probability = all_draws(r)
    estimates = shrinkage_estimate(w, r, shrinkage, sampled, residual)
    bias = (w * (1 - shrinkage))[residual].sum()
    torch.testing.assert_close((probability * estimates).sum(), w.sum() - bias, rtol=1e-12, atol=1e-12)

    error = (probability * (estimates - w.sum()).square()).sum()
    predicted = mean_squared_error(w, r, shrinkage, residual)
    torch.testing.assert_close(error, predicted, rtol=1e-12, atol=1e-26 * float(w.sum().square()))


def test_promoted_tokens_count_with_their_weight():
    """Making a token exact takes it out of the residual set; its draw then plays no part."""
    w, r = make_problem("plain")
    residual = torch.arange(10) >= 4
    sampled, probability = all_draws(r)
    estimates = horvitz_thompson(w, r, sampled, residual)
    torch.testing.assert_close((probability * estimates).sum(), w.sum(), rtol=1e-12, atol=0)
    torch.testing.assert_close(estimates, horvitz_thompson(w, r, sampled | ~residual, residual), rtol=0, atol=0)
    variance = (probability * (estimates - w.sum()).square()).sum()
    torch.testing.assert_close(variance, (w.square() * (1 - r) / r)[4:].sum(), rtol=1e-12, atol=0)


def test_hand_computed():
    w = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=F64)
    r = torch.tensor([1.0, 0.5, 0.25, 0.5], dtype=F64)
    shrinkage = torch.tensor([1.0, 0.5, 0.75, 1.0], dtype=F64)
    sampled = torch.tensor([True, True, True, False])
    assert horvitz_thompson(w, r, sampled, r < 1) == 1 + 2 / 0.5 + 4 / 0.25
    assert shrinkage_estimate(w, r, shrinkage, sampled, r < 1) == 1 + 2 + 0.75 * 4 / 0.25


def test_weights_of_dropped_tokens_are_not_read():
    w = torch.tensor([1.0, 2.0, float("nan"), float("inf")])
    r = torch.tensor([1.0, 0.5, 0.5, 0.5])
    assert horvitz_thompson(w, r, torch.tensor([True, True, False, False]), r < 1) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 63, 1000, 4097])
def test_low_precision_and_batches(n, dtype):
    g = torch.Generator().manual_seed(n)
    w = torch.rand(2, 3, n, generator=g).to(dtype)
    r = (0.1 + 0.8 * torch.rand(n, generator=g)).to(dtype)
    sampled = torch.rand(3, n, generator=g) < r
    residual = torch.rand(n, generator=g) < 0.9
    estimate = horvitz_thompson(w, r, sampled, residual)
    expected = horvitz_thompson(w.double(), r.double(), sampled, residual)
    assert (estimate.shape, estimate.dtype) == ((2, 3), torch.float32)
    # Three roundings a token in float32, all sums of non-negative terms, taken pairwise.
    torch.testing.assert_close(estimate.double(), expected, rtol=4 * torch.finfo(torch.float32).eps, atol=0)
