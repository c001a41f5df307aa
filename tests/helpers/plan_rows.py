"""Random rows for plans, of every kind that is hard for one, and the sorting reference's answers to them."""

import torch

from verkv.estimators import (
    MIN_INCLUSION_PROB,
    bernstein_certificate,
    binary_shrinkage,
    certificate_drop,
    decode_inclusion_probs,
    fetch_plan,
    linear_plan,
)

F64, F32 = torch.float64, torch.float32
DELTA = 0.1

KINDS = [
    "flat",
    "peaked",
    "heavy_tailed",
    "tied",
    "constant",
    "huge_weight",
    "huge_weights",
    "r_at_floor",
    "equal_r",
    "r_off_grid",
    "some_certain",
    "one_residual",
    "all_certain",
    "underflowing",
    "zero_weights",
    "inflated",
    "tiny_denominator",
]


def make_rows(kind, n_rows, n_tokens, seed=0, dtype=F64):
    """Weights, inclusion probabilities, residual mask and denominator of random rows."""
    g = torch.Generator().manual_seed(seed)
    shape = (n_rows, n_tokens)
    logits = torch.randn(shape, generator=g, dtype=F64) * 2.0
    levels = (20 + 15 * torch.randn(shape, generator=g, dtype=F64) - 3.0 * logits).round().clamp(1, 127)
    spare = torch.rand(n_rows, generator=g, dtype=F64) * 3.0  # the share of D outside these weights
    if kind == "flat":
        logits = logits * 0.1
    elif kind == "peaked":
        logits = logits * 4.0
    elif kind == "heavy_tailed":
        logits = torch.rand(shape, generator=g, dtype=F64).clamp_min(1e-9).log().neg().square()
    elif kind == "tied":
        logits, levels = (logits * 2.0).round() * 0.5, (levels / 8.0).round().clamp_min(1) * 8.0
    elif kind == "constant":
        logits, levels = torch.zeros_like(logits), torch.full_like(levels, 21.0)
    elif kind == "huge_weight":
        logits[:, n_tokens // 2] = 30.0
    elif kind == "huge_weights":
        logits[:, :: max(1, n_tokens // 5)] += 14.0
    elif kind == "r_at_floor":
        levels = torch.full_like(levels, 127.0)
    elif kind == "equal_r":
        levels = torch.full_like(levels, 30.0)
    elif kind == "some_certain":
        levels[torch.rand(shape, generator=g) < 0.3] = 0.0
    elif kind == "one_residual":
        levels[:] = 0.0
        levels[torch.arange(n_rows), torch.randint(n_tokens, (n_rows,), generator=g)] = 25.0
    elif kind == "all_certain":
        levels[:] = 0.0
    elif kind == "underflowing":
        logits = logits * 40.0
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    if kind == "zero_weights":
        weights[:, 1::2] = 0.0
    denominator = weights.sum(-1) * (1.0 + spare)
    if kind == "inflated":  # planning weights in the residual set may be larger than those in D
        weights = weights * 5.0
    if kind == "tiny_denominator":  # a common scale cancels
        weights, denominator = weights * 1e-25, denominator * 1e-25
    r = decode_inclusion_probs(levels.to(torch.uint8), F64)
    if kind == "r_off_grid":
        r = MIN_INCLUSION_PROB + (1.0 - MIN_INCLUSION_PROB) * torch.rand(shape, generator=g, dtype=F64) ** 3
    return weights.to(dtype), r.to(dtype), r < 1, denominator.to(dtype)


def reference(weights, r, residual, denominator, epsilon, upper_share=None):
    """The plan by sorting, and its shrinkage."""
    shrinkage = binary_shrinkage(weights, r, residual)
    return fetch_plan(weights, r, shrinkage, residual, denominator, epsilon, DELTA, upper_share), shrinkage


def exact_bound(weights, r, residual, denominator, shrinkage, promoted, upper_share=None):
    """The float64 bound of what is left."""
    wide = [tensor.double() for tensor in (weights, r, shrinkage)]
    left = residual & ~promoted
    return bernstein_certificate(*wide, left, denominator.double(), DELTA, upper_share).error_bound


def assert_same_plan(rows, epsilon, upper_share=None, make_plan=linear_plan):
    """k*, shrinkage and bounds are the reference's; sets differ only where drops are equal."""
    weights, r, residual, denominator = rows
    plan = make_plan(*rows, epsilon, DELTA, upper_share=upper_share)
    expected, shrinkage = reference(*rows, epsilon, upper_share)
    assert torch.equal(plan.n_promoted, expected.n_promoted)
    assert torch.equal(plan.shrinkage, shrinkage)
    assert torch.equal(plan.promoted.sum(-1), plan.n_promoted)
    torch.testing.assert_close(plan.error_bound, expected.error_bound, rtol=1e-12, atol=0.0)
    bound = exact_bound(*rows, plan.shrinkage, plan.promoted, upper_share)
    assert bool((bound < epsilon).all())
    torch.testing.assert_close(plan.planned_bound, bound, rtol=1e-10, atol=1e-30)
    swapped = plan.promoted ^ expected.promoted
    for row in swapped.any(-1).nonzero().flatten().tolist():
        drop = certificate_drop(weights[row], r[row], shrinkage[row], residual[row], denominator[row], DELTA)
        tied = drop[swapped[row]]
        assert float(tied.max() - tied.min()) <= 1e-12 * float(tied.max())
