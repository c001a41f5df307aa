"""Upper bounds of the distance of every value from the attention output, from one byte a token.

The values are on the host and the output is what is to be computed; a stored distance from a fixed centre, and the
values that are at hand, bound it all the same: ``docs/output_bound.md``, section 2.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.estimators.numerics import at_least_float32

# Codes 1 .. 255 are levels of a geometric grid below a head's largest norm; 0 is a norm of exactly zero.
TOP_CODE = 255
# The grid's lower end: a few tiny norms (sinks often lie at the centre) must not coarsen it for all others.
LOWEST_SHARE = 1 / 200
MAX_OCTAVES = 16.0
# A code is chosen for the norm times this: float32 rounding of the norm itself (up to some 1,000 channels), of the
# logarithm here and of the decoder's exp2, which differ between devices, must not lead below the true norm.
ROUND_UP = 1.0 + 2.0**-14


@dataclass(frozen=True)
class NormCodes:
    """Norms in one byte each, rounded up.

    Attributes
    ----------
    codes : Tensor, shape (..., T), uint8
    top : Tensor, shape (...,), float32
        What code 255 stands for: at least the largest norm.
    step : Tensor, shape (...,), float32
        Octaves between two codes.
    """

    codes: Tensor
    top: Tensor
    step: Tensor


def value_norms(values: Tensor, centre: Tensor) -> Tensor:
    """Distance of every value from its head's centre, ||v_i - c||.

    Parameters
    ----------
    values : Tensor, shape (..., T, d), float
    centre : Tensor, shape (..., d), float
        Any point that does not depend on the draw, such as the mean value; the bound holds for each, and is tighter
        the closer the values and the outputs are to it.

    Returns
    -------
    Tensor, shape (..., T)

    Examples
    --------
    >>> import torch
    >>> value_norms(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([0.0, 0.0]))
    tensor([5., 1.])
    """
    return (at_least_float32(values) - at_least_float32(centre)[..., None, :]).norm(dim=-1)


def encode_norms(norms: Tensor) -> NormCodes:
    """Norms in one byte each, never rounded down: a geometric grid from nearly the smallest to the largest of a head.

    The error is relative: at most the 254th root of largest / smallest, 0.9 % where they are a factor ten apart. So a
    heavy tail does not coarsen the grid for the others as it would with a linear scale. The smallest half per cent
    is rounded up to the grid's lower end.

    Parameters
    ----------
    norms : Tensor, shape (..., T), float
        >= 0. A head with a NaN or an infinite norm decodes to infinity throughout, which makes every bound that uses it
        infinite.

    Returns
    -------
    NormCodes

    Examples
    --------
    >>> import torch
    >>> norms = torch.tensor([0.0, 1.0, 3.0])
    >>> bool((decode_norms(encode_norms(norms)) >= norms).all())
    True
    """
    target = at_least_float32(norms).float() * ROUND_UP
    is_usable = torch.isfinite(target).all(-1)
    target = torch.where(is_usable[..., None], target, 1.0)
    top, smallest = _grid_ends(target)
    octaves = torch.where(top > 0, (top / smallest).log2(), 0.0).clamp(0.0, MAX_OCTAVES)
    step = octaves / (TOP_CODE - 1)
    below = (top[..., None] / target).log2() / step[..., None].clamp_min(torch.finfo(step.dtype).tiny)
    codes = (TOP_CODE - below.floor()).clamp(1, TOP_CODE)
    codes = torch.where(target > 0, codes, 0.0)
    codes = torch.where(is_usable[..., None], codes, float(TOP_CODE)).to(torch.uint8)
    return NormCodes(codes, torch.where(is_usable, top, torch.inf), torch.where(is_usable, step, 0.0))


def _grid_ends(norms: Tensor) -> tuple[Tensor, Tensor]:
    """Slightly more than the largest norm, and the smallest positive one but for the lowest half per cent."""
    if norms.shape[-1] == 0:
        return norms.new_zeros(norms.shape[:-1]), norms.new_ones(norms.shape[:-1])
    top = norms.amax(-1) * ROUND_UP
    n_skipped = ((norms > 0).sum(-1) * LOWEST_SHARE).floor() + (norms == 0).sum(-1)
    index = n_skipped.long().clamp(max=norms.shape[-1] - 1)
    return top, norms.sort(dim=-1).values.gather(-1, index[..., None]).squeeze(-1)


def decode_norms(norm_codes: NormCodes) -> Tensor:
    """The norms that the codes stand for, each at least the encoded one.

    Parameters
    ----------
    norm_codes : NormCodes

    Returns
    -------
    Tensor, shape (..., T), float32
    """
    return _decode(norm_codes.codes.float(), norm_codes.top, norm_codes.step)


def _decode(codes: Tensor, top: Tensor, step: Tensor) -> Tensor:
    return torch.where(codes > 0, top[..., None] * torch.exp2((codes - TOP_CODE) * step[..., None]), 0.0)


def value_distances(
    norms: Tensor,
    weights: Tensor,
    denominator: Tensor,
    *,
    known: Tensor | None = None,
    known_sum: Tensor | None = None,
    inflation: float = 1.0,
    largest: Tensor | None = None,
) -> Tensor:
    """Upper bounds d_i of ||v_i - o||, without the values.

    ||v_i - o|| <= ||v_i - c|| + ||o - c||, and o - c is a weighted mean of v_j - c. Where values are at hand that were
    not chosen by the draw (tokens with r = 1, new tokens, promoted ones once they are read), their part of the mean
    is taken as it is; for the others the norms stand in:
    ||o - c|| <= (||sum_known w_j (v_j - c)|| + sum_others w_j ||v_j - c||) / D.

    Parameters
    ----------
    norms : Tensor, shape (..., T), float
        At least ||v_i - c||, from :func:`decode_norms`; 0 at positions that are not tokens.
    weights : Tensor, shape (..., T), float
        Unnormalised attention weights, >= 0.
    denominator : Tensor, shape (...,), float
        Sum of all weights, also of tokens outside ``weights``; > 0.
    known : Tensor, shape broadcastable to (..., T), bool, optional
        Tokens of ``weights`` that are part of ``known_sum``; none by default.
    known_sum : Tensor, shape (..., d), float, optional
        Sum of w_j (v_j - c) over the known tokens *and all tokens outside* ``weights``. Needed unless there are none.
    inflation : float >= 1, or infinity
        Factor on the bound of ||o - c||, for weights that are not exact; see the notes.
    largest : Tensor, shape (...,), float, optional
        At least the largest ||v_j - c|| over all tokens, outside ``weights`` too. Caps ||o - c||.

    Returns
    -------
    Tensor, shape (..., T)
        In units of the values.

    Raises
    ------
    ValueError
        If ``inflation`` is below 1, or infinite without ``largest``, or only one of ``known`` and ``known_sum`` is
        there for tokens inside ``weights``.

    Notes
    -----
    With exact weights the bound is certain, and independent of the draw if its inputs are. With a sketch's it is an
    estimate, unless ``inflation`` pays for it: exp(2 eta) where every log-weight is off by at most eta. ``largest``
    alone (``inflation`` infinite) holds whatever the weights are, since o lies in the convex hull of the values.

    Examples
    --------
    >>> import torch
    >>> value_distances(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]), torch.tensor(2.0))
    tensor([3., 5.])
    """
    if not inflation >= 1.0:
        raise ValueError(f"inflation must be >= 1, got {inflation}: 1 means exact weights")
    if inflation == math.inf:
        if largest is None:
            raise ValueError("inflation is infinite: pass largest, a bound on all norms, to have a finite distance")
        return norms + largest[..., None]
    if known is not None and known_sum is None:
        raise ValueError("known tokens without known_sum: pass the sum of w (v - c) over them and over outside tokens")
    moments = at_least_float32(weights) * at_least_float32(norms)
    if known is not None:
        moments = torch.where(known, 0.0, moments)
    offset = moments.sum(-1)
    if known_sum is not None:
        offset = offset + at_least_float32(known_sum).norm(dim=-1)
    offset = inflation * offset / denominator
    if largest is not None:
        offset = torch.minimum(offset, largest)
    return norms + offset[..., None]
