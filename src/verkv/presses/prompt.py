"""What is known about the prompts of a batch: lengths, padding, protected tokens, rows that share one."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """What is known about the tokens that are to be sealed: a prefilled context, or the next segment of one.

    Attributes
    ----------
    n_tokens : int
        T, padding included.
    n_padding : Tensor, shape (C,), int64
        Left padding of each context.
    protected : Tensor, shape (C, T), bool
        Tokens that get r = 1: sinks, template prefix, local window.
    beams : int
        Batch rows that share a context.
    hidden : Tensor, shape (C, T), bool, optional
        Of a later segment: tokens that the attention mask hides.
    earlier : Tensor, shape (C, S), int64, optional
        Of a later segment: real tokens of each segment before. None for a context, which begins at 0.
    n_certain_before : Tensor, shape (C,), int64, optional
        Of a later segment under a budget by size: tokens per KV head of the earlier ones that are always kept.
    """

    n_tokens: int
    n_padding: Tensor
    protected: Tensor
    beams: int
    hidden: Tensor | None = None
    earlier: Tensor | None = None
    n_certain_before: Tensor | None = None

    @property
    def first(self) -> Tensor | None:
        """Of a later segment: position of each row's first token, (C,)."""
        return None if self.earlier is None else self.earlier.sum(-1)

    @property
    def is_token(self) -> Tensor:
        """(C, T), False at padding and hidden tokens."""
        behind_padding = torch.arange(self.n_tokens, device=self.n_padding.device) >= self.n_padding[:, None]
        return behind_padding if self.hidden is None else behind_padding & ~self.hidden

    @property
    def lengths(self) -> Tensor:
        """Real tokens of each context, (C,)."""
        return self.is_token.sum(-1)

    @property
    def n_protected(self) -> Tensor:
        """(C,)."""
        return self.protected.sum(-1)


def left_padding(attention_mask: Tensor | None, batch: int, n_tokens: int) -> Tensor:
    """Padding tokens before each row, (B,), int64.

    Raises
    ------
    NotImplementedError
        If the mask hides anything but leading tokens.
    """
    if attention_mask is None:
        return torch.zeros(batch, dtype=torch.int64, device="cpu")
    visible = attention_mask.bool()
    n_padding = n_tokens - visible.sum(-1)
    position = torch.arange(n_tokens, device=visible.device)
    if visible.shape != (batch, n_tokens) or not torch.equal(visible, position >= n_padding[:, None]):
        raise NotImplementedError("attention_mask may hide only leading tokens in prefill; pad the batch on the left")
    if bool((n_padding == n_tokens).any()):
        raise ValueError("attention_mask hides all tokens of a row; remove the row from the batch")
    return n_padding


def shared_prompts(input_ids: Tensor | None, attention_mask: Tensor | None) -> int:
    """How many consecutive batch rows have the same prompt (beams, samples), so that they can share a context."""
    if input_ids is None or len(input_ids) == 1:
        return 1
    rows = input_ids if attention_mask is None else torch.cat([input_ids, attention_mask.to(input_ids.dtype)], -1)
    changes = (rows[1:] != rows[:-1]).any(-1).nonzero().flatten().tolist()
    ends = [i + 1 for i in changes] + [len(rows)]
    sizes = {end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)}
    return sizes.pop() if len(sizes) == 1 else 1
