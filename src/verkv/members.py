"""How the layers of one cache know each other, to notice a forward pass that was cut short."""

import copy
import inspect
import weakref
from collections.abc import Iterable, Iterator

from torch import Tensor
from transformers.cache_utils import DynamicLayer

# Newer transformers (seen in 5.24) only crop by a number of tokens to remove, older ones also to a length to keep.
_ZERO_REMOVES_NOTHING = "tokens_to_remove" in inspect.signature(DynamicLayer.crop).parameters


def kept_length(crop_argument: int, length: int) -> int:
    """How many of ``length`` tokens ``crop`` keeps.

    On every version of transformers, a positive argument is the length to keep, which half a forward pass can only be
    mended with, and a negative one the number of tokens to remove. Zero is what it is in the version installed: remove
    nothing, as generate asks for in newer ones, or keep nothing.
    """
    if crop_argument < 0 or (crop_argument == 0 and _ZERO_REMOVES_NOTHING):
        crop_argument += length
    return max(0, min(crop_argument, length))


class Siblings:
    """All layers of a cache, by weak references.

    Strong ones would make a cycle of every cache, and its gigabytes on host and device would wait for the garbage
    collector instead of being freed with the last reference. Copies and pickles of a cache refer to their own layers.
    """

    def __init__(self, layers: Iterable):
        self._references = [weakref.ref(layer) for layer in layers]

    def __iter__(self) -> Iterator[tuple[int, object]]:
        """Index and layer, of those that are still there."""
        for index, reference in enumerate(self._references):
            layer = reference()
            if layer is not None:
                yield index, layer

    def __deepcopy__(self, memo: dict) -> "Siblings":
        copied = Siblings(())
        memo[id(self)] = copied  # before the layers, which refer to this object
        copied.__init__([copy.deepcopy(layer, memo) for _, layer in self])
        return copied

    def __getstate__(self) -> list:
        return [layer for _, layer in self]

    def __setstate__(self, layers: list) -> None:
        self.__init__(layers)


class Member:
    """Mixin of cache layers that check, before they append, whether an earlier forward pass was cut short."""

    _siblings = Siblings(())  # of a layer that has not joined a cache
    _index = 0

    def join(self, siblings: Siblings, index: int) -> None:
        """Get to know all layers of the cache and the own place."""
        self._siblings, self._index = siblings, index

    def leave(self) -> None:
        """Forget the other layers."""
        self._siblings = Siblings(())

    def refuse_half_a_forward(self, n_new: int) -> None:
        """Raise ValueError if the layers of the cache have lengths that no complete forward pass leaves.

        Called by a layer that is about to append ``n_new`` tokens; those before it have done so.
        """
        length = self.get_seq_length()
        for i, layer in self._siblings:
            expected = length + n_new if i < self._index else length
            if layer.get_seq_length() != expected:
                shortest = min(layer.get_seq_length() for _, layer in self._siblings)
                raise ValueError(
                    f"the cache holds half a forward pass: layer {i} has {layer.get_seq_length()} tokens instead of "
                    f"{expected}. An earlier forward pass was interrupted; call cache.crop({shortest}) or cache.reset()"
                )


class BatchMapped:
    """Mixin of layers whose batch operations apply one function to each of their tensors, by ``_map``."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Permute the batch, of the remembered states too."""
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row."""
        self._map(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some batch rows."""
        self._map(lambda t: t[indices.to(t.device)])


def join_layers(layers: list) -> None:
    """Let the layers of a cache know each other; plain ones of transformers take no part."""
    siblings = Siblings(layers)  # one object for all, so that copying stays flat
    for index, layer in enumerate(layers):
        if isinstance(layer, Member):
            layer.join(siblings, index)
