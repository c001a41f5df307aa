"""The calibration of a model in one safetensors file: bases, quantiser steps and the tables of best bit plans."""

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from verkv.codecs.bit_allocation import AllocationTable, allocation_kinds
from verkv.codecs.errors import CorruptFileError, FormatError, MismatchError, VersionError
from verkv.codecs.layout import SIDES, CacheLayout
from verkv.codecs.model_binding import config_hash, weights_hash
from verkv.codecs.quantiser import BLOCK, MODES, PARAMETER_BITS
from verkv.rotary import Rotary

FORMAT = "verkv.kvtc"
VERSION = 1
INV_FREQ = "rope.inv_freq"


@dataclass(frozen=True)
class SideCalibration:
    """One side of one group: what its rows need but the basis, which is read slice by slice.

    Attributes
    ----------
    mean : Tensor, shape (p,), float32
    steps : Tensor, shape (9, r), float32
        Static mode, row b for b bits.
    tail : Tensor, shape (p,), float32
        Mean squared residual of every feature outside the basis.
    tables : dict of str to AllocationTable
        By mode.
    energy : float
        Mean squared norm of a row.
    """

    mean: Tensor
    steps: Tensor
    tail: Tensor
    tables: dict[str, AllocationTable]
    energy: float

    def expected_squared_error(self, mode: str, budget_bits: float) -> float:
        """Of a row at a budget, on the calibration rows."""
        return self.tables[mode].expected_error(budget_bits) + float(self.tail.double().sum())


class Artefact:
    """A calibration opened for reading. Tensors are mapped from the file and read when they are used.

    Parameters
    ----------
    path : path-like
        A file that :func:`save_artefact` wrote.

    Attributes
    ----------
    layout : CacheLayout
    rotary : Rotary
    metadata : dict
        Everything that is not a tensor: model, hashes, calibration data and settings, held-out errors.

    Raises
    ------
    FormatError
        If the file is no calibration.
    VersionError
        If it was written by a newer version.
    CorruptFileError
        If it is truncated or contradicts itself.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        if not self.path.is_file():
            raise FormatError(f"there is no calibration at {self.path}; make one with `verkv kvtc calibrate`")
        self._file = _open(self.path)
        self._names = frozenset(self._file.keys())
        self._sides: dict[tuple[int, str], SideCalibration] = {}
        self.metadata = _metadata(self._file, self.path)
        try:
            self.layout = CacheLayout.from_json(self.metadata["layout"])
            self._check_shapes()
            self.rotary = Rotary(self._tensor(INV_FREQ))
        except CorruptFileError:
            raise
        except (KeyError, TypeError, ValueError, IndexError, SafetensorError) as error:
            raise CorruptFileError(f"the calibration {self.path} contradicts itself: {error}") from None

    @property
    def content_hash(self) -> str:
        """sha256 over all tensors, by which stored caches refer to the calibration."""
        return self.metadata["content_sha256"]

    @property
    def min_ratio(self) -> float:
        """Smallest compression ratio that its tables serve."""
        return float(self.metadata["min_ratio"])

    def side(self, group: int, side: str) -> SideCalibration:
        """Mean, steps and tables of one side ("k" or "v") of a group; read once."""
        if (group, side) not in self._sides:
            self._sides[group, side] = self._read_side(f"g{group}.{side}")
        return self._sides[group, side]

    def _read_side(self, name: str) -> SideCalibration:
        tables = {}
        for mode in MODES:
            tables[mode] = AllocationTable(
                self._tensor(f"{name}.table.{mode}").numpy(),
                allocation_kinds(mode),
                self._tensor(f"{name}.error.{mode}").numpy(),
                PARAMETER_BITS if mode == "dynamic" else 0,
            )
        mean, tail, variance = (self._tensor(f"{name}.{part}") for part in ("mean", "tail", "var"))
        energy = float(mean.double().square().sum() + variance.double().sum() + tail.double().sum())
        return SideCalibration(mean, self._tensor(f"{name}.step"), tail, tables, energy)

    def basis(self, group: int, side: str, rows: slice, width: int) -> Tensor:
        """Rows (features) of a basis, first ``width`` columns, as stored; nothing else of it is read.

        Returns
        -------
        Tensor, shape (rows, width), bfloat16 or float32
        """
        return self._file.get_slice(f"g{group}.{side}.basis")[rows.start : rows.stop, :width]

    def check_config(self, config) -> None:
        """Raise MismatchError if the calibration is of a model with another config."""
        if config_hash(config) != self.metadata["config_sha256"]:
            raise MismatchError(
                f"the calibration {self.path.name} was made for {self.metadata.get('model')!r}, whose layers, heads or "
                f"RoPE differ from this model's; calibrate this model with `verkv kvtc calibrate`"
            )

    def check_model(self, model) -> None:
        """Raise MismatchError if the calibration is of a model with another config or other weights."""
        self.check_config(model.config)
        if weights_hash(model) != self.metadata["weights_sha256"]:
            raise MismatchError(
                f"the calibration {self.path.name} was made for {self.metadata.get('model')!r}, which has other "
                f"weights than this model; calibrate this model with `verkv kvtc calibrate`"
            )

    def verify(self) -> None:
        """Read everything and compare with the stored hash; CorruptFileError if it differs."""
        if _content_hash({name: self._tensor(name) for name in self._names}) != self.content_hash:
            raise CorruptFileError(f"the calibration {self.path} is damaged: its tensors do not match their hash")

    def _tensor(self, name: str) -> Tensor:
        try:
            return self._file.get_tensor(name)
        except SafetensorError as error:
            raise CorruptFileError(f"the calibration {self.path} has no readable tensor {name!r}: {error}") from None

    def _check_shapes(self) -> None:
        for g, group in enumerate(self.layout.groups):
            for side in SIDES:
                name, width = f"g{g}.{side}", group.width(side)
                rows, rank = self._file.get_slice(f"{name}.basis").get_shape()
                if rows != width or rank % BLOCK:
                    raise ValueError(f"the basis of {name} is {rows} x {rank}, rows have {width} features")
                expected = {"mean": [width], "tail": [width], "var": [rank], "step": [9, rank]}
                for mode in MODES:
                    n_units = self._file.get_slice(f"{name}.error.{mode}").get_shape()[0]
                    expected[f"table.{mode}"] = [rank // BLOCK + 1, n_units]
                for part, shape in expected.items():
                    if self._file.get_slice(f"{name}.{part}").get_shape() != shape:
                        raise ValueError(f"{name}.{part} is not of shape {shape}")


def save_artefact(path: str | os.PathLike, tensors: dict[str, Tensor], metadata: dict) -> None:
    """Write a calibration in one step: readers see the old file or the new one, never a part.

    Parameters
    ----------
    path : path-like
    tensors : dict of str to Tensor
    metadata : dict
        Of values that JSON can hold; format, version and the tensors' hash are added.
    """
    path = Path(path)
    tensors = {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}
    stored = metadata | {"content_sha256": _content_hash(tensors)}
    strings = {"format": FORMAT, "version": str(VERSION), "kvtc": json.dumps(stored, sort_keys=True)}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata=strings)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _open(path: Path):
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise FormatError(f"{path} is not a readable safetensors file: {error}") from None


def _metadata(file, path: Path) -> dict:
    strings = file.metadata() or {}
    if strings.get("format") != FORMAT:
        raise FormatError(f"{path} is a safetensors file, but no kvtc calibration")
    try:
        version = int(strings["version"])
        metadata = json.loads(strings["kvtc"])
    except (KeyError, ValueError) as error:
        raise CorruptFileError(f"the calibration {path} has unreadable metadata: {error!r}") from None
    if version > VERSION:
        raise VersionError(f"{path} has format version {version}; this library reads up to {VERSION}: update verkv")
    return metadata


def _content_hash(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()
