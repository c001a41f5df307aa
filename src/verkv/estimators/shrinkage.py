"""Shrinkage coefficients that trade the estimator's variance for a known bias (Definition 2, Theorem 1, A.2).

None of these functions sees the sample: the certificate needs coefficients that were fixed before the draw.
"""

import torch
from torch import Tensor

from verkv.estimators.numerics import at_least_float32


def mean_squared_error(weights: Tensor, inclusion_probs: Tensor, shrinkage: Tensor, residual: Tensor) -> Tensor:
    """Mean squared error of the shrinkage estimator over the draw, Eq. (6) of [1]_.

    Parameters
    ----------
    weights : Tensor, shape (..., T), float
        Unnormalised attention weights, >= 0.
    inclusion_probs : Tensor, shape (..., T), float
        In (0, 1] on the residual set.
    shrinkage : Tensor, shape (..., T), float
        In [inclusion_probs, 1].
    residual : Tensor, shape (..., T), bool
        Tokens estimated by sampling.

    Returns
    -------
    Tensor, shape (...,)
        Squared bias plus variance, in squared units of ``weights``; 0 on an empty residual set.

    References
    ----------
    .. [1] Jha et al., "Verify Before You Fetch", arXiv:2611.11319v1.

    Examples
    --------
    >>> import torch
    >>> w, r = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 1.0])
    >>> mean_squared_error(w, r, torch.ones(2), r < 1)
    tensor(1.)
    """
    weights, inclusion_probs = at_least_float32(weights), at_least_float32(inclusion_probs)
    r = torch.where(residual, inclusion_probs, 1.0)
    bias = torch.where(residual, weights * (1.0 - shrinkage), 0.0).sum(-1)
    variance = torch.where(residual, (shrinkage * weights).square() * (1.0 - r) / r, 0.0).sum(-1)
    return bias.square() + variance


def optimal_shrinkage(weights: Tensor, inclusion_probs: Tensor, residual: Tensor) -> Tensor:
    """The unique minimiser of the mean squared error over lambda in [r, 1], Definition 2 and Theorem 1 of [1]_.

    lambda_i = clip(beta / u_i, r_i, 1) with u_i = w_i (1 - r_i) / r_i and beta = sum_i w_i (1 - lambda_i). The
    right-hand side falls in beta, piecewise linearly with breaks at a_i = w_i (1 - r_i), where lambda_i leaves r_i,
    and at u_i, where it reaches 1. Sorting the breaks gives the piece that holds the root, and the root exactly.

    Parameters
    ----------
    weights : Tensor, shape (..., T), float
        Unnormalised attention weights, >= 0. Weights from a sketch are fine; weights that depend on the draw are not.
    inclusion_probs : Tensor, shape broadcastable to (..., T), float
        In (0, 1] on the residual set.
    residual : Tensor, shape broadcastable to (..., T), bool
        Tokens estimated by sampling.

    Returns
    -------
    Tensor, shape (..., T)
        Coefficients in [r, 1]; 1 outside the residual set.

    References
    ----------
    .. [1] Jha et al., "Verify Before You Fetch", arXiv:2611.11319v1.

    Examples
    --------
    >>> import torch
    >>> optimal_shrinkage(torch.tensor([1.0]), torch.tensor([0.25]), torch.tensor([True]))
    tensor([0.2500])
    """
    weights, inclusion_probs = at_least_float32(weights), at_least_float32(inclusion_probs)
    weights, r, residual = torch.broadcast_tensors(weights, inclusion_probs, residual)
    residual = residual & (weights * (1.0 - r) > 0)  # not weights > 0: the product may underflow, and beta / u be 0 / 0
    r = torch.where(residual, r, 1.0)
    w = torch.where(residual, weights, 0.0)
    gain = w * (1.0 - r)  # a_i: bias at lambda = r
    spread = gain / r  # u_i
    breaks = torch.cat([gain, spread], dim=-1).sort(dim=-1).values

    # Total bias, a function of beta: sum_{u > beta} w - sum_{a > beta} w r - beta * sum_{a <= beta < u} r / (1 - r).
    # Its value at a break is compared with beta itself; the last break that is still below it starts the root's piece.
    slope = torch.where(residual, r / torch.where(residual, 1.0 - r, 1.0), 0.0)
    above_u, above_a = _tail_sum(spread, w, breaks), _tail_sum(gain, w * r, breaks)
    inclined = _tail_sum(spread, slope, breaks) - _tail_sum(gain, slope, breaks)
    not_passed = (above_u - above_a - breaks * inclined) >= breaks
    start = (not_passed.sum(-1, keepdim=True) - 1).clamp_min(0)
    beta_low = torch.where(not_passed.any(-1, keepdim=True), breaks.gather(-1, start), 0.0)

    # On that piece the sums are taken again over masks, free of the scans' rounding.
    in_middle = (gain <= beta_low) & (spread > beta_low)
    constant = torch.where(gain > beta_low, gain, torch.where(in_middle, w, 0.0)).sum(-1, keepdim=True)
    beta = constant / (1.0 + torch.where(in_middle, slope, 0.0).sum(-1, keepdim=True))
    shrinkage = torch.minimum(torch.maximum(beta / torch.where(residual, spread, 1.0), r), torch.ones_like(r))
    return torch.where(residual, shrinkage, 1.0)


def binary_shrinkage(weights: Tensor, inclusion_probs: Tensor, residual: Tensor) -> Tensor:
    """Shrinkage with lambda in {r, 1}: the best prefix in the order of u = w (1 - r) / r, Appendix A.2 of [1]_.

    Moving a token from lambda = 1 to lambda = r changes the mean squared error by a (2 beta - u) with a = w (1 - r) and
    beta the bias accumulated so far. Visiting tokens by falling u, the walk stops at the first that does not gain.

    Parameters
    ----------
    weights : Tensor, shape (..., T), float
        Unnormalised attention weights, >= 0.
    inclusion_probs : Tensor, shape broadcastable to (..., T), float
        In (0, 1] on the residual set.
    residual : Tensor, shape broadcastable to (..., T), bool
        Tokens estimated by sampling.

    Returns
    -------
    Tensor, shape (..., T)
        r where shrunk, 1 elsewhere.

    References
    ----------
    .. [1] Jha et al., "Verify Before You Fetch", arXiv:2611.11319v1.

    Examples
    --------
    >>> import torch
    >>> w = torch.tensor([8.0, 1.0, 1.0])
    >>> binary_shrinkage(w, torch.tensor(0.25), torch.ones(3, dtype=torch.bool))
    tensor([0.2500, 1.0000, 1.0000])
    """
    weights, inclusion_probs = at_least_float32(weights), at_least_float32(inclusion_probs)
    weights, r, residual = torch.broadcast_tensors(weights, inclusion_probs, residual)
    gain = torch.where(residual, weights * (1.0 - r), 0.0)  # a_i
    spread = torch.where(residual, gain / torch.where(residual, r, 1.0), 0.0)  # u_i
    spread_sorted, order = spread.sort(dim=-1, descending=True, stable=True)
    gain_sorted = gain.gather(-1, order)
    bias_before = gain_sorted.cumsum(-1) - gain_sorted
    gains = (spread_sorted > 2.0 * bias_before) & (spread_sorted > 0)
    prefix = gains.long().cumprod(-1).bool()  # up to the first token that does not gain
    shrunk = torch.zeros_like(prefix).scatter(-1, order, prefix)
    return torch.where(shrunk, r, torch.ones_like(weights))


def _tail_sum(keys: Tensor, values: Tensor, points: Tensor) -> Tensor:
    """For each point, the sum of the values whose key is larger than it."""
    keys_sorted, order = keys.sort(dim=-1)
    tails = values.gather(-1, order).flip(-1).cumsum(-1).flip(-1)
    tails = torch.cat([tails, torch.zeros_like(tails[..., :1])], dim=-1)
    first_larger = torch.searchsorted(keys_sorted.contiguous(), points.contiguous(), right=True)
    return tails.gather(-1, first_larger)
