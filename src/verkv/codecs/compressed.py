"""A coded cache, in memory or in a file: what it holds, and how it is restored, whole or in parts."""

import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verkv import __version__
from verkv.codecs.cache_access import dense_cache
from verkv.codecs.container import (
    EXACT,
    EXACT_INDEX,
    POSITIONS,
    ROWS,
    Container,
    MemorySections,
    SectionKey,
    container_length,
    section_bytes,
    write_container,
)
from verkv.codecs.errors import CorruptFileError
from verkv.codecs.layout import SIDES, LayerSlice
from verkv.codecs.model_binding import config_hash, hash_tokens
from verkv.codecs.packing import CodedRun
from verkv.codecs.ratios import header_ratios
from verkv.codecs.raw_layers import check_complete, fill_layers, set_states
from verkv.codecs.tensor_store import DTYPES, TensorReader, tensor_from_bytes
from verkv.codecs.transform import Stages

if TYPE_CHECKING:
    from verkv.codecs.kvtc import KVTC


class CompressedCache:
    """A coded cache of one sequence. Made by :meth:`KVTC.compress`, or opened from a file.

    Parameters
    ----------
    codec : KVTC
    segment : dict
        What the header says of it.
    sections : MemorySections or Container
    number : int
        Of the segment.

    Attributes
    ----------
    n_tokens : int
    blocks : list of int
        Coded tokens of each block.
    positions : Tensor, shape (T,), int32
    exact_index, coded_index : Tensor, int64
        Tokens that are kept as they are, and the others, ascending.

    Raises
    ------
    CorruptFileError
        If what it says of itself does not add up.
    """

    def __init__(self, codec: "KVTC", segment: dict, sections: MemorySections | Container, number: int = 0):
        self.codec, self.segment, self.sections, self.number = codec, segment, sections, number
        try:
            self.n_tokens, n_exact = int(segment["n_tokens"]), int(segment["n_exact"])
            self.n_outliers = int(segment["n_outliers"])
            self.blocks = [int(n) for n in segment["blocks"]]
            self.dtype = DTYPES[segment["dtype"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptFileError(f"the header of the stored context is invalid ({error!r})") from None
        limit = codec.config.block_tokens
        if min(self.blocks, default=1) < 1 or max(self.blocks, default=1) > limit or min(self.n_tokens, n_exact) < 0:
            raise CorruptFileError("the header of the stored context has impossible numbers of tokens")
        if sum(self.blocks) + n_exact != self.n_tokens:
            raise CorruptFileError(f"coded and exact tokens of the stored context are not {self.n_tokens} together")
        # Read before anything of T tokens is allocated: a section that is in the file has a sane length.
        self.positions = self._read_tensor(SectionKey(POSITIONS, number), torch.int32, (self.n_tokens,))
        index = self._read_tensor(SectionKey(EXACT_INDEX, number), torch.int32, (n_exact,))
        self.exact_index = index.long()
        is_exact = torch.zeros(self.n_tokens, dtype=torch.bool)
        if n_exact and not 0 <= int(index.min()) <= int(index.max()) < self.n_tokens:
            raise CorruptFileError("exact tokens of the stored context lie outside it")
        is_exact[self.exact_index] = True
        if int(is_exact.sum()) != n_exact or not bool((index.diff() > 0).all()):
            raise CorruptFileError("exact tokens of the stored context are not ascending")
        self.coded_index = (~is_exact).nonzero()[:, 0]

    # --- restoring --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def restore(self, layers=None, device: torch.device | str = "cpu", stages: Stages | None = None):
        """The cache, ready for generation or for a press.

        Parameters
        ----------
        layers : iterable of int, optional
            Only these; the others stay empty.
        device : device
            Where to decode, and where the cache shall be.
        stages : Stages, optional
            Gets the seconds of each stage.

        Returns
        -------
        VerKVCache
            As :func:`verkv.make_cache` makes it for the model.

        Raises
        ------
        CorruptFileError
            If something is damaged; there is no partial cache then.
        """
        wanted = None if layers is None else frozenset(layers)
        cache = dense_cache(self.codec.model_config)
        for layer, keys, values in self.iter_layers(wanted, device, stages):
            set_states(cache.layers[layer], keys, values)
        reader = TensorReader(self.segment.get("tensors", {}), self.sections, self.number)
        fill_layers(cache, self.segment.get("raw_layers", {}), reader, wanted, device)
        if wanted is None:
            check_complete(cache, self.n_tokens)
        return cache

    @torch.no_grad()
    def iter_layers(
        self, layers=None, device: torch.device | str = "cpu", stages: Stages | None = None
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Decode layer by layer, in the order a forward pass needs them.

        Yields
        ------
        layer : int
        keys, values : Tensor, shape (1, Hkv, T, d)
        """
        stages = Stages() if stages is None else stages
        for g, group in enumerate(self.codec.layout.groups):
            wanted = [layer for layer in group.layers if layers is None or layer in layers]
            if not wanted:
                continue
            coordinates = {side: self.coordinates(g, side, None, stages).to(device) for side in SIDES}
            for layer in wanted:
                states = [self._decode(g, layer, side, coordinates[side], stages) for side in SIDES]
                yield layer, states[0][None], states[1][None]

    @torch.no_grad()
    def decode_layer(self, layer: int, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values (Hkv, n, d) of some tokens of one layer; only blocks that hold them are read.

        Parameters
        ----------
        layer : int
        tokens : Tensor, shape (n,), int64, optional
            Indices into the sequence, in any order; all by default.
        """
        g = self.codec.layout.group_of(layer)
        if tokens is None:
            found = [self._decode(g, layer, side, self.coordinates(g, side), Stages()) for side in SIDES]
            return found[0], found[1]
        tokens = torch.as_tensor(tokens).long().cpu()
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.n_tokens:
            raise ValueError(f"tokens must be indices from 0 to {self.n_tokens - 1}")
        rank = torch.empty(self.n_tokens, dtype=torch.int64)
        rank[self.coded_index] = torch.arange(len(self.coded_index))
        rank[self.exact_index] = torch.arange(len(self.exact_index))
        is_coded = torch.isin(tokens, self.coded_index)
        found = []
        for side in SIDES:
            part = self.codec.layout.groups[g].slice_of(layer, side)
            states = torch.empty(part.n_heads, len(tokens), part.dim, dtype=self.dtype)
            if bool(is_coded.any()):
                coordinates = self.coordinates(g, side, rank[tokens[is_coded]])
                decoded = self._decode_coded(g, part, side, coordinates, self.positions[tokens[is_coded]], Stages())
                states[:, is_coded] = decoded.to(self.dtype)
            if not bool(is_coded.all()):
                states[:, ~is_coded] = self.exact_rows(part, side)[:, rank[tokens[~is_coded]]]
            found.append(states)
        return found[0], found[1]

    def coordinates(self, group: int, side: str, coded: Tensor | None = None, stages: Stages | None = None) -> Tensor:
        """Dequantised coordinates (n, width of the plan) of coded tokens, all or those numbered ``coded``."""
        codec, stages = self.codec.sides[group, side], Stages() if stages is None else stages
        n_rows = len(self.coded_index) if coded is None else len(coded)
        out = torch.zeros(n_rows, codec.coder.width)
        start = 0
        for block, n_tokens in enumerate(self.blocks):
            stop = start + n_tokens
            if coded is None:
                inside, target = None, slice(start, stop)
            else:
                target = ((coded >= start) & (coded < stop)).nonzero()[:, 0]
                inside = coded[target] - start
            if inside is None or len(inside):
                runs = self._read_block(group, side, block, n_tokens, stages)
                with stages("dequantise"):
                    out[target] = codec.coder.dequantise([r if inside is None else r.select(inside) for r in runs])
            start = stop
        return out

    def exact_rows(self, part: LayerSlice, side: str) -> Tensor:
        """Rows (Hkv, n, d) of a layer that are kept as they are."""
        key = SectionKey(EXACT, self.number, part.layer, 0, SIDES.index(side))
        return self._read_tensor(key, self.dtype, (part.n_heads, len(self.exact_index), part.dim))

    def _read_block(self, group: int, side: str, block: int, n_tokens: int, stages: Stages) -> list[CodedRun]:
        coder = self.codec.sides[group, side].coder
        key = SectionKey(ROWS, self.number, group, block, SIDES.index(side))
        with stages("inflate"):
            data = self.sections.read(key, n_tokens * coder.row_bytes)
        with stages("unpack"):
            return coder.read(torch.frombuffer(bytearray(data), dtype=torch.uint8), n_tokens, self.codec.config.layout)

    def _decode(self, group: int, layer: int, side: str, coordinates: Tensor, stages: Stages) -> Tensor:
        """All tokens (Hkv, T, d) of one layer and side."""
        part = self.codec.layout.groups[group].slice_of(layer, side)
        device = coordinates.device
        states = torch.empty(part.n_heads, self.n_tokens, part.dim, dtype=self.dtype, device=device)
        if len(self.coded_index):
            decoded = self._decode_coded(group, part, side, coordinates, self.positions[self.coded_index], stages)
            with stages("place"):
                states[:, self.coded_index.to(device)] = decoded.to(self.dtype)
        if len(self.exact_index):
            states[:, self.exact_index.to(device)] = self.exact_rows(part, side).to(device)
        return states

    def _decode_coded(self, group, part, side, coordinates, positions, stages: Stages) -> Tensor:
        with stages("reconstruct"):
            decoded = self.codec.sides[group, side].reconstruct(coordinates, part)
        if side == "k":
            with stages("rotate"):
                decoded = self.codec.rotary.apply(decoded, positions)
        return decoded

    # --- what it costs, and how good it is ----------------------------------------------------------------------------

    def sizes(self) -> dict[str, int]:
        """Stored bytes: coded rows, rows kept as they are, positions, index, raw tensors, and the whole file."""
        lengths = [(key, self.sections.stored_length(key)) for key in self._keys()]
        return section_bytes(self.sections) | {"file": container_length(self.header(), lengths)}

    def ratios(self) -> dict[str, float]:
        """Compression ratios, see :func:`~verkv.codecs.ratios.header_ratios`."""
        sizes = self.sizes()
        return header_ratios(self.segment, sizes, sizes["file"])

    def residual_sums(self) -> dict[str, list]:
        """Sum of the squared residuals relative to the calibrated ones, and their number, by side."""
        return {side: list(self.segment["residuals"][side]) for side in SIDES}

    def residual_ratio(self) -> dict[str, float]:
        """Residuals of the coded tokens relative to those of the calibration text: 1 is as expected, by side."""
        return {side: math.sqrt(total / max(1, n)) for side, (total, n) in self.residual_sums().items()}

    def is_prefix_of(self, token_ids: Tensor) -> bool:
        """Whether a prompt (T',) begins with the context's tokens; False if their hash was not stored."""
        ids = torch.as_tensor(token_ids).reshape(-1)
        stored = self.segment.get("token_ids_sha256")
        return (
            stored is not None
            and len(ids) >= self.n_tokens
            and hash_tokens(ids[: self.n_tokens], self.n_tokens) == stored
        )

    # --- storing ------------------------------------------------------------------------------------------------------

    def header(self) -> dict:
        """Of a file that holds this segment alone."""
        return {
            "format": "verkv.context",
            "kind": "cache",
            "config_sha256": config_hash(self.codec.model_config),
            "verkv": __version__,
            "segments": [self.segment],
        }

    def save(self, path: str | os.PathLike) -> int:
        """Write a file in one step; returns its length in bytes."""
        stored = ((key._replace(segment=0), self.sections.stored(key)) for key in self._keys())
        return write_container(path, self.header(), stored)

    def _keys(self) -> list[SectionKey]:
        return [key for key in self.sections if key.segment == self.number]

    def _read_tensor(self, key: SectionKey, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        data = self.sections.read(key, math.prod(shape) * dtype.itemsize)
        return tensor_from_bytes(data, dtype, shape)
