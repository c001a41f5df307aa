"""One ``with press(model)`` block: from the prefill's forward pass to a sealed cache."""

import collections
import inspect
import threading
import warnings

import torch
from torch import Tensor, nn

from verkv.cache import check_cache, empty_cache
from verkv.presses.prompt import shared_prompts
from verkv.presses.queries import QueryRecorder
from verkv.presses.scores import Scores, ScoreSource

# Rotary embeddings put on attention modules, by module: how many blocks, of different threads, still need them.
_LENT_ROTARY: collections.Counter[int] = collections.Counter()
_LENDING = threading.Lock()


class Session:
    """The hooks of one block, and the scores collected so far."""

    def __init__(self, press, model, kinds: list[str], source: ScoreSource | None):
        self.press, self.model, self.kinds, self.source = press, model, kinds, source
        self.scores: Scores = {}
        self.recorder = QueryRecorder(model.config, press.n_recorded_queries)
        self.busy = False  # replays run the model again
        self.thread = threading.get_ident()
        self.is_prefill = False
        self.prefill_cache = None
        self.has_candidates = False
        self.has_warned = False
        self.postponed: tuple | None = None  # cache, ids and mask of a prefill that is not sealed yet
        self.with_rotary: list[nn.Module] = []

    def register(self, backbone: nn.Module):
        """Register the hooks; yields their handles."""
        yield self.model.register_forward_pre_hook(self.before_model, with_kwargs=True)
        yield backbone.register_forward_pre_hook(self.before_forward, with_kwargs=True)
        yield backbone.register_forward_hook(self.after_forward, with_kwargs=True)
        if self.source is None or self.source.on_attention is None:
            return
        decoder = getattr(backbone, "language_model", backbone)
        blocks = [
            b for b, kind in zip(getattr(decoder, "layers", []), self.kinds, strict=False) if kind == "full_attention"
        ]
        if not blocks or not all(hasattr(getattr(block, "self_attn", None), "layer_idx") for block in blocks):
            raise NotImplementedError(
                f"{type(self.model).__name__} has no layers with self_attn, where this press takes its scores; use "
                f"KVzipPress() as press"
            )
        for block in blocks:
            self.lend_rotary_embedding(block.self_attn, decoder)
            yield block.self_attn.register_forward_hook(self.after_attention, with_kwargs=True)

    def lend_rotary_embedding(self, attention: nn.Module, decoder: nn.Module) -> None:
        """Some KVPress scorers look for it on the attention module."""
        with _LENDING:
            if _LENT_ROTARY[id(attention)] or not hasattr(attention, "rotary_emb"):
                attention.rotary_emb = decoder.rotary_emb
                _LENT_ROTARY[id(attention)] += 1
                self.with_rotary.append(attention)

    def remove_rotary_embeddings(self) -> None:
        """Leave the model's modules as they were, unless another thread's block still needs what was put there."""
        with _LENDING:
            for attention in self.with_rotary:
                _LENT_ROTARY[id(attention)] -= 1
                if not _LENT_ROTARY[id(attention)]:
                    del _LENT_ROTARY[id(attention)], attention.rotary_emb

    def ignores_this_pass(self) -> bool:
        """A replay of our own, or another thread's forward pass: hooks are the model's, the session is this block's."""
        return self.busy or threading.get_ident() != self.thread

    def before_model(self, module: nn.Module, args, kwargs: dict) -> None:
        """See whether candidate tokens may be among the inputs.

        With prompt lookup or an assistant model ``generate`` guesses tokens before the prefill, asks for their logits,
        and takes the wrong ones out of the cache again.
        """
        if self.ignores_this_pass():
            return
        n_logits = kwargs.get("logits_to_keep")
        self.has_candidates = isinstance(n_logits, int) and n_logits > 1

    def before_forward(self, module: nn.Module, args, kwargs: dict) -> None:
        """See whether this forward pass is the prefill, and refuse caches that cannot be sealed before it runs."""
        if self.ignores_this_pass():
            return
        self.discard_unfinished_prefill()
        self.seal_postponed()
        kwargs = _by_name(module, args, kwargs)
        cache = _cache_argument(kwargs)
        if "linear_attention" in self.kinds:  # also if there is none: such models would make one of their own
            check_cache(cache, self.kinds)
        if cache is not None and cache.get_seq_length() > 0:
            self.say_what_stays_uncompressed(cache, kwargs)
            return
        if cache is not None:
            check_cache(cache, self.kinds)
        self.is_prefill, self.prefill_cache, self.scores = True, cache, {}
        self.recorder.queries.clear()

    def say_what_stays_uncompressed(self, cache, kwargs: dict) -> None:
        """Only the first forward pass with an empty cache is compressed: note what else comes in many at once."""
        tokens = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
        if not any(getattr(layer, "sealed", False) for layer in cache.layers):
            if self.press.stats is None and self.press.compression_ratio > 0 and not self.has_warned:
                self.has_warned = True
                warnings.warn(
                    f"past_key_values held {cache.get_seq_length()} tokens before the block: they are not compressed; "
                    f"prefill inside the block, with an empty cache",
                    stacklevel=2,
                )
        elif self.press.stats is not None and tokens is not None and tokens.shape[1] > 1 and not self.has_candidates:
            note = (
                "a pass of several tokens after the prefill is kept uncompressed, as a question is; for chunked "
                "prefill pass the whole prompt at once"
            )
            if note not in self.press.stats.notes:
                self.press.stats.notes.append(note)

    def discard_unfinished_prefill(self) -> None:
        """Empty the cache of a prefill that failed: half a prompt must not be taken for a whole one."""
        if self.is_prefill and self.prefill_cache is not None:
            empty_cache(self.prefill_cache)
        self.is_prefill, self.prefill_cache = False, None

    def observe(self, module: nn.Module, query: Tensor, key: Tensor, scaling: float) -> None:
        """Record the queries of a prefill, where the press asks for some."""
        if self.is_prefill and self.recorder.n_positions and not self.ignores_this_pass():
            self.recorder.observe(module, query, key, scaling)

    @torch.no_grad()
    def after_attention(self, module: nn.Module, args, kwargs: dict, output):
        """Collect a layer's scores during prefill."""
        if self.ignores_this_pass() or not self.is_prefill:
            return
        cache = _cache_argument(kwargs)
        if cache is None:
            return  # after_forward says what is wrong
        layer = cache.layers[module.layer_idx]
        self.scores[module.layer_idx] = self.source.on_attention(module, kwargs, output, layer)

    def after_forward(self, module: nn.Module, args, kwargs: dict, output) -> None:
        """Seal after the prefill; later, where candidates may still be taken out of the cache."""
        if self.ignores_this_pass():
            return
        is_prefill, self.is_prefill, self.prefill_cache = self.is_prefill, False, None
        has_candidates, self.has_candidates = self.has_candidates, False
        if not is_prefill:
            return
        kwargs = _by_name(module, args, kwargs)
        cache = _cache_argument(kwargs)
        if cache is None:
            cache = getattr(output, "past_key_values", None)
        if cache is None:
            raise ValueError("there is no cache to compress: call the model with use_cache=True")
        check_cache(cache, self.kinds)
        ids = kwargs.get("input_ids")
        mask = kwargs.get("attention_mask")
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
            raise NotImplementedError(
                "attention_mask must have shape (batch, tokens) in prefill; pass the padding mask"
            )
        self.n_prefilled = cache.get_seq_length()
        if has_candidates:
            self.postponed = cache, ids, mask
        else:
            self.seal(cache, ids, mask)

    def seal_postponed(self) -> None:
        """Seal what a prefill with candidates left in the cache: at the next forward pass or the end of the block."""
        if self.postponed is None:
            return
        (cache, ids, mask), self.postponed = self.postponed, None
        n_tokens = cache.get_seq_length()
        if n_tokens > 0:
            cut = lambda t: None if t is None else t[:, :n_tokens]  # noqa: E731
            self.scores = {i: score[..., :n_tokens] for i, score in self.scores.items()}
            self.recorder.cut(self.n_prefilled - n_tokens)
            self.seal(cache, cut(ids), cut(mask))

    @torch.no_grad()
    def seal(self, cache, ids: Tensor | None, mask: Tensor | None) -> None:
        """Score what is left to score, and seal."""
        self.busy = True
        try:
            scores = self.scores
            if self.source is not None:
                replayed = self.source.after_prefill(self.model, cache, ids, mask)
                scores = scores if replayed is None else replayed
            self.press.seal(
                self.model,
                cache,
                scores,
                prefix_length=self.source.prefix_length if self.source else 0,
                attention_mask=mask,
                beams=shared_prompts(ids, mask),
                queries=self.recorder.of(cache),
            )
        finally:
            self.busy, self.scores = False, {}
            self.recorder.queries.clear()


def _by_name(module: nn.Module, args: tuple, kwargs: dict) -> dict:
    """All arguments of a forward call by name; most are passed by name already."""
    if not args:
        return kwargs
    names = [name for name, p in inspect.signature(module.forward).parameters.items() if p.kind is not p.VAR_KEYWORD]
    return dict(zip(names, args, strict=False)) | kwargs


def _cache_argument(kwargs: dict):
    """The cache among a forward call's arguments; it was renamed in transformers 5.24."""
    cache = kwargs.get("past_key_values")
    return cache if cache is not None else kwargs.get("cache")
