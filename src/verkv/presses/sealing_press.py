"""What all presses share: score the prompt in prefill, decide what each layer keeps, seal."""

import contextlib
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from kvpress.presses.base_press import BasePress
from torch import Tensor, nn

from verkv.attention import observe_attention
from verkv.cache import check_cache, layer_kinds, seal_cache
from verkv.context import SealPlan
from verkv.hybrid import repair_linear_attention
from verkv.presses.budget import LayerGeometry, check_compression_ratio
from verkv.presses.prompt import Prompt, left_padding
from verkv.presses.queries import Queries, without_padding
from verkv.presses.scores import Scores, ScoreSource, unit_scores
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

    @property
    def n_recorded_queries(self) -> int:
        """How many of the prompt's last positions' queries :meth:`_plans` wants."""
        return 0

    def _plans(
        self, scores: Scores, prompt: Prompt, geometry: LayerGeometry, model, cache, queries: Queries
    ) -> tuple[dict[int, SealPlan], list[str]]:
        """The plan of every layer and notes for the statistics."""
        raise NotImplementedError

    def _after_sealing(self, cache, prompt: Prompt, queries: Queries, layers: list[int]) -> list[str]:
        """What can be done only once the layers are sealed; notes for the statistics."""
        return []

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
        model = without_adapters(model)
        kinds = check_config(model.config)
        refuse_learned_sinks(model)
        if "linear_attention" in kinds:
            repair_linear_attention(model.config)
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
            session = Session(self, model, kinds, source)
            backbone = getattr(model, "model", None) or model.base_model
            stack.callback(session.remove_rotary_embeddings)
            for handle in session.register(backbone):
                stack.callback(handle.remove)
            if self.n_recorded_queries and source is not None:
                stack.enter_context(observe_attention(session.observe))
            stack.callback(session.discard_unfinished_prefill)
            yield
            session.seal_postponed()

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

        Raises
        ------
        ValueError
            If scores are not finite or do not fit the cache, or the budget is impossible.
        """
        kinds = check_config(model.config)
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
        queries = {i: query.to(cache.layers[i].keys.device) for i, query in (queries or {}).items()}
        queries = self._check_queries(queries, prompt, beams)
        plans, notes = self._plans(scores, prompt, geometry, model, cache, queries)
        stats.notes += notes
        seal_cache(cache, plans, stats)
        stats.notes += self._after_sealing(cache, prompt, queries, layers)

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
    def _check_queries(queries: Queries, prompt: Prompt, beams: int) -> Queries:
        """One row per context, and nothing where there is padding."""
        for i, query in queries.items():
            if query.dim() != 4 or query.shape[0] != len(prompt.n_padding) * beams or query.shape[2] > prompt.n_tokens:
                raise ValueError(
                    f"queries of layer {i} have shape {tuple(query.shape)}, but there are "
                    f"{len(prompt.n_padding) * beams} rows of {prompt.n_tokens} tokens; record them in the prefill"
                )
        return {i: without_padding(query[::beams], prompt.n_padding, prompt.n_tokens) for i, query in queries.items()}

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
