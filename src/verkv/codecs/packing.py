"""Codes of 1 to 8 bits as bytes, and coded rows in the two layouts: `store` by component, `fetch` by token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.codecs.errors import CorruptFileError
from verkv.codecs.quantiser import (
    Run,
    dequantise_dynamic,
    dequantise_static,
    plan_bits,
    plan_width,
    quantise_dynamic,
    quantise_static,
    to_half,
)

_CODES_PER_WORD = 8  # eight codes of b bits fill b bytes


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes along the last axis, the first in the lowest bits.

    Parameters
    ----------
    codes : Tensor, shape (..., n), uint8
        n a multiple of 8, values below 2**bits.
    bits : int
        1 .. 8.

    Returns
    -------
    Tensor, shape (..., n * bits / 8), uint8

    Examples
    --------
    >>> import torch
    >>> pack_codes(torch.tensor([1, 0, 1, 1, 0, 0, 0, 1], dtype=torch.uint8), bits=1)
    tensor([141], dtype=torch.uint8)
    """
    if bits == 8:
        return codes.contiguous()
    words = codes.unflatten(-1, (-1, _CODES_PER_WORD)).to(torch.int64)
    packed = words[..., 0].clone()
    for place in range(1, _CODES_PER_WORD):
        packed |= words[..., place] << (bits * place)
    return packed[..., None].view(torch.uint8)[..., :bits].flatten(-2)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Inverse of :func:`pack_codes`; (..., n * bits / 8) -> (..., n)."""
    if bits == 8:
        return packed
    groups = packed.unflatten(-1, (-1, bits))
    filled = torch.zeros(*groups.shape[:-1], 8, dtype=torch.uint8, device=packed.device)
    filled[..., :bits] = groups
    words = filled.view(torch.int64)  # (..., n / 8, 1)
    codes = torch.empty(*groups.shape[:-1], _CODES_PER_WORD, dtype=torch.uint8, device=packed.device)
    for place in range(_CODES_PER_WORD):
        codes[..., place] = ((words[..., 0] >> (bits * place)) & (2**bits - 1)).to(torch.uint8)
    return codes.flatten(-2)


@dataclass(frozen=True)
class CodedRun:
    """What one run of a plan holds for n tokens: codes (n, g) uint8 with shift and scale (n,), or float16 (n, g)."""

    values: Tensor
    shift: Tensor | None = None
    scale: Tensor | None = None

    def select(self, tokens: Tensor) -> "CodedRun":
        """Some of the tokens."""
        return self._map(lambda tensor: tensor[tokens])

    def to(self, device: torch.device | str) -> "CodedRun":
        """On a device."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, function) -> "CodedRun":
        return CodedRun(*(None if t is None else function(t) for t in (self.values, self.shift, self.scale)))


class RowCoder:
    """Quantises coordinates (n, r) under a plan, and writes and reads them as bytes.

    Parameters
    ----------
    plan : tuple of Run
    mode : {"dynamic", "static"}
    steps : Tensor, shape (9, r)
        Used in static mode.
    """

    def __init__(self, plan: tuple[Run, ...], mode: str, steps: Tensor):
        self.plan, self.mode, self.steps = plan, mode, steps
        self.bits = plan_bits(plan, mode)
        self.row_bytes = self.bits // 8
        self.width = plan_width(plan)
        self._with_parameters = [mode == "dynamic" and not run.is_raw for run in plan]

    # --- coordinates <-> codes --------------------------------------------------------------------------------------

    def quantise(self, coordinates: Tensor) -> list[CodedRun]:
        """Codes of coordinates (n, at least :attr:`width`), one item per run."""
        coded = []
        for run in self.plan:
            values = coordinates[:, run.start : run.stop]
            if run.is_raw:
                coded.append(CodedRun(to_half(values)))
            elif self.mode == "dynamic":
                coded.append(CodedRun(*quantise_dynamic(values, run.bits)))
            else:
                coded.append(CodedRun(quantise_static(values, self._step(run, values.device), run.bits)))
        return coded

    def dequantise(self, coded: list[CodedRun]) -> Tensor:
        """Coordinates (n, width), float32; dropped ones are 0."""
        first = coded[0].values
        coordinates = torch.zeros(len(first), self.width, device=first.device)
        for run, item in zip(self.plan, coded, strict=True):
            target = coordinates[:, run.start : run.stop]
            if run.is_raw:
                target.copy_(item.values)
            elif self.mode == "dynamic":
                target.copy_(dequantise_dynamic(item.values, item.shift, item.scale))
            else:
                target.copy_(dequantise_static(item.values, self._step(run, target.device), run.bits))
        return coordinates

    def _step(self, run: Run, device: torch.device) -> Tensor:
        return self.steps[run.bits, run.start : run.stop].to(device)

    # --- codes <-> bytes --------------------------------------------------------------------------------------------

    def write(self, coded: list[CodedRun], layout: str) -> Tensor:
        """Bytes of n tokens, (n * row_bytes,): exactly the planned bits in either layout."""
        return self._write_by_component(coded) if layout == "store" else self.write_rows(coded).flatten()

    def read(self, data: Tensor, n_tokens: int, layout: str) -> list[CodedRun]:
        """Inverse of :meth:`write`.

        Raises
        ------
        CorruptFileError
            If the bytes are not those of so many tokens.
        """
        if len(data) != n_tokens * self.row_bytes:
            raise CorruptFileError(
                f"coded rows of {n_tokens} tokens take {n_tokens * self.row_bytes} bytes, {len(data)} are there"
            )
        if layout == "store":
            return self._read_by_component(data, n_tokens)
        return self.read_rows(data.view(n_tokens, self.row_bytes))

    def write_rows(self, coded: list[CodedRun]) -> Tensor:
        """The `fetch` layout, (n, row_bytes): parameters of all runs, then their codes."""
        parameters = [
            _as_bytes(torch.stack([item.shift, item.scale], dim=1))
            for item, has in zip(coded, self._with_parameters, strict=True)
            if has
        ]
        codes = [
            _as_bytes(item.values) if run.is_raw else pack_codes(item.values, run.bits)
            for run, item in zip(self.plan, coded, strict=True)
        ]
        return torch.cat(parameters + codes, dim=1)

    def read_rows(self, rows: Tensor) -> list[CodedRun]:
        """Inverse of :meth:`write_rows` for any rows of it."""
        n_parameters = sum(self._with_parameters)
        parameters = rows[:, : 4 * n_parameters].flatten().view(torch.float16).view(len(rows), n_parameters, 2)
        at, coded, seen = 4 * n_parameters, [], 0
        for run, has in zip(self.plan, self._with_parameters, strict=True):
            n_bytes = run.size * run.bits // 8
            part = rows[:, at : at + n_bytes].contiguous()
            at += n_bytes
            if run.is_raw:
                coded.append(CodedRun(part.flatten().view(torch.float16).view(len(rows), run.size)))
                continue
            shift_scale = (parameters[:, seen, 0], parameters[:, seen, 1]) if has else ()
            seen += has
            coded.append(CodedRun(unpack_codes(part, run.bits), *shift_scale))
        return coded

    def _write_by_component(self, coded: list[CodedRun]) -> Tensor:
        """The `store` layout: neighbours in time side by side, which is what DEFLATE gains most from."""
        shifts = [item.shift for item, has in zip(coded, self._with_parameters, strict=True) if has]
        scales = [item.scale for item, has in zip(coded, self._with_parameters, strict=True) if has]
        parts = [_byte_planes(torch.stack(shifts + scales))] if shifts else []
        for run, item in zip(self.plan, coded, strict=True):
            by_component = item.values.T.contiguous()  # (g, n)
            parts.append(_byte_planes(by_component) if run.is_raw else pack_codes(by_component.flatten(), run.bits))
        return torch.cat(parts)

    def _read_by_component(self, data: Tensor, n_tokens: int) -> list[CodedRun]:
        n_parameters = sum(self._with_parameters)
        at = 4 * n_parameters * n_tokens
        parameters = _from_byte_planes(data[:at], 2 * n_parameters, n_tokens)
        coded, seen = [], 0
        for run, has in zip(self.plan, self._with_parameters, strict=True):
            n_bytes = n_tokens * run.size * run.bits // 8
            part = data[at : at + n_bytes]
            at += n_bytes
            if run.is_raw:
                coded.append(CodedRun(_from_byte_planes(part, run.size, n_tokens).T))
                continue
            shift_scale = (parameters[seen], parameters[n_parameters + seen]) if has else ()
            seen += has
            coded.append(CodedRun(unpack_codes(part, run.bits).view(run.size, n_tokens).T, *shift_scale))
        return coded


def _as_bytes(halves: Tensor) -> Tensor:
    """float16 (n, g) as bytes (n, 2 g). Flat before it is viewed: views of other types want a last stride of 1."""
    return halves.reshape(-1).view(torch.uint8).view(len(halves), -1)


def _byte_planes(halves: Tensor) -> Tensor:
    """float16 (m, n) as all low bytes of a row, then all its high bytes."""
    return halves.reshape(-1).view(torch.uint8).view(*halves.shape, 2).transpose(1, 2).reshape(-1)


def _from_byte_planes(data: Tensor, m: int, n: int) -> Tensor:
    planes = data.view(m, 2, n)
    return torch.stack([planes[:, 0], planes[:, 1]], dim=-1).flatten().view(torch.float16).view(m, n)
