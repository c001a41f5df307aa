"""Where importance scores come from: KVzip's replay, Fast KVzip's gates, or the score of any KVPress scorer."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from kvpress import ScorerPress
from torch import Tensor, nn

Scores = dict[int, Tensor]  # by layer, (B, Hkv, T)


class ScoreSource(Protocol):
    """Scores the tokens of a context that has just been prefilled.

    Attributes
    ----------
    name : str
        For statistics.
    prefix_length : int
        Leading tokens that the scores say nothing about (a chat template's prefix) and that must be kept.
    on_attention : callable or None
        Forward hook ``(module, kwargs, output, layer)`` of every full-attention module during prefill; returns that
        layer's scores (B, Hkv, T).
    """

    name: str
    prefix_length: int
    on_attention: Callable | None

    def prepare(self, model) -> None:
        """Load what is needed, before the prefill; raises where the model cannot be scored."""
        ...

    def after_prefill(self, model, cache, input_ids: Tensor | None, attention_mask: Tensor | None) -> Scores | None:
        """Scores that need more forward passes; None where ``on_attention`` collected them."""
        ...


@dataclass
class ScorerSource:
    """The ``score`` method of a KVPress ``ScorerPress``, called in prefill; nothing is pruned by it."""

    press: ScorerPress
    prefix_length = 0

    def __post_init__(self):
        self.press = copy.copy(self.press)  # the user's press stays as it is
        self.name = type(self.press).__name__

    def prepare(self, model) -> None:
        """Let the press read the model."""
        self.press.post_init_from_model(model)

    def on_attention(self, module: nn.Module, kwargs: dict, output, layer) -> Tensor:
        """The press' scores of one layer."""
        attentions = output[1] if len(output) > 1 else None
        return self.press.score(module, kwargs["hidden_states"], layer.keys, layer.values, attentions, kwargs)

    def after_prefill(self, model, cache, input_ids, attention_mask) -> None:
        """Nothing is left to do."""
        return None


def unit_scores(scores: Scores, is_token: Tensor) -> Scores:
    """Scores in [0, 1] as float32, checked; outside that range a softmax over the tokens, as the paper says.

    Each row is judged by its own scores, of all layers: what becomes of it does not depend on its neighbours.

    Parameters
    ----------
    scores : dict of int to Tensor, shape (B, Hkv, T)
    is_token : Tensor, shape (B, T), bool
        False at padding, whose scores are ignored and set to 0.

    Raises
    ------
    ValueError
        If a token's score is NaN or infinite.
    """
    keep = is_token[:, None]
    checked = {}
    for idx, score in scores.items():
        score = score.float()
        mask = keep.to(score.device)
        if not bool(torch.isfinite(score.masked_fill(~mask, 0.0)).all()):
            raise ValueError(f"scores of layer {idx} hold NaN or infinite values; check the press that made them")
        checked[idx] = score.masked_fill(~mask, 0.0)
    lowest = torch.stack([score.amin((1, 2)).cpu() for score in checked.values()]).amin(0)
    highest = torch.stack([score.amax((1, 2)).cpu() for score in checked.values()]).amax(0)
    fits = ((lowest >= 0.0) & (highest <= 1.0))[:, None, None]
    if bool(fits.all()):
        return checked
    for idx, score in checked.items():
        share = score.masked_fill(~keep.to(score.device), -torch.inf).softmax(-1)
        checked[idx] = torch.where(fits.to(score.device), score, share)
    return checked
