"""A context that is prefilled and scored once, and copies of its cache for everything that is run on it."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from kvpress import ObservedAttentionPress
from torch import Tensor
from transformers import DynamicCache

from verkv import FastKVzipPress, KVzipPress, make_cache
from verkv.cache import VerKVLayer, layer_kinds
from verkv.evaluation.decoding import now
from verkv.members import join_layers
from verkv.presses.sealing_press import SealingPress
from verkv.presses.verkv_press import N_QUERIES
from verkv.stats import FetchStats

SourceKey = tuple[str, str | None]  # name of a score source, and the file of its gates


@dataclass(frozen=True)
class ScoredContext:
    """What all methods of ours start from.

    Attributes
    ----------
    cache : transformers.Cache
        Of the context, not sealed; see :meth:`fork`.
    n_tokens : int
    scores : dict
        By source, then by layer.
    prefix_lengths : dict
        By source: leading tokens its scores say nothing about.
    queries : dict of int to Tensor
        The context's last ones.
    prefill_seconds : float
    score_seconds : dict
        By source.
    """

    cache: object
    n_tokens: int
    scores: dict[SourceKey, dict[int, Tensor]]
    prefix_lengths: dict[SourceKey, int]
    queries: dict[int, Tensor]
    prefill_seconds: float
    score_seconds: dict[SourceKey, float]

    def fork(self):
        """A cache of its own with the context in it.

        Tensors are shared: layers append by concatenation and never write into what they hold.
        """
        forked = copy.copy(self.cache)
        forked.layers = [copy.copy(layer) for layer in self.cache.layers]
        join_layers(forked.layers)
        return forked

    def offloaded(self):
        """The context in transformers' offloading cache: layers wait in host memory and are moved as a pass needs them.

        Needs a CUDA device.
        """
        cache = DynamicCache([(layer.keys, layer.values) for layer in self.cache.layers], offloading=True)
        for layer in cache.layers[1:]:
            layer.offload()
        return cache

    def sealed(self, model, press: SealingPress, source: SourceKey):
        """A copy of the cache, sealed with a press.

        Raises
        ------
        ValueError
            If the budget is impossible.
        """
        cache = self.fork()
        queries = {i: query[:, :, -press.n_recorded_queries :] for i, query in self.queries.items()}
        press.seal(
            model,
            cache,
            self.scores[source],
            prefix_length=self.prefix_lengths[source],
            queries=queries if press.n_recorded_queries else None,
        )
        return cache


@torch.inference_mode()
def score_context(model, tokenizer, context_ids: Tensor, sources: list[SourceKey]) -> ScoredContext:
    """Prefill a context once and score it with every source in the same pass.

    Parameters
    ----------
    model, tokenizer
    context_ids : Tensor, shape (1, T), int64
    sources : list of (name, gates)
        May be empty, for dense attention alone.

    Returns
    -------
    ScoredContext

    Raises
    ------
    ValueError
        If a source cannot score the model.
    """
    press = _ScoringPress(_all_sources(tokenizer, sources))
    cache = make_cache(model.config)
    start = now(model)
    with press(model):
        (getattr(model, "model", None) or model.base_model)(input_ids=context_ids, past_key_values=cache)
    seconds = now(model) - start
    found = press.found
    return ScoredContext(
        cache=cache,
        n_tokens=context_ids.shape[1],
        scores=found.scores,
        prefix_lengths={key: source.prefix_length for key, source in found.sources.items()},
        queries=press.queries,
        prefill_seconds=seconds - sum(found.seconds.values()),
        score_seconds=found.seconds,
    )


def _all_sources(tokenizer, keys: list[SourceKey]) -> "_AllSources":
    made = {}
    for key in keys:
        name, gates = key
        press = KVzipPress(tokenizer=tokenizer) if name == "kvzip" else FastKVzipPress(gates=gates)
        made[key] = press.source()
    return _AllSources(made)


class _AllSources:
    """Several score sources at once, as one that gives none itself."""

    name, prefix_length = "all", 0

    def __init__(self, sources: dict[SourceKey, object]):
        self.sources = sources
        self.scores = {key: {} for key in sources}
        self.seconds = dict.fromkeys(sources, 0.0)
        self.in_prefill = [key for key, source in sources.items() if source.on_attention is not None]
        self.on_attention = self._on_attention if self.in_prefill else None

    def prepare(self, model) -> None:
        """Prepare each."""
        self.model = model
        for source in self.sources.values():
            source.prepare(model)

    def _on_attention(self, module, kwargs: dict, output, layer) -> None:
        for key in self.in_prefill:
            start = now(self.model)
            self.scores[key][module.layer_idx] = self.sources[key].on_attention(module, kwargs, output, layer)
            self.seconds[key] += now(self.model) - start

    def after_prefill(self, model, cache, input_ids, attention_mask) -> dict:
        """Let those that need forward passes of their own have them."""
        for key, source in self.sources.items():
            start = now(model)
            found = source.after_prefill(model, cache, input_ids, attention_mask)
            if found is not None:
                self.scores[key] = found
                self.seconds[key] += now(model) - start
        return {}


class _ScoringPress(SealingPress):
    """Goes through a prefill as every press of ours does, and keeps what it would seal with instead of sealing."""

    n_recorded_queries = N_QUERIES

    def __init__(self, found: _AllSources):
        self.compression_ratio = 0.5  # some compression: scores are wanted
        self.found, self.queries = found, {}
        self.__post_init__()

    def source(self) -> _AllSources:
        """All sources."""
        return self.found

    def seal(self, model, cache, scores, *, queries=None, **options) -> None:
        """Keep the prompt's queries; the recorder forgets its own."""
        self.queries = dict(queries or {})


def replace_statistics(press: SealingPress, cache, stats: FetchStats) -> None:
    """Count in ``stats`` from now on, whatever has been counted on a sealed cache."""
    press._stats = cache.stats = stats
    for layer in cache.layers:
        if isinstance(layer, VerKVLayer) and layer.sealed:
            layer.context.stats = stats


@torch.inference_mode()
def prefill_with(model, context_ids: Tensor, press):
    """Prefill under the hooks of a press of KVPress, which prunes as it goes; the cache and the seconds it took."""
    hybrid = "linear_attention" in layer_kinds(model.config)
    cache = make_cache(model.config) if hybrid else DynamicCache()
    start = now(model)
    with _attention_for(model, press), press(model):
        (getattr(model, "model", None) or model.base_model)(input_ids=context_ids, past_key_values=cache)
    return cache, now(model) - start


@contextmanager
def _attention_for(model, press) -> Iterator[None]:
    """Eager attention for presses that read its weights (H2O), which no other implementation returns."""
    if not _reads_weights(press):
        yield
        return
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _reads_weights(press) -> bool:
    inner = [getattr(press, "press", None), *getattr(press, "presses", [])]
    return isinstance(press, ObservedAttentionPress) or any(_reads_weights(p) for p in inner if p is not None)


def forget_masks(model) -> None:
    """Take out the masks that KVPress' head-wise presses leave on attention modules for later passes."""
    for module in model.modules():
        if getattr(module, "masked_key_indices", None) is not None:
            module.masked_key_indices = None
