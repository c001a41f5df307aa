"""Estimates of the softmax denominator from a Poisson sample, Eq. (5)."""

import torch
from torch import Tensor

from verkv.estimators.numerics import at_least_float32


def horvitz_thompson(weights: Tensor, inclusion_probs: Tensor, sampled: Tensor, residual: Tensor) -> Tensor:
    """Unbiased estimate of the denominator: Eq. (5) of [1]_ with shrinkage 1.

    Parameters
    ----------
    weights : Tensor, shape (..., T), float
        Unnormalised attention weights, >= 0; only those of certain and of sampled tokens are read.
    inclusion_probs : Tensor, shape (..., T), float
        In (0, 1] on the residual set.
    sampled : Tensor, shape (..., T), bool
        The draw. Ignored outside the residual set.
    residual : Tensor, shape (..., T), bool
        Tokens estimated by sampling; all others count with their weight.

    Returns
    -------
    Tensor, shape (...,)
        In units of ``weights``.

    References
    ----------
    .. [1] Jha et al., "Verify Before You Fetch", arXiv:2611.11319v1.

    Examples
    --------
    >>> import torch
    >>> w, r = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.5, 0.5])
    >>> horvitz_thompson(w, r, torch.tensor([True, True, False]), r < 1)
    tensor(5.)
    """
    return shrinkage_estimate(weights, inclusion_probs, torch.ones_like(weights), sampled, residual)


def shrinkage_estimate(
    weights: Tensor, inclusion_probs: Tensor, shrinkage: Tensor, sampled: Tensor, residual: Tensor
) -> Tensor:
    """Bounded shrinkage estimate of the denominator, Definition 2 and Eq. (5) of [1]_.

    sum over certain tokens of w + sum over sampled residual tokens of lambda w / r.

    Parameters
    ----------
    weights, inclusion_probs, sampled, residual
        As in :func:`horvitz_thompson`.
    shrinkage : Tensor, shape (..., T), float
        Coefficients in [inclusion_probs, 1], chosen without looking at ``sampled``.

    Returns
    -------
    Tensor, shape (...,)
        In units of ``weights``.

    References
    ----------
    .. [1] Jha et al., "Verify Before You Fetch", arXiv:2611.11319v1.

    Examples
    --------
    >>> import torch
    >>> w, r = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.5])
    >>> shrinkage_estimate(w, r, torch.tensor([1.0, 0.5]), torch.tensor([True, True]), r < 1)
    tensor(3.)
    """
    weights, inclusion_probs = at_least_float32(weights), at_least_float32(inclusion_probs)
    r = torch.where(residual, inclusion_probs, 1.0)
    estimated = torch.where(sampled, shrinkage * weights / r, 0.0)
    return torch.where(residual, estimated, weights).sum(-1)
