"""Which coordinates get how many bits: dynamic programming over groups of neighbouring coordinates.

With an orthonormal basis the squared error of a row is the sum of its coordinates' errors, so a plan is a partition of
the coordinates into dropped ones and groups, and the best plan for a budget is found by dynamic programming (Section
3.2 of [1]_). Groups start at multiples of 16 here; every cost is then a multiple of 16 bits, which keeps the table
small enough to be stored whole: one table serves every budget up to the one it was made for.

References
----------
.. [1] "KV Cache Transform Coding for Compact Storage in LLM Inference", arXiv:2511.01815v1.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verkv.codecs.quantiser import (
    BIT_WIDTHS,
    BLOCK,
    GROUP_SIZES,
    PARAMETER_BITS,
    RAW_BITS,
    Run,
    dynamic_error,
    to_half,
)

UNIT_BITS = 16  # every cost is a multiple of it


@dataclass(frozen=True)
class Choice:
    """One way to code a group: its size in coordinates, its bit width, what a token costs, and the mean errors.

    ``errors[j]`` is the mean squared error of the group that starts at coordinate 16 * j.
    """

    size: int
    bits: int
    cost_bits: int
    errors: np.ndarray


@dataclass(frozen=True)
class AllocationTable:
    """The best plan of every budget.

    Attributes
    ----------
    choices : ndarray, shape (R + 1, Q + 1), uint8
        ``choices[i, q]``: what ends at coordinate 16 * i in the best plan for the first 16 * i coordinates and 16 * q
        bits; 0 drops the last 16, k > 0 is kind k - 1.
    kinds : tuple of (size, bits)
        What the numbers mean.
    errors : ndarray, shape (Q + 1,), float64
        Mean squared error of a row within the basis, by budget; never increases.
    parameter_bits : int
        Per token and group of 1 to 8 bits.
    """

    choices: np.ndarray
    kinds: tuple[tuple[int, int], ...]
    errors: np.ndarray
    parameter_bits: int

    @property
    def max_bits(self) -> int:
        """Largest budget per token."""
        return (self.choices.shape[1] - 1) * UNIT_BITS

    def plan(self, budget_bits: float) -> tuple[Run, ...]:
        """The plan of least expected error that costs at most ``budget_bits`` a token.

        Parameters
        ----------
        budget_bits : float
            0 .. :attr:`max_bits`.

        Returns
        -------
        tuple of Run
            Ascending, disjoint; coordinates in none of them are dropped. In static mode neighbours of equal width are
            joined.

        Raises
        ------
        ValueError
            If the budget is out of range.
        """
        if not 0 <= budget_bits < self.max_bits + UNIT_BITS:
            raise ValueError(f"budget_bits={budget_bits} is outside this table's range of 0 .. {self.max_bits}")
        i, q = self.choices.shape[0] - 1, int(budget_bits // UNIT_BITS)
        runs: list[Run] = []
        while i > 0:
            kind = int(self.choices[i, q])
            if kind == 0:
                i -= 1
                continue
            size, bits = self.kinds[kind - 1]
            i -= size // BLOCK
            q -= _cost(size, bits, self.parameter_bits) // UNIT_BITS
            if i < 0 or q < 0:
                raise ValueError("the allocation table contradicts itself; calibrate again")
            runs.append(Run(i * BLOCK, size, bits))
        return self._joined(runs[::-1])

    def expected_error(self, budget_bits: float) -> float:
        """Mean squared error of a row within the basis under :meth:`plan`."""
        return float(self.errors[int(budget_bits // UNIT_BITS)])

    def _joined(self, runs: list[Run]) -> tuple[Run, ...]:
        """Join neighbours that share nothing but their width."""
        joined: list[Run] = []
        for run in runs:
            last = joined[-1] if joined else None
            shares_nothing = self.parameter_bits == 0 or run.is_raw
            if last and shares_nothing and last.stop == run.start and last.bits == run.bits:
                joined[-1] = Run(last.start, last.size + run.size, run.bits)
            else:
                joined.append(run)
        return tuple(joined)


def _cost(size: int, bits: int, parameter_bits: int) -> int:
    return size * bits + (parameter_bits if bits != RAW_BITS else 0)


def allocation_kinds(mode: str) -> tuple[tuple[int, int], ...]:
    """(size, bits) of every way to code a group, in the order their numbers mean in a table."""
    sizes = GROUP_SIZES if mode == "dynamic" else (BLOCK,)
    return (*((size, bits) for size in sizes for bits in BIT_WIDTHS), (BLOCK, RAW_BITS))


def dynamic_choices(coordinates: Tensor, progress=None) -> list[Choice]:
    """Errors of every group of the dynamic mode, by running its quantiser on rows the basis was not fitted to.

    Parameters
    ----------
    coordinates : Tensor, shape (n, r), float32
        r a multiple of 16.
    progress : callable, optional
        Called with the number of coordinates after each group.

    Returns
    -------
    list of Choice
        In the order of ``allocation_kinds("dynamic")``.
    """
    rank = coordinates.shape[1]
    choices = []
    for size in GROUP_SIZES:
        starts = range(0, max(0, rank - size + BLOCK), BLOCK) if size <= rank else range(0)
        errors = np.zeros((len(BIT_WIDTHS), len(starts)))
        for j, start in enumerate(starts):
            group = coordinates[:, start : start + size].contiguous()
            errors[:, j] = [dynamic_error(group, bits) for bits in BIT_WIDTHS]
            if progress is not None:
                progress(size)
        for bits, error in zip(BIT_WIDTHS, errors, strict=True):
            choices.append(Choice(size, bits, _cost(size, bits, PARAMETER_BITS), error))
    return [*choices, _raw_choice(coordinates)]


def static_choices(coordinates: Tensor, step_errors: Tensor) -> list[Choice]:
    """Errors of every block of the static mode, from those of its coordinates.

    Parameters
    ----------
    coordinates : Tensor, shape (n, r), float32
    step_errors : Tensor, shape (9, r)
        As :func:`~verkv.codecs.quantiser.fit_steps` returns them.

    Returns
    -------
    list of Choice
        In the order of ``allocation_kinds("static")``.
    """
    blocks = step_errors.unflatten(1, (-1, BLOCK)).sum(2).numpy()
    choices = [Choice(BLOCK, bits, BLOCK * bits, blocks[bits]) for bits in BIT_WIDTHS]
    return [*choices, _raw_choice(coordinates)]


def _raw_choice(coordinates: Tensor) -> Choice:
    squared = (to_half(coordinates).float() - coordinates).double().square().mean(0)
    return Choice(BLOCK, RAW_BITS, BLOCK * RAW_BITS, squared.unflatten(0, (-1, BLOCK)).sum(1).numpy())


def allocate(energy: np.ndarray, choices: list[Choice], max_bits: int, parameter_bits: int) -> AllocationTable:
    """Fill the table of best plans: Section 3.2 of [1]_, with groups that start at multiples of 16.

    ``best[i][q]``, the least error of the first 16 i coordinates within 16 q bits, is the smaller of dropping the last
    16 (``best[i - 1][q]`` plus their energy) and of every group that ends there.

    Parameters
    ----------
    energy : ndarray, shape (R,), float
        Mean squared value of each block of 16 coordinates: the error of dropping it.
    choices : list of Choice
        Ways to code a group. Errors must be additive over disjoint groups.
    max_bits : int
        Largest budget per token.
    parameter_bits : int
        What the choices' costs hold for a shift and a scale.

    Returns
    -------
    AllocationTable

    References
    ----------
    .. [1] arXiv:2511.01815v1.
    """
    n_blocks, n_units = len(energy), int(max_bits // UNIT_BITS)
    best = np.zeros((n_blocks + 1, n_units + 1))
    chosen = np.zeros((n_blocks + 1, n_units + 1), dtype=np.uint8)
    for i in range(1, n_blocks + 1):
        best[i] = best[i - 1] + energy[i - 1]
        for number, choice in enumerate(choices, start=1):
            length, cost = choice.size // BLOCK, choice.cost_bits // UNIT_BITS
            if length > i or cost > n_units:
                continue
            error = best[i - length, : n_units + 1 - cost] + choice.errors[i - length]
            better = error < best[i, cost:]
            best[i, cost:][better] = error[better]
            chosen[i, cost:][better] = number
    kinds = tuple((choice.size, choice.bits) for choice in choices)
    return AllocationTable(chosen, kinds, best[-1], parameter_bits)


def block_energy(coordinates: Tensor) -> np.ndarray:
    """Mean squared value of every block of 16 coordinates (n, r) -> (r / 16,)."""
    return coordinates.double().square().mean(0).unflatten(0, (-1, BLOCK)).sum(1).numpy()


def make_table(mode: str, coordinates: Tensor, step_errors: Tensor, max_bits: int, progress=None) -> AllocationTable:
    """The table of a mode from coordinates (n, r) of rows that the basis was not fitted to."""
    with torch.no_grad():
        if mode == "dynamic":
            choices, parameter_bits = dynamic_choices(coordinates, progress), PARAMETER_BITS
        else:
            choices, parameter_bits = static_choices(coordinates, step_errors), 0
    return allocate(block_energy(coordinates), choices, max_bits, parameter_bits)
