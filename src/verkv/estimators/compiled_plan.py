"""The plan of :mod:`linear_plan` on a CPU by compiled loops, where numba is installed.

A decode step of a model with a few thousand tokens is too small for tensor operations: torch spends its time between
them. The loops are in :mod:`verkv.loops`; numba compiles them at the first plan and keeps the result on disk.
"""

import torch
from torch import Tensor

from verkv import loops
from verkv.checks import is_switched_on
from verkv.estimators.certificate import check_delta, check_upper_share, log_terms
from verkv.estimators.fetching import check_epsilon
from verkv.estimators.linear_plan import LinearPlan
from verkv.estimators.numerics import at_least_float32


def compiles() -> bool:
    """Whether loops can be compiled: numba is there, and ``VERKV_COMPILED=0`` does not forbid it.

    Returns
    -------
    bool

    Raises
    ------
    ValueError
        If the environment variable ``VERKV_COMPILED`` is neither 0 nor 1.
    """
    return is_switched_on("VERKV_COMPILED") and loops.load() is not None


@torch.no_grad()
def compiled_plan(
    weights: Tensor,
    inclusion_probs: Tensor,
    residual: Tensor,
    denominator: Tensor,
    epsilon: float | Tensor,
    delta: float,
    shrinkage: Tensor | None = None,
    upper_share: float | None = None,
) -> LinearPlan:
    """Shrink, certify and find the fewest tokens to make exact: :func:`linear_plan` by compiled loops.

    Parameters
    ----------
    weights, inclusion_probs, residual, denominator, epsilon, delta, shrinkage, upper_share
        As in :func:`~verkv.estimators.linear_plan.linear_plan`, on the CPU.

    Returns
    -------
    LinearPlan

    Raises
    ------
    ValueError
        If ``epsilon`` is not > 0, or ``delta`` or ``upper_share`` not in (0, 1).
    ModuleNotFoundError
        Without numba; :func:`compiles` tells.

    Notes
    -----
    All sums are taken in float64, of whatever float the weights are: k* is that of the sorting reference applied to the
    same numbers in float64, up to bounds that differ from the tolerance by its rounding. Where results are written as
    float32 the tolerance is tightened by their rounding, 2^-22 of it. Time is linear in the number of tokens.

    Examples
    --------
    >>> import torch
    >>> w, r = torch.tensor([8.0, 0.1, 0.1]), torch.tensor([0.5, 0.5, 0.5])
    >>> compiled_plan(w, r, r < 1, w.sum() + 30.0, epsilon=0.2, delta=0.1).promoted.tolist()  # doctest: +SKIP
    [True, False, False]
    """
    check_epsilon(epsilon)
    check_delta(delta)
    check_upper_share(upper_share)
    found = loops.load()
    if found is None:
        raise ModuleNotFoundError("compiled plans need numba: pip install 'verkv[compiled]'")
    weights, r, denominator = (at_least_float32(tensor) for tensor in (weights, inclusion_probs, denominator))
    weights = weights.contiguous()
    shape, dtype = weights.shape, weights.dtype
    n_rows = shape[:-1].numel()
    r, residual, unit_of = _by_unit(r, residual, shape)
    given = weights.new_empty(0, 0) if shrinkage is None else _lines(at_least_float32(shrinkage).expand(shape), n_rows)
    coefficients, promoted = torch.empty_like(weights), torch.empty_like(weights, dtype=torch.bool)
    n_promoted = weights.new_empty(shape[:-1], dtype=torch.int64)
    bounds = weights.new_empty(n_rows, 2, dtype=torch.float64)
    rounding = 0.0 if dtype == torch.float64 else 2.0**-22
    tolerance = torch.as_tensor(epsilon, dtype=torch.float64, device="cpu").expand(shape[:-1]) * (1.0 - rounding)
    arguments = [_lines(weights, n_rows), r, residual, unit_of, given.to(dtype)]
    arguments += [denominator.double().expand(shape[:-1]).reshape(n_rows), tolerance.reshape(n_rows)]
    outputs = [_lines(coefficients, n_rows), _lines(promoted, n_rows), n_promoted.view(n_rows), bounds]
    sides = log_terms(delta, upper_share)
    found["plan"].plan_rows(*(tensor.numpy() for tensor in arguments), sides, *(tensor.numpy() for tensor in outputs))
    before, after = (bound.view(shape[:-1]) for bound in bounds.to(dtype).unbind(1))
    return LinearPlan(coefficients, promoted, n_promoted, before, after)


def _lines(tensor: Tensor, n_lines: int) -> Tensor:
    return tensor.reshape(n_lines, tensor.shape[-1]).contiguous()  # of contiguous ones, a view


def _by_unit(r: Tensor, residual: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities and residual set (K, T) without repetitions, and the line of each row (M,)."""
    r, residual = torch.broadcast_tensors(r, residual)
    n_units = r.shape[:-1].numel()
    units = torch.arange(n_units, device=r.device).view(r.shape[:-1]).expand(shape[:-1]).reshape(-1)
    r, residual = (_lines(tensor.expand(*tensor.shape[:-1], shape[-1]), n_units) for tensor in (r, residual))
    return r, residual, units
