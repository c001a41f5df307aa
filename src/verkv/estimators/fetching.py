"""Which tokens to make exact so that the certificate falls below the tolerance (Eqs. 8-10, Theorem 2)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.estimators.certificate import (
    CertificateTerms,
    certificate_terms,
    check_delta,
    check_upper_share,
    error_bound,
    sided_deviations,
    sided_error_bound,
)


@dataclass(frozen=True)
class FetchPlan:
    """The greedy plan of one or more query rows.

    Attributes
    ----------
    promoted : Tensor, shape (..., T), bool
        Tokens whose weight must be exact. *Fetched* are those of them that are not resident.
    n_promoted : Tensor, shape (...,), int64
        k* of Eq. (10).
    error_bound : Tensor, shape (...,)
        The bound before anything is promoted.
    planned_bound : Tensor, shape (...,)
        The bound after promoting; < epsilon.
    """

    promoted: Tensor
    n_promoted: Tensor
    error_bound: Tensor
    planned_bound: Tensor


def certificate_drop(
    weights: Tensor, inclusion_probs: Tensor, shrinkage: Tensor, residual: Tensor, denominator: Tensor, delta: float
) -> Tensor:
    """How much the bound falls when one token is made exact: g of Eq. (9) in [1]_.

    Computed without subtracting nearly equal bounds: sqrt(X) - sqrt(X_i) = (X - X_i) / (sqrt(X) + sqrt(X_i)).

    Parameters
    ----------
    weights, inclusion_probs, shrinkage, residual, denominator, delta
        As in :func:`~verkv.estimators.certificate.bernstein_certificate`.

    Returns
    -------
    Tensor, shape (..., T)
        >= 0; 0 outside the residual set.

    References
    ----------
    .. [1] Jha et al., "Verify Before You Fetch", arXiv:2611.11319v1.

    Examples
    --------
    >>> import torch
    >>> w, r = torch.tensor([4.0, 1.0]), torch.tensor([0.5, 0.5])
    >>> g = certificate_drop(w, r, torch.ones(2), r < 1, w.sum(), delta=0.1)
    >>> bool(g[0] > g[1] > 0)
    True
    """
    check_delta(delta)
    terms = certificate_terms(weights, inclusion_probs, shrinkage, residual)
    return _drop(terms, denominator, delta)


def _drop(terms: CertificateTerms, denominator: Tensor, delta: float) -> Tensor:
    log_term = math.log(2.0 / delta)
    n_tokens = terms.deviation.shape[-1]
    top = terms.deviation.topk(min(2, n_tokens), dim=-1)
    largest = top.values[..., :1]
    second = top.values[..., 1:2] if n_tokens > 1 else torch.zeros_like(largest)
    # Only the token with the largest deviation lowers b when it goes; the maximum of the others is the runner-up.
    is_largest = torch.zeros_like(terms.deviation, dtype=torch.bool).scatter(-1, top.indices[..., :1], True)

    scaled = largest * (log_term / 3.0)  # B
    scaled_without = torch.where(is_largest, second, largest) * (log_term / 3.0)
    variance = terms.variance.sum(-1, keepdim=True)
    variance_without = (variance - terms.variance).clamp_min(0.0)
    root = (scaled.square() + 2.0 * log_term * variance).sqrt()
    root_without = (scaled_without.square() + 2.0 * log_term * variance_without).sqrt()
    squares = (scaled - scaled_without) * (scaled + scaled_without) + 2.0 * log_term * terms.variance
    root_drop = squares / (root + root_without).clamp_min(torch.finfo(root.dtype).tiny)
    return (terms.bias + (scaled - scaled_without) + root_drop) / denominator[..., None]


def fetch_plan(
    weights: Tensor,
    inclusion_probs: Tensor,
    shrinkage: Tensor,
    residual: Tensor,
    denominator: Tensor,
    epsilon: float | Tensor,
    delta: float,
    upper_share: float | None = None,
) -> FetchPlan:
    """The fewest tokens, in the order of their drop, that bring the bound below epsilon: Eqs. (8)-(10) of [1]_.

    Parameters
    ----------
    weights, inclusion_probs, shrinkage, residual, denominator, delta, upper_share
        As in :func:`~verkv.estimators.certificate.bernstein_certificate`. There is no ``sampled`` argument: Theorem 2
        needs a plan that does not depend on the draw. The order is that of Eq. (9) whatever ``upper_share`` is.
    epsilon : float > 0, or Tensor, shape (...,)
        Tolerance of the relative error, of all rows or of each.

    Returns
    -------
    FetchPlan

    Raises
    ------
    ValueError
        If ``epsilon`` is not > 0, or ``delta`` or ``upper_share`` not in (0, 1).

    Notes
    -----
    Shrinkage and denominator are held fixed while tokens are promoted (Theorem 2). Sums over what remains are reversed
    scans, never total minus prefix, so the last tokens' bound is not lost in rounding.

    References
    ----------
    .. [1] Jha et al., "Verify Before You Fetch", arXiv:2611.11319v1.

    Examples
    --------
    >>> import torch
    >>> w, r = torch.tensor([8.0, 0.1, 0.1]), torch.tensor([0.5, 0.5, 0.5])
    >>> plan = fetch_plan(w, r, torch.ones(3), r < 1, w.sum(), epsilon=0.2, delta=0.1)
    >>> plan.promoted.tolist()
    [True, False, False]
    """
    check_epsilon(epsilon)
    check_delta(delta)
    check_upper_share(upper_share)
    terms = certificate_terms(weights, inclusion_probs, shrinkage, residual)
    drop = torch.where(residual, _drop(terms, denominator, delta), -torch.inf)
    order = drop.argsort(dim=-1, descending=True, stable=True)  # L_g, then the tokens outside L, which add nothing

    sums = _suffix_sum(terms.bias, order), _suffix_sum(terms.variance, order)
    if upper_share is None:
        bounds = error_bound(*sums, _suffix_max(terms.deviation, order), denominator[..., None], delta)
    else:
        sides = sided_deviations(weights, inclusion_probs, shrinkage, residual)
        largest = [_suffix_max(side, order) for side in sides]
        bounds = sided_error_bound(*sums, *largest, denominator[..., None], delta, upper_share)
    # (..., T): bound of L_g[k:] for k = 0 .. T - 1; nothing remains at k = T
    bounds = torch.cat([bounds, torch.zeros_like(bounds[..., :1])], dim=-1)
    # Bounds fall in k, so k* is one more than the last k that fails. A NaN counts as failing: it promotes everything.
    limit = epsilon[..., None] if isinstance(epsilon, Tensor) else epsilon
    promoted, n_promoted = smallest_prefix(order, ~(bounds[..., :-1] < limit), residual)
    return FetchPlan(
        promoted=promoted,
        n_promoted=n_promoted,
        error_bound=bounds[..., 0],
        planned_bound=bounds.gather(-1, n_promoted[..., None]).squeeze(-1),
    )


def check_epsilon(epsilon: float | Tensor) -> None:
    """Raise ValueError unless 0 < epsilon < infinity, everywhere."""
    if isinstance(epsilon, Tensor):
        if not bool(((epsilon > 0.0) & torch.isfinite(epsilon)).all()):
            raise ValueError("epsilon must be > 0 and finite in every row: use a tiny value to fetch everything")
    elif not 0.0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be > 0 and finite, got {epsilon}: use a tiny value to fetch everything")


def smallest_prefix(order: Tensor, fails: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of an order before the first place from which on no bound fails.

    Parameters
    ----------
    order : Tensor, shape (..., T), int64
        Tokens, the most expensive first.
    fails : Tensor, shape (..., T), bool
        Whether the bound of order[k:] misses the tolerance.
    residual : Tensor, shape broadcastable to (..., T), bool

    Returns
    -------
    promoted : Tensor, shape (..., T), bool
    n_promoted : Tensor, shape (...,), int64
    """
    n_promoted = torch.where(fails, _arange_like(order) + 1, 0).amax(-1)
    rank = torch.empty_like(order).scatter(-1, order, _arange_like(order))
    return (rank < n_promoted[..., None]) & residual, n_promoted


def _suffix_sum(values: Tensor, order: Tensor) -> Tensor:
    return values.gather(-1, order).flip(-1).cumsum(-1).flip(-1)


def _suffix_max(values: Tensor, order: Tensor) -> Tensor:
    return values.gather(-1, order).flip(-1).cummax(-1).values.flip(-1)


def _arange_like(order: Tensor) -> Tensor:
    return torch.arange(order.shape[-1], device=order.device).expand_as(order)
