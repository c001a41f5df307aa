"""Split conformal tolerance: how loose the plan's tolerance may be for the true error to stay within epsilon.

The certificate is an upper bound, and with a sketch it is not even that. Queries whose exact denominator and output are
known measure what it is worth: the largest nominal tolerance at which few enough of them miss epsilon is used for the
queries to come. What that guarantees, and what not: ``docs/output_bound.md``.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.estimators.certificate import check_delta
from verkv.estimators.fetching import check_epsilon


@dataclass(frozen=True)
class CalibratedTolerance:
    """Nominal tolerances to plan with, one for each group of heads.

    A group may be uncalibrated for two reasons. With fewer than :func:`required_queries` positions nothing is known:
    plan with epsilon itself, as without calibration. With more, even the smallest tolerance misses too often, as would
    epsilon: compute such heads exactly.

    Attributes
    ----------
    tolerance : Tensor, shape (...,), float
        Pass it to the plan in place of epsilon; NaN where the group is not calibrated.
    is_calibrated : Tensor, shape (...,), bool
        Where ``tolerance`` is not NaN.
    miss_rate : Tensor, shape (...,), float
        (sum of losses + 1) / (m + 1) at the chosen tolerance, at the smallest where none was chosen.
    n_queries : int
        m, the calibration positions.
    """

    tolerance: Tensor
    is_calibrated: Tensor
    miss_rate: Tensor
    n_queries: int


def required_queries(delta: float) -> int:
    """Fewest calibration positions with which a tolerance can be calibrated: the least m with 1 / (m + 1) <= delta.

    With these, not one of them may miss; ten times as many leave room for a choice.

    Parameters
    ----------
    delta : float in (0, 1)
        Miss rate aimed at.

    Returns
    -------
    int

    Raises
    ------
    ValueError
        If ``delta`` is outside (0, 1).

    Examples
    --------
    >>> required_queries(0.1), required_queries(0.05)
    (9, 19)
    """
    check_delta(delta)
    n = max(0, math.ceil(1.0 / delta) - 2)  # rounding of 1 / delta may be off by one
    while delta * (n + 1) < 1.0:
        n += 1
    return n


def tolerance_grid(epsilon: float, n_points: int = 16, lowest: float = 0.25, highest: float = 16.0) -> Tensor:
    """Nominal tolerances to try: a geometric grid around epsilon, epsilon itself among them where the ends allow it.

    Parameters
    ----------
    epsilon : float > 0
        Tolerance of the true error.
    n_points : int >= 2
    lowest, highest : float, 0 < lowest < highest
        Ends of the grid in units of epsilon. Below 1 helps where a sketch makes the plan at epsilon miss too often.

    Returns
    -------
    Tensor, shape (n_points,), float64
        Ascending.

    Raises
    ------
    ValueError
        If an argument is out of range.

    Examples
    --------
    >>> tolerance_grid(0.1, n_points=4, lowest=0.5, highest=4.0).tolist()
    [0.05, 0.1, 0.2, 0.4]
    """
    check_epsilon(epsilon)
    if n_points < 2:
        raise ValueError(f"n_points must be an integer >= 2, got {n_points}")
    if not 0.0 < lowest < highest < math.inf:
        raise ValueError(f"lowest and highest must be 0 < lowest < highest, got {lowest} and {highest}")
    ratio = (highest / lowest) ** (1.0 / (n_points - 1))
    return epsilon * lowest * ratio ** torch.arange(n_points, dtype=torch.float64, device="cpu")


def monotone_losses(errors: Tensor, epsilon: float) -> Tensor:
    """Whether the true error exceeds epsilon at a tolerance or at any smaller one.

    A looser tolerance promotes fewer tokens but need not have the larger error in a given draw; conformal risk control
    [1]_ needs losses that never fall as the tolerance grows.

    Parameters
    ----------
    errors : Tensor, shape (..., grid), float
        True relative error of a query planned at each nominal tolerance, the tolerances ascending along the last axis.
        NaN counts as a miss.
    epsilon : float > 0
        Tolerance of the true error.

    Returns
    -------
    Tensor, shape (..., grid), bool
        Not decreasing along the last axis.

    Raises
    ------
    ValueError
        If ``epsilon`` is not > 0.

    References
    ----------
    .. [1] Angelopoulos, Bates, Fisch, Lei and Schuster, "Conformal risk control", ICLR 2024.

    Examples
    --------
    >>> import torch
    >>> monotone_losses(torch.tensor([0.01, 0.2, 0.05]), epsilon=0.1)
    tensor([False,  True,  True])
    """
    check_epsilon(epsilon)
    misses = ~(errors <= epsilon)
    return misses.cummax(dim=-1).values


def calibrated_tolerance(
    losses: Tensor, tolerances: Tensor, delta: float, pooled_dims: int | tuple[int, ...] = ()
) -> CalibratedTolerance:
    """The largest nominal tolerance with (sum of losses + 1) / (m + 1) <= delta, Eq. (4) of [1]_.

    Parameters
    ----------
    losses : Tensor, shape (m, ..., grid), bool or float in [0, 1]
        From :func:`monotone_losses`, one row per calibration position; the axes between are groups, such as layers and
        heads.
    tolerances : Tensor, shape (grid,), float
        Ascending, fixed before the losses were seen.
    delta : float in (0, 1)
        Rate at which the true error may exceed epsilon.
    pooled_dims : int or tuple of int
        Axes of ``losses`` that share one tolerance: none calibrates each head by itself; with losses
        (m, layers, heads, grid), 2 pools the heads of a layer and (1, 2) the model. Heads at one position depend
        on each other, so they enter as the mean of their losses there, and m still counts positions.

    Returns
    -------
    CalibratedTolerance
        Of tensors with the shape of the groups that remain.

    Raises
    ------
    ValueError
        If ``losses`` has no axis for positions, holds NaN or values outside [0, 1], or decreases along the grid; if
        ``tolerances`` does not fit it or does not ascend; if ``delta`` is outside (0, 1) or ``pooled_dims`` names the
        positions or the grid.

    References
    ----------
    .. [1] Angelopoulos, Bates, Fisch, Lei and Schuster, "Conformal risk control", ICLR 2024.

    Examples
    --------
    >>> import torch
    >>> errors = torch.tensor([[0.01, 0.05, 0.2]]).expand(40, 3)
    >>> chosen = calibrated_tolerance(monotone_losses(errors, 0.1), torch.tensor([0.1, 0.2, 0.4]), delta=0.05)
    >>> round(chosen.tolerance.item(), 6), chosen.is_calibrated.item()
    (0.2, True)
    """
    check_delta(delta)
    losses = _checked_losses(losses, tolerances)
    pooled = _pooled_axes(losses, pooled_dims)
    if pooled:
        losses = losses.mean(dim=pooled)
    n_queries = losses.shape[0]
    miss_rates = (losses.sum(0) + 1.0) / (n_queries + 1.0)  # (..., grid)
    # The walk up the grid stops at the first that fails; rates of monotone losses fall after it by rounding only.
    # The margin is for sums of means: six times 1/3 must be 2.
    holds = (miss_rates <= delta * (1.0 + 1e-12)).long().cumprod(-1)
    n_holding = holds.sum(-1)
    chosen = (n_holding - 1).clamp_min(0)
    is_calibrated = n_holding > 0
    tolerance = torch.where(is_calibrated, tolerances.to(losses)[chosen], math.nan)
    miss_rate = miss_rates.gather(-1, chosen[..., None]).squeeze(-1)
    return CalibratedTolerance(tolerance, is_calibrated, miss_rate, n_queries)


def _checked_losses(losses: Tensor, tolerances: Tensor) -> Tensor:
    """The losses in float64."""
    if losses.dim() < 2:
        raise ValueError(f"losses must have the shape (positions, ..., grid), got {tuple(losses.shape)}")
    if tolerances.dim() != 1 or len(tolerances) != losses.shape[-1] or len(tolerances) == 0:
        raise ValueError(
            f"tolerances must be one for each of the {losses.shape[-1]} grid points of losses, "
            f"got the shape {tuple(tolerances.shape)}"
        )
    if not bool((tolerances.diff() > 0).all()):
        raise ValueError("tolerances must ascend strictly: the loss of one includes those of all smaller ones")
    losses = losses.double()
    if not bool(((losses >= 0) & (losses <= 1)).all()):
        raise ValueError("losses must be in [0, 1]; errors that are NaN count as misses in monotone_losses")
    if bool((losses.diff(dim=-1) < 0).any()):
        raise ValueError("losses must not decrease along the grid: make them with monotone_losses")
    return losses


def _pooled_axes(losses: Tensor, pooled_dims: int | tuple[int, ...]) -> tuple[int, ...]:
    """Non-negative axes."""
    dims = (pooled_dims,) if isinstance(pooled_dims, int) else tuple(pooled_dims)
    axes = tuple(sorted({d + losses.dim() if d < 0 else d for d in dims}))
    if any(not 0 < axis < losses.dim() - 1 for axis in axes):
        raise ValueError(
            f"pooled_dims must name axes between the positions (0) and the grid ({losses.dim() - 1}), got {pooled_dims}"
        )
    return axes
