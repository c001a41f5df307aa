"""Branches of a cache, and moments that it can be brought back to: copy on write, as no tensor of a cache is written.

A branch shares every tensor with its origin; both go on by themselves, since whatever grows makes new ones. A moment is
a branch reduced to what cannot be had again from the cache as it goes on.
"""

import copy
import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from verkv.cache import VerKVLayer
from verkv.members import join_layers
from verkv.stats import FetchStats
from verkv.tiers import RESIDENT_BIT, host_parts


def branch(cache):
    """A copy of a cache between two forward passes that shares all tensors, and goes on independently.

    Host tiers, samples and sketches are not copied. Statistics are counted apart from here on. The state of the draws
    is copied: both branches use the same random numbers for their next segments. Inside each, draws stay independent of
    the earlier ones, which is all that the certificate needs; only estimates of different branches are correlated.

    Parameters
    ----------
    cache : transformers.Cache

    Returns
    -------
    transformers.Cache
        Of the same type.
    """
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    join_layers(twin.layers)
    stats = getattr(cache, "stats", None)
    if stats is not None:
        twin.stats = _copied_stats(stats)
    for layer in twin.layers:
        if getattr(layer, "sealed", False):
            layer.context = copy.copy(layer.context)
            layer.context.stats = twin.stats
    if getattr(cache, "resealer", None) is not None:
        twin.resealer = copy.deepcopy(cache.resealer)
    return twin


@dataclass(frozen=True)
class Moment:
    """What brings a cache back to a state it was in.

    Attributes
    ----------
    cache : transformers.Cache
        A branch. What is not on the CPU is held there, but for sketches, which the cache goes on using anyway.
    lengths : tuple of (int or None)
        Tokens of each layer whose keys and values are left out, to be read again; None for the others.
    """

    cache: object
    lengths: tuple[int | None, ...]


def remember(cache, is_sealed_later: bool) -> Moment:
    """The present state of a cache, to be brought back by :func:`recall`.

    Of a sealed layer with a host copy no keys and values are held: its probabilities and draws, one byte a token, say
    which rows were resident. Nor of full attention that is never sealed. Layers that forget tokens (sliding and linear
    ones, and sealed ones without a host copy) are held as they are.

    Parameters
    ----------
    cache : transformers.Cache
        Between two forward passes.
    is_sealed_later : bool
        Whether layers that are not sealed may be, so that their tokens may be lost.
    """
    moment, lengths = branch(cache), []
    for layer in moment.layers:
        is_left_out = _can_be_read_again(layer, is_sealed_later)
        lengths.append(layer.get_seq_length() if is_left_out else None)
        if is_left_out:
            _leave_out(layer)
        _change(layer, _to_host)
        if getattr(layer, "sealed", False):
            _change(layer.context, _to_host, ("codes", "rows", "value_norms", "sketch_error"))
    return Moment(moment, tuple(lengths))


def recall(moment: Moment, cache):
    """A cache in the state of a moment, bit by bit. The moment can be recalled again.

    Parameters
    ----------
    moment : Moment
    cache : transformers.Cache
        What has become of the cache since: it still has, on the device or the host, the tokens that it had then.
    """
    recalled = branch(moment.cache)
    for layer, source, length in zip(recalled.layers, cache.layers, moment.lengths, strict=True):
        _change(layer, _from_host)
        if getattr(layer, "sealed", False):
            _change(layer.context, _from_host, ("codes", "rows", "value_norms", "sketch_error"))
        if length is not None:
            _read_again(layer, source, length)
    return recalled


def held_tensors(value, found: dict[int, Tensor] | None = None) -> dict[int, Tensor]:
    """All tensors of a cache, a layer or a moment, by their ``id``."""
    found = {} if found is None else found
    if isinstance(value, Tensor):
        found[id(value)] = value
    elif isinstance(value, (list, tuple)):
        for item in value:
            held_tensors(item, found)
    elif type(value).__module__.startswith("verkv.") or hasattr(value, "layers") or isinstance(value, DynamicLayer):
        for name, item in vars(value).items():
            if name not in ("_siblings", "stats", "resealer", "layer_class_to_replicate"):
                held_tensors(item, found)
    return found


def _copied_stats(stats: FetchStats) -> FetchStats:
    """Statistics that count on by themselves. Records are never changed, so they are shared."""
    copied = copy.copy(stats)
    copied.notes, copied._totals = list(stats.notes), dict(stats._totals)
    copied.passes = [list(records) for records in stats.passes]
    for name in ("chunks", "replays"):
        apart = getattr(stats, name)
        setattr(copied, name, None if apart is None else _copied_stats(apart))
    return copied


# --- leaving out and reading again ------------------------------------------------------------------------------------


def _can_be_read_again(layer, is_sealed_later: bool) -> bool:
    if getattr(layer, "sealed", False):
        return layer.context.host is not None and layer.context.codes is not None
    return type(layer) in (DynamicLayer, VerKVLayer) and layer.get_seq_length() > 0 and not is_sealed_later


def _leave_out(layer) -> None:
    if getattr(layer, "sealed", False):
        layer.context.rows = dataclasses.replace(layer.context.rows, keys=None, values=None)
        layer.tail_keys = layer.tail_values = None
    else:
        layer.keys = layer.values = None


def _read_again(layer, source, length: int) -> None:
    """Give a layer the keys and values that were left out."""
    if not getattr(layer, "sealed", False):
        layer.keys, layer.values = _states(source, 0, length)
        return
    context = layer.context
    layer.tail_keys, layer.tail_values = _states(source, context.n_tokens, length)
    units, positions = ((context.codes & RESIDENT_BIT) != 0).nonzero(as_tuple=True)
    read = (context.host.read_keys, context.host.read_values)
    keys, values = (read_rows(units, positions, context.device) for read_rows in read)
    context.rows = dataclasses.replace(context.rows, keys=keys, values=values)


def _states(layer, start: int, stop: int) -> list[Tensor]:
    """Keys and values (B, Hkv, stop - start, d) of tokens of a layer, from wherever they are (copies)."""
    n_sealed, unsealed, parts = 0, (getattr(layer, "keys", None), getattr(layer, "values", None)), []
    if getattr(layer, "sealed", False):
        n_sealed, unsealed = layer.context.n_tokens, layer.unsealed()
        parts = [(first, (part.keys, part.values)) for first, part in host_parts(layer.context.host)]
    states = []
    for side in (0, 1):
        pieces = []
        for first, part in [*parts, (n_sealed, unsealed)]:
            low, high = max(start - first, 0), min(stop - first, part[side].shape[2])
            if low < high:
                piece = part[side][:, :, low:high].to(unsealed[0].device)
                pieces.append(piece.repeat_interleave(layer.context.beams, 0) if first < n_sealed else piece)
        states.append(torch.cat(pieces, 2) if pieces else unsealed[side][:, :, :0])
        assert states[side].shape[2] == stop - start, "the cache has lost tokens of this moment"
    return states


# --- keeping on the host ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OnHost:
    """A tensor of a device, kept on the CPU."""

    tensor: Tensor
    device: torch.device


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _to_host(tensor: Tensor):
    return tensor if _is_on_host(tensor) else _OnHost(tensor.to("cpu"), tensor.device)


def _from_host(kept):
    return kept.tensor.to(kept.device) if isinstance(kept, _OnHost) else kept


def _change(owner, function, names: tuple[str, ...] | None = None) -> None:
    """Apply a function to the tensors among an object's attributes, and to those in dataclasses there."""
    for name in vars(owner) if names is None else names:
        vars(owner)[name] = _changed(getattr(owner, name), function)


def _changed(value, function):
    if isinstance(value, (Tensor, _OnHost)):
        return function(value)
    if type(value) is tuple:
        return tuple(_changed(item, function) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _changed(getattr(value, f.name), function) for f in dataclasses.fields(value)}
        if any(fields[name] is not getattr(value, name) for name in fields):
            return dataclasses.replace(value, **fields)
    return value
