"""Seal a cache by hand, with codes of the test's choice: what presses do, without scores. Needs no KVPress."""

import inspect

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

from verkv.cache import layer_kinds, seal_cache
from verkv.context import SealPlan
from verkv.stats import FetchStats
from verkv.tiers import RESIDENT_BIT

LEVEL = 19  # r = 2 ** (-19 / 8), about 0.19

# What newer transformers (5.24) call otherwise: the models' keyword for a cache, and what tells a mask its size.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
MASKS_TAKE_POSITIONS = "cache_position" in inspect.signature(DynamicLayer.get_mask_sizes).parameters
# There, crop(0) removes nothing; it used to keep nothing.
CROP_TAKES_REMOVED = "tokens_to_remove" in inspect.signature(DynamicLayer.crop).parameters


def full_layers(model) -> list[int]:
    """Indices of the layers that can be sealed."""
    return [i for i, kind in enumerate(layer_kinds(model.config)) if kind == "full_attention"]


def prompt_ids(batch: int, n_tokens: int, seed: int = 1) -> Tensor:
    """Random token ids, none of them special."""
    return torch.randint(3, 256, (batch, n_tokens), generator=torch.Generator().manual_seed(seed))


def certain_codes(shape, n_padding: Tensor | None = None) -> Tensor:
    """Codes (C, Hkv, T) with r = 1 for every token, 0 at left padding."""
    codes = torch.full(tuple(shape), RESIDENT_BIT, dtype=torch.uint8)
    return codes if n_padding is None else _without_padding(codes, n_padding)


def sampled_codes(
    shape, seed: int = 0, level: int = LEVEL, n_first: int = 2, n_last: int = 3, n_padding=None
) -> Tensor:
    """Codes of a Poisson sample at one level for all but the first and last tokens, which are certain."""
    n_tokens = shape[-1]
    padding = torch.zeros(shape[0], dtype=torch.int64) if n_padding is None else n_padding
    position = torch.arange(n_tokens)
    certain = (position < padding[:, None] + n_first) | (position >= n_tokens - n_last)  # (C, T)
    levels = torch.where(certain[:, None], 0, level).expand(tuple(shape))
    uniform = torch.rand(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    sampled = uniform < torch.exp2(-levels.double() / 8)
    return _without_padding((levels + RESIDENT_BIT * sampled).to(torch.uint8), padding)


def is_resident(codes: Tensor) -> Tensor:
    return (codes & RESIDENT_BIT) != 0


def n_absent(codes: Tensor) -> int:
    """Tokens of all units that are sampled from, and were not drawn: those a plan may fetch."""
    return int((~is_resident(codes) & (codes > 0)).sum())


def seal(model, cache, make_codes=certain_codes, n_padding=None, sealed_layers=None, **options) -> FetchStats:
    """Seal the full-attention layers; ``options`` are those of SealPlan, and ``record_bounds``.

    ``make_codes`` is called with the shape (C, Hkv, T) and, where there is padding, ``n_padding``. Layers differ in it
    if it takes a ``seed``.
    """
    record_bounds = options.pop("record_bounds", False)
    plans = {}
    for i in full_layers(model) if sealed_layers is None else sealed_layers:
        batch, n_heads, n_tokens, _ = cache.layers[i].keys.shape
        shape = (batch // options.get("beams", 1), n_heads, n_tokens)
        arguments = {} if n_padding is None else {"n_padding": n_padding}
        if make_codes is sampled_codes:
            arguments["seed"] = i
        plans[i] = SealPlan(
            make_codes(shape, **arguments),
            torch.zeros(shape[0], dtype=torch.int64) if n_padding is None else n_padding,
            **options,
        )
    fetch = options.get("fetch")
    stats = FetchStats(
        "test",
        fetch and fetch.epsilon,
        fetch and fetch.delta,
        fetch and options["sketch"].name,
        record_bounds=record_bounds,
    )
    seal_cache(cache, plans, stats)
    return stats


def forward(model, ids: Tensor, cache, **kwargs) -> Tensor:
    """Logits of one forward pass that extends the cache."""
    with torch.no_grad():
        return model(ids, **{CACHE: cache}, **kwargs).logits


def lengths(cache) -> list[int]:
    return [layer.get_seq_length() for layer in cache.layers]


def _without_padding(codes: Tensor, n_padding: Tensor) -> Tensor:
    is_token = torch.arange(codes.shape[-1]) >= n_padding[:, None]
    return torch.where(is_token[:, None], codes, torch.zeros_like(codes))
