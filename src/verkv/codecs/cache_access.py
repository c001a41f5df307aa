"""Reading and making caches: the only place that knows what layers of transformers' and VerKV's caches look like."""

import torch
from torch import Tensor
from transformers import Cache

from verkv.cache import VerKVLayer, layer_kinds, make_cache
from verkv.codecs.errors import CodecError, MismatchError
from verkv.codecs.layout import CacheLayout, LayerSlice, layout_from_shapes
from verkv.rotary import Rotary, rotary_from_config


def find_rotary(config) -> Rotary:
    """The rotation to undo; NotImplementedError for models whose rotation depends on the length."""
    try:
        return rotary_from_config(config)
    except ValueError as error:
        raise NotImplementedError(
            f"this model's cache cannot be transform-coded: {error}. Save it without a codec instead"
        ) from None


def coded_layers(config) -> list[int]:
    """Indices of the layers that are coded: those with full attention."""
    return [i for i, kind in enumerate(layer_kinds(config)) if kind == "full_attention"]


def dense_cache(config) -> Cache:
    """An empty cache for a model, whatever its layers."""
    return make_cache(config)


def layer_states(layer) -> tuple[Tensor, Tensor]:
    """Keys and values (B, H, T, d) of a full-attention layer, of a sealed one those of its host tier.

    Raises
    ------
    CodecError
        If the layer holds no tokens, or is sealed and keeps no full copy.
    """
    if isinstance(layer, VerKVLayer) and layer.sealed:
        if layer.context.host is None:
            raise CodecError(
                "the cache is sealed and keeps no full copy of its context, so it cannot be transform-coded: compress "
                "the full cache first and sample after restoring it, or save this one without a codec"
            )
        return layer.context.host.keys, layer.context.host.values
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, Tensor) or keys.numel() == 0:
        raise CodecError("the cache holds no tokens; prefill it before it is compressed")
    return keys, values


def coded_states(cache: Cache, part: LayerSlice, side: str) -> Tensor:
    """Keys or values (H, T, d) of one layer of a cache of one sequence.

    Raises
    ------
    MismatchError
        If the cache has several sequences, or other heads than the calibration.
    """
    if part.layer >= len(cache.layers):
        raise MismatchError(f"the cache has {len(cache.layers)} layers, but layer {part.layer} is to be coded")
    states = layer_states(cache.layers[part.layer])[0 if side == "k" else 1]
    if states.shape[0] != 1:
        raise MismatchError(
            f"the cache holds {states.shape[0]} sequences; a stored cache holds one, so that each has its own "
            f"positions: select them with copy.deepcopy(cache) and batch_select_indices"
        )
    if (states.shape[1], states.shape[3]) != (part.n_heads, part.dim):
        raise MismatchError(
            f"layer {part.layer} has {states.shape[1]} KV heads of {states.shape[3]} channels, the calibration was "
            f"made for {part.n_heads} of {part.dim}; use the model that was calibrated"
        )
    return states[0]


def layout_of_cache(cache: Cache, config, layers_per_group: int | str) -> CacheLayout:
    """The layout of the full-attention layers of a prefilled cache."""
    shapes = {}
    for index in coded_layers(config):
        keys, values = layer_states(cache.layers[index])
        shapes[index] = (keys.shape[1], keys.shape[3], values.shape[3])
    return layout_from_shapes(shapes, layers_per_group)


def cache_dtype(cache: Cache, layer: int) -> torch.dtype:
    """Of a layer's keys."""
    return layer_states(cache.layers[layer])[0].dtype
