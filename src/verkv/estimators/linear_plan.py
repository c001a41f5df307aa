"""Binary shrinkage and the fetch plan in time linear in the number of tokens (A.2, Eqs. 8-10, Theorem 2).

The same decisions as `shrinkage.binary_shrinkage` followed by `fetching.fetch_plan`, which sort all tokens, twice.

Why no drop g need be computed for most tokens
----------------------------------------------
Let X = B^2 + 2 l V, with l = ln(2 / delta) and B = b l / 3 of the whole residual set. Taking out a token with lambda =
1 that does not have the largest deviation leaves bias and b alone, so its drop is g = (sqrt(X) - sqrt(X - 2 l v)) / D
with v = w^2 (1 - r) / r: it rises with v, whatever X is. The order of these tokens is the order of their variances, a
static key. For the others, those with lambda < 1 and the one with the largest deviation, g is computed, and turned into
the variance that an ordinary token with the same drop would have: v' = g D (2 sqrt(X) - g D) / (2 l). It rises with g
up to g D = sqrt(X), above every ordinary token; from there on a straight line continues it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from verkv.estimators.boundary import Selection, running_sum, sizes_may_vary, summation_error, tokens_above
from verkv.estimators.certificate import (
    CertificateTerms,
    check_delta,
    check_upper_share,
    error_bound,
    sided_error_bound,
)
from verkv.estimators.fetching import check_epsilon
from verkv.estimators.numerics import at_least_float32

# (row, token) pairs planned at once: on a CPU the dozen temporaries should stay in the cache.
_CPU_PAIRS = 2**18
_DEVICE_PAIRS = 2**24


@dataclass(frozen=True)
class LinearPlan:
    """Shrinkage and the greedy plan of one or more query rows.

    Attributes
    ----------
    shrinkage : Tensor, shape (..., T)
        r where shrunk, 1 elsewhere.
    promoted : Tensor, shape (..., T), bool
        Tokens whose weight must be exact.
    n_promoted : Tensor, shape (...,), int64
        k* of Eq. (10).
    error_bound : Tensor, shape (...,)
        The bound before anything is promoted.
    planned_bound : Tensor, shape (...,)
        The bound after promoting; < epsilon.
    """

    shrinkage: Tensor
    promoted: Tensor
    n_promoted: Tensor
    error_bound: Tensor
    planned_bound: Tensor


@torch.no_grad()
def linear_plan(
    weights: Tensor,
    inclusion_probs: Tensor,
    residual: Tensor,
    denominator: Tensor,
    epsilon: float | Tensor,
    delta: float,
    shrinkage: Tensor | None = None,
    upper_share: float | None = None,
) -> LinearPlan:
    """Shrink, certify and find the fewest tokens to make exact, in linear time: Algorithm 2 of [1]_ and its A.2.

    Parameters
    ----------
    weights : Tensor, shape (..., T), float
        Unnormalised attention weights, >= 0, on the scale of ``denominator``.
    inclusion_probs : Tensor, shape broadcastable to (..., T), float
        In (0, 1] on the residual set. Not expanding it saves time.
    residual : Tensor, shape broadcastable to (..., T), bool
        Tokens estimated by sampling.
    denominator : Tensor, shape (...,), float
        D, of all tokens; not necessarily the sum of ``weights``.
    epsilon : float > 0, or Tensor, shape (...,)
        Tolerance of the relative error, of all rows or of each.
    delta : float in (0, 1)
        Probability that the bound fails.
    shrinkage : Tensor, shape (..., T), optional
        Coefficients in [r, 1] to plan with, instead of the binary ones.
    upper_share : float in (0, 1), optional
        As in :func:`~verkv.estimators.certificate.bernstein_certificate`.

    Returns
    -------
    LinearPlan

    Raises
    ------
    ValueError
        If ``epsilon`` is not > 0, or ``delta`` or ``upper_share`` not in (0, 1).

    Notes
    -----
    In float64, k* is that of the sorting reference, and so is the promoted set up to tokens with equal drops. Below
    float64 the tolerance is tightened by the worst rounding of the sums (1e-4 to 4e-4 of it) and by what may underflow
    (about 1e-12): more tokens may be promoted, never so few that the bound, evaluated exactly at the float32 weights,
    probabilities, shrinkage and denominator, is epsilon or more. Where that bound is not a number or infinite, the
    whole residual set is promoted. Denormal denominators count as such.

    References
    ----------
    .. [1] Jha et al., "Verify Before You Fetch", arXiv:2611.11319v1.

    Examples
    --------
    >>> import torch
    >>> w, r = torch.tensor([8.0, 0.1, 0.1]), torch.tensor([0.5, 0.5, 0.5])
    >>> plan = linear_plan(w, r, r < 1, w.sum() + 30.0, epsilon=0.2, delta=0.1)
    >>> plan.promoted.tolist(), plan.n_promoted.item()
    ([True, False, False], 1)
    """
    check_epsilon(epsilon)
    check_delta(delta)
    check_upper_share(upper_share)
    weights, r, denominator = (at_least_float32(tensor) for tensor in (weights, inclusion_probs, denominator))
    shape = weights.shape
    epsilon = torch.as_tensor(epsilon, dtype=weights.dtype, device=weights.device)
    inputs = [weights, _lift(r, shape), _lift(residual, shape)]
    inputs += [denominator.expand(shape[:-1]), epsilon.expand(shape[:-1])]
    inputs.append(shrinkage if shrinkage is None else at_least_float32(shrinkage).expand(shape))
    outputs = LinearPlan(
        weights.new_ones(shape),
        torch.zeros(shape, dtype=torch.bool, device=weights.device),
        torch.zeros(shape[:-1], dtype=torch.int64, device=weights.device),
        weights.new_zeros(shape[:-1]),
        weights.new_zeros(shape[:-1]),
    )
    if weights.numel():
        _plan_blocks(inputs, outputs, _Bound(delta, upper_share))
    return outputs


def _lift(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Give a broadcast tensor all axes; those along which it is repeated have size 1, except the last."""
    tensor = tensor.expand(shape)
    for axis, stride in enumerate(tensor.stride()[:-1]):
        tensor = tensor.narrow(axis, 0, 1) if stride == 0 else tensor
    return tensor


def _plan_blocks(inputs: list[Tensor | None], outputs: LinearPlan, bound: "_Bound") -> None:
    """Plan as many rows at a time as stay in the cache; the first axes are cut first."""
    shape = inputs[0].shape
    limit = _CPU_PAIRS if inputs[0].device.type == "cpu" else _DEVICE_PAIRS
    axis = next((axis for axis, size in enumerate(shape[:-1]) if size > 1), None)
    if axis is None or shape.numel() <= limit:
        _plan_block(*inputs, outputs, bound)
        return
    step = max(1, limit * shape[axis] // shape.numel())
    for start in range(0, shape[axis], step):
        cut = partial(_cut, axis=axis, start=start, length=min(step, shape[axis] - start))
        _plan_blocks([cut(tensor) for tensor in inputs], LinearPlan(*map(cut, _fields(outputs))), bound)


def _cut(tensor: Tensor | None, axis: int, start: int, length: int) -> Tensor | None:
    return tensor if tensor is None or tensor.shape[axis] == 1 else tensor.narrow(axis, start, length)


def _fields(plan: LinearPlan) -> list[Tensor]:
    return [plan.shrinkage, plan.promoted, plan.n_promoted, plan.error_bound, plan.planned_bound]


def _plan_block(
    weights: Tensor,
    r: Tensor,
    residual: Tensor,
    denominator: Tensor,
    epsilon: Tensor,
    shrinkage: Tensor | None,
    outputs: LinearPlan,
    bound: "_Bound",
) -> None:
    weights, denominator = _normalised(weights, denominator[..., None])
    certain = ~residual
    r = r.masked_fill(certain, 1.0)  # then 1 - r, and all but the deviation, is 0 outside the residual set
    gain = weights * (1.0 - r)  # a
    spread = gain / r  # u
    if shrinkage is None:
        shrunk = Selection(tokens_above(_rows(spread), [_rows(gain)], _ShrinkageWalk())[0].view(weights.shape))
        shrinkage = shrunk.replace(outputs.shrinkage, shrunk.of(r))
    else:
        shrunk = Selection((shrinkage < 1.0) & residual)
    if shrinkage is not outputs.shrinkage:
        outputs.shrinkage.copy_(shrinkage)
    terms, own = _certificate_terms(weights, r, certain, spread, shrunk, shrinkage)
    key, bias, variance, largest = _order(terms, own, shrunk, bound.log_term)
    addends = [terms.bias, terms.variance, terms.deviation]
    before = [bias, variance, largest]
    if bound.upper_share is not None:
        # What is not shrunk lifts the estimate by u at most, and lowers it by w.
        sides = [shrunk.replace(side.clone(), shrunk.of(side) * shrunk.of(shrinkage)) for side in (spread, weights)]
        addends[2:] = [side.masked_fill_(certain, 0.0) for side in sides]
        before[2:] = [side.amax(-1, keepdim=True) for side in addends[2:]]
    error = bound.of(before, denominator)

    tolerance = _safe_tolerance(epsilon[..., None], bound.largest_log_term, r, weights.shape[-1])
    rule = _FetchRule(_rows(denominator), _rows(tolerance), bound)
    outputs.error_bound.copy_(error.squeeze(-1))
    if sizes_may_vary(error.device) and bool((error < tolerance * (1.0 - 1e-3)).all()):
        outputs.planned_bound.copy_(outputs.error_bound)  # nothing to promote in any row
        return
    promoted, kept = tokens_above(_rows(key), [_rows(addend) for addend in addends], rule)
    torch.logical_and(promoted.view(weights.shape), residual, out=outputs.promoted)
    outputs.n_promoted.copy_(outputs.promoted.view(torch.uint8).sum(-1, dtype=torch.int32))
    outputs.planned_bound.copy_(rule.bound_of(kept).view_as(error).squeeze(-1))
    _promote_all(~torch.isfinite(error), residual, outputs)  # there neither an order nor a certificate exists


def _promote_all(lost: Tensor, residual: Tensor, outputs: LinearPlan) -> None:
    """In the lost rows, shape (..., 1), make everything exact."""
    if sizes_may_vary(lost.device) and not bool(lost.any()):
        return
    outputs.promoted.logical_or_(lost & residual)
    outputs.n_promoted.copy_(outputs.promoted.sum(-1))
    outputs.planned_bound.masked_fill_(lost.squeeze(-1), 0.0)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _normalised(weights: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
    """Both on a scale on which D is at least 1 and small weights' squares do not underflow."""
    if sizes_may_vary(weights.device) and bool(((denominator >= 1.0) & (denominator < 2.0**30)).all()):
        return weights, denominator
    # A power of two scales without rounding: 1 / 2 ** floor(log2 D), infinite where D is 0 or denormal.
    bits, exponent = (torch.int64, 0x7FF << 52) if weights.dtype == torch.float64 else (torch.int32, 0xFF << 23)
    scale = 1.0 / (denominator.contiguous().view(bits) & exponent).view(weights.dtype)
    return weights * scale, denominator * scale


def _certificate_terms(
    weights: Tensor, r: Tensor, certain: Tensor, spread: Tensor, shrunk: Selection, shrinkage: Tensor
) -> tuple[CertificateTerms, CertificateTerms]:
    """As `certificate.certificate_terms`, first for lambda = 1; all terms, and those of the shrunk tokens again."""
    factor = (torch.maximum(r, 1.0 - r) / r).masked_fill_(certain, 0.0)
    terms = CertificateTerms(torch.zeros_like(weights), weights * spread, weights * factor)
    own_shrinkage = shrunk.of(shrinkage)
    own = CertificateTerms(
        bias=shrunk.of(weights) * (1.0 - own_shrinkage),
        variance=shrunk.of(terms.variance) * own_shrinkage.square(),
        deviation=shrunk.of(terms.deviation) * own_shrinkage,
    )
    terms = CertificateTerms(
        shrunk.replace(terms.bias, own.bias),
        shrunk.replace(terms.variance, own.variance),
        shrunk.replace(terms.deviation, own.deviation),
    )
    return terms, own


def _order(
    terms: CertificateTerms, own: CertificateTerms, shrunk: Selection, log_term: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A key in the order of the drops, (..., T), and Eq. (7)'s beta, V and b of the whole residual set, (..., 1)."""
    bias, variance = terms.bias.sum(-1, keepdim=True), terms.variance.sum(-1, keepdim=True)
    largest, at = terms.deviation.max(-1, keepdim=True)
    second = terms.deviation.scatter_(-1, at, 0.0).amax(-1, keepdim=True)
    terms.deviation.scatter_(-1, at, largest)
    scaled, scaled_second = largest * (log_term / 3.0), second * (log_term / 3.0)  # B, and B without the largest
    root = (scaled.square() + 2.0 * log_term * variance).sqrt()
    key = _ordinary_variance(own, shrunk.of(variance), shrunk.of(root), shrunk.of(scaled), None, log_term)
    key = shrunk.replace(terms.variance.clone(), key)
    # Only the token with the largest deviation lowers b when it goes, and only if it is alone in having it.
    own = CertificateTerms(terms.bias.gather(-1, at), terms.variance.gather(-1, at), largest)
    alone = _ordinary_variance(own, variance, root, scaled, scaled_second, log_term)
    key = key.scatter_(-1, at, torch.where(second < largest, alone, key.gather(-1, at)))
    return key, bias, variance, largest


def _ordinary_variance(
    own: CertificateTerms,
    variance: Tensor,
    root: Tensor,
    scaled: Tensor,
    scaled_without: Tensor | None,
    log_term: float,
) -> Tensor:
    """The variance of an ordinary token whose drop (Eq. 9, times D) is that of these; continued where there is none."""
    squares, drop = 2.0 * log_term * own.variance, own.bias
    if scaled_without is None:  # B stays
        scaled_without = scaled
    else:
        squares = squares + (scaled - scaled_without) * (scaled + scaled_without)
        drop = drop + (scaled - scaled_without)
    variance_without = (variance - own.variance).clamp_min_(0.0)
    root_without = (scaled_without.square() + 2.0 * log_term * variance_without).sqrt_()
    drop = drop + squares / (root + root_without).clamp_min_(torch.finfo(root.dtype).tiny)
    below, beyond = drop * (2.0 * root - drop), root * (2.0 * drop - root)
    return torch.where(drop < root, below, beyond) / (2.0 * log_term)


def _safe_tolerance(epsilon: Tensor, log_term: float, r: Tensor, n_tokens: int) -> Tensor:
    """Epsilon less what rounding may hide below float64; (..., 1). In float64 it is epsilon, as in the reference."""
    if epsilon.dtype == torch.float64:
        return epsilon
    limits = torch.finfo(epsilon.dtype)
    relative = summation_error(n_tokens, epsilon.dtype) + 16 * limits.eps  # the sums; the terms and the bound itself
    # Each weight and each square may have lost up to the smallest normal number, divided by r (D is at least 1 here);
    # what that does to the sums of biases and deviations is less than what it does to the root of the variances.
    lost = 4.0 * math.sqrt(2.0 * log_term * n_tokens * limits.tiny)
    return epsilon * (1.0 - relative) - lost * r.amin(-1, keepdim=True).rsqrt_()


@dataclass(frozen=True)
class _Bound:
    """Eq. (7), or the larger of the bounds of the two sides, as a function of sums and maxima over tokens."""

    delta: float
    upper_share: float | None

    @property
    def log_term(self) -> float:
        """l of Eq. (7), which also orders the tokens."""
        return math.log(2.0 / self.delta)

    @property
    def largest_log_term(self) -> float:
        """Of the side with the smaller part of delta."""
        share = 0.5 if self.upper_share is None else min(self.upper_share, 1.0 - self.upper_share)
        return -math.log(share * self.delta)

    @property
    def reductions(self) -> tuple[str, ...]:
        """Of bias, variance and deviation, or of bias, variance and the deviations of the two sides."""
        return ("sum", "sum", "amax") if self.upper_share is None else ("sum", "sum", "amax", "amax")

    def of(self, reduced: list[Tensor], denominator: Tensor) -> Tensor:
        """The bound."""
        if self.upper_share is None:
            return error_bound(*reduced, denominator, self.delta)
        return sided_error_bound(*reduced, denominator, self.delta, self.upper_share)


class _ShrinkageWalk:
    """Tokens by falling u are shrunk while u > 2 beta, beta the sum of a over those before (A.2)."""

    from_top = True
    reductions = ("sum",)  # a

    def boundary_bin(
        self, bins: list[Tensor], largest_key: Callable[[], Tensor], state: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        # beta before bin i, for i from the top bin to below the last one
        before = torch.cat([state[0], running_sum(bins[0].flip(-1)) + state[0]], dim=-1).flip(-1)
        # The lowest bin that may have shrunk tokens. All tokens above it have a u larger than its largest, which is
        # more than 2 beta of them all: u falls and beta rises, so they are all shrunk. (Bins of NaN do not count.)
        chosen = (largest_key() <= 2.0 * before[:, 1:]).sum(-1, keepdim=True)
        return chosen, [before.gather(-1, chosen + 1)]

    def last(self, key: Tensor, values: list[Tensor], state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        before = torch.cat([state[0], running_sum(values[0])[:, :-1] + state[0]], dim=-1)
        return key > 2.0 * before, state


class _FetchRule:
    """Tokens by falling drop are promoted until the bound of those left is below the tolerance (Eq. 10)."""

    from_top = False

    def __init__(self, denominator: Tensor, tolerance: Tensor, bound: _Bound):
        self.denominator, self.tolerance, self.bound = denominator, tolerance, bound
        self.reductions = bound.reductions

    def bound_of(self, reduced: list[Tensor]) -> Tensor:
        return self.bound.of(reduced, self.denominator)

    def boundary_bin(
        self, bins: list[Tensor], largest_key: Callable[[], Tensor], state: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        return self._count_kept(bins, state)[1:]

    def last(self, key: Tensor, values: list[Tensor], state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        enough, _, state = self._count_kept(values, state)
        return ~enough, state

    def _count_kept(self, values: list[Tensor], state: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Whether the bound holds with these kept, from the smallest drop to each; for how many, and their terms."""
        left = [running_sum(value) + before for value, before in zip(values[:2], state[:2], strict=True)]
        left += [
            torch.maximum(value.cummax(-1).values, before) for value, before in zip(values[2:], state[2:], strict=True)
        ]
        enough = self.bound_of(left) < self.tolerance  # a NaN is not
        count = enough.sum(-1, keepdim=True)
        # Where all is kept the boundary bin may be empty, in all rows, so that nothing could be gathered from it alone.
        kept = [torch.cat(pair, dim=-1).gather(-1, count) for pair in zip(state, left, strict=True)]
        return enough, count, kept
