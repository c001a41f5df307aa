"""One layer's attention for one token: VerKV, from scores to output, against dense, resident and offloaded."""

import copy
import dataclasses

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from verkv.bench.prefix import Prefix
from verkv.bench.settings import BenchSettings
from verkv.bench.timing import Comparison, compare

RESIDENT = "dense, resident"


@torch.no_grad()
def run(settings: BenchSettings, prefix: Prefix) -> list[Comparison]:
    """Time the middle layer with the keys of a real context and the query of a real token.

    Parameters
    ----------
    settings : BenchSettings
    prefix : Prefix

    Returns
    -------
    list of Comparison
    """
    sealed = {name: prefix.sealed(press) for name, press in prefix.presses(settings).items()}
    layer_idx = next(iter(sealed.values())).stats.sealed_layers[len(prefix.scores) // 2]
    query, scaling = _next_query(prefix, layer_idx)
    for cache in sealed.values():  # the token's own key goes into the tail
        prefix.model(input_ids=prefix.next_token, past_key_values=cache)
    keys, values = prefix.cache.layers[layer_idx].keys, prefix.cache.layers[layer_idx].values

    cases = {RESIDENT: lambda: _dense(query, keys, values, scaling)}
    cases["dense, offloaded"] = _offloaded(query, keys, values, scaling)
    notes = []
    if settings.torch_device.type == "cuda":
        cases["transformers' offloaded cache"] = _transformers_offloaded(query, keys, values, scaling)
    else:
        notes.append("transformers' offloaded cache needs CUDA")
    for name, cache in sealed.items():
        cases[name] = lambda layer=cache.layers[layer_idx]: layer.attend(query, None, scaling)
    comparison = compare(
        f"attention of one token over {keys.shape[2]:,}, layer {layer_idx}",
        cases,
        RESIDENT,
        rounds=settings.n_rounds(25),
        seed=settings.seed,
        device=settings.torch_device,
        threads=settings.threads,
    )
    facts = {"query heads": query.shape[1], "KV heads": keys.shape[1], "head dim": keys.shape[3], "notes": notes}
    return [dataclasses.replace(comparison, facts=facts)]


def _next_query(prefix: Prefix, layer_idx: int) -> tuple[Tensor, float]:
    """The query of a next token, (1, Hq, 1, d), and its scaling."""
    from verkv.attention import observe_attention

    seen = {}

    def observe(module, query, key, scaling):
        if module.layer_idx == layer_idx:
            seen["query"], seen["scaling"] = query.clone(), scaling

    with observe_attention(observe):
        prefix.model(input_ids=prefix.next_token, past_key_values=copy.deepcopy(prefix.cache))
    return seen["query"], seen["scaling"]


def _dense(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    return scaled_dot_product_attention(query, keys, values, scale=scaling, enable_gqa=True)


def _offloaded(query: Tensor, keys: Tensor, values: Tensor, scaling: float):
    """Keys and values lie in (pinned) host memory and are moved for every token, as one layer of an offloaded cache."""
    is_gpu = query.device.type == "cuda"
    host = [tensor.cpu().pin_memory() if is_gpu else tensor.clone() for tensor in (keys, values)]

    def step():
        moved = [tensor.to(query.device, non_blocking=is_gpu, copy=True) for tensor in host]
        return _dense(query, *moved, scaling)

    return step


def _transformers_offloaded(query: Tensor, keys: Tensor, values: Tensor, scaling: float):
    """A ``DynamicCache(offloading=True)`` of two layers, in turn, so that each has to be fetched again.

    The cache grows by one token a step, as in decoding.
    """
    from transformers import DynamicCache

    cache = DynamicCache(offloading=True)
    new_key, new_value = keys[:, :, -1:], values[:, :, -1:]
    for layer in range(2):
        cache.update(keys.clone(), values.clone(), layer)
    layer = 0

    def step():
        nonlocal layer
        layer = 1 - layer
        return _dense(query, *cache.update(new_key, new_value, layer), scaling)

    return step
