"""One ``with press(model)`` block: from the prefill's forward pass to a sealed cache, and on to its next segments."""

import collections
import inspect
import threading
import warnings

import torch
from torch import Tensor, nn

from verkv.cache import check_cache, empty_cache, unsealed_keys
from verkv.presses.hooks import register_hook
from verkv.presses.prompt import shared_prompts
from verkv.presses.queries import QueryRecorder
from verkv.presses.resealing import chunked_prefill, sealing_tail, update_record
from verkv.presses.scores import Scores, ScoreSource

# Rotary embeddings put on attention modules, by module: how many blocks, of different threads, still need them.
_LENT_ROTARY: collections.Counter[int] = collections.Counter()
_LENDING = threading.Lock()

N_TAIL_QUERIES = 64  # of the last tokens, kept to fit the sketch of the next segment


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
        self.seals_tails = press.seals_tails and source is not None
        self.chunked = chunked_prefill.get()
        self.appending = None  # a cache that this forward pass extends
        self.to_reseal: tuple | None = None  # cache and mask of a pass with candidates
        self.hidden: dict[int, Tensor] = {}  # of the prefill's last tokens
        self.with_rotary: list[nn.Module] = []

    def register(self, backbone: nn.Module):
        """Register the hooks; yields their handles."""
        yield register_hook(self.model.register_forward_pre_hook, self.before_model)
        yield register_hook(backbone.register_forward_pre_hook, self.before_forward)
        yield register_hook(backbone.register_forward_hook, self.after_forward)
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
            yield register_hook(block.self_attn.register_forward_hook, self.after_attention)

    def lend_rotary_embedding(self, attention: nn.Module, decoder: nn.Module) -> None:
        """Some KVPress scorers look for it on the attention module."""
        with _LENDING:
            if _LENT_ROTARY[id(attention)] or not hasattr(attention, "rotary_emb"):
                # Not as a submodule: another thread may be walking through the model's.
                vars(attention)["rotary_emb"] = decoder.rotary_emb
                _LENT_ROTARY[id(attention)] += 1
                self.with_rotary.append(attention)

    def remove_rotary_embeddings(self) -> None:
        """Leave the model's modules as they were, unless another thread's block still needs what was put there."""
        with _LENDING:
            for attention in self.with_rotary:
                _LENT_ROTARY[id(attention)] -= 1
                if not _LENT_ROTARY[id(attention)]:
                    del _LENT_ROTARY[id(attention)]
                    vars(attention).pop("rotary_emb", None)  # a KVPress press may have put it among the modules since

    def ignores_this_pass(self) -> bool:
        """A replay of our own, or another thread's forward pass: hooks are the model's, the session is this block's."""
        return self.busy or sealing_tail.get() or threading.get_ident() != self.thread

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
        self.reseal_postponed()
        kwargs = _by_name(module, args, kwargs)
        cache = _cache_argument(kwargs)
        if "linear_attention" in self.kinds:  # also if there is none: such models would make one of their own
            check_cache(cache, self.kinds)
        if cache is not None and cache.get_seq_length() > 0:
            self.say_what_stays_uncompressed(cache, kwargs)
            self.begin_to_append(cache)
            return
        if cache is not None:
            check_cache(cache, self.kinds)
        self.is_prefill, self.prefill_cache, self.scores, self.hidden = True, cache, {}, {}
        self.appending = None
        self.recorder.queries.clear()

    def say_what_stays_uncompressed(self, cache, kwargs: dict) -> None:
        """Only the first forward pass with an empty cache is compressed: note what else comes in many at once."""
        tokens = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
        if not any(getattr(layer, "sealed", False) for layer in cache.layers):
            if self.press.stats is None and not self.press.keeps_everything and not self.has_warned:
                self.has_warned = True
                warnings.warn(
                    f"past_key_values held {cache.get_seq_length()} tokens before the block: they are not compressed; "
                    f"prefill inside the block, with an empty cache",
                    stacklevel=2,
                )
        elif self.seals_tails:
            return
        elif self.press.stats is not None and tokens is not None and tokens.shape[1] > 1 and not self.has_candidates:
            note = (
                "a pass of several tokens after the prefill is kept uncompressed, as a question is; for chunked "
                "prefill use verkv.prefill, and reseal_every or max_tail to compress what comes later"
            )
            if note not in self.press.stats.notes:
                self.press.stats.notes.append(note)

    def begin_to_append(self, cache) -> None:
        """Remember what sealing the new tokens will need, where they are to be sealed."""
        self.appending = None
        if self.seals_tails and any(getattr(layer, "sealed", False) or _has_record(layer) for layer in cache.layers):
            resealer = self.press.take_over(self.model, cache)
            resealer.source = self.source
            self.appending = cache

    def discard_unfinished_prefill(self) -> None:
        """Empty the cache of a prefill that failed: half a prompt must not be taken for a whole one."""
        if self.is_prefill and self.prefill_cache is not None:
            empty_cache(self.prefill_cache)
        self.is_prefill, self.prefill_cache = False, None

    def observe(self, module: nn.Module, query: Tensor, key: Tensor, scaling: float) -> None:
        """Record the queries of a prefill, where the press asks for some."""
        if self.ignores_this_pass() or not self.recorder.n_positions:
            return
        if self.is_prefill:
            self.recorder.observe(module, query, key, scaling)
        elif self.appending is not None:
            self.observe_sealed(module, query, self.appending.layers[module.layer_idx], scaling)

    def observe_sealed(self, module: nn.Module, query: Tensor, layer, scaling: float) -> None:
        """Record the queries of new tokens, where the tail is to be sealed later."""
        if self.appending is not None and not self.ignores_this_pass():
            queries = query.detach()[:, :, -N_TAIL_QUERIES:].float() * scaling
            n_tokens = layer.get_seq_length()
            update_record(layer, lambda record: record.add_queries(queries, N_TAIL_QUERIES, n_tokens))

    @torch.no_grad()
    def after_attention(self, module: nn.Module, args, kwargs: dict, output):
        """Collect a layer's scores, or what they need, during prefill and where the tail is to be sealed."""
        if self.ignores_this_pass() or not (self.is_prefill or self.appending is not None):
            return
        cache = _cache_argument(kwargs)
        if cache is None:
            return  # after_forward says what is wrong
        layer, hidden = cache.layers[module.layer_idx], kwargs["hidden_states"]
        if self.is_prefill:
            self.scores[module.layer_idx] = self.source.on_attention(module, kwargs, output, layer)
            if self.seals_tails and self.source.records == "hidden":
                n_kept = sum(self.press._n_protected_ends(hidden.shape[1], self.source.prefix_length))
                self.hidden[module.layer_idx] = hidden[:, max(0, hidden.shape[1] - n_kept) :].detach().clone()
            return
        n_tail = unsealed_keys(layer).shape[2]
        if self.source.records == "scores":
            scores = self.source.on_attention(module, kwargs, output, layer).float()
            update_record(layer, lambda record: record.add_scores(scores, n_tail))
        else:
            update_record(layer, lambda record: record.add_hidden(hidden.detach(), n_tail))

    def remember_tail(self, cache, ids: Tensor | None) -> None:
        """Remember of a prefill's tokens that were not sealed what sealing them later needs."""
        layers = [i for i, kind in enumerate(self.kinds) if kind == "full_attention" and _has_record(cache.layers[i])]
        for i in layers:
            layer = cache.layers[i]
            n_tail = unsealed_keys(layer).shape[2]
            if i in self.hidden:
                hidden = self.hidden[i][:, -n_tail:] if n_tail else self.hidden[i][:, :0]
                update_record(layer, lambda record, h=hidden, n=n_tail: record.add_hidden(h, n))
            elif i in self.scores and self.source.records == "scores":
                scores = self.scores[i][..., self.scores[i].shape[2] - n_tail :].float()
                update_record(layer, lambda record, s=scores, n=n_tail: record.add_scores(s, n))
        self.add_ids(cache, ids)

    def add_ids(self, cache, ids: Tensor | None) -> None:
        """Remember the ids of a pass; one layer is enough."""
        if ids is not None and self.source.records == "ids":
            layer = next((layer for layer in cache.layers if _has_record(layer)), None)
            update_record(layer, lambda record: record.add_ids(ids, layer.get_seq_length()))

    def after_forward(self, module: nn.Module, args, kwargs: dict, output) -> None:
        """Seal after the prefill; later, where candidates may still be taken out of the cache."""
        if self.ignores_this_pass():
            return
        is_prefill, self.is_prefill, self.prefill_cache = self.is_prefill, False, None
        has_candidates, self.has_candidates = self.has_candidates, False
        kwargs = _by_name(module, args, kwargs)
        if not is_prefill:
            self.after_appending(kwargs, has_candidates)
            return
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

    def after_appending(self, kwargs: dict, has_candidates: bool) -> None:
        """Seal the tail if it is long enough, but not while candidates may still be taken out of it."""
        cache, self.appending = self.appending, None
        if cache is None:
            return
        self.add_ids(cache, kwargs.get("input_ids"))
        mask = kwargs.get("attention_mask")
        mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        self.to_reseal = None if self.chunked else (cache, mask)
        if not has_candidates:
            self.reseal_postponed()

    def reseal_postponed(self) -> None:
        """Seal the tail of the cache that the last forward pass has extended, if that is due."""
        if self.to_reseal is None:
            return
        (cache, mask), self.to_reseal = self.to_reseal, None
        if getattr(cache, "resealer", None) is None or not cache.layers[0].get_seq_length():
            return
        self.busy = True
        try:
            cache.resealer.run_if_due(cache, mask)
        finally:
            self.busy = False

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
            if self.seals_tails:
                cache.resealer.source = self.source
                self.remember_tail(cache, ids)
        finally:
            self.busy, self.scores, self.hidden = False, {}, {}
            self.recorder.queries.clear()


def _has_record(layer) -> bool:
    return getattr(layer, "record", None) is not None


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
