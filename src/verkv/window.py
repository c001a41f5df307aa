"""Sliding-window layers beside sealed ones: left as they are, but able to go back to the end of the context."""

import copy
from dataclasses import dataclass

from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from verkv.members import BatchMapped, Member, kept_length


@dataclass(frozen=True)
class _Moment:
    """State of a window at one length. Tensors are never written in place, so references are enough."""

    keys: Tensor
    values: Tensor
    length: int


@dataclass(frozen=True)
class LogicalKV:
    """Stands for ``layer.keys`` of a layer that can go back but holds no prefixes: its logical length, nothing else."""

    layer: object
    length: int

    def __getitem__(self, index) -> "LogicalKV":
        """A prefix ``[:, :, :n]``, as KVPress' roll-back takes it."""
        start, stop, step = index[2].indices(self.length)
        if start != 0 or step != 1:
            raise NotImplementedError("keys and values of sliding and linear layers can only be sliced as [:, :, :n]")
        return LogicalKV(self.layer, stop)


class WindowLayer(BatchMapped, Member, DynamicSlidingWindowLayer):
    """transformers' sliding-window layer, which remembers its state at the end of the context.

    A window forgets old tokens, so it cannot be cropped in general. Asking several questions about one context only
    needs the way back to the context's end, and a failed forward pass the way back to its start.
    """

    def __init__(self, sliding_window: int):
        self._context: _Moment | None = None
        self._before: _Moment | None = None
        super().__init__(sliding_window)

    @classmethod
    def adopt(cls, layer: DynamicSlidingWindowLayer) -> "WindowLayer":
        """A window with the state of a plain one, to take its place in ``cache.layers``."""
        adopted = cls(layer.sliding_window)
        adopted.__dict__.update({k: v for k, v in layer.__dict__.items() if k not in ("keys", "values")})
        adopted._keys, adopted._values = layer.keys, layer.values
        return adopted

    def mark_context(self) -> None:
        """Remember the present state as the context's end."""
        self._context = self._now()

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Append tokens as transformers does."""
        self.refuse_half_a_forward(key_states.shape[2])
        marked, self._context = self._context, None  # plain tensors for the parent class
        self._before = self._now()
        try:
            return super().update(key_states, value_states, *args, **kwargs)
        finally:
            self._context = marked

    def crop(self, max_length: int) -> None:
        """Keep a prefix, see :func:`~verkv.members.kept_length`, that is remembered or that the window still covers."""
        self.roll_back_to(kept_length(max_length, self.get_seq_length()))

    def roll_back_to(self, length: int) -> None:
        """Return to the state at that length, whatever transformers' convention for :meth:`crop` is."""
        if not self._go_back(length):
            raise ValueError(
                f"a sliding layer cannot go back from {self.cumulative_length} to {length} tokens: its window has "
                f"forgotten those before; crop to the context's end or reset the cache"
            )

    def check_crop(self, length: int) -> None:
        """Raise ValueError unless the state at that length is remembered or still covered."""
        copy.copy(self).roll_back_to(length)

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes by tier and part: the window itself, and the states it can go back to."""
        moments = [m for m in (self._context, self._before) if m is not None and m.keys is not None]
        now = {id(t): t.nbytes for t in (self._keys, self._values) if t is not None}
        remembered = {id(t): t.nbytes for m in moments for t in (m.keys, m.values) if id(t) not in now}
        states = sum(remembered.values()) + self._sliding_window_tensor.nbytes
        return {"device": {"unsealed": sum(now.values())}, "device_uncharged": {"window_states": states}}

    def reset(self) -> None:
        """Forget everything."""
        self._context, self._before = None, None
        self.leave()
        self._keys, self._values, self.is_initialized, self.cumulative_length = None, None, False, 0

    @property
    def keys(self):
        """The window's keys; a stand-in once the context's end is marked."""
        return LogicalKV(self, self.cumulative_length) if self._context is not None else self._keys

    @keys.setter
    def keys(self, value):
        self._assign("_keys", value)

    @property
    def values(self):
        """See :attr:`keys`."""
        return LogicalKV(self, self.cumulative_length) if self._context is not None else self._values

    @values.setter
    def values(self, value):
        self._assign("_values", value)

    def _now(self) -> _Moment:
        return _Moment(self._keys, self._values, self.cumulative_length)

    def _assign(self, name: str, value) -> None:
        if not isinstance(value, LogicalKV):
            setattr(self, name, value)
        elif not self._go_back(value.length):
            raise NotImplementedError(
                f"a sliding layer can go back to the context's end, not to {value.length} tokens; reset the cache"
            )

    def _go_back(self, length: int) -> bool:
        """Return to a state of that length, if it is remembered or all of its window is stored."""
        if length == self.cumulative_length and not self._holds_more_than_a_window():
            return True
        for moment in (self._context, self._before):
            if moment is not None and moment.length == length and moment.keys is not None:
                self._keys, self._values, self.cumulative_length = moment.keys, moment.values, moment.length
                return True
        # Before the window is full, and where transformers records the past for assisted decoding.
        oldest = self.cumulative_length - (0 if self._keys is None else self._keys.shape[2])
        first = max(0, length - self.sliding_window + 1)  # what the next token sees
        if not oldest <= first <= length <= self.cumulative_length:
            return False
        kept = slice(first - oldest, length - oldest)
        self._keys, self._values = self._keys[:, :, kept], self._values[:, :, kept]
        self.cumulative_length = length
        return True

    def _holds_more_than_a_window(self) -> bool:
        return self._keys is not None and self._keys.shape[2] > max(1, self.sliding_window - 1)

    def _map(self, function) -> None:
        move = lambda m: m and _Moment(function(m.keys), function(m.values), m.length)  # noqa: E731
        if self.get_seq_length() > 0:
            self._keys, self._values = function(self._keys), function(self._values)
            self._context = move(self._context)
            self._before = None
