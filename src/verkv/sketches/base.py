"""What a key sketch must offer: a small stand-in for all keys that scores every token for a query."""

from typing import Protocol

from torch import Tensor


class Sketch(Protocol):
    """A key sketch. An instance is a recipe until :meth:`build` returns a fitted copy of it.

    Attributes
    ----------
    name : str
        For statistics and logs.
    is_oracle : bool
        True where the sketch reads host keys in full, so that its scores are exact and its reads are not counted.
    is_linear : bool
        True where ``logits(q)`` is the inner product of q with the keys that :meth:`decode` returns.
    nbytes : int
        Bytes on the device that grow with the context. They are charged to the memory budget.
    uncharged_nbytes : int
        Bytes on the device that do not depend on the context's length (channel choices, bases). Reported, not charged.
    """

    name: str
    is_oracle: bool
    is_linear: bool

    def build(self, keys: Tensor, queries: Tensor | None = None, positions: Tensor | None = None) -> "Sketch":
        """Fit the sketch.

        Parameters
        ----------
        keys : Tensor, shape (B, Hkv, T, d), float
            As they are cached: RoPE applied.
        queries : Tensor, shape (B, Hq, M, d), float, optional
            Queries like those it will be used with, as attention sees them: RoPE applied, those of KV head h in the
            query heads h * G .. (h + 1) * G - 1. A sketch may weight its errors by them, or ignore them.
        positions : Tensor, shape (B, T), int64, optional
            True positions; 0, 1, ... by default. In left-padded rows the padding holds copies of the row's first key
            and position 0.
        """
        ...

    def logits(self, query: Tensor) -> Tensor:
        """Approximate <k, q>, without the model's scaling, in float32.

        Query (B, Hkv, R, d): R rows per KV head, whatever query heads and positions they are. Returns (B, Hkv, R, T).
        """
        ...

    def decode(self) -> Tensor:
        """The sketched keys in the cache's coordinates, (B, Hkv, T, d), float32; 0 in channels that are not kept.

        Raises
        ------
        NotImplementedError
            If the sketch is not linear.
        """
        ...

    def charged_bytes(self, n_tokens: int, head_dim: int) -> int:
        """Bytes per KV head that :attr:`nbytes` will count for a context of that length: needed before the fit."""
        ...

    @property
    def nbytes(self) -> int: ...

    @property
    def uncharged_nbytes(self) -> int: ...

    def tensors(self) -> dict[str, Tensor]:
        """The device tensors that :attr:`nbytes` counts, by part."""
        ...

    def uncharged_tensors(self) -> dict[str, Tensor]:
        """The device tensors that :attr:`uncharged_nbytes` counts, by part."""
        ...

    def select(self, indices: Tensor) -> "Sketch":
        """The sketch of a batch that was indexed by ``indices`` (B',)."""
        ...
