"""The sketch of a context that grew: one sketch for each segment, their logits one behind the other."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.sketches.base import Sketch


@dataclass(frozen=True)
class SegmentSketch:
    """One segment's sketch.

    Attributes
    ----------
    sketch : Sketch
        Built on the segment's keys, those of hidden tokens first.
    place : Tensor, shape (C, t), int64, or None
        Where each token of the segment stands in the sketch; None for the same order.
    """

    sketch: Sketch
    place: Tensor | None = None

    def logits(self, query: Tensor) -> Tensor:
        """As :meth:`Sketch.logits`, in the order of the tokens."""
        logits = self.sketch.logits(query)
        if self.place is None:
            return logits
        return logits.gather(-1, self.place[:, None, None].expand_as(logits))

    def decode(self) -> Tensor:
        """As :meth:`Sketch.decode`, in the order of the tokens."""
        keys = self.sketch.decode()
        return keys if self.place is None else keys.gather(2, self.place[:, None, :, None].expand_as(keys))

    def tensors(self) -> dict[str, Tensor]:
        """By part of the memory report."""
        return self.sketch.tensors()

    def uncharged_tensors(self) -> dict[str, Tensor]:
        """By part of the memory report."""
        return self.sketch.uncharged_tensors() | ({} if self.place is None else {"sketch_place": self.place})

    def select(self, indices: Tensor) -> "SegmentSketch":
        """Reindex the batch."""
        place = None if self.place is None else self.place[indices.to(self.place.device)]
        return SegmentSketch(self.sketch.select(indices), place)


@dataclass(frozen=True)
class SegmentedSketch:
    """Sketches of consecutive segments; offers what a built :class:`~verkv.sketches.Sketch` does.

    Attributes
    ----------
    parts : tuple of SegmentSketch
    """

    parts: tuple[SegmentSketch, ...]

    is_oracle = False

    @classmethod
    def of(cls, sketch) -> "SegmentedSketch":
        """Any built sketch as one of segments."""
        if isinstance(sketch, SegmentedSketch):
            return sketch
        return cls((sketch if isinstance(sketch, SegmentSketch) else SegmentSketch(sketch),))

    def append(self, part: SegmentSketch) -> "SegmentedSketch":
        """With one more segment."""
        return SegmentedSketch((*self.parts, part))

    def head(self, n_segments: int) -> "SegmentedSketch":
        """Of the first segments only."""
        return SegmentedSketch(self.parts[:n_segments])

    @property
    def name(self) -> str:
        """Of the first segment's sketch."""
        return self.parts[0].sketch.name

    @property
    def is_linear(self) -> bool:
        """Whether all segments' are."""
        return all(part.sketch.is_linear for part in self.parts)

    def logits(self, query: Tensor) -> Tensor:
        """(C, Hkv, R, d) -> (C, Hkv, R, T), float32."""
        return torch.cat([part.logits(query) for part in self.parts], -1)

    def decode(self) -> Tensor:
        """The sketched keys, (C, Hkv, T, d), float32."""
        return torch.cat([part.decode() for part in self.parts], 2)

    @property
    def nbytes(self) -> int:
        """Of all segments."""
        return sum(part.sketch.nbytes for part in self.parts)

    @property
    def uncharged_nbytes(self) -> int:
        """Of all segments."""
        return sum(tensor.nbytes for tensor in {id(t): t for t in self.uncharged_tensors().values()}.values())  # shared

    def tensors(self) -> dict[str, Tensor]:
        """By part of the memory report; names of later segments end with their number."""
        return dict(self._named(SegmentSketch.tensors))

    def uncharged_tensors(self) -> dict[str, Tensor]:
        """By part of the memory report; names of later segments end with their number."""
        return dict(self._named(SegmentSketch.uncharged_tensors))

    def select(self, indices: Tensor) -> "SegmentedSketch":
        """Reindex the batch."""
        return SegmentedSketch(tuple(part.select(indices) for part in self.parts))

    def _named(self, tensors_of) -> Iterator[tuple[str, Tensor]]:
        for number, part in enumerate(self.parts):
            for name, tensor in tensors_of(part).items():
                yield (f"{name}.{number}" if number else name), tensor


def hidden_first(is_token: Tensor) -> tuple[Tensor, Tensor] | None:
    """An order of a segment's tokens (C, t) that puts hidden ones first, and where each token is in it.

    Sketches take rows with padding at the left. None if that is how they are.
    """
    order = is_token.to(torch.uint8).argsort(dim=-1, stable=True)
    identity = torch.arange(is_token.shape[1], device=order.device).expand_as(order)
    return None if torch.equal(order, identity) else (order, order.argsort(dim=-1))
