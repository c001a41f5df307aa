"""Which numbers of a cache form one row of the transform: layers, heads, and where each of them lies in the row."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.codecs.errors import MismatchError

SIDES = ("k", "v")


@dataclass(frozen=True)
class LayerSlice:
    """The place of one layer's KV heads in the row of its group, one side.

    Attributes
    ----------
    layer : int
        Index of the decoder layer; layers without keys are simply absent, so it is not the slice's number.
    n_heads, dim : int
        KV heads and channels of each.
    offset : int
        First coordinate; head h covers offset + h * dim .. offset + (h + 1) * dim.
    """

    layer: int
    n_heads: int
    dim: int
    offset: int

    @property
    def rows(self) -> slice:
        """The layer's coordinates."""
        return slice(self.offset, self.offset + self.n_heads * self.dim)

    def head_rows(self, head: int) -> slice:
        """One head's coordinates."""
        return slice(self.offset + head * self.dim, self.offset + (head + 1) * self.dim)


@dataclass(frozen=True)
class GroupLayout:
    """Layers whose heads are concatenated to one row per token: p coordinates on either side."""

    k: tuple[LayerSlice, ...]
    v: tuple[LayerSlice, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers of the group, ascending."""
        return tuple(s.layer for s in self.k)

    def slices(self, side: str) -> tuple[LayerSlice, ...]:
        """Of side "k" or "v"."""
        return self.k if side == "k" else self.v

    def width(self, side: str) -> int:
        """p: coordinates of a row."""
        last = self.slices(side)[-1]
        return last.rows.stop

    def slice_of(self, layer: int, side: str) -> LayerSlice:
        """The layer's place."""
        return next(s for s in self.slices(side) if s.layer == layer)


@dataclass(frozen=True)
class CacheLayout:
    """All coded layers of a model in groups. Layers in no group (sliding windows, recurrent states) are kept raw."""

    groups: tuple[GroupLayout, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """Coded layers, ascending."""
        return tuple(sorted(layer for group in self.groups for layer in group.layers))

    def group_of(self, layer: int) -> int:
        """Number of the group that a layer belongs to."""
        return next(g for g, group in enumerate(self.groups) if layer in group.layers)

    def elements_per_token(self) -> int:
        """Numbers that the coded layers hold for a token, both sides."""
        return sum(group.width(side) for group in self.groups for side in SIDES)

    def to_json(self) -> list:
        """Lists of [layer, n_heads, key dim, value dim], one list per group."""
        return [
            [[k.layer, k.n_heads, k.dim, v.dim] for k, v in zip(group.k, group.v, strict=True)] for group in self.groups
        ]

    @classmethod
    def from_json(cls, groups: list) -> "CacheLayout":
        """Inverse of :meth:`to_json`."""
        return cls(tuple(_group([tuple(layer) for layer in group]) for group in groups))


def layout_from_shapes(shapes: dict[int, tuple[int, int, int]], layers_per_group: int | str = "all") -> CacheLayout:
    """Split coded layers into groups of neighbours.

    Parameters
    ----------
    shapes : dict of int to (n_heads, key_dim, value_dim)
        By index of the decoder layer.
    layers_per_group : int >= 1 or "all"
        Layers that share a basis; the last group may be smaller.

    Returns
    -------
    CacheLayout

    Raises
    ------
    ValueError
        If there are no layers, or ``layers_per_group`` is neither a positive integer nor "all".
    """
    if not shapes:
        raise ValueError("the cache has no full-attention layer with tokens, so there is nothing to code")
    size = len(shapes) if layers_per_group == "all" else layers_per_group
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"layers_per_group must be a positive integer or 'all', got {layers_per_group!r}")
    layers = [(layer, *shapes[layer]) for layer in sorted(shapes)]
    return CacheLayout(tuple(_group(layers[i : i + size]) for i in range(0, len(layers), size)))


def _group(layers: list[tuple[int, int, int, int]]) -> GroupLayout:
    sides: dict[str, list[LayerSlice]] = {"k": [], "v": []}
    offsets = {"k": 0, "v": 0}
    for layer, n_heads, key_dim, value_dim in layers:
        for side, dim in (("k", key_dim), ("v", value_dim)):
            sides[side].append(LayerSlice(layer, n_heads, dim, offsets[side]))
            offsets[side] += n_heads * dim
    return GroupLayout(tuple(sides["k"]), tuple(sides["v"]))


def states_to_rows(states: Tensor) -> Tensor:
    """Keys or values (H, T, d) of a layer as rows (T, H * d)."""
    return states.transpose(0, 1).flatten(1)


def rows_to_states(rows: Tensor, n_heads: int) -> Tensor:
    """Inverse of :func:`states_to_rows`."""
    return rows.unflatten(1, (n_heads, -1)).transpose(0, 1)


def check_positions(positions: Tensor | None, n_tokens: int) -> Tensor:
    """RoPE positions of a sequence as int32 on the CPU; 0 .. T - 1 by default.

    Parameters
    ----------
    positions : Tensor, shape (T,) or (1, T), integer, optional
    n_tokens : int
        T.

    Returns
    -------
    Tensor, shape (T,), int32

    Raises
    ------
    MismatchError
        If there are not T of them, or they are not whole numbers from 0 to 2**31 - 1, or have several sections as
        multimodal RoPE has.
    """
    if positions is None:
        return torch.arange(n_tokens, dtype=torch.int32)
    positions = torch.as_tensor(positions).detach().to("cpu")
    if positions.dim() == 2 and positions.shape[0] == 1:
        positions = positions[0]
    if positions.dim() != 1:
        raise MismatchError(
            f"positions have shape {tuple(positions.shape)}: one position per token of one sequence is needed. "
            f"Multimodal positions (several sections) cannot be undone; code text-only contexts"
        )
    if len(positions) != n_tokens:
        raise MismatchError(f"positions are {len(positions)}, but the cache holds {n_tokens} tokens")
    if positions.is_floating_point() or positions.dtype == torch.bool:
        raise MismatchError(f"positions must be integers, got {positions.dtype}")
    if n_tokens and not 0 <= int(positions.min()) <= int(positions.max()) < 2**31:
        raise MismatchError("positions must be from 0 to 2**31 - 1")
    return positions.to(torch.int32)
