"""One side of one group under one bit plan: rows to coordinates and back."""

from collections.abc import Callable
from contextlib import contextmanager
from time import perf_counter

import torch
from torch import Tensor

from verkv.codecs.artefact import Artefact
from verkv.codecs.errors import CodecError
from verkv.codecs.layout import LayerSlice, rows_to_states, states_to_rows
from verkv.codecs.packing import CodedRun, RowCoder

RAW_BITS_PER_NUMBER = 16  # what ratios are counted against
_NEGLIGIBLE = 1e-5  # squared residuals, relative to a row's energy, that are rounding and make no outlier


class Stages(dict):
    """Seconds by stage of the codec, for whoever asks where the time goes.

    Parameters
    ----------
    clock : callable
        Gives seconds; ``time.process_time`` counts the process' own, whatever else the machine does.

    Examples
    --------
    >>> stages = Stages()
    >>> with stages("project"):
    ...     pass
    >>> list(stages)
    ['project']
    """

    def __init__(self, clock: Callable[[], float] = perf_counter):
        super().__init__()
        self._clock = clock

    @contextmanager
    def __call__(self, name: str):
        """Add the time of a block to a stage."""
        start = self._clock()
        try:
            yield
        finally:
            self[name] = self.get(name, 0.0) + self._clock() - start


class SideCodec:
    """Transform, bit plan and quantiser of one side ("k" or "v") of one group of layers.

    Parameters
    ----------
    artefact : Artefact
    group : int
    side : {"k", "v"}
    mode : {"dynamic", "static"}
    ratio : float
        16-bit numbers to coded bits, parameters included.

    Attributes
    ----------
    budget_bits : float
        Per token.
    coder : RowCoder
        Its ``bits`` are at most the budget.
    expected_squared_error, expected_energy : float
        Of a row, on the calibration rows: mean squared residual and mean squared norm.
    """

    def __init__(self, artefact: Artefact, group: int, side: str, mode: str, ratio: float):
        self.artefact, self.group, self.side = artefact, group, side
        self.slices = artefact.layout.groups[group].slices(side)
        self.width = artefact.layout.groups[group].width(side)
        self.budget_bits = RAW_BITS_PER_NUMBER * self.width / ratio
        calibration = artefact.side(group, side)
        self.mean = calibration.mean
        plan = calibration.tables[mode].plan(self.budget_bits)
        if not plan:
            raise ValueError(f"{side}_ratio={ratio:g} leaves no bits for any group of coordinates; use a smaller ratio")
        self.coder = RowCoder(plan, mode, calibration.steps)
        self.expected_energy = calibration.energy
        self.expected_squared_error = calibration.expected_squared_error(mode, self.budget_bits)

    def encode(
        self, states_of: Callable[[LayerSlice], Tensor], stages: Stages
    ) -> tuple[list[CodedRun], Tensor, Tensor]:
        """Code n tokens.

        Returns
        -------
        coded : list of CodedRun
            On the CPU.
        residual : Tensor, shape (n,)
            Squared residual of each token's row, in units of the calibrated one.
        relative_residual : Tensor, shape (n,)
            The same after both are divided by their row's energy: attention sinks have small rows that are coded badly.

        Raises
        ------
        CodecError
            If states are not finite.
        """
        with stages("project"):
            coordinates, centred_energy, energy = self.project(states_of)
        if not bool(torch.isfinite(energy).all()):
            raise CodecError("the cache holds NaN or infinite values, or too large ones, and cannot be coded")
        with stages("quantise"):
            coded = [run.to("cpu") for run in self.coder.quantise(coordinates)]
            error = (self.coder.dequantise(coded) - coordinates.cpu()).square().sum(1)
            # With an orthonormal basis the rest of a row is what its coordinates do not hold.
            residual = error + (centred_energy - coordinates.square().sum(1)).clamp_min(0).cpu()
            tiny = torch.finfo(torch.float32).tiny
            residual = residual / max(self.expected_squared_error + _NEGLIGIBLE * self.expected_energy, tiny)
        return coded, residual, residual * self.expected_energy / energy.cpu().clamp_min(tiny)

    def project(self, states_of: Callable[[LayerSlice], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Coordinates (n, width of the plan), and the squared norms (n,) of the rows about the mean and about zero.

        Parameters
        ----------
        states_of : callable
            Gives the states (H, n, d) of a layer, keys without RoPE, float32. Layers are asked for one after the other,
            so the whole row is never in memory.
        """
        coordinates = None
        for part in self.slices:
            rows = states_to_rows(states_of(part))
            if coordinates is None:
                coordinates = rows.new_zeros(len(rows), self.coder.width)
                centred_energy, energy = rows.new_zeros(len(rows)), rows.new_zeros(len(rows))
            centred = rows - self.mean[part.rows].to(rows.device)
            centred_energy += centred.square().sum(1)
            energy += rows.square().sum(1)
            coordinates.addmm_(centred, self._basis(part.rows, rows.device))
        return coordinates, centred_energy, energy

    def reconstruct(self, coordinates: Tensor, part: LayerSlice) -> Tensor:
        """States (H, n, d) of one layer, keys without RoPE, from coordinates (n, width of the plan)."""
        mean = self.mean[part.rows].to(coordinates.device)
        rows = torch.addmm(mean, coordinates, self._basis(part.rows, coordinates.device).T)
        return rows_to_states(rows, part.n_heads)

    def basis_and_mean(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The whole basis (p, width of the plan) and mean (p,) in float32 on a device."""
        return self._basis(slice(0, self.width), device), self.mean.to(device)

    def _basis(self, rows: slice, device: torch.device) -> Tensor:
        return self.artefact.basis(self.group, self.side, rows, self.coder.width).to(device, torch.float32)


def find_outliers(score: Tensor, factor: float, allowed: int) -> Tensor:
    """Tokens worth keeping as they are: squared scores (n,) above ``factor ** 2``, the largest if too many."""
    is_outlier = score > factor**2
    if int(is_outlier.sum()) > max(0, allowed):
        worst = score.topk(max(0, allowed)).indices
        is_outlier = torch.zeros_like(is_outlier).index_fill(0, worst, True)
    return is_outlier
