"""The certificate and its plan from the exponential moments themselves, tighter than Bernstein's form of them.

Bernstein's inequality replaces every token's exponential moment by one made of its variance and the largest deviation
of all. Both are known here token by token, so Chernoff's bound can be had as it is: for any tilt s > 0 that does not
depend on the draw, the error exceeds

    beta + (l + sum_i psi_i(s)) / s,    psi_i(s) = ln E exp(s X_i),    l = ln(2 / delta)

with probability at most delta. At a fixed s it is a sum over tokens: the fewest tokens to promote are then simply those
with the largest terms, with no drop to compute and no maximum that changes. For the output psi_i is that of
``docs/output_bound.md``, section 1.
"""

import math

import torch
from torch import Tensor

from verkv.estimators.certificate import CertificateTerms, certificate_terms, check_delta, error_bound
from verkv.estimators.fetching import FetchPlan, _arange_like, _suffix_sum, check_epsilon, smallest_prefix
from verkv.estimators.numerics import at_least_float32

# In units of l / (epsilon D). Of the tolerance, 1 / TILT goes to l and the rest to the tokens.
TILT = 1.75

# Tilts tried by the certificate, as multiples of the one that is best for Bernstein's form.
TILT_FACTORS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)


def chernoff_bound(
    weights: Tensor,
    inclusion_probs: Tensor,
    shrinkage: Tensor,
    residual: Tensor,
    denominator: Tensor,
    delta: float,
    distances: Tensor | None = None,
) -> Tensor:
    """Bound the error of the shrinkage estimator, never above Eq. (7) of [1]_ and on the same assumptions.

    Parameters
    ----------
    weights, inclusion_probs, shrinkage, residual, denominator, delta
        As in :func:`~verkv.estimators.certificate.bernstein_certificate`.
    distances : Tensor, shape (..., T), float, optional
        d_i >= ||v_i - o||. With them the bound is that of the output's numerator, sum (a_i - 1) w_i (v_i - o), over D.

    Returns
    -------
    Tensor, shape (...,)
        Of |D^ - D| / D, or of the numerator's norm over D; 0 on an empty residual set.

    Raises
    ------
    ValueError
        If ``delta`` is outside (0, 1).

    References
    ----------
    .. [1] Jha et al., "Verify Before You Fetch", arXiv:2611.11319v1.

    Examples
    --------
    >>> import torch
    >>> w, r = torch.ones(1000), torch.full((1000,), 0.05)
    >>> round(chernoff_bound(w, r, torch.ones(1000), r < 1, w.sum(), delta=0.1).item(), 3)
    0.355
    """
    check_delta(delta)
    log_term = math.log(2.0 / delta)
    terms = _terms(weights, inclusion_probs, shrinkage, residual, distances)
    bias, variance, largest = terms.bias.sum(-1), terms.variance.sum(-1), terms.deviation.amax(-1)
    bound = error_bound(bias, variance, largest, denominator, delta)
    deviation = bound * denominator - bias  # t of Bernstein's tail; its tilt is t / (V + b t / 3)
    tilt = deviation / (variance + largest * deviation / 3.0)
    for factor in TILT_FACTORS:
        s = factor * tilt
        sums = log_moments(weights, inclusion_probs, shrinkage, residual, s, distances).sum(-1)
        candidate = (bias + (log_term + sums) / s) / denominator
        bound = torch.where(candidate < bound, candidate, bound)  # NaN (no residual token, overflow) changes nothing
    return bound


def chernoff_fetch_plan(
    weights: Tensor,
    inclusion_probs: Tensor,
    shrinkage: Tensor,
    residual: Tensor,
    denominator: Tensor,
    epsilon: float,
    delta: float,
    tilt: float = TILT,
) -> FetchPlan:
    """The fewest tokens that bring Chernoff's bound of the denominator below epsilon.

    The tilt is s = tilt * ln(2 / delta) / (epsilon D), fixed before anything is promoted. A token costs
    (1 - lambda_i) w_i + psi_i(s) / s, and those that remain may cost epsilon D (1 - 1 / tilt) together: the plan
    promotes the most expensive ones, and no smaller set meets the bound at this tilt.

    Parameters
    ----------
    weights, inclusion_probs, shrinkage, residual, denominator, epsilon, delta
        As in :func:`~verkv.estimators.fetching.fetch_plan`. There is no ``sampled`` argument either.
    tilt : float > 1
        The default is near the best from 0.05 to 0.3 in epsilon; the guarantee holds for each.

    Returns
    -------
    FetchPlan

    Raises
    ------
    ValueError
        If ``epsilon`` is not > 0, ``delta`` not in (0, 1) or ``tilt`` not > 1.

    Examples
    --------
    >>> import torch
    >>> w, r = torch.tensor([8.0, 0.1, 0.1]), torch.tensor([0.5, 0.5, 0.5])
    >>> plan = chernoff_fetch_plan(w, r, torch.ones(3), r < 1, w.sum(), epsilon=0.2, delta=0.1)
    >>> plan.promoted.tolist()
    [True, False, False]
    """
    check_epsilon(epsilon)
    check_delta(delta)
    if not 1.0 < tilt < math.inf:
        raise ValueError(f"tilt must be > 1 and finite, got {tilt}: at 1 nothing is left for the tokens")
    log_term = math.log(2.0 / delta)
    s = tilt * log_term / (epsilon * denominator)
    bias = _terms(weights, inclusion_probs, shrinkage, residual, None).bias
    cost = bias + log_moments(weights, inclusion_probs, shrinkage, residual, s) / s[..., None]
    order = torch.where(residual, cost, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    bounds = (log_term / s[..., None] + _suffix_sum(cost, order)) / denominator[..., None]
    n_residual = residual.expand_as(cost).sum(-1)
    # Where nothing remains there is no error, and no l to pay for it.
    bounds = torch.where(_arange_like(order) < n_residual[..., None], bounds, 0.0)
    bounds = torch.cat([bounds, torch.zeros_like(bounds[..., :1])], dim=-1)
    fails = ~(bounds[..., :-1] < epsilon)  # a NaN counts as failing
    promoted, n_promoted = smallest_prefix(order, fails, residual)
    return FetchPlan(
        promoted=promoted,
        n_promoted=n_promoted,
        error_bound=bounds[..., 0],
        planned_bound=bounds.gather(-1, n_promoted[..., None]).squeeze(-1),
    )


def _terms(
    weights: Tensor, inclusion_probs: Tensor, shrinkage: Tensor, residual: Tensor, distances: Tensor | None
) -> CertificateTerms:
    """The terms of Eq. (7), of the output's numerator with ``distances``."""
    weights = at_least_float32(weights)
    return certificate_terms(
        weights if distances is None else weights * distances, inclusion_probs, shrinkage, residual
    )


def log_moments(
    weights: Tensor,
    inclusion_probs: Tensor,
    shrinkage: Tensor,
    residual: Tensor,
    s: Tensor,
    distances: Tensor | None = None,
) -> Tensor:
    """psi_i(s), shape (..., T): of the worse side for the denominator, of the norm for the output; 0 outside L.

    A token deviates by a (1 - r) / r if it is drawn, which has the probability r, and by -a if not, a = lambda w.
    """
    weights = at_least_float32(weights) if distances is None else at_least_float32(weights) * distances
    r = torch.where(residual, at_least_float32(inclusion_probs), 0.5)
    lost = s[..., None] * torch.where(residual, shrinkage * weights, 0.0)
    gained = lost * (1.0 - r) / r
    if distances is not None:
        return torch.log1p(r * _remainder(gained) + (1.0 - r) * _remainder(lost))
    above = r * _remainder(gained) + (1.0 - r) * _remainder(-lost)
    below = r * _remainder(-gained) + (1.0 - r) * _remainder(lost)
    return torch.log1p(torch.maximum(above, below))


def _remainder(x: Tensor) -> Tensor:
    """exp(x) - 1 - x; by its series near 0, where the difference would be rounding."""
    series = 1.0 + x / 9.0
    for k in (8.0, 7.0, 6.0, 5.0, 4.0, 3.0):
        series = 1.0 + x / k * series
    return torch.where(x.abs() < 0.5, 0.5 * x.square() * series, torch.expm1(x) - x)
