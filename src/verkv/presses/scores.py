"""Where importance scores come from: KVzip's replay, Fast KVzip's gates, or the score of any KVPress scorer."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from kvpress import ScorerPress
from torch import Tensor, nn

Scores = dict[int, Tensor]  # by layer, (B, Hkv, T)


@dataclass(frozen=True)
class Tail:
    """The tokens of a cache that are not sealed yet, of which the first are to be scored.

    Attributes
    ----------
    layers : list of int
        Full-attention layers.
    n_new : int
        Tokens to score.
    is_token : Tensor, shape (B, t), bool
        False at tokens of the tail that are hidden.
    n_first : int
        Leading tokens of the context that are always kept.
    """

    layers: list[int]
    n_new: int
    is_token: Tensor
    n_first: int


class ScoreSource(Protocol):
    """Scores the tokens of a context that has just been prefilled, and later those of its tail.

    Attributes
    ----------
    name : str
        For statistics.
    prefix_length : int
        Leading tokens that the scores say nothing about (a chat template's prefix) and that must be kept.
    on_attention : callable or None
        Forward hook ``(module, kwargs, output, layer)`` of every full-attention module during prefill; returns that
        layer's scores (B, Hkv, T).
    records : {"scores", "hidden", "ids"}
        What must be remembered of new tokens so that they can be scored later: the scores of ``on_attention``, the
        hidden states that attention gets, or the token ids.
    """

    name: str
    prefix_length: int
    on_attention: Callable | None
    records: str

    def prepare(self, model) -> None:
        """Load what is needed, before the prefill; raises where the model cannot be scored."""
        ...

    def after_prefill(self, model, cache, input_ids: Tensor | None, attention_mask: Tensor | None) -> Scores | None:
        """Scores that need more forward passes; None where ``on_attention`` collected them."""
        ...

    def score_tail(self, model, cache, tail: Tail) -> Scores:
        """Scores (B, Hkv, n) of the tail's first tokens, from nothing but the tokens there are.

        Raises
        ------
        ValueError
            If something that should have been remembered is missing.
        NotImplementedError
            If the tail cannot be scored.
        """
        ...


@dataclass
class ScorerSource:
    """The ``score`` method of a KVPress ``ScorerPress``, called in prefill; nothing is pruned by it."""

    press: ScorerPress
    prefix_length = 0
    records = "hidden"

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

    def score_tail(self, model, cache, tail: Tail) -> Scores:
        """The press' scores, given the hidden states, keys and values of the tail alone."""
        if not bool(tail.is_token.all()):
            raise NotImplementedError(
                f"{self.name} cannot score a tail with hidden tokens, as of rows that ended earlier; pass scores="
            )
        decoder = decoder_of(model)
        scores = {}
        for i in tail.layers:
            layer = cache.layers[i]
            hidden = recorded(layer.record and layer.record.hidden, "hidden", *tail.is_token.shape)
            scores[i] = self._score(decoder, decoder.layers[i], hidden, layer, cache)[..., : tail.n_new]
        return scores

    def _score(self, decoder, block: nn.Module, hidden: Tensor, layer, cache) -> Tensor:
        """The press' scores of a layer's tail (B, Hkv, t), called as in a prefill of the tail alone."""
        n_tokens, (keys, values) = layer.get_seq_length(), layer.unsealed()
        positions = torch.arange(n_tokens - keys.shape[2], n_tokens, device=keys.device)
        module = block.self_attn
        kind = {"layer_type": block.attention_type} if _needs_layer_type(decoder.rotary_emb) else {}
        kwargs = {
            "hidden_states": hidden,
            "position_ids": positions[None],
            "cache_position": positions,
            "position_embeddings": decoder.rotary_emb(hidden, positions[None], **kind),
            "attention_mask": None,
            "past_key_values": cache,
        }
        lends = not hasattr(module, "rotary_emb")  # some scorers look for it there
        if lends:
            module.rotary_emb = decoder.rotary_emb
        try:
            return self.press.score(module, hidden, keys, values, None, kwargs)
        except Exception as error:
            raise NotImplementedError(
                f"{self.name} cannot score a segment of {keys.shape[2]} tokens from its own hidden states, keys and "
                f"values ({error or type(error).__name__}); pass scores=, or use KVzipPress()"
            ) from error
        finally:
            if lends:
                del module.rotary_emb


def decoder_of(model) -> nn.Module:
    """The module that holds a model's decoder layers."""
    backbone = getattr(model, "model", None) or model.base_model
    return getattr(backbone, "language_model", backbone)


def recorded(states: Tensor | None, name: str, batch: int, n_tail: int) -> Tensor:
    """What was remembered of the tail, checked to be complete.

    Parameters
    ----------
    states : Tensor, shape (B, t, D) or (B, Hkv, t), or None
        NaN where nothing is known.
    name : {"hidden", "scores"}
    batch, n_tail : int

    Raises
    ------
    ValueError
        If some of it is missing.
    """
    axis = {"hidden": 1, "scores": 2}[name]
    if states is not None and states.shape[axis] == n_tail and not bool(states.isnan().any()):
        return states
    raise ValueError(
        f"the {name} of some of the tail's {n_tail} tokens were not recorded: run the model inside `with press(model)` "
        f"with reseal_every or max_tail set (math.inf will do), or pass scores="
    )


def _needs_layer_type(rotary_emb: nn.Module) -> bool:
    return "layer_type" in inspect.signature(rotary_emb.forward).parameters


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
