"""The two places a sealed context lives: all rows in host memory, a ragged sample of them on the device.

A context grows by segments. Nothing that was kept of the earlier ones is changed or copied on the host.
"""

import contextlib
import dataclasses
import mmap
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.estimators.thinning import thin_levels

RESIDENT_BIT = 0x80
LEVEL_MASK = 0x7F
_ROW_FIELDS = ("keys", "values", "codes")
PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU

_said_pageable = False

# A KV head of one context of the batch is a "unit": N = contexts * Hkv of them, in (context, head) order.


@dataclass(frozen=True)
class Segment:
    """A stretch of tokens that was sealed together.

    Attributes
    ----------
    n_tokens : int
    n_rows : Tensor, shape (N,), int64, or None
        Resident rows of each unit. None for the first segment: all that the others leave.
    counts : Tensor, shape (N, 256), int64, on the CPU, or None
        Its tokens by :func:`~verkv.estimators.thinning.count_levels`, where the sample may be thinned.
    """

    n_tokens: int
    n_rows: Tensor | None = None
    counts: Tensor | None = None

    def with_counts_on_cpu(self) -> "Segment":
        """Where the counts belong; a file's tensors all come to the device."""
        return self if self.counts is None else dataclasses.replace(self, counts=self.counts.cpu())

    def select(self, units: Tensor) -> "Segment":
        """Reindex the units (a copy)."""
        n_rows = None if self.n_rows is None else self.n_rows[units]
        return Segment(self.n_tokens, n_rows, None if self.counts is None else self.counts[units.to("cpu")])


@dataclass(frozen=True)
class HostTier:
    """The whole context's keys and values in host memory, (B, Hkv, T, d) each, pinned where there is a GPU."""

    keys: Tensor
    values: Tensor
    is_coded = False  # what is read are the very rows

    @classmethod
    def copy_from(cls, keys: Tensor, values: Tensor) -> "HostTier":
        """Copy device tensors to the host, once: allocated pinned and then filled."""
        return cls(*(_to_host(tensor, pin=tensor.is_cuda) for tensor in (keys, values)))

    def read_keys(self, units: Tensor, positions: Tensor, device: torch.device) -> Tensor:
        """Key rows (M, d) of M (unit, position) pairs, moved to the device."""
        return _read_rows(self.keys, units, positions, device)

    def read_values(self, units: Tensor, positions: Tensor, device: torch.device) -> Tensor:
        """Value rows (M, d) of M (unit, position) pairs, moved to the device."""
        return _read_rows(self.values, units, positions, device)

    @property
    def key_row_bytes(self) -> int:
        """Bytes of one key row."""
        return self.keys.shape[-1] * self.keys.element_size()

    @property
    def row_bytes(self) -> int:
        """Bytes of one key and one value row."""
        return self.key_row_bytes + self.values.shape[-1] * self.values.element_size()

    def nbytes(self, side: str) -> int:
        """Host bytes of the keys ("k") or the values ("v")."""
        return (self.keys if side == "k" else self.values).nbytes

    def select(self, indices: Tensor) -> "HostTier":
        """Reindex the batch (a copy, pinned where this is)."""
        indices = indices.to("cpu")
        return HostTier(*(_selected(tensor, indices) for tensor in (self.keys, self.values)))

    def __deepcopy__(self, memo: dict) -> "HostTier":
        """Pinned where this is; the copies of tensors alone would not be."""
        for tensor in (self.keys, self.values):
            memo[id(tensor)] = _to_host(tensor, pin=tensor.is_pinned())  # for a sketch that refers to it, too
        return HostTier(memo[id(self.keys)], memo[id(self.values)])

    def __reduce__(self) -> tuple:
        """Unpickled, it is pinned where this is, if there is a GPU."""
        return _unpickled, tuple((tensor, tensor.is_pinned()) for tensor in (self.keys, self.values))


@dataclass(frozen=True)
class HostParts:
    """A context that grew: a host tier for each of its segments, one behind the other.

    Attributes
    ----------
    parts : tuple of HostTier, or of what offers the same
    lengths : tuple of int
        Tokens of each.
    """

    parts: tuple
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, host, n_tokens: int) -> "HostParts":
        """A host tier of ``n_tokens`` as parts; those of a context that has grown before as they are."""
        return host if isinstance(host, HostParts) else cls((host,), (n_tokens,))

    def append(self, host, n_tokens: int) -> "HostParts":
        """With one more part; nothing is copied."""
        return HostParts((*self.parts, host), (*self.lengths, n_tokens))

    def read_keys(self, units: Tensor, positions: Tensor, device: torch.device) -> Tensor:
        """Key rows (M, d) of M (unit, position) pairs, moved to the device."""
        return self._read("read_keys", units, positions, device)

    def read_values(self, units: Tensor, positions: Tensor, device: torch.device) -> Tensor:
        """Value rows (M, d) of M (unit, position) pairs, moved to the device."""
        return self._read("read_values", units, positions, device)

    @property
    def is_coded(self) -> bool:
        """Whether a part holds its rows coded with loss."""
        return any(part.is_coded for part in self.parts)

    @property
    def keys(self) -> Tensor:
        """All keys, (C, Hkv, T, d), put together: for unsealing, audits and files only."""
        return torch.cat([part.keys for part in self.parts], 2)

    @property
    def values(self) -> Tensor:
        """All values; see :attr:`keys`."""
        return torch.cat([part.values for part in self.parts], 2)

    @property
    def key_row_bytes(self) -> int:
        """Bytes of one key row."""
        return self.parts[0].key_row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one key and one value row."""
        return self.parts[0].row_bytes

    def select(self, indices: Tensor) -> "HostParts":
        """Reindex the batch (a copy)."""
        return HostParts(tuple(part.select(indices) for part in self.parts), self.lengths)

    def _read(self, method: str, units: Tensor, positions: Tensor, device: torch.device) -> Tensor:
        units, positions = units.to("cpu"), positions.to("cpu")
        ends = torch.tensor(self.lengths, device="cpu").cumsum(0)
        of_part = torch.bucketize(positions, ends, right=True)
        order = of_part.argsort(stable=True)
        pieces = []
        for number, part in enumerate(self.parts):
            chosen = order[of_part[order] == number]
            start = int(ends[number]) - self.lengths[number]
            pieces.append(getattr(part, method)(units[chosen], positions[chosen] - start, device))
        return torch.cat(pieces)[order.argsort().to(device)]


def host_parts(host) -> list[tuple[int, "HostTier"]]:
    """First position and host tier of every segment of a context."""
    if not isinstance(host, HostParts):
        return [(0, host)]
    starts = [sum(host.lengths[:number]) for number in range(len(host.parts))]
    return list(zip(starts, host.parts, strict=True))


@dataclass(frozen=True)
class ResidentRows:
    """Sinks, local window and sample of all units, ragged and without padding.

    Attributes
    ----------
    keys, values : Tensor, shape (M, d)
        Rows in (unit, position) order.
    codes : Tensor, shape (M,), uint8
        Resident bit and level of r = 2 ** (-level / 8) of each row.
    offsets : Tensor, shape (N + 1,), int64
        Rows of unit u are offsets[u] .. offsets[u + 1].
    surplus : Tensor, shape (M,), uint8, or None
        Of :func:`~verkv.estimators.thinning.surplus_levels`, where the sample may be thinned.
    """

    keys: Tensor
    values: Tensor
    codes: Tensor
    offsets: Tensor
    surplus: Tensor | None = None

    @classmethod
    def gather(cls, keys: Tensor, values: Tensor, codes: Tensor, surplus: Tensor | None = None) -> "ResidentRows":
        """Pick the resident rows of keys and values (B, Hkv, T, d) by their codes (B, Hkv, T)."""
        codes = codes.flatten(0, 1)
        resident = (codes & RESIDENT_BIT) != 0
        units, positions = resident.nonzero(as_tuple=True)
        offsets = torch.zeros(len(codes) + 1, dtype=torch.int64, device=codes.device)
        offsets[1:] = resident.sum(-1).cumsum(0)
        return cls(
            keys.flatten(0, 1)[units, positions],
            values.flatten(0, 1)[units, positions],
            codes[units, positions],
            offsets,
            None if surplus is None else surplus.flatten(0, 1)[units, positions],
        )

    def padded_index(self) -> tuple[Tensor, Tensor]:
        """Row numbers padded to the fullest unit, (N, S), and which of them are rows."""
        counts = self.offsets.diff()
        slots = torch.arange(int(counts.max()), device=self.offsets.device)  # S is 0 if nothing is resident
        is_row = slots < counts[:, None]
        index = (self.offsets[:-1, None] + slots).clamp_max(max(0, len(self.codes) - 1))
        return index, is_row

    def first(self, n_rows: int) -> Tensor:
        """Keys of each unit's first rows, (N, n_rows, d); there must be as many."""
        return self.keys[self.offsets[:-1, None] + torch.arange(n_rows, device=self.offsets.device)]

    def append(self, later: "ResidentRows") -> "ResidentRows":
        """With the rows of later tokens behind each unit's own."""
        counts = torch.cat([self.offsets.diff(), later.offsets.diff()])
        units = torch.arange(len(self.offsets) - 1, device=counts.device).repeat(2).repeat_interleave(counts)
        order = units.argsort(stable=True)
        both = {name: torch.cat([getattr(rows, name) for rows in (self, later)])[order] for name in self._fields()}
        return ResidentRows(offsets=self.offsets + later.offsets, **both)

    def thin(self, steps: Tensor, kept: Tensor) -> "ResidentRows":
        """The rows that are ``kept`` (M,), with the probabilities of each unit lowered by ``steps`` (N,) levels."""
        steps = steps.to(self.codes.device).repeat_interleave(self.offsets.diff())
        levels, surplus = thin_levels(self.codes & LEVEL_MASK, self.surplus, steps)
        n_before = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.cumsum(0)])
        return ResidentRows(
            self.keys[kept],
            self.values[kept],
            (levels | RESIDENT_BIT)[kept],
            n_before[self.offsets],
            surplus[kept],
        )

    def head(self, n_last: Tensor) -> "ResidentRows":
        """Without the last ``n_last`` (N,) rows of each unit (a copy)."""
        index, is_row = self.padded_index()
        slots = torch.arange(index.shape[1], device=index.device)
        kept = index[is_row & (slots < (self.offsets.diff() - n_last)[:, None])]
        offsets = torch.zeros_like(self.offsets)
        offsets[1:] = (self.offsets.diff() - n_last).cumsum(0)
        return self._take(kept, offsets)

    def select(self, indices: Tensor, n_kv_heads: int) -> "ResidentRows":
        """Reindex the batch (a copy): the rows of contexts ``indices``."""
        units = (indices[:, None] * n_kv_heads + torch.arange(n_kv_heads, device=indices.device)).flatten()
        rows = torch.cat([torch.arange(self.offsets[u], self.offsets[u + 1], device=units.device) for u in units])
        offsets = torch.cat([torch.zeros_like(units[:1]), self.offsets.diff()[units].cumsum(0)])
        return self._take(rows, offsets)

    def _take(self, rows: Tensor, offsets: Tensor) -> "ResidentRows":
        return ResidentRows(offsets=offsets, **{name: getattr(self, name)[rows] for name in self._fields()})

    def _fields(self) -> tuple[str, ...]:
        """What there is of every row."""
        return _ROW_FIELDS if self.surplus is None else (*_ROW_FIELDS, "surplus")


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Rows (M, d) at an index (N, S) of :meth:`ResidentRows.padded_index`, (N, S, d)."""
    return rows.index_select(0, index.flatten()).unflatten(0, index.shape)


def pad_rows(rows: Tensor, units: Tensor, n_units: int) -> tuple[Tensor, Tensor]:
    """Spread ragged rows (M, d), sorted by unit, over (N, S, d) with zeros behind, and say which slots are rows."""
    counts = torch.bincount(units, minlength=n_units)
    slots = torch.arange(len(units), device=units.device) - (counts.cumsum(0) - counts)[units]
    width = max(1, int(counts.max()) if len(units) else 0)
    padded = rows.new_zeros(n_units * width, rows.shape[-1]).index_copy_(0, units * width + slots, rows)
    return padded.unflatten(0, (n_units, width)), torch.arange(width, device=units.device) < counts[:, None]


class _LockedPages(mmap.mmap):
    """Anonymous memory that a GPU reads directly, until the last tensor on it is gone."""

    _cudart = None

    def lock(self, address: int) -> None:
        """Register the pages with CUDA; RuntimeError if it refuses."""
        cudart = torch.cuda.cudart()
        error = cudart.cudaHostRegister(address, len(self), PORTABLE)
        if int(error) != 0:
            with contextlib.suppress(Exception):  # CUDA reports it once more, at the next kernel: let it be this one
                torch.ones(1, device="cuda")
            raise RuntimeError(cudart.cudaGetErrorString(error))
        self._cudart, self._address = cudart, address

    def __del__(self):
        if self._cudart is not None:
            self._cudart.cudaHostUnregister(self._address)


def _to_host(tensor: Tensor, pin: bool) -> Tensor:
    return _host_buffer(tensor.shape, tensor.dtype, pin).copy_(tensor)


def _selected(tensor: Tensor, indices: Tensor) -> Tensor:
    shape = torch.Size((len(indices), *tensor.shape[1:]))
    return torch.index_select(tensor, 0, indices, out=_host_buffer(shape, tensor.dtype, pin=tensor.is_pinned()))


def _unpickled(*tensors: tuple[Tensor, bool]) -> HostTier:
    has_gpu = torch.cuda.is_available()
    return HostTier(*(_to_host(tensor, pin=True) if pinned and has_gpu else tensor for tensor, pinned in tensors))


def _host_buffer(shape: torch.Size, dtype: torch.dtype, pin: bool) -> Tensor:
    """Host memory, pinned if that is wanted and the system grants it; otherwise says so, once per process."""
    global _said_pageable
    if pin and shape.numel() > 0:
        try:
            return _pinned(shape, dtype)
        except (OSError, RuntimeError) as error:
            if not _said_pageable:
                cause = str(error).partition("\n")[0]
                warnings.warn(
                    f"pinned host memory was refused ({cause}): contexts are kept in pageable memory, from which "
                    f"fetching is slower. Raise the limit of locked memory (ulimit -l), or free host memory",
                    stacklevel=2,
                )
            _said_pageable = True
    return torch.empty(shape, dtype=dtype, device="cpu")


def _pinned(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Pinned memory of the size asked for, in whole pages.

    Not by ``pin_memory=True``: torch's allocator of pinned memory rounds sizes up to a power of two, which nearly
    doubles a context just above one, and keeps the memory when the context is gone.
    """
    pages = _LockedPages(-1, shape.numel() * dtype.itemsize)
    buffer = torch.frombuffer(pages, dtype=dtype, count=shape.numel()).view(shape)
    pages.lock(buffer.data_ptr())
    return buffer


def _read_rows(tier: Tensor, units: Tensor, positions: Tensor, device: torch.device) -> Tensor:
    places = (units * tier.shape[2] + positions).to("cpu")
    return tier.flatten(0, 2).index_select(0, places).to(device)
