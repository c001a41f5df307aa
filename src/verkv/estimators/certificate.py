"""The Bernstein certificate: a bound on the relative error of the denominator, Eq. (7) and Lemma 1.

Eq. (7) bounds both sides of the error alike. They differ: a drawn token may add up to lambda w (1 - r) / r, a token
that is not drawn takes away lambda w at most, and the bias only ever makes the estimate too small. With
``upper_share`` each side has a bound, and a part of delta, of its own; ``docs/method.md`` derives it.
"""

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
    weights: Tensor,
    inclusion_probs: Tensor,
    shrinkage: Tensor,
    residual: Tensor,
    denominator: Tensor,
    delta: float,
    upper_share: float | None = None,
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
    upper_share : float in (0, 1), optional
        Part of ``delta`` for estimates that are too large; the rest is for those that are too small. None is Eq. (7).

    Returns
    -------
    Certificate
        Of tensors of shape (...,).

    Raises
    ------
    ValueError
        If ``delta`` or ``upper_share`` is outside (0, 1).

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
    check_upper_share(upper_share)
    terms = certificate_terms(weights, inclusion_probs, shrinkage, residual)
    bias, variance, max_deviation = terms.bias.sum(-1), terms.variance.sum(-1), terms.deviation.amax(-1)
    if upper_share is None:
        bound = error_bound(bias, variance, max_deviation, denominator, delta)
    else:
        above, below = (side.amax(-1) for side in sided_deviations(weights, inclusion_probs, shrinkage, residual))
        bound = sided_error_bound(bias, variance, above, below, denominator, delta, upper_share)
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
    return (bias + _bernstein_tail(variance, max_deviation, math.log(2.0 / delta))) / denominator


def sided_deviations(
    weights: Tensor, inclusion_probs: Tensor, shrinkage: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """How far each token can lift the estimate, and how far it can lower it, (..., T); zero outside the residual set.

    The larger of the two is its deviation in Eq. (7).
    """
    weights, inclusion_probs = at_least_float32(weights), at_least_float32(inclusion_probs)
    r = torch.where(residual, inclusion_probs, 1.0)
    below = torch.where(residual, shrinkage * weights, 0.0)
    return below / r * (1.0 - r), below


def sided_error_bound(
    bias: Tensor,
    variance: Tensor,
    above: Tensor,
    below: Tensor,
    denominator: Tensor,
    delta: float,
    upper_share: float,
) -> Tensor:
    """The larger of Bernstein's bounds of the two sides; the bias counts only for estimates that are too small."""
    upper = _bernstein_tail(variance, above, -math.log(upper_share * delta))
    lower = bias + _bernstein_tail(variance, below, -math.log((1.0 - upper_share) * delta))
    return torch.maximum(upper, lower) / denominator


def log_terms(delta: float, upper_share: float | None) -> tuple[float, float, float]:
    """l of Eq. (7), and of the upper and the lower side; 0 where the sides are not bounded apart."""
    if upper_share is None:
        return math.log(2.0 / delta), 0.0, 0.0
    return math.log(2.0 / delta), -math.log(upper_share * delta), -math.log((1.0 - upper_share) * delta)


def _bernstein_tail(variance: Tensor, max_deviation: Tensor, log_term: float) -> Tensor:
    scaled = max_deviation * (log_term / 3.0)
    return scaled + (scaled.square() + 2.0 * log_term * variance).sqrt()


def check_upper_share(upper_share: float | None) -> None:
    """Raise ValueError unless it is None or 0 < upper_share < 1."""
    if upper_share is not None and not 0.0 < upper_share < 1.0:
        raise ValueError(
            f"upper_share must be in (0, 1), got {upper_share}: it is the part of delta for estimates that are too "
            f"large, and both sides need some"
        )


def check_delta(delta: float) -> None:
    """Raise ValueError unless 0 < delta < 1."""
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must be in (0, 1), got {delta}: it is the probability that the error bound fails")
