"""The file: a self-describing header, a table, and checksummed sections that can be read one by one.

All numbers are little-endian. In order:

* prefix, 40 bytes: magic ``VKVC``, version u16, flags u16 (0), header length u64, number of sections u64, file length
  u64, CRC-32 of everything before the first section but itself u32, zero u32;
* header: UTF-8 JSON with sorted keys;
* table: per section kind u16, segment u16, group u32, block u32, side u8, compression u8, zero u16, offset u64, stored
  length u64, raw length u64, CRC-32 u32, zero u32;
* sections, each from a multiple of 64 bytes on and filled up with zeros to the next one; the CRC covers the filling.

Every byte of a file is covered by a checksum or compared, so no flipped byte goes unnoticed.
"""

import contextlib
import json
import os
import struct
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from verkv.codecs import lossless
from verkv.codecs.errors import CorruptFileError, FormatError, VersionError

MAGIC = b"VKVC"
VERSION = 1
ALIGNMENT = 64
PREFIX = struct.Struct("<4sHHQQQII")
ENTRY = struct.Struct("<HHIIBBHQQQII")

# Kinds of sections.
POSITIONS, EXACT_INDEX, EXACT, ROWS, TENSOR = 1, 2, 3, 4, 5


class SectionKey(NamedTuple):
    """What a section holds: kind, segment of the context, group (or layer), block of tokens, side 0 (K) or 1 (V)."""

    kind: int
    segment: int = 0
    group: int = 0
    block: int = 0
    side: int = 0


@dataclass(frozen=True)
class Section:
    """Bytes as stored.

    Attributes
    ----------
    data : bytes-like
    raw_length : int
        After decompression.
    stored_as : int
        Of ``lossless.FORMATS``.
    """

    data: bytes | memoryview
    raw_length: int
    stored_as: int = lossless.STORED


class MemorySections:
    """Sections that are in memory, read as those of a file are."""

    def __init__(self, sections: dict[SectionKey, Section] | None = None):
        self._sections = dict(sections or {})

    def __iter__(self) -> Iterable[SectionKey]:
        return iter(self._sections)

    def stored(self, key: SectionKey) -> Section:
        """A section as it is stored."""
        if key not in self._sections:
            raise CorruptFileError(f"section {tuple(key)} is missing")
        return self._sections[key]

    def read(self, key: SectionKey, length: int) -> bytes:
        """A section decompressed, which must be ``length`` bytes."""
        return _inflated(self.stored(key), key, length)

    def stored_length(self, key: SectionKey) -> int:
        """Bytes of a section as it is stored."""
        return len(self.stored(key).data)


class Container:
    """A file opened for reading. The head is checked at once, every section when it is read.

    Parameters
    ----------
    path : path-like

    Attributes
    ----------
    header : dict
    n_bytes : int
        Of the file.

    Raises
    ------
    FormatError
        If the file is something else.
    VersionError
        If it was written by a newer version.
    CorruptFileError
        If it is truncated or damaged.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        if not self.path.is_file():
            raise FormatError(f"there is no file {self.path}")
        self._file = self.path.open("rb")
        try:
            self.n_bytes = os.fstat(self._file.fileno()).st_size
            self.header, self._entries = self._read_head()
            self._unread = set(self._entries)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "Container":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; nothing can be read afterwards."""
        self._file.close()

    def __iter__(self) -> Iterable[SectionKey]:
        return iter(self._entries)

    def stored(self, key: SectionKey) -> Section:
        """A section as it is stored, its checksum compared.

        Raises
        ------
        CorruptFileError
            If it is missing or damaged.
        """
        if key not in self._entries:
            raise CorruptFileError(f"{self.path.name}: section {tuple(key)} is missing")
        offset, length, raw_length, stored_as, checksum = self._entries[key]
        self._file.seek(offset)
        data = self._file.read(_aligned(length))
        if len(data) != _aligned(length) or zlib.crc32(data) != checksum:
            raise CorruptFileError(f"{self.path.name}: section {tuple(key)} is damaged (its checksum differs)")
        self._unread.discard(key)
        return Section(memoryview(data)[:length], raw_length, stored_as)

    def read(self, key: SectionKey, length: int) -> bytes:
        """A section decompressed, which must be ``length`` bytes: the caller knows from the plan."""
        return _inflated(self.stored(key), key, length)

    def stored_length(self, key: SectionKey) -> int:
        """Bytes of a section as it is stored."""
        if key not in self._entries:
            raise CorruptFileError(f"{self.path.name}: section {tuple(key)} is missing")
        return self._entries[key][1]

    def verify(self) -> None:
        """Compare the checksums of all sections; CorruptFileError for the first that differs."""
        for key in self._entries:
            self.stored(key)

    def verify_unread(self) -> None:
        """Compare the checksums of those sections that have not been read yet."""
        for key in sorted(self._unread):
            self.stored(key)

    def _read_head(self) -> tuple[dict, dict[SectionKey, tuple[int, int, int, int, int]]]:
        name = self.path.name
        prefix = self._file.read(PREFIX.size)
        if prefix[: len(MAGIC)] != MAGIC[: len(prefix)] or not prefix:
            raise FormatError(f"{name} is not a stored context (it does not start with {MAGIC.decode()})")
        if len(prefix) < PREFIX.size:
            raise CorruptFileError(f"{name} is truncated: it has {self.n_bytes} bytes")
        _, version, flags, header_length, n_sections, file_length, checksum, zero = PREFIX.unpack(prefix)
        if version > VERSION:
            raise VersionError(f"{name} has format version {version}; this library reads up to {VERSION}: update verkv")
        if version == 0 or flags or zero:
            raise CorruptFileError(f"{name} is damaged: its prefix holds impossible values")
        if file_length != self.n_bytes:
            raise CorruptFileError(f"{name} is truncated or damaged: {self.n_bytes} of {file_length} bytes are there")
        # Lengths are compared with the file before anything of that length is read.
        head_length = PREFIX.size + header_length + n_sections * ENTRY.size
        if _aligned(head_length) > self.n_bytes:
            raise CorruptFileError(f"{name} is damaged: its header would be longer than the file")
        rest = self._file.read(_aligned(head_length) - PREFIX.size)
        if zlib.crc32(rest, zlib.crc32(_prefix(version, header_length, n_sections, file_length, 0))) != checksum:
            raise CorruptFileError(f"{name} is damaged: the checksum of its header differs")
        try:
            header = json.loads(rest[:header_length])
            entries = _parse_table(rest[header_length:], n_sections, _aligned(head_length), self.n_bytes)
        except (ValueError, RecursionError) as error:
            raise CorruptFileError(f"{name} is damaged: {error}") from None
        if not isinstance(header, dict):
            raise CorruptFileError(f"{name} is damaged: its header is no JSON object")
        return header, entries


def write_container(path: str | os.PathLike, header: dict, sections: Iterable[tuple[SectionKey, Section]]) -> int:
    """Write a file in one step: whoever opens it sees the old one or the new one, also after a crash.

    Parameters
    ----------
    path : path-like
    header : dict
        Of values that JSON can hold.
    sections : iterable of (SectionKey, Section)

    Returns
    -------
    int
        Bytes of the file.
    """
    if sys.byteorder != "little":
        raise NotImplementedError("stored contexts are little-endian; this machine is not")
    path, sections = Path(path), list(sections)
    head, length = _head(header, sections)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(head)
            for _, section in sections:
                file.write(section.data)
                file.write(_filling(len(section.data)))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)
    return length


def section_bytes(sections: Container | MemorySections) -> dict[str, int]:
    """Stored bytes by what they hold, without filling."""
    names = {POSITIONS: "positions", EXACT_INDEX: "exact_index", EXACT: "exact_rows", ROWS: "coded_rows"}
    sizes = dict.fromkeys([*names.values(), "tensors"], 0)
    for key in sections:
        sizes[names.get(key.kind, "tensors")] += sections.stored_length(key)
    return sizes


def container_length(header: dict, sections: Iterable[tuple[SectionKey, int]]) -> int:
    """Bytes a file would have, from its header and its sections' stored lengths."""
    lengths = [length for _, length in sections]
    head = PREFIX.size + len(_encoded(header)) + len(lengths) * ENTRY.size
    return _aligned(head) + sum(map(_aligned, lengths))


def _head(header: dict, sections: list[tuple[SectionKey, Section]]) -> tuple[bytes, int]:
    encoded = _encoded(header)
    offset = _aligned(PREFIX.size + len(encoded) + len(sections) * ENTRY.size)
    table = b""
    for key, section in sections:
        length = len(section.data)
        checksum = zlib.crc32(_filling(length), zlib.crc32(section.data))
        table += ENTRY.pack(*key[:4], key.side, section.stored_as, 0, offset, length, section.raw_length, checksum, 0)
        offset += _aligned(length)
    rest = encoded + table
    rest += _filling(PREFIX.size + len(rest))
    checksum = zlib.crc32(rest, zlib.crc32(_prefix(VERSION, len(encoded), len(sections), offset, 0)))
    return _prefix(VERSION, len(encoded), len(sections), offset, checksum) + rest, offset


def _parse_table(data: bytes, n_sections: int, offset: int, n_bytes: int) -> dict:
    """Entries by key. Sections must follow each other without a gap to the file's end, so that none is uncovered."""
    entries = {}
    for number in range(n_sections):
        fields = ENTRY.unpack_from(data, number * ENTRY.size)
        kind, segment, group, block, side, stored_as, zero, at, length, raw_length, checksum, zero2 = fields
        if at != offset or length > n_bytes - offset or zero or zero2:
            raise ValueError(f"entry {number} of its table is impossible")
        offset += _aligned(length)
        entries[SectionKey(kind, segment, group, block, side)] = (at, length, raw_length, stored_as, checksum)
    if offset != n_bytes or len(entries) != n_sections:
        raise ValueError("its table does not cover the file")
    return entries


def _inflated(section: Section, key: SectionKey, length: int) -> bytes:
    if section.raw_length != length:
        raise CorruptFileError(
            f"section {tuple(key)} says that it holds {section.raw_length} bytes, it should hold {length}"
        )
    return lossless.decompress(section.stored_as, section.data, length)


def _encoded(header: dict) -> bytes:
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def _prefix(version: int, header_length: int, n_sections: int, file_length: int, checksum: int) -> bytes:
    return PREFIX.pack(MAGIC, version, 0, header_length, n_sections, file_length, checksum, 0)


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _filling(length: int) -> bytes:
    return bytes(_aligned(length) - length)


def _sync_folder(folder: Path) -> None:
    """Make the renaming durable, where a folder can be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
