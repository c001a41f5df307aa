"""KVzip's scores: our replay against KVPress' KVzip, each with the prefill it needs, and the prefill alone."""

import dataclasses
import logging

import torch

from verkv.bench.prefix import Prefix
from verkv.bench.settings import BenchSettings, BenchSkipped
from verkv.bench.timing import Comparison, compare

OURS, THEIRS, PREFILL = "prefill and replay, VerKV", "prefill and replay, KVPress", "prefill"


@torch.inference_mode()
def run(settings: BenchSettings, prefix: Prefix) -> list[Comparison]:
    """Time prefill and scores of the prefix' context, with eviction left out or negligible.

    Parameters
    ----------
    settings : BenchSettings
    prefix : Prefix

    Returns
    -------
    list of Comparison

    Raises
    ------
    BenchSkipped
        If KVPress' KVzip does not take the model.
    """
    try:
        from kvpress import KVzipPress as TheirPress
    except ImportError as error:
        raise BenchSkipped(f"{error}; pip install 'verkv[kvpress]'") from error
    logging.getLogger("kvpress").setLevel(logging.ERROR)
    comparison = compare(
        f"KVzip scores of {prefix.context_ids.shape[1]:,} tokens",
        {
            THEIRS: lambda: _theirs(TheirPress, prefix),
            OURS: lambda: _ours(prefix),
            PREFILL: lambda: _prefill(prefix),
        },
        THEIRS,
        rounds=settings.n_rounds(3),
        seed=settings.seed,
        device=settings.torch_device,
        threads=settings.threads,
        warmup=0 if settings.n_tokens > 1000 else 1,
    )
    replay = {name: comparison.median(name) - comparison.median(PREFILL) for name in (OURS, THEIRS)}
    facts = {"replay alone, VerKV, s": replay[OURS], "replay alone, KVPress, s": replay[THEIRS]}
    return [dataclasses.replace(comparison, facts=facts)]


def _prefill(prefix: Prefix):
    from transformers import DynamicCache

    cache = DynamicCache()
    prefix.model.model(input_ids=prefix.context_ids, past_key_values=cache)
    return cache


def _ours(prefix: Prefix):
    from verkv import KVzipPress

    source = KVzipPress(tokenizer=prefix.tokenizer).source()
    source.prepare(prefix.model)
    return source.after_prefill(prefix.model, _prefill(prefix), prefix.context_ids, None)


def _theirs(press_class, prefix: Prefix) -> None:
    with press_class(compression_ratio=0.01)(prefix.model):  # 0 would skip the replay
        _prefill(prefix)
