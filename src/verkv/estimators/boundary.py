"""Which tokens lie above the boundary of a greedy order, without sorting the tokens.

A greedy choice takes the tokens by falling key until a condition on sums over the tokens taken, or over those left,
holds. Only the tokens next to the boundary need an order among themselves. They are found as in a radix selection: the
keys are floats >= 0, whose bit patterns rise with their value, so the leading bits are the bin of a logarithmic
histogram. One pass over the tokens sums what the condition needs per bin; the rule names the bin in which the boundary
falls; the next bits split that bin, and so on, until its tokens are few (they are sorted) or equal (the first go
first).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

# Widths of the groups of bits, leading ones first; the sign is always 0. The first group is the exponent and, in
# float32, three bits of the mantissa: of eighths of an octave, mostly few enough tokens are in one bin to be sorted.
_DIGIT_WIDTHS = {torch.float32: (11, 10, 10), torch.float64: (12, 13, 13, 13, 12)}
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}

# Below float64, sums over tokens are taken in chunks of this many, then over the chunks, and running sums in blocks
# from this length on: the rounding of a plain running sum would grow with the number of tokens.
_CHUNK = 4096
_BLOCKED = 2048

# Where sizes may depend on the data, so many tokens per row are sorted rather than put into bins.
_FEW = 2048


class BoundaryRule(Protocol):
    """What a greedy choice needs to know of the tokens, and where it stops."""

    from_top: bool
    """Whether the condition is on the tokens taken (the largest keys), not on those left."""

    reductions: tuple[str, ...]
    """Either "sum" or "amax" for each of the values."""

    def boundary_bin(
        self, bins: list[Tensor], largest_key: Callable[[], Tensor], state: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Name the bin in which the boundary falls.

        Parameters
        ----------
        bins : list of Tensor, shape (rows, bins)
            The values reduced per bin; keys rise with the bin.
        largest_key : function that returns a Tensor, shape (rows or 1, bins)
            The largest key that each bin can hold; NaN where that is not a number.
        state : list of Tensor, shape (rows, 1)
            The values reduced over the tokens that are on the rule's side of the boundary for certain; 0 at first.

        Returns
        -------
        chosen : Tensor, shape (rows, 1), int64
            All tokens of the bins above are taken, none of those below; the number of bins if none is taken at all.
        state : list of Tensor, shape (rows, 1)
        """

    def last(self, key: Tensor, values: list[Tensor], state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Decide token by token: a mask of the tokens taken, and the last state.

        All are of shape (rows, C), in the greedy order or, for a condition on those left, against it. Where there is no
        token, the values are 0 and the mask does not matter.
        """


class Selection:
    """Some tokens of some rows: gathered where sizes may depend on the data, among all others where they must not.

    Parameters
    ----------
    mask : Tensor, shape (..., T), bool
    """

    def __init__(self, mask: Tensor):
        self.mask = mask
        self._positions = true_positions(mask) if sizes_may_vary(mask.device) else None  # in the flattened mask

    def of(self, tensor: Tensor) -> Tensor:
        """The tokens' values, of a tensor that broadcasts to (..., T); all values where nothing may be gathered."""
        if self._positions is None:
            return tensor
        if tensor.shape[-1] == 1:
            rows = self._positions.div(self.mask.shape[-1], rounding_mode="floor")
            return tensor.expand(*self.mask.shape[:-1], 1).reshape(-1).index_select(0, rows)
        return tensor.expand(self.mask.shape).reshape(-1).index_select(0, self._positions)

    def replace(self, tensor: Tensor, values: Tensor) -> Tensor:
        """A tensor (..., T) with the tokens' values replaced; it may be changed in place, and must be contiguous."""
        if self._positions is None:
            return torch.where(self.mask, values, tensor)
        tensor.view(-1).index_copy_(0, self._positions, values)
        return tensor


def sizes_may_vary(device: torch.device) -> bool:
    """Whether tensors whose size depends on the data come cheap; elsewhere the host would have to wait for the size."""
    return device.type == "cpu"


def true_positions(mask: Tensor) -> Tensor:
    """Where a contiguous mask is True, in the flattened mask, rising; faster than `nonzero` where that is rare.

    Parameters
    ----------
    mask : Tensor, any shape, bool

    Returns
    -------
    Tensor, shape (M,), int64
    """
    flat = mask.view(-1)
    if flat.numel() % 8 == 0:
        words = flat.view(torch.int64).nonzero()  # eight at a time
        if 64 * len(words) < flat.numel():
            near = (words * 8 + torch.arange(8, device=mask.device)).view(-1)
            return near[flat[near]]
    return flat.nonzero().squeeze(1)


def tokens_above(key: Tensor, values: Sequence[Tensor], rule: BoundaryRule) -> tuple[Tensor, list[Tensor]]:
    """The tokens that a greedy choice by falling key takes, equal keys in the order of their position.

    Time and memory are linear in the number of tokens.

    Parameters
    ----------
    key : Tensor, shape (rows, T), float32 or float64
        >= 0. A NaN makes the result of its row meaningless, but is no error.
    values : sequence of Tensor, shape (rows, T), same dtype
        What the rule adds up; 0 where a token does not count.
    rule : BoundaryRule

    Returns
    -------
    taken : Tensor, shape (rows, T), bool
    state : list of Tensor, shape (rows, 1)
        What the rule has reduced over its side of the final boundary.
    """
    widths = _DIGIT_WIDTHS[key.dtype]
    members = (_Gathered if sizes_may_vary(key.device) else _Masked)(key, list(values))
    state = [values[0].new_zeros(len(key), 1)] * len(values)
    shift = sum(widths)
    prefix = torch.zeros((), dtype=_BITS[key.dtype], device=key.device)  # the bits of the boundary bin
    for width in widths:
        if members.are_few:
            break
        shift -= width
        digit = (members.key.view(prefix.dtype) >> shift).bitwise_and_(2**width - 1)  # drops the sign a NaN may have
        index = digit.long()
        bins = [
            reduce_bins(index, value, 2**width, how) for value, how in zip(members.values, rule.reductions, strict=True)
        ]
        largest_key = partial(_largest_keys, prefix, shift, 2**width, key.dtype)
        chosen, state = rule.boundary_bin(bins, largest_key, state)
        chosen = chosen.to(digit.dtype)
        prefix = prefix + (chosen << shift)
        members.split(digit, chosen)
    members.line_up(sort=shift > 0, flip=not rule.from_top)
    taken, state = rule.last(members.key, members.values, state)
    members.take(taken)
    return members.taken, state


def _largest_keys(prefix: Tensor, shift: int, n_bins: int, dtype: torch.dtype) -> Tensor:
    bins = torch.arange(n_bins, dtype=prefix.dtype, device=prefix.device)
    return (prefix + ((bins << shift) | (2**shift - 1))).view(dtype).view(-1, n_bins)


class _Masked:
    """The tokens of the boundary bin as a mask over all: sizes are fixed, and the host never waits."""

    are_few = False

    def __init__(self, key: Tensor, values: list[Tensor]):
        self.key, self.values = key, values  # values are 0 where a token is not a member
        self.mask = torch.ones_like(key, dtype=torch.bool)
        self.taken = torch.zeros_like(self.mask)
        self.flipped = False

    def split(self, digit: Tensor, chosen: Tensor) -> None:
        self.taken |= self.mask & (digit > chosen)
        self.mask = self.mask & (digit == chosen)
        self.values = [torch.where(self.mask, value, 0.0) for value in self.values]

    def line_up(self, sort: bool, flip: bool) -> None:
        assert not sort  # all bits are used up: the members' keys are equal
        self.flipped = flip
        if flip:
            self.key, self.values = self.key.flip(-1), [value.flip(-1) for value in self.values]

    def take(self, mask: Tensor) -> None:
        self.taken |= self.mask & (mask.flip(-1) if self.flipped else mask)


class _Gathered:
    """The tokens of the boundary bin side by side; rows that have fewer of them are filled up with position -1."""

    def __init__(self, key: Tensor, values: list[Tensor]):
        self.key, self.all_values = key, values
        self.positions: Tensor | None = None  # (rows, C), in the flattened (rows, T); None: all tokens are members
        self.taken = torch.zeros_like(key, dtype=torch.bool)

    @property
    def are_few(self) -> bool:
        return self.key.shape[1] <= _FEW

    @property
    def values(self) -> list[Tensor]:
        if self.positions is None:
            return self.all_values
        source, absent = self.positions.clamp_min(0), self.positions < 0
        return [value.view(-1)[source].masked_fill_(absent, 0.0) for value in self.all_values]

    def split(self, digit: Tensor, chosen: Tensor) -> None:
        n_rows, width = digit.shape
        reaches, passes = digit >= chosen, digit > chosen
        self.take(passes)
        members = reaches.logical_xor_(passes)
        if self.positions is not None:
            members &= self.positions >= 0
        found = true_positions(members)
        rows = found // width
        positions = found if self.positions is None else self.positions.view(-1)[found]
        counts = torch.bincount(rows, minlength=n_rows)
        starts = counts.cumsum(0) - counts
        slots = (rows, torch.arange(len(rows), device=rows.device) - starts[rows])
        shape = (n_rows, int(counts.max()))
        self.positions = found.new_full(shape, -1).index_put_(slots, positions)
        self.key = self.key.new_full(shape, -1.0).index_put_(slots, self.key.view(-1)[found])

    def line_up(self, sort: bool, flip: bool) -> None:
        if self.positions is None:
            self.positions = torch.arange(self.key.numel(), device=self.key.device).view_as(self.key)
        if sort:
            self.key, order = self.key.sort(dim=-1, descending=True, stable=True)
            self.positions = self.positions.gather(1, order)
        if flip:
            self.key, self.positions = self.key.flip(-1), self.positions.flip(-1)

    def take(self, mask: Tensor) -> None:
        if self.positions is None:
            self.taken |= mask
        else:
            self.taken.view(-1)[self.positions[mask & (self.positions >= 0)]] = True


def reduce_bins(index: Tensor, values: Tensor, n_bins: int, reduction: str) -> Tensor:
    """Sum or maximum of the values of each bin, 0 where a bin is empty.

    Parameters
    ----------
    index : Tensor, shape (rows, C), int64
        The bin of each value.
    values : Tensor, shape (rows, C), float
        >= 0.
    n_bins : int
    reduction : {"sum", "amax"}

    Returns
    -------
    Tensor, shape (rows, n_bins)
    """
    n_rows, n_values = values.shape
    if reduction == "amax":
        return values.new_zeros(n_rows, n_bins).scatter_reduce_(1, index, values, "amax")
    n_chunks = n_values // _CHUNK
    if values.dtype == torch.float64 or n_values <= _CHUNK:
        return values.new_zeros(n_rows, n_bins).scatter_add_(1, index, values)
    whole = n_chunks * _CHUNK
    sums = values.new_zeros(n_rows, n_chunks + 1, n_bins)
    chunks = [tensor[:, :whole].unflatten(1, (n_chunks, _CHUNK)) for tensor in (index, values)]
    sums[:, :-1].scatter_add_(2, *chunks)
    sums[:, -1].scatter_add_(1, index[:, whole:], values[:, whole:])
    return sums.sum(1)


def running_sum(values: Tensor) -> Tensor:
    """Inclusive running sums over the last axis, in blocks: rounding grows with the root of its length.

    Parameters
    ----------
    values : Tensor, shape (rows, C)

    Returns
    -------
    Tensor, shape (rows, C)
    """
    n_rows, n_values = values.shape
    if values.dtype == torch.float64 or n_values <= _BLOCKED:
        return values.cumsum(-1)
    block = math.isqrt(n_values - 1) + 1
    n_blocks = -(-n_values // block)
    inner = torch.nn.functional.pad(values, (0, n_blocks * block - n_values)).view(n_rows, n_blocks, block).cumsum(-1)
    inner[:, 1:] += inner[:, :-1, -1].cumsum(-1)[..., None]
    return inner.view(n_rows, -1)[:, :n_values]


def summation_error(n_tokens: int, dtype: torch.dtype) -> float:
    """Largest relative rounding error of the sums that `tokens_above` gives to its rule, all terms being >= 0.

    A sum of n terms, each rounded, is off by at most (n - 1) u / (1 - (n - 1) u) whatever the order, with u half the
    distance from 1 to the next number; here the longest chain of additions takes the place of n.

    Parameters
    ----------
    n_tokens : int
    dtype : torch.dtype

    Returns
    -------
    float
    """
    widths = _DIGIT_WIDTHS[dtype]
    chain = min(n_tokens, _CHUNK) + math.ceil(n_tokens / _CHUNK)  # tokens of a bin: in a chunk, over the chunks
    chain += max(_BLOCKED, 2 * math.isqrt(max(n_tokens, 2 ** max(widths))) + 2)  # bins, or tokens of the last bin
    chain += len(widths)  # levels
    unit = torch.finfo(dtype).eps / 2
    return chain * unit / (1.0 - chain * unit)
