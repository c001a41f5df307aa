"""Scalar quantisers of transform coordinates: per-token ranges (dynamic) or calibrated steps (static)."""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 16  # groups start at multiples of it and are made of it, so that every group's bits fill whole bytes
RAW_BITS = 16  # float16 as they are
GROUP_SIZES = (16, 64, 256, 1024)
BIT_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8)
PARAMETER_BITS = 32  # a float16 shift and a float16 scale per token and group, dynamic mode only
MAX_HALF = 65504.0
MODES = ("dynamic", "static")


@dataclass(frozen=True)
class Run:
    """Neighbouring coordinates that share a bit width; in dynamic mode also a shift and a scale per token.

    Attributes
    ----------
    start, size : int
        Multiples of 16.
    bits : int
        1 .. 8, or 16 for coordinates kept as float16.
    """

    start: int
    size: int
    bits: int

    @property
    def stop(self) -> int:
        """First coordinate behind it."""
        return self.start + self.size

    @property
    def is_raw(self) -> bool:
        """Kept as float16."""
        return self.bits == RAW_BITS

    def cost(self, mode: str) -> int:
        """Bits of one token, parameters included."""
        has_parameters = mode == "dynamic" and not self.is_raw
        return self.size * self.bits + PARAMETER_BITS * has_parameters


def plan_bits(plan: tuple[Run, ...], mode: str) -> int:
    """Bits of one token under a plan."""
    return sum(run.cost(mode) for run in plan)


def plan_width(plan: tuple[Run, ...]) -> int:
    """Leading coordinates that a plan needs: those behind are dropped."""
    return max((run.stop for run in plan), default=0)


def quantise_dynamic(values: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Uniform quantiser between a group's smallest and largest coordinate of a token.

    Parameters
    ----------
    values : Tensor, shape (..., g), float32
    bits : int
        1 .. 8.

    Returns
    -------
    codes : Tensor, shape (..., g), uint8
    shift, scale : Tensor, shape (...), float16
        As stored; the encoder uses them rounded, too, so that it agrees with the decoder.
    """
    levels = 2**bits - 1
    low, high = values.aminmax(dim=-1)
    shift = low.clamp(-MAX_HALF, MAX_HALF).half()
    scale = ((high - low) / levels).clamp_max(MAX_HALF).half()
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = ((values - shift.float()[..., None]) / scale.float()[..., None]).round_().clamp_(0, levels)
    return codes.to(torch.uint8), shift, scale


def dequantise_dynamic(codes: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Inverse of :func:`quantise_dynamic` up to rounding; float32."""
    return torch.addcmul(shift.float()[..., None], codes.float(), scale.float()[..., None])


def quantise_static(values: Tensor, step: Tensor, bits: int) -> Tensor:
    """Mid-rise uniform quantiser with a calibrated step for every coordinate.

    Parameters
    ----------
    values : Tensor, shape (..., g), float32
    step : Tensor, shape (g,) or broadcastable, > 0
    bits : int
        1 .. 8.

    Returns
    -------
    Tensor, shape (..., g), uint8
    """
    half = 2 ** (bits - 1)
    return ((values / step).floor_() + half).clamp_(0, 2 * half - 1).to(torch.uint8)


def dequantise_static(codes: Tensor, step: Tensor, bits: int) -> Tensor:
    """Inverse of :func:`quantise_static` up to rounding; float32."""
    return (codes.float() - (2 ** (bits - 1) - 0.5)) * step


def to_half(values: Tensor) -> Tensor:
    """float16 with saturation, for coordinates kept as they are."""
    return values.clamp(-MAX_HALF, MAX_HALF).half()


def dynamic_error(values: Tensor, bits: int) -> float:
    """Mean over tokens (n, g) of a group's squared error, by running the quantiser."""
    codes, shift, scale = quantise_dynamic(values, bits)
    return float((dequantise_dynamic(codes, shift, scale) - values).square_().sum(-1).double().mean())


# Steps of least squared error for a Gaussian of unit variance, 1 .. 8 bits (Max 1960): the search starts around them.
_GAUSSIAN_STEPS = (1.596, 0.996, 0.586, 0.335, 0.188, 0.104, 0.0569, 0.0308)
_STEP_FACTORS = tuple(1.13**k for k in range(-6, 9))


def fit_steps(values: Tensor) -> tuple[Tensor, Tensor]:
    """Step of least squared error for every coordinate and bit width, by search on calibration rows.

    Parameters
    ----------
    values : Tensor, shape (n, r), float32
        Coordinates of rows that the basis was not fitted to.

    Returns
    -------
    steps : Tensor, shape (9, r), float32
        Row b is for b bits; row 0 is not used.
    errors : Tensor, shape (9, r), float64
        Mean squared error with that step; row 0 is the coordinate's energy.
    """
    energy = values.double().square().mean(0)
    deviation = energy.sqrt().float().clamp_min(torch.finfo(torch.float16).tiny)
    steps, errors = [torch.ones_like(deviation)], [energy]
    for bits, gaussian in zip(BIT_WIDTHS, _GAUSSIAN_STEPS, strict=True):
        best_step, best_error = None, None
        for factor in _STEP_FACTORS:
            step = deviation * (gaussian * factor)
            codes = quantise_static(values, step, bits)
            error = (dequantise_static(codes, step, bits) - values).square_().mean(0)
            if best_error is None:
                best_step, best_error = step, error
            better = error < best_error
            best_step, best_error = torch.where(better, step, best_step), torch.where(better, error, best_error)
        steps.append(best_step)
        errors.append(best_error.double())
    return torch.stack(steps), torch.stack(errors)
