"""The Bernstein certificate: a bound on the relative error of the denominator, Eq. (7) and Lemma 1."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.estimators.numerics import at_least_float32


@dataclass(frozen=True)
class Certificate:
    """What is claimed of one estimate: |D^ - D| / D <= ``error_bound`` with probability >= 1 - delta.

    Attributes
    ----------
    error_bound : Tensor, shape (...,)
        Dimensionless, >= 0; 0 on an empty residual set.
    bias, variance, max_deviation : Tensor, shape (...,)
        beta, V and b of Eq. (7), in units of the weights (V: squared).
    """

    error_bound: Tensor
    bias: Tensor
    variance: Tensor
    max_deviation: Tensor


@dataclass(frozen=True)
class CertificateTerms:
    """What each token contributes to beta, V and b, shape (..., T); zero outside the residual set."""

    bias: Tensor
    variance: Tensor
    deviation: Tensor


def bernstein_certificate(
    weights: Tensor, inclusion_probs: Tensor, shrinkage: Tensor, residual: Tensor, denominator: Tensor, delta: float
) -> Certificate:
    """Bound the relative error of the shrinkage estimator, Eq. (7) and Lemma 1 of [1]_.

    eps = (beta + B + sqrt(B^2 + 2 V l)) / D with l = ln(2 / delta) and B = b l / 3.

    Parameters
    ----------
    weights : Tensor, shape (..., T), float
        Unnormalised attention weights, >= 0. A common scale cancels, so pass exp(logit - max).
    inclusion_probs : Tensor, shape (..., T), float
        In (0, 1] on the residual set.
    shrinkage : Tensor, shape (..., T), float
        In [inclusion_probs, 1].
    residual : Tensor, shape (..., T), bool
        Tokens still estimated by sampling. Certain tokens must be False: their deviation formula is not zero at r = 1.
    denominator : Tensor, shape (...,), float
        Sum of *all* weights, also of certain tokens and of tokens outside ``weights``; > 0, same scale.
    delta : float in (0, 1)
        Failure probability.

    Returns
    -------
    Certificate
        Of tensors of shape (...,).

    Raises
    ------
    ValueError
        If ``delta`` is outside (0, 1).

    Notes
    -----
    Holds for a query, weights and coefficients fixed before the draw, and independent draws. With weights from a
    sketch it is a plan, not a proof.

    References
    ----------
    .. [1] Jha et al., "Verify Before You Fetch", arXiv:2611.11319v1.

    Examples
    --------
    >>> import torch
    >>> w, r = torch.full((1000,), 1.0), torch.full((1000,), 0.5)
    >>> c = bernstein_certificate(w, r, torch.ones(1000), r < 1, w.sum(), delta=0.1)
    >>> round(c.error_bound.item(), 4)
    0.0784
    """
    check_delta(delta)
    terms = certificate_terms(weights, inclusion_probs, shrinkage, residual)
    bias, variance, max_deviation = terms.bias.sum(-1), terms.variance.sum(-1), terms.deviation.amax(-1)
    bound = error_bound(bias, variance, max_deviation, denominator, delta)
    return Certificate(bound, bias, variance, max_deviation)


def certificate_terms(
    weights: Tensor, inclusion_probs: Tensor, shrinkage: Tensor, residual: Tensor
) -> CertificateTerms:
    """Each token's share of beta, V and b of Eq. (7)."""
    weights, inclusion_probs = at_least_float32(weights), at_least_float32(inclusion_probs)
    r = torch.where(residual, inclusion_probs, 1.0)
    kept = torch.where(residual, shrinkage * weights, 0.0)
    return CertificateTerms(
        bias=torch.where(residual, weights * (1.0 - shrinkage), 0.0),
        variance=kept.square() * (1.0 - r) / r,
        deviation=kept / r * torch.maximum(r, 1.0 - r),
    )


def error_bound(bias: Tensor, variance: Tensor, max_deviation: Tensor, denominator: Tensor, delta: float) -> Tensor:
    """Eq. (7) from its three sums."""
    log_term = math.log(2.0 / delta)
    scaled = max_deviation * (log_term / 3.0)  # B
    return (bias + scaled + (scaled.square() + 2.0 * log_term * variance).sqrt()) / denominator


def check_delta(delta: float) -> None:
    """Raise ValueError unless 0 < delta < 1."""
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must be in (0, 1), got {delta}: it is the probability that the error bound fails")
