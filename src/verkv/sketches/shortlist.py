"""The shortlist: the few tokens per KV head whose keys are read and scored exactly before planning (A.1)."""

import torch
from torch import Tensor


def shortlist(logits: Tensor, candidates: Tensor, size: int) -> Tensor:
    """The tokens with the largest sketch score over a KV head's query rows.

    Parameters
    ----------
    logits : Tensor, shape (N, R, T), float
        Sketch scores: N KV heads (of a batch), R query rows each.
    candidates : Tensor, shape (N, T), bool
        Tokens that may be chosen. For a plan that is blind to the draw: all residual tokens, sampled or not.
    size : int >= 0
        Tokens per KV head; all candidates where there are fewer.

    Returns
    -------
    Tensor, shape (N, T), bool

    Examples
    --------
    >>> import torch
    >>> shortlist(torch.tensor([[[1.0, 3.0, 2.0]]]), torch.tensor([[True, False, True]]), size=1)
    tensor([[False, False,  True]])
    """
    if size < 0:
        raise ValueError(f"shortlist size must be >= 0, got {size}")
    best = logits.amax(1).masked_fill(~candidates, -torch.inf)
    chosen = best.topk(min(size, best.shape[-1]), dim=-1).indices
    return torch.zeros_like(candidates).scatter(-1, chosen, True) & candidates
