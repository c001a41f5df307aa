"""A decode step of a real model, dense and with VerKV, and the bytes that VerKV reads for it."""

import copy
import dataclasses
import os
from unittest import mock

import torch

from verkv.bench.prefix import Prefix
from verkv.bench.settings import BenchSettings
from verkv.bench.timing import Comparison, compare
from verkv.estimators.compiled_plan import compiles

DENSE = "dense"
WITHOUT_LOOPS = ", torch alone"  # where loops serve sealed layers on a CPU, the same without them


@torch.inference_mode()
def run(settings: BenchSettings, prefix: Prefix) -> list[Comparison]:
    """Time whole decode steps; every case decodes the same tokens on a cache of its own.

    Parameters
    ----------
    settings : BenchSettings
    prefix : Prefix

    Returns
    -------
    list of Comparison
        ``facts`` holds, by case, the resident share and the bytes of the statistics; see :func:`traffic`.
    """
    caches = {DENSE: copy.deepcopy(prefix.cache)}
    presses = prefix.presses(settings)
    if settings.torch_device.type == "cpu" and compiles():
        presses |= {name + WITHOUT_LOOPS: press for name, press in prefix.presses(settings).items()}
    caches |= {name: prefix.sealed(press) for name, press in presses.items()}
    steps = {name: lambda name=name, cache=cache: _step(prefix, name, cache) for name, cache in caches.items()}
    comparison = compare(
        f"decode step at {prefix.context_ids.shape[1]:,} tokens",
        steps,
        DENSE,
        rounds=settings.n_rounds(15),
        seed=settings.seed,
        device=settings.torch_device,
        threads=settings.threads,
        warmup=2,
    )
    layer = prefix.cache.layers[presses[next(iter(presses))].stats.sealed_layers[0]]
    row_bytes = sum(tensor.shape[-1] * tensor.element_size() for tensor in (layer.keys, layer.values))
    facts = {
        name: {"resident share": caches[name].memory_report().resident_share, **traffic(press.stats, row_bytes)}
        for name, press in presses.items()
    }
    return [dataclasses.replace(comparison, facts=facts)]


def traffic(stats, row_bytes: int) -> dict[str, float]:
    """Bytes that one decode step reads from the host, those that must move, and those of the whole cache.

    Parameters
    ----------
    stats : verkv.stats.FetchStats
    row_bytes : int
        Of one token's key and value in one KV head.

    Returns
    -------
    dict of str to float
        Means over decode steps. "bytes that must move" are the keys and values of tokens that are promoted and not
        resident; what is read beyond them are keys read to decide. Dense offloading moves "bytes of the full cache".
    """
    full = sum(record.full_bytes for record in stats.records("decode"))
    n_steps = max(1, round(full / stats.full_bytes))
    read, needed = stats.bytes_read("decode") / n_steps, stats.fetched("decode") * row_bytes / n_steps
    return {
        "decode steps": n_steps,
        "bytes read": read,
        "bytes that must move": needed,
        "bytes of the full cache": stats.full_bytes,
        "share of the full cache read": read / stats.full_bytes,
    }


def _step(prefix: Prefix, name: str, cache) -> None:
    with mock.patch.dict(os.environ, {"VERKV_COMPILED": "0"} if name.endswith(WITHOUT_LOOPS) else {}):
        prefix.model(input_ids=prefix.next_token, past_key_values=cache)
