"""What is remembered of the tokens that are not sealed yet, so that they can be: kept beside a layer's tail."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

UNKNOWN_ID = -1


@dataclass(frozen=True)
class TailRecord:
    """Of a layer's tail of t tokens, as far as it is wanted. Never written into: every change makes a new one.

    Attributes
    ----------
    scores : Tensor, shape (B, Hkv, t), float32, optional
        Importance scores; NaN where they are not known.
    hidden : Tensor, shape (B, t, D), optional
        What went into the layer's attention, for scorers that see a whole segment; NaN where it is not known.
    queries : Tensor, shape (B, Hq, M, d), float32, optional
        Of the last M of the first ``queries_end`` tokens, times the scaling.
    ids : Tensor, shape (B, T), int64, on the CPU, optional
        Of all tokens since the start; -1 where they are not known.
    """

    scores: Tensor | None = None
    hidden: Tensor | None = None
    queries: Tensor | None = None
    queries_end: int = 0
    ids: Tensor | None = None

    def add_scores(self, scores: Tensor, n_tail: int) -> "TailRecord":
        """Scores (B, Hkv, n) of the tail's last tokens; ``n_tail`` counts them."""
        gap = scores.new_full((*scores.shape[:2], n_tail - scores.shape[2]), torch.nan)
        return replace(self, scores=torch.cat([_fitted(self.scores, gap, 2), scores], 2))

    def add_hidden(self, hidden: Tensor, n_tail: int) -> "TailRecord":
        """Hidden states (B, n, D) of the tail's last tokens; ``n_tail`` counts them."""
        gap = hidden.new_full((len(hidden), n_tail - hidden.shape[1], hidden.shape[2]), torch.nan)
        return replace(self, hidden=torch.cat([_fitted(self.hidden, gap, 1), hidden], 1))

    def add_queries(self, queries: Tensor, n_kept: int, n_tokens: int) -> "TailRecord":
        """Queries (B, Hq, n, d) of the last of ``n_tokens`` tokens; the last ``n_kept`` are remembered."""
        follows = self.queries is not None and self.queries_end == n_tokens - queries.shape[2]
        before = [self.queries] if follows else []
        return replace(self, queries=torch.cat([*before, queries], 2)[:, :, -n_kept:], queries_end=n_tokens)

    def add_ids(self, ids: Tensor, n_tokens: int) -> "TailRecord":
        """Ids (B, n) of the last of ``n_tokens`` tokens."""
        gap = torch.full((len(ids), n_tokens - ids.shape[1]), UNKNOWN_ID, dtype=torch.int64, device="cpu")
        return replace(self, ids=torch.cat([_fitted(self.ids, gap, 1), ids.to("cpu")], 1))

    def map(self, function: Callable[[Tensor], Tensor]) -> "TailRecord":
        """Index or repeat the rows of the batch."""
        return replace(self, **{name: function(tensor) for name, tensor in self._tensors().items()})

    def drop_first(self, n_tokens: int) -> "TailRecord":
        """The first tokens of the tail were sealed."""
        kept = {}
        if self.scores is not None:
            kept["scores"] = self.scores[:, :, n_tokens:].clone()
        if self.hidden is not None:
            kept["hidden"] = self.hidden[:, n_tokens:].clone()
        return replace(self, **kept)

    def cut(self, n_tail: int, n_tokens: int) -> "TailRecord":
        """Tokens behind the first ``n_tail`` of the tail, ``n_tokens`` of all, were taken out of the cache.

        They need not have been recorded: not those of a pass that failed, nor of a replay.
        """
        kept = {}
        if self.scores is not None:
            kept["scores"] = self.scores[:, :, :n_tail]
        if self.hidden is not None:
            kept["hidden"] = self.hidden[:, :n_tail]
        if self.ids is not None:
            kept["ids"] = self.ids[:, :n_tokens]
        if self.queries is not None and self.queries_end > n_tokens:
            kept["queries"] = self.queries[:, :, : max(0, self.queries.shape[2] - self.queries_end + n_tokens)]
            kept["queries_end"] = n_tokens
        return replace(self, **kept)

    def bring_back(self, n_tokens: int, scores: Tensor | None, beams: int) -> "TailRecord":
        """Sealed tokens came back into an empty tail, with their inclusion probabilities (C, Hkv, n) as scores."""
        kept = {}
        if self.scores is not None and scores is not None:
            kept["scores"] = scores.to(self.scores).repeat_interleave(beams, 0)
        elif self.scores is not None:
            kept["scores"] = self.scores.new_full((*self.scores.shape[:2], n_tokens), torch.nan)
        if self.hidden is not None:
            kept["hidden"] = self.hidden.new_full((len(self.hidden), n_tokens, self.hidden.shape[2]), torch.nan)
        return replace(self, **kept)

    def device_bytes(self) -> dict[str, int]:
        """By part of the memory report."""
        return {f"tail_{name}": tensor.nbytes for name, tensor in self._tensors().items() if name != "ids"}

    def host_bytes(self) -> dict[str, int]:
        """By part of the memory report."""
        return {} if self.ids is None else {"token_ids": self.ids.nbytes}

    def _tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in vars(self).items() if isinstance(tensor, Tensor)}


def _fitted(known: Tensor | None, gap: Tensor, axis: int) -> Tensor:
    """What is known, cut or filled up to the length of ``gap``, which holds what stands for unknown."""
    if known is None:
        return gap
    n_known = min(known.shape[axis], gap.shape[axis])
    return torch.cat([known.narrow(axis, 0, n_known), gap.narrow(axis, n_known, gap.shape[axis] - n_known)], axis)
