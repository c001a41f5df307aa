"""Tensors as sections of a container: named in the header with their type and shape, stored as they are."""

import math

import torch
from torch import Tensor

from verkv.codecs.container import TENSOR, Container, MemorySections, Section, SectionKey
from verkv.codecs.errors import CorruptFileError

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type in headers."""
    return str(dtype).removeprefix("torch.")


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy where it is contiguous and on the CPU."""
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def tensor_from_bytes(data: bytes | memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Inverse of :func:`tensor_bytes`, in memory of its own."""
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if len(data) else torch.empty(shape, dtype=dtype)


class TensorWriter:
    """Collects tensors of one segment.

    Parameters
    ----------
    segment, group : int
        Under which the tensors are numbered.

    Attributes
    ----------
    table : dict of str to [number, dtype, shape]
        For the segment's header.
    sections : list of (SectionKey, Section)
    """

    def __init__(self, segment: int = 0, group: int = 0):
        self.segment, self.group = segment, group
        self.table: dict[str, list] = {}
        self.sections: list[tuple[SectionKey, Section]] = []

    def put(self, name: str, tensor: Tensor) -> None:
        """Add a tensor; bytes are referred to, not copied, until they are written."""
        assert name not in self.table, name
        key = SectionKey(TENSOR, self.segment, self.group, len(self.table))
        self.table[name] = [len(self.table), dtype_name(tensor.dtype), list(tensor.shape)]
        data = tensor_bytes(tensor)
        self.sections.append((key, Section(data, len(data))))

    def put_all(self, prefix: str, tensors: dict[str, Tensor]) -> None:
        """Add several under ``prefix.name``."""
        for name, tensor in tensors.items():
            self.put(f"{prefix}.{name}", tensor)


class TensorReader:
    """Reads what a :class:`TensorWriter` wrote.

    Parameters
    ----------
    table : dict
        From the segment's header.
    sections : Container or MemorySections
    segment, group : int
        Under which the tensors are numbered.
    """

    def __init__(self, table: dict, sections: MemorySections | Container, segment: int = 0, group: int = 0):
        self.table, self.sections, self.segment, self.group = table, sections, segment, group

    def get(self, name: str) -> Tensor:
        """One tensor.

        Raises
        ------
        CorruptFileError
            If it is missing, or not of the size that the header says.
        """
        try:
            number, dtype_name, shape = self.table[name]
            dtype, shape = DTYPES[dtype_name], tuple(int(n) for n in shape)
            length = math.prod(shape) * dtype.itemsize
            key = SectionKey(TENSOR, self.segment, self.group, int(number))
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptFileError(f"the header has no valid entry for tensor {name!r} ({error!r})") from None
        if min(shape, default=0) < 0:
            raise CorruptFileError(f"tensor {name!r} has a negative size")
        return tensor_from_bytes(self.sections.read(key, length), dtype, shape)

    def get_all(self, prefix: str) -> dict[str, Tensor]:
        """All tensors under ``prefix.name``, by name."""
        start = prefix + "."
        return {name.removeprefix(start): self.get(name) for name in self.table if name.startswith(start)}
