"""A bound on the error of the attention *output* that holds before the values are read.

The estimate is self-normalised, o^ = N^ / D^, and its error is a sum of independent centred vectors over D^;
Bernstein's inequality in a Hilbert space bounds the sum, a one-sided one bounds D^ from below. Of each value row it
needs one number, its distance from a centre, kept in a byte. Derivation and assumptions: ``docs/output_bound.md``.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from verkv.estimators.certificate import CertificateTerms, certificate_terms, check_delta, error_bound
from verkv.estimators.chernoff import TILT, chernoff_bound, log_moments
from verkv.estimators.fetching import _arange_like, _drop, _suffix_sum, check_epsilon, smallest_prefix
from verkv.estimators.numerics import at_least_float32


@dataclass(frozen=True)
class OutputCertificate:
    """What is claimed of one estimate: ||o^ - o|| <= ``error_bound`` with probability >= 1 - delta.

    Attributes
    ----------
    error_bound : Tensor, shape (...,)
        Absolute, in units of the values, >= 0; 0 on an empty residual set, infinite where ``denominator_bound`` >= 1.
    denominator_bound : Tensor, shape (...,)
        D^ >= (1 - ``denominator_bound``) D holds together with the claim. One-sided: not the certificate of Eq. (7).
    bias, variance, max_deviation : Tensor, shape (...,)
        beta_o, V_o and b_o, in units of weight times value (V_o: squared).
    """

    error_bound: Tensor
    denominator_bound: Tensor
    bias: Tensor
    variance: Tensor
    max_deviation: Tensor


@dataclass(frozen=True)
class OutputFetchPlan:
    """The greedy plan of one or more query rows for the output.

    Attributes
    ----------
    promoted : Tensor, shape (..., T), bool
        Tokens whose weight must be exact. *Fetched* are those of them that are not resident.
    n_promoted : Tensor, shape (...,), int64
        The fewest, in the greedy order, that meet both constraints.
    error_bound, denominator_bound : Tensor, shape (...,)
        The bounds of :class:`OutputCertificate` before anything is promoted; with ``form="chernoff"`` at the plan's own
        tilt, which is poor, or infinite, where much is to be promoted.
    planned_bound, planned_denominator_bound : Tensor, shape (...,)
        The same after promoting: below epsilon times the scale, and below the cap; both 0 where everything is promoted.
    """

    promoted: Tensor
    n_promoted: Tensor
    error_bound: Tensor
    denominator_bound: Tensor
    planned_bound: Tensor
    planned_denominator_bound: Tensor


def output_certificate(
    weights: Tensor,
    inclusion_probs: Tensor,
    shrinkage: Tensor,
    residual: Tensor,
    denominator: Tensor,
    distances: Tensor,
    delta: float,
    denominator_share: float = 0.1,
    form: Literal["bernstein", "chernoff"] = "bernstein",
) -> OutputCertificate:
    """Bound the error of the self-normalised estimate of the attention output.

    ||o^ - o|| <= (beta_o + B_o + sqrt(B_o^2 + 2 V_o l)) / ((1 - eps_D) D) with l = ln(2 / delta_N), B_o = b_o l / 3:
    the terms of Eq. (7) in [1]_ with w_i d_i for w_i, by Bernstein's inequality in a Hilbert space [2]_, [3]_. And
    D^ >= (1 - eps_D) D with eps_D = (beta + B + sqrt(B^2 + 2 V l)) / D, l = ln(1 / delta_D) and B = max lambda_i w_i
    l / 3: only the lower side is needed, on which a token moves D^ by at most lambda_i w_i. delta = delta_N + delta_D.

    Parameters
    ----------
    weights, inclusion_probs, shrinkage, residual, denominator
        As in :func:`~verkv.estimators.certificate.bernstein_certificate`.
    distances : Tensor, shape (..., T), float
        d_i >= ||v_i - o||, from :func:`~verkv.estimators.distances.value_distances`.
    delta : float in (0, 1)
        Failure probability.
    denominator_share : float in (0, 1), default 0.1
        delta_D / delta. Within 2 % of the best choice for a denominator bound up to 0.3.
    form : {"bernstein", "chernoff"}
        Of the numerator's bound. "chernoff" is :func:`~verkv.estimators.chernoff.chernoff_bound`, never above the other
        and on the same assumptions; ``bias``, ``variance`` and ``max_deviation`` are the same.

    Returns
    -------
    OutputCertificate
        Of tensors of shape (...,).

    Raises
    ------
    ValueError
        If ``delta`` or ``denominator_share`` is outside (0, 1), or ``form`` is unknown.

    Notes
    -----
    Holds for a query, weights, distances and coefficients fixed before the draw, exact weights, and independent draws.
    Numerics: terms below the square root of the smallest float (1e-19 for float32) count in b_o but not in V_o.

    References
    ----------
    .. [1] Jha et al., "Verify Before You Fetch", arXiv:2611.11319v1.
    .. [2] Pinelis and Sakhanenko, "Remarks on inequalities for large deviation probabilities", Theory of Probability
       and its Applications 30 (1985).
    .. [3] Pinelis, "Optimum bounds for the distributions of martingales in Banach spaces", Annals of Probability 22
       (1994).

    Examples
    --------
    >>> import torch
    >>> w, r = torch.ones(1000), torch.full((1000,), 0.5)
    >>> distances = torch.ones(1000)  # values on the unit sphere around their mean
    >>> c = output_certificate(w, r, torch.ones(1000), r < 1, w.sum(), distances, delta=0.1)
    >>> round(c.error_bound.item(), 4), round(c.denominator_bound.item(), 4)
    (0.0884, 0.0975)
    """
    delta_n, delta_d = _split(delta, denominator_share)
    _check_form(form)
    terms = certificate_terms(at_least_float32(weights) * distances, inclusion_probs, shrinkage, residual)
    bias, variance, max_deviation = terms.bias.sum(-1), terms.variance.sum(-1), terms.deviation.amax(-1)
    if form == "bernstein":
        numerator = error_bound(bias, variance, max_deviation, denominator, delta_n)
    else:
        numerator = chernoff_bound(weights, inclusion_probs, shrinkage, residual, denominator, delta_n, distances)

    terms_d = _lower_tail_terms(weights, inclusion_probs, shrinkage, residual)
    sums_d = terms_d.bias.sum(-1), terms_d.variance.sum(-1), terms_d.deviation.amax(-1)
    denominator_bound = _one_sided_bound(*sums_d, denominator, delta_d)
    return OutputCertificate(_quotient(numerator, denominator_bound), denominator_bound, bias, variance, max_deviation)


def output_fetch_plan(
    weights: Tensor,
    inclusion_probs: Tensor,
    shrinkage: Tensor,
    residual: Tensor,
    denominator: Tensor,
    distances: Tensor,
    epsilon: float | Tensor,
    scale: Tensor,
    delta: float,
    denominator_share: float = 0.1,
    max_denominator_bound: float = 0.5,
    form: Literal["bernstein", "chernoff"] = "bernstein",
) -> OutputFetchPlan:
    """The fewest tokens, in a greedy order, that bring the bound on the output's error below epsilon times a scale.

    The order is that of the drop of the numerator's bound, Eq. (9) of [1]_ with w_i d_i for w_i, or of the terms of its
    Chernoff bound. Both bounds fall along it, so k* is the first count that meets both constraints.

    Parameters
    ----------
    weights, inclusion_probs, shrinkage, residual, denominator, distances, delta, denominator_share
        As in :func:`output_certificate`. There is no ``sampled`` argument: the plan must not depend on the draw.
    epsilon : float > 0, or Tensor, shape (...,)
        Tolerance, in units of ``scale``, of all rows or of each.
    scale : Tensor, shape broadcastable to (...,), float
        Length that makes the tolerance absolute, such as the norm of an estimate of o from tokens with r = 1. It
        must not depend on the draw either. With 0 or NaN everything is promoted.
    max_denominator_bound : float in (0, 1]
        The denominator's bound must be below it, too.
    form : {"bernstein", "chernoff"}
        Of the numerator's bound. "chernoff" promotes fewer; its tilt is fixed by the tolerance, as in
        :func:`~verkv.estimators.chernoff.chernoff_fetch_plan`.

    Returns
    -------
    OutputFetchPlan

    Raises
    ------
    ValueError
        If ``epsilon`` is not > 0, ``delta`` or ``denominator_share`` is not in (0, 1), ``max_denominator_bound`` is
        not in (0, 1], or ``form`` is unknown.

    Notes
    -----
    Shrinkage, denominator and distances are held fixed while tokens are promoted. They stay valid: the distances
    bound ||v_i - o|| whatever is promoted. Computed again with the promoted values as known ones, they are smaller, and
    :func:`output_certificate` on what remains gives a bound to report that is below the planned one.

    References
    ----------
    .. [1] Jha et al., "Verify Before You Fetch", arXiv:2611.11319v1.

    Examples
    --------
    >>> import torch
    >>> w, r = torch.tensor([8.0, 0.1, 0.1]), torch.tensor([0.5, 0.5, 0.5])
    >>> ones = torch.ones(3)
    >>> plan = output_fetch_plan(w, r, ones, r < 1, w.sum(), ones, epsilon=0.2, scale=torch.tensor(1.0), delta=0.1)
    >>> plan.promoted.tolist()
    [True, False, False]
    """
    check_epsilon(epsilon)
    delta_n, delta_d = _split(delta, denominator_share)
    if not 0.0 < max_denominator_bound <= 1.0:
        raise ValueError(f"max_denominator_bound must be in (0, 1], got {max_denominator_bound}")
    _check_form(form)
    terms = certificate_terms(at_least_float32(weights) * distances, inclusion_probs, shrinkage, residual)
    terms_d = _lower_tail_terms(weights, inclusion_probs, shrinkage, residual)
    tolerance = epsilon * torch.as_tensor(scale, dtype=terms.bias.dtype, device=terms.bias.device)
    if form == "bernstein":
        key = _drop(terms, denominator, delta_n)
    else:
        log_term = math.log(2.0 / delta_n)
        tilt = TILT * log_term / (tolerance * denominator)
        moments = log_moments(weights, inclusion_probs, shrinkage, residual, tilt, distances)
        key = terms.bias + moments / tilt[..., None]
    # Tokens outside L come last and add nothing.
    order = torch.where(residual, key, -torch.inf).argsort(dim=-1, descending=True, stable=True)

    if form == "bernstein":
        numerator = error_bound(*_suffixes(terms, order), denominator[..., None], delta_n)
    else:
        is_left = _arange_like(order) < residual.expand_as(key).sum(-1, keepdim=True)
        numerator = (log_term / tilt[..., None] + _suffix_sum(key, order)) / denominator[..., None]
        numerator = torch.where(is_left, numerator, 0.0)
    denominator_bound = _one_sided_bound(*_suffixes(terms_d, order), denominator[..., None], delta_d)
    denominator_bound = _append_zero(denominator_bound)  # (..., T + 1): of L_g[k:] for k = 0 .. T
    bound = _quotient(_append_zero(numerator), denominator_bound)
    # A NaN counts as failing: it promotes everything. So does a tolerance that is not positive.
    meets = (bound < tolerance[..., None]) & (tolerance[..., None] > 0) & (denominator_bound < max_denominator_bound)
    promoted, n_promoted = smallest_prefix(order, ~meets[..., :-1], residual)
    at_plan = n_promoted[..., None]
    return OutputFetchPlan(
        promoted=promoted,
        n_promoted=n_promoted.clamp(max=residual.sum(-1)),
        error_bound=bound[..., 0],
        denominator_bound=denominator_bound[..., 0],
        planned_bound=bound.gather(-1, at_plan).squeeze(-1),
        planned_denominator_bound=denominator_bound.gather(-1, at_plan).squeeze(-1),
    )


def relative_output_bound(error_bound: Tensor, output_norm: Tensor) -> Tensor:
    """Relative error implied by an absolute bound and the estimate's norm: ||o|| >= ||o^|| - bound.

    Parameters
    ----------
    error_bound : Tensor, shape (...,), float
        Bound of ||o^ - o||, >= 0.
    output_norm : Tensor, shape (...,), float
        ||o^||, which may depend on the draw: this is arithmetic after the fact, within the same event.

    Returns
    -------
    Tensor, shape (...,)
        Bound of ||o^ - o|| / ||o||; infinite where the bound says nothing (it is not below the norm, or NaN), 0 where
        the absolute bound is 0.

    Examples
    --------
    >>> import torch
    >>> relative_output_bound(torch.tensor([1.0, 5.0]), torch.tensor([5.0, 5.0]))
    tensor([0.2500,    inf])
    """
    relative = torch.where(error_bound < output_norm, error_bound / (output_norm - error_bound), torch.inf)
    return torch.where((error_bound == 0) & torch.isfinite(output_norm), 0.0, relative)


def _split(delta: float, denominator_share: float) -> tuple[float, float]:
    """delta_N and delta_D."""
    check_delta(delta)
    if not 0.0 < denominator_share < 1.0:
        raise ValueError(f"denominator_share must be in (0, 1), got {denominator_share}")
    return delta * (1.0 - denominator_share), delta * denominator_share


def _check_form(form: str) -> None:
    if form not in ("bernstein", "chernoff"):
        raise ValueError(f"form must be 'bernstein' or 'chernoff', got {form!r}")


def _lower_tail_terms(
    weights: Tensor, inclusion_probs: Tensor, shrinkage: Tensor, residual: Tensor
) -> CertificateTerms:
    """Terms of Eq. (7) for D^ falling short of D: a token that is not drawn takes lambda w away, and no more."""
    terms = certificate_terms(weights, inclusion_probs, shrinkage, residual)
    lost = torch.where(residual, shrinkage * at_least_float32(weights), 0.0)
    return CertificateTerms(terms.bias, terms.variance, lost)


def _one_sided_bound(
    bias: Tensor, variance: Tensor, max_deviation: Tensor, denominator: Tensor, delta: float
) -> Tensor:
    """Eq. (7) with ln(1 / delta): one side needs no factor 2 for the other."""
    return error_bound(bias, variance, max_deviation, denominator, 2.0 * delta)


def _quotient(numerator_bound: Tensor, denominator_bound: Tensor) -> Tensor:
    """Bound of N / D^ where D^ may be as small as 1 - denominator_bound; infinite where it may be zero."""
    return torch.where(denominator_bound < 1, numerator_bound / (1.0 - denominator_bound), torch.inf)


def _suffixes(terms: CertificateTerms, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """beta, V and b of what remains after each prefix of the order: reversed scans, never total minus prefix."""
    largest = terms.deviation.gather(-1, order).flip(-1).cummax(-1).values.flip(-1)
    return _suffix_sum(terms.bias, order), _suffix_sum(terms.variance, order), largest


def _append_zero(bounds: Tensor) -> Tensor:
    return torch.cat([bounds, torch.zeros_like(bounds[..., :1])], dim=-1)
