"""What all presses share: score the prompt in prefill, decide what each layer keeps, seal."""

import collections
import contextlib
import inspect
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from kvpress.presses.base_press import BasePress
from torch import Tensor, nn

from verkv.cache import check_cache, empty_cache, layer_kinds, seal_cache
from verkv.context import SealPlan
from verkv.hybrid import repair_linear_attention
from verkv.presses.budget import LayerGeometry, check_compression_ratio
from verkv.presses.scores import Scores, ScoreSource, unit_scores
from verkv.stats import FetchStats, MemoryReport, memory_report

# Models that a press is active on, by thread: the replay of one press must not be taken for another's prefill.
_ACTIVE_BLOCKS: set[tuple[int, int]] = set()

# Rotary embeddings put on attention modules, by module: how many blocks, of different threads, still need them.
_LENT_ROTARY: collections.Counter[int] = collections.Counter()
_LENDING = threading.Lock()

BUDGET_SCOPES = {"head": 1, "layer": 2, "model": 3}  # trailing axes of (C, L, Hkv, T) that share one budget


@dataclass(frozen=True)
class Prompt:
    """What is known about the prefilled contexts.

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
    """

    n_tokens: int
    n_padding: Tensor
    protected: Tensor
    beams: int

    @property
    def is_token(self) -> Tensor:
        """(C, T), False at padding."""
        return torch.arange(self.n_tokens, device=self.n_padding.device) >= self.n_padding[:, None]

    @property
    def lengths(self) -> Tensor:
        """Real tokens of each context, (C,)."""
        return self.n_tokens - self.n_padding

    @property
    def n_protected(self) -> Tensor:
        """(C,)."""
        return self.protected.sum(-1)


@dataclass
class SealingPress(BasePress):
    """Base of VerKV's presses; a context manager over the model, as every KVPress press.

    The first forward pass with an empty cache inside the context is the prefill. Right after it the prompt is scored
    and the cache's full-attention layers are sealed in place, so that both KVPress' pipeline and ``model.generate``
    work. Sliding-window and linear-attention layers are left as they are; models with the latter need a cache of
    :func:`verkv.make_cache`. For inference only: no gradient flows through a sealed cache.

    Subclasses have a field ``compression_ratio`` and provide :meth:`source` and :meth:`_plans`.
    """

    def __post_init__(self):
        self._stats: FetchStats | None = None
        self._cache_ref = None

    def __setattr__(self, name: str, value) -> None:
        if name == "compression_ratio":
            value = check_compression_ratio(value)
        super().__setattr__(name, value)

    def __getstate__(self) -> dict:
        """Everything but the reference to the last cache, which cannot be pickled."""
        return self.__dict__ | {"_cache_ref": None}

    # --- for subclasses ---------------------------------------------------------------------------------------------

    def _check_options(self) -> None:
        """Raise ValueError if an option is out of range. They may be set after construction, so it is called again."""

    def source(self) -> ScoreSource:
        """A fresh score source."""
        raise NotImplementedError

    def _plans(
        self, scores: Scores, prompt: Prompt, geometry: LayerGeometry, model
    ) -> tuple[dict[int, SealPlan], list[str]]:
        """The plan of every layer and notes for the statistics."""
        raise NotImplementedError

    def _n_protected_ends(self, n_tokens: int, prefix_length: int) -> tuple[int, int]:
        """How many leading and trailing tokens are always kept."""
        raise NotImplementedError

    def _new_stats(self) -> FetchStats:
        return FetchStats(method=type(self).__name__)

    # --- results ----------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> FetchStats | None:
        """Statistics of the cache that was sealed last; None before the first."""
        return self._stats

    def memory_report(self) -> MemoryReport:
        """Memory of the cache that was handled last.

        Raises
        ------
        ValueError
            If there is none, or it has been freed.
        """
        cache = self._cache_ref and self._cache_ref()
        if cache is None:
            raise ValueError("no cache to report on: none was prefilled with this press, or it has been freed")
        return memory_report(cache)

    # --- KVPress' interface -----------------------------------------------------------------------------------------

    def post_init_from_model(self, model) -> None:
        """Nothing: what depends on the model is prepared when the context is entered."""

    def forward_hook(self, module: nn.Module, input, kwargs: dict, output):
        """Called by KVPress' ComposedPress, which never enters this press' own context: warn that it does nothing."""
        warnings.warn(
            f"{type(self).__name__} compresses only as the outermost press: inside ComposedPress it leaves the cache "
            f"uncompressed. Use `with press(model):` directly",
            stacklevel=2,
        )
        return output

    @contextmanager
    def __call__(self, model) -> Iterator[None]:
        """Compress every context that is prefilled inside the ``with`` block.

        Raises
        ------
        NotImplementedError
            For models and caches that cannot be sealed.
        ValueError
            If the budget is impossible, or scores are not finite. The cache then holds the exact, uncompressed context.
        """
        kinds = layer_kinds(model.config)
        refuse_soft_capping(model.config)
        if "linear_attention" in kinds:
            repair_linear_attention(model.config)
        refuse_learned_sinks(model)
        self._check_options()
        block = id(model), threading.get_ident()
        if block in _ACTIVE_BLOCKS:
            raise NotImplementedError(
                "another VerKV press is active on this model: leave its block before entering one"
            )
        self._stats, self._cache_ref = None, None
        with contextlib.ExitStack() as stack:
            _ACTIVE_BLOCKS.add(block)
            stack.callback(_ACTIVE_BLOCKS.discard, block)
            if self.compression_ratio == 0.0:
                source = None  # exact; no scores are needed
            else:
                source = self.source()
                source.prepare(model)
            session = _Session(self, model, kinds, source)
            backbone = getattr(model, "model", None) or model.base_model
            stack.callback(session.remove_rotary_embeddings)
            for handle in session.register(backbone):
                stack.callback(handle.remove)
            stack.callback(session.discard_unfinished_prefill)
            yield
            session.seal_postponed()

    def seal(
        self, model, cache, scores: Scores, *, prefix_length: int = 0, attention_mask: Tensor | None = None, beams=1
    ):
        """Seal a prefilled cache with scores that are already there, say to try several settings on one prompt.

        Parameters
        ----------
        model : PreTrainedModel
        cache : transformers.Cache
            Prefilled and not sealed. Layers are swapped in place.
        scores : dict of int to Tensor, shape (B, Hkv, T)
            By layer index, for every full-attention layer.
        prefix_length : int
            Leading tokens to keep whatever their score (a chat template's prefix).
        attention_mask : Tensor, shape (B, T), optional
            0 at left padding.
        beams : int
            Consecutive batch rows with the same prompt, which then share one context.

        Raises
        ------
        ValueError
            If scores are not finite or do not fit the cache, or the budget is impossible.
        """
        kinds = layer_kinds(model.config)
        refuse_soft_capping(model.config)
        self._check_options()
        check_cache(cache, kinds)
        stats = self._new_stats()
        layers = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        self._cache_ref = weakref.ref(cache)
        self._stats = stats
        cache.stats = stats
        reasons = {
            "the model has no full-attention layer": not layers,
            "compression_ratio is 0": self.compression_ratio == 0.0,
            "the cache holds no tokens": cache.get_seq_length() == 0,  # it may have no layers yet
        }
        if any(reasons.values()):
            reason = next(reason for reason, holds in reasons.items() if holds)
            stats.notes.append(f"not sealed, attention is exact: {reason}")
            return
        first = cache.layers[layers[0]]
        if getattr(first, "sealed", False):
            raise ValueError("the cache is sealed already; reset it, or prefill a new one")

        keys = first.keys
        prompt = self._prompt(keys, attention_mask, prefix_length, beams)
        if bool((prompt.n_protected == prompt.lengths).all()):
            stats.notes.append(f"not sealed, attention is exact: all {int(prompt.lengths.max())} tokens are protected")
            return
        scores = self._check_scores(scores, cache, layers)
        scores = unit_scores({i: score[::beams] for i, score in scores.items()}, prompt.is_token)
        geometry = LayerGeometry(
            n_units=keys.shape[1],
            key_dim=keys.shape[-1],
            value_dim=first.values.shape[-1],
            element_size=keys.element_size(),
        )
        del first, keys  # each layer's full copy must be freed as soon as it is sealed
        plans, notes = self._plans(scores, prompt, geometry, model)
        stats.notes += notes
        seal_cache(cache, plans, stats)

    # --- internals --------------------------------------------------------------------------------------------------

    def _prompt(self, keys: Tensor, attention_mask: Tensor | None, prefix_length: int, beams: int) -> Prompt:
        batch, _, n_tokens, _ = keys.shape
        n_padding = left_padding(attention_mask, batch, n_tokens).to(keys.device)[::beams]
        n_first, n_last = self._n_protected_ends(n_tokens, prefix_length)
        position = torch.arange(n_tokens, device=keys.device)
        real_position = position - n_padding[:, None]  # (C, T)
        protected = (real_position >= 0) & ((real_position < n_first) | (position >= n_tokens - n_last))
        return Prompt(n_tokens, n_padding, protected, beams)

    @staticmethod
    def _check_scores(scores: Scores, cache, layers: list[int]) -> Scores:
        for i in layers:
            expected = tuple(cache.layers[i].keys.shape[:3])
            if i not in scores:
                raise ValueError(f"scores of layer {i} are missing; the press gave those of layers {sorted(scores)}")
            if tuple(scores[i].shape) != expected:
                raise ValueError(f"scores of layer {i} have shape {tuple(scores[i].shape)}, the cache needs {expected}")
            if expected != tuple(cache.layers[layers[0]].keys.shape[:3]):
                raise NotImplementedError("layers with different numbers of KV heads cannot be sealed together yet")
        return {i: scores[i] for i in layers}


class _Session:
    """One ``with press(model)`` block: its hooks, and the scores collected so far."""

    def __init__(self, press: SealingPress, model, kinds: list[str], source: ScoreSource | None):
        self.press, self.model, self.kinds, self.source = press, model, kinds, source
        self.scores: Scores = {}
        self.busy = False  # replays run the model again
        self.thread = threading.get_ident()
        self.is_prefill = False
        self.prefill_cache = None
        self.has_candidates = False
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
        if not blocks or not all(hasattr(block, "self_attn") for block in blocks):
            raise NotImplementedError(
                f"{type(self.model).__name__} has no layers with self_attn, where this press takes its scores; use "
                f"KVzipPress() as press"
            )
        for layer, kind in zip(decoder.layers, self.kinds, strict=True):
            if kind != "full_attention":
                continue
            attention = layer.self_attn
            self.lend_rotary_embedding(attention, decoder)
            yield attention.register_forward_hook(self.after_attention, with_kwargs=True)

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

    def say_what_stays_uncompressed(self, cache, kwargs: dict) -> None:
        """Only the first forward pass with an empty cache is compressed: note what else comes in many at once."""
        tokens = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
        if not any(getattr(layer, "sealed", False) for layer in cache.layers):
            if self.press.stats is None and self.press.compression_ratio > 0:
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
            )
        finally:
            self.busy, self.scores = False, {}


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


def refuse_soft_capping(config) -> None:
    """Raise NotImplementedError for models whose attention logits are soft-capped."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "attn_logit_softcapping", None) is not None:
        raise NotImplementedError(
            f"attn_logit_softcapping={text.attn_logit_softcapping}: the certificate needs weights exp(<k, q>), "
            f"soft-capped attention has none; use the model without VerKV"
        )


def refuse_learned_sinks(model) -> None:
    """Raise NotImplementedError for models whose softmax has a learned extra term (gpt-oss)."""
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        raise NotImplementedError(
            f"{type(model).__name__} has learned attention sinks (a softmax term without a token), which are not "
            f"supported; use the model without VerKV"
        )


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
