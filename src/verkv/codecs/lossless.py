"""Lossless compression of coded rows: DEFLATE from the standard library, others where they are installed."""

import importlib
import zlib

from verkv.codecs.errors import CodecError, CorruptFileError

# What a section says of its bytes. Several names may write one format: they differ in speed and gain.
STORED, DEFLATE, ZSTD = 0, 1, 2
FORMATS = {"none": STORED, "deflate": DEFLATE, "huffman": DEFLATE, "isal": DEFLATE, "zstd": ZSTD}


def check_lossless(name: str) -> None:
    """Raise unless a compressor of that name is there.

    Raises
    ------
    ValueError
        If the name is unknown.
    CodecError
        If its package is not installed.
    """
    if name not in FORMATS:
        raise ValueError(f"lossless must be one of {sorted(FORMATS)}, got {name!r}")
    if name == "isal":
        _isal()
    elif name == "zstd":
        _zstd()


def compress(name: str, data: bytes | memoryview) -> bytes:
    """Compress bytes.

    Parameters
    ----------
    name : {"none", "deflate", "huffman", "isal", "zstd"}
        "huffman" writes DEFLATE without searching for repetitions, faster at some loss; "isal" writes DEFLATE with
        Intel's library.
    data : bytes-like

    Returns
    -------
    bytes
    """
    if name == "none":
        return bytes(data)
    if name == "isal":
        return _isal().compress(data, 2)
    if name == "zstd":
        return _zstd().compress(data)
    strategy = zlib.Z_HUFFMAN_ONLY if name == "huffman" else zlib.Z_DEFAULT_STRATEGY
    compressor = zlib.compressobj(level=6, strategy=strategy)
    return compressor.compress(data) + compressor.flush()


def decompress(stored_as: int, data: bytes, length: int) -> bytes:
    """Decompress to exactly ``length`` bytes; no more than that is ever allocated.

    Parameters
    ----------
    stored_as : int
        One of the values of ``FORMATS``.
    data : bytes
    length : int
        Known from the plan, not taken from the data.

    Raises
    ------
    CorruptFileError
        If the data is damaged, or decompresses to another length.
    """
    if stored_as == STORED:
        inflated = data
    elif stored_as == DEFLATE:
        try:
            decompressor = zlib.decompressobj()
            inflated = decompressor.decompress(data, length + 1)
            complete = decompressor.eof or (length == 0 and not inflated)
        except zlib.error as error:
            raise CorruptFileError(f"a compressed section is damaged: {error}") from None
        if not complete and len(inflated) <= length:
            raise CorruptFileError("a compressed section is incomplete")
    elif stored_as == ZSTD:
        inflated = _zstd().decompress(data, length)
    else:
        raise CorruptFileError(f"a section is compressed in an unknown way ({stored_as})")
    if len(inflated) != length:
        raise CorruptFileError(f"a section holds another number of bytes than the {length} it should")
    return inflated


def _isal():
    try:
        return importlib.import_module("isal.isal_zlib")
    except ImportError:
        raise CodecError("lossless='isal' needs pip install isal; 'deflate' needs nothing") from None


class _Zstandard:
    """The package `zstandard` behind the two functions used here."""

    def __init__(self, module):
        self.module = module

    def compress(self, data) -> bytes:
        return self.module.ZstdCompressor(level=3).compress(data)

    def decompress(self, data: bytes, length: int) -> bytes:
        try:
            reader = self.module.ZstdDecompressor().stream_reader(data)
            return reader.read(length + 1)
        except self.module.ZstdError as error:
            raise CorruptFileError(f"a compressed section is damaged: {error}") from None


def _zstd() -> _Zstandard:
    try:
        return _Zstandard(importlib.import_module("zstandard"))
    except ImportError:
        raise CodecError("zstd needs pip install zstandard; 'deflate' needs nothing") from None
