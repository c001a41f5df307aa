"""What all presses share: score the prompt in prefill, decide what each layer keeps, seal."""

import contextlib
import math
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from kvpress.presses.base_press import BasePress
from torch import Tensor, nn

from verkv.attention import observe_attention
from verkv.cache import check_cache, layer_kinds, seal_cache
from verkv.checks import check_count
from verkv.context import SealedContext, SealPlan
from verkv.estimators.thinning import n_protected
from verkv.hybrid import repair_linear_attention
from verkv.presses.budget import LayerGeometry, check_compression_ratio
from verkv.presses.prompt import Prompt, left_padding
from verkv.presses.queries import Queries, without_padding
from verkv.presses.resealing import Resealer, chunked_prefill, start_records
from verkv.presses.scores import Scores, ScoreSource, Tail, unit_scores
from verkv.presses.session import Session
from verkv.stats import FetchStats, MemoryReport, memory_report

# Models that a press is active on, by thread: the replay of one press must not be taken for another's prefill.
_ACTIVE_BLOCKS: set[tuple[int, int]] = set()

BUDGET_SCOPES = {"head": 1, "layer": 2, "model": 3}  # trailing axes of (C, L, Hkv, T) that share one budget


@dataclass
class SealingPress(BasePress):
    """Base of VerKV's presses; a context manager over the model, as every KVPress press.

    The first forward pass with an empty cache inside the context is the prefill. Right after it the prompt is scored
    and the cache's full-attention layers are sealed in place, so that both KVPress' pipeline and ``model.generate``
    work. Sliding-window and linear-attention layers are left as they are; models with the latter need a cache of
    :func:`verkv.make_cache`. For inference only: no gradient flows through a sealed cache.

    What comes after the prefill is an exact tail, until it is sealed as a further segment: by :meth:`reseal`, or by
    itself where ``reseal_every`` or ``max_tail`` is set. Every segment has its own draw and its own share of the
    budget, ``1 - compression_ratio`` of its bytes; sinks are the first segment's. The last ``n_local`` tokens are not
    sealed but stay in the tail, of the first segment too where one of the two is set, so that the exact window moves.

    Subclasses have a field ``compression_ratio`` and provide :meth:`source` and :meth:`_plans`.

    Parameters
    ----------
    reseal_every : int or inf, optional
        Seal the tail when it holds that many tokens beyond the window, at the end of a forward pass inside the block.
    max_tail : int or inf, optional
        Seal the tail when it holds more tokens than that. With ``math.inf``, here or there, nothing is sealed by
        itself, but what :meth:`reseal` needs is remembered of the tail's tokens.
    """

    reseal_every: float | None = field(default=None, kw_only=True)
    max_tail: float | None = field(default=None, kw_only=True)

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

    @property
    def n_recorded_queries(self) -> int:
        """How many of the prompt's last positions' queries :meth:`_plans` wants."""
        return 0

    def _token_budget(self, prompt: Prompt, geometry: LayerGeometry, model, n_kept: Tensor) -> Tensor:
        """Expected tokens per KV head that the budget pays for, (C,), if ``n_kept`` (C,) of them are certain."""
        raise NotImplementedError

    def _plans(
        self,
        scores: Scores,
        prompt: Prompt,
        geometry: LayerGeometry,
        model,
        cache,
        queries: Queries,
        generator: torch.Generator,
    ) -> tuple[dict[int, SealPlan], list[str]]:
        """The plan of every layer, for its first unsealed tokens, and notes for the statistics."""
        raise NotImplementedError

    def _after_sealing(self, cache, prompt: Prompt, queries: Queries, layers: list[int]) -> list[str]:
        """What can be done only once the layers are sealed; notes for the statistics."""
        return []

    def _n_protected_ends(self, n_tokens: int, prefix_length: int) -> tuple[int, int]:
        """How many leading and trailing tokens are always kept."""
        raise NotImplementedError

    def _generator(self) -> torch.Generator:
        """Of the draws; on the CPU: the same sample on every device."""
        generator, seed = torch.Generator(), getattr(self, "seed", 0)
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        return generator

    @property
    def keeps_everything(self) -> bool:
        """Whether nothing is to be removed, and so nothing scored."""
        return self.compression_ratio == 0.0

    @property
    def seals_tails(self) -> bool:
        """Whether what is needed to seal the tail is remembered, and the window is left in the tail."""
        return self.reseal_every is not None or self.max_tail is not None or chunked_prefill.get()

    def window(self, n_tokens: int, prefix_length: int) -> int:
        """Tokens at the end that stay in the tail."""
        return self._n_protected_ends(n_tokens, prefix_length)[1]

    def n_protected_first(self, n_tokens: int, prefix_length: int) -> int:
        """Leading tokens that are always kept."""
        return self._n_protected_ends(n_tokens, prefix_length)[0]

    @staticmethod
    def full_layers(model) -> list[int]:
        """The layers that can be sealed."""
        return [i for i, kind in enumerate(check_config(model.config)) if kind == "full_attention"]

    def _check_resealing(self) -> None:
        """Raise ValueError if the options of sealing tails are out of range."""
        for name in ("reseal_every", "max_tail"):
            value = getattr(self, name)
            if value is not None and value != math.inf:
                check_count(name, value, least=1)
        n_local = getattr(self, "n_local", None) or 0
        if self.max_tail is not None and self.max_tail <= n_local:
            raise ValueError(
                f"max_tail={self.max_tail} must be larger than n_local={n_local}: the window stays in the tail"
            )

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
        model = without_adapters(model)
        kinds = check_config(model.config)
        refuse_learned_sinks(model)
        if "linear_attention" in kinds:
            repair_linear_attention(model.config)
        self._check_options()
        self._check_resealing()
        block = id(model), threading.get_ident()
        if block in _ACTIVE_BLOCKS:
            raise NotImplementedError(
                "another VerKV press is active on this model: leave its block before entering one"
            )
        self._stats, self._cache_ref = None, None
        with contextlib.ExitStack() as stack:
            _ACTIVE_BLOCKS.add(block)
            stack.callback(_ACTIVE_BLOCKS.discard, block)
            if self.keeps_everything:
                source = None  # exact; no scores are needed
            else:
                source = self.source()
                source.prepare(model)
            session = Session(self, model, kinds, source)
            backbone = getattr(model, "model", None) or model.base_model
            stack.callback(session.remove_rotary_embeddings)
            for handle in session.register(backbone):
                stack.callback(handle.remove)
            if self.n_recorded_queries and source is not None:
                stack.enter_context(observe_attention(session.observe, session.observe_sealed))
            stack.callback(session.discard_unfinished_prefill)
            yield
            session.seal_postponed()
            session.reseal_postponed()

    def seal(
        self,
        model,
        cache,
        scores: Scores,
        *,
        prefix_length: int = 0,
        attention_mask: Tensor | None = None,
        beams: int = 1,
        queries: Queries | None = None,
        resealer: Resealer | None = None,
    ) -> None:
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
        queries : dict of int to Tensor, shape (B, Hq, M, d), optional
            The queries of the prompt's last M positions, from :func:`verkv.record_queries`; sketches are fitted with
            them, and tolerances calibrated on them.
        resealer : Resealer, optional
            What seals later segments; made anew by default.

        Raises
        ------
        ValueError
            If scores are not finite or do not fit the cache, or the budget is impossible.
        """
        kinds = check_config(model.config)
        self._check_options()
        self._check_resealing()
        check_cache(cache, kinds)
        stats = self._new_stats()
        layers = self.full_layers(model)
        self._cache_ref = weakref.ref(cache)
        self._stats = stats
        cache.stats = stats
        reasons = {
            "the model has no full-attention layer": not layers,
            "compression_ratio is 0": self.keeps_everything,
            "the cache holds no tokens": cache.get_seq_length() == 0,  # it may have no layers yet
        }
        if any(reasons.values()):
            reason = next(reason for reason, holds in reasons.items() if holds)
            stats.notes.append(f"not sealed, attention is exact: {reason}")
            return
        if getattr(cache.layers[layers[0]], "sealed", False):
            raise ValueError("the cache is sealed already; reset it, prefill a new one, or seal its tail by reseal")
        cache.resealer = resealer or Resealer(self, model, self._generator(), prefix_length)
        if self.seals_tails:
            start_records(cache, layers)

        keys = cache.layers[layers[0]].keys
        prompt = self.context(keys, attention_mask, prefix_length, beams)
        if bool((prompt.n_protected == prompt.lengths).all()):
            stats.notes.append(f"not sealed, attention is exact: all {keys.shape[2]} tokens are protected")
            return
        del keys  # each layer's full copy must be freed as soon as it is sealed
        scores = self._check_scores(scores, cache, layers)
        queries = {i: query.to(cache.layers[i].keys.device) for i, query in (queries or {}).items()}
        queries = self._check_queries(queries, prompt, beams, cache.get_seq_length())
        stats.notes += self._seal_tokens(model, cache, layers, scores, prompt, queries, cache.resealer.generator)
        n_left = cache.get_seq_length() - prompt.n_tokens  # their queries are behind the context
        queries = {i: query[:, :, : max(0, query.shape[2] - n_left)] for i, query in queries.items()}
        stats.notes += self._after_sealing(cache, prompt, queries, layers)

    def reseal(self, model, cache, *, scores: Scores | None = None, attention_mask: Tensor | None = None) -> None:
        """Seal the tail of a sealed cache as a further segment; see :func:`verkv.cache.reseal`.

        Also for caches that this press did not seal, or that came from a file or a pickle: this press seals their tails
        from now on.

        Parameters
        ----------
        model : PreTrainedModel
        cache : transformers.Cache
        scores, attention_mask
            As in :func:`verkv.cache.reseal`.

        Raises
        ------
        ValueError, NotImplementedError
            As there.
        """
        self._check_options()
        self._check_resealing()
        self.take_over(model, cache).run(cache, scores=scores, attention_mask=attention_mask)

    def take_over(self, model, cache) -> Resealer:
        """Make this press the one that seals the cache's tail; draws go on where the cache knows their state."""
        resealer, model = getattr(cache, "resealer", None), without_adapters(model)
        if resealer is None:
            if not any(getattr(layer, "sealed", False) for layer in cache.layers):
                raise ValueError("the cache is not sealed: prefill it inside `with press(model)`")
            generator = self._generator()
            if getattr(self, "seed", 0) is not None:  # another stream than that of the draws there were
                generator.manual_seed(generator.initial_seed() + 1_000_003 * cache.get_seq_length())
            resealer = cache.resealer = Resealer(self, model, generator)
        elif resealer.press is not self or resealer.model() is not model:
            resealer.press, resealer.model, resealer.source = self, weakref.ref(model), None
        layers = self.full_layers(model)
        if self.seals_tails and any(getattr(cache.layers[i], "record", None) is None for i in layers):
            start_records(cache, layers)
        return resealer

    def seal_segment(
        self, model, cache, scores: Scores, tail: Tail, queries: Queries, generator: torch.Generator
    ) -> None:
        """Seal the first tokens of a sealed cache's tail, given their scores; what :meth:`reseal` ends with."""
        prompt = self.segment(cache.layers[tail.layers[0]].context, tail)
        scores = self._check_scores(scores, cache, tail.layers, tail.n_new)
        queries = {i: query[:: prompt.beams] for i, query in queries.items()}
        self._seal_tokens(model, cache, tail.layers, scores, prompt, queries, generator)

    @staticmethod
    def segment(context: SealedContext, tail: Tail) -> Prompt:
        """What is known about the first tokens of a sealed context's tail, which are to be its next segment."""
        hidden = ~tail.is_token[:: context.beams, : tail.n_new]
        parts = context.is_token().split([segment.n_tokens for segment in context.segments], -1)
        counts, n_certain = context.level_counts, None
        if counts is not None:
            n_certain = n_protected(counts).view(context.n_contexts, -1).amax(-1)
        return Prompt(
            tail.n_new,
            torch.zeros_like(context.n_padding),
            torch.zeros_like(hidden),
            context.beams,
            hidden=hidden,
            earlier=torch.stack([part.sum(-1) for part in parts], -1),
            n_certain_before=n_certain,
        )

    def check_growth(self, context: SealedContext) -> None:
        """Raise ValueError if this press cannot go on with what another one has sealed."""

    def check_budget(self, layer, prompt: Prompt, model) -> None:
        """Raise BudgetTooSmall if the budget does not pay for the fixed parts of what is to be sealed."""
        self._token_budget(prompt, _geometry(layer), model, prompt.n_protected)

    # --- internals --------------------------------------------------------------------------------------------------

    def _seal_tokens(
        self,
        model,
        cache,
        layers: list[int],
        scores: Scores,
        prompt: Prompt,
        queries: Queries,
        generator: torch.Generator,
    ) -> list[str]:
        """Plan and seal the first unsealed tokens of a cache; notes for the statistics."""
        scores = {i: score[:: prompt.beams, :, : prompt.n_tokens] for i, score in scores.items()}
        scores = unit_scores(scores, prompt.is_token)
        before = generator.get_state()
        try:
            geometry = _geometry(cache.layers[layers[0]])
            plans, notes = self._plans(scores, prompt, geometry, model, cache, queries, generator)
            seal_cache(cache, plans, cache.stats)
        except BaseException:
            generator.set_state(before)
            raise
        return notes

    def context(self, keys: Tensor, attention_mask: Tensor | None, prefix_length: int, beams: int) -> Prompt:
        """What is known about a prefilled context, or about what of it is to be sealed."""
        batch, _, n_tokens, _ = keys.shape
        n_padding = left_padding(attention_mask, batch, n_tokens).to(keys.device)[::beams]
        n_first, n_last = self._n_protected_ends(n_tokens, prefix_length)
        if self.seals_tails:
            n_tokens, n_last = max(0, n_tokens - n_last), 0
            n_padding = n_padding.clamp_max(n_tokens)
        position = torch.arange(n_tokens, device=keys.device)
        real_position = position - n_padding[:, None]  # (C, T)
        protected = (real_position >= 0) & ((real_position < n_first) | (position >= n_tokens - n_last))
        return Prompt(n_tokens, n_padding, protected, beams)

    @staticmethod
    def _check_queries(queries: Queries, prompt: Prompt, beams: int, n_tokens: int) -> Queries:
        """Those of the last of ``n_tokens``: one row per context, and nothing where there is padding."""
        for i, query in queries.items():
            if query.dim() != 4 or query.shape[0] != len(prompt.n_padding) * beams or query.shape[2] > n_tokens:
                raise ValueError(
                    f"queries of layer {i} have shape {tuple(query.shape)}, but there are "
                    f"{len(prompt.n_padding) * beams} rows of {n_tokens} tokens; record them in the prefill"
                )
        return {i: without_padding(query[::beams], prompt.n_padding, n_tokens) for i, query in queries.items()}

    @staticmethod
    def _check_scores(scores: Scores, cache, layers: list[int], n_scored: int | None = None) -> Scores:
        """Those of the layers that are sealed; of all tokens, or at least of the tail's first ``n_scored``."""
        for i in layers:
            expected = tuple(cache.layers[i].keys.shape[:3])
            if n_scored is not None and i in scores:
                n_tail = cache.layers[i].unsealed()[0].shape[2]
                expected = (*expected[:2], n_tail if scores[i].shape[2] == n_tail else n_scored)
            if i not in scores:
                raise ValueError(f"scores of layer {i} are missing; the press gave those of layers {sorted(scores)}")
            if tuple(scores[i].shape) != expected:
                raise ValueError(f"scores of layer {i} have shape {tuple(scores[i].shape)}, the cache needs {expected}")
            if expected[:2] != tuple(cache.layers[layers[0]].keys.shape[:2]):
                raise NotImplementedError("layers with different numbers of KV heads cannot be sealed together yet")
        return {i: scores[i] for i in layers}


def _geometry(layer) -> LayerGeometry:
    """Of a layer that is sealed or not."""
    keys, values = layer.keys, layer.values
    return LayerGeometry(
        n_units=keys.shape[1],
        key_dim=keys.shape[-1],
        value_dim=values.shape[-1],
        element_size=keys.dtype.itemsize,
    )


def without_adapters(model):
    """The model inside PEFT's wrappers, whose layers hold the adapters; other models as they are.

    ``generate`` calls the model inside, so hooks on a wrapper would miss what it does.
    """
    if hasattr(model, "get_base_model"):  # a PeftModel
        return model.get_base_model()
    return model.model if hasattr(model, "merge_and_unload") else model  # its ``base_model``, such as a LoraModel


def check_config(config) -> list[str]:
    """Kinds of a model's layers; raises NotImplementedError for what its config says cannot be sealed."""
    kinds = layer_kinds(config)
    refuse_soft_capping(config)
    return kinds


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
