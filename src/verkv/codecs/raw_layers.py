"""Layers that are stored as they are: plain ones without a codec, sliding windows, recurrent states."""

import dataclasses

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicSlidingWindowLayer

from verkv.cache import VerKVLayer
from verkv.codecs.cache_access import coded_layers, layer_states
from verkv.codecs.errors import CodecError, CorruptFileError
from verkv.codecs.tensor_store import TensorReader, TensorWriter
from verkv.hybrid import LinearLayer
from verkv.window import WindowLayer


def put_layers(writer: TensorWriter, cache: Cache, layers: list[int]) -> dict[str, dict]:
    """Add layers of a cache to a segment as they are; returns what the header must say of them, by layer."""
    described = {}
    for index in layers:
        described[str(index)], tensors = _read_layer(cache.layers[index])
        writer.put_all(f"layer.{index}", tensors)
    return described


def fill_layers(cache: Cache, described: dict[str, dict], reader: TensorReader, wanted=None, device="cpu") -> None:
    """Inverse of :func:`put_layers`, into the empty layers of a cache; ``wanted`` limits it to some layers."""
    for name, facts in described.items():
        index = int(name)
        if not 0 <= index < len(cache.layers):
            raise CorruptFileError(f"the header names layer {index}, the model has {len(cache.layers)}")
        if wanted is None or index in wanted:
            tensors = {name: tensor.to(device) for name, tensor in reader.get_all(f"layer.{index}").items()}
            _fill_layer(cache.layers[index], facts, tensors)


def check_complete(cache: Cache, n_tokens: int) -> None:
    """Raise CorruptFileError unless every layer of a restored cache has the same tokens, ``n_tokens`` at least."""
    lengths = {layer.get_seq_length() for layer in cache.layers}
    if len(lengths) != 1 or min(lengths) < n_tokens:
        raise CorruptFileError(f"the stored context is incomplete: its layers hold {sorted(lengths)} tokens")


def uncoded_layers(cache: Cache, config) -> list[int]:
    """Indices of the layers of a cache that no codec is for."""
    coded = set(coded_layers(config))
    return [index for index in range(len(cache.layers)) if index not in coded]


def set_states(layer, keys: Tensor, values: Tensor) -> None:
    """Give an empty layer its keys and values (B, H, T, d)."""
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values


def _read_layer(layer) -> tuple[dict, dict[str, Tensor]]:
    if isinstance(layer, LinearLayer):
        return _read_linear(layer)
    if isinstance(layer, DynamicSlidingWindowLayer):
        return _read_window(layer)
    keys, values = layer_states(layer)
    return {"kind": "full"}, {"keys": keys, "values": values}


def _fill_layer(layer, facts: dict, tensors: dict[str, Tensor]) -> None:
    kinds = {"full": VerKVLayer, "sliding": WindowLayer, "linear": LinearLayer}
    kind = facts.get("kind")
    if not isinstance(layer, kinds.get(kind, ())):
        raise CorruptFileError(f"the header says that a {type(layer).__name__} is of kind {kind!r}")
    try:
        if kind == "full":
            set_states(layer, tensors["keys"], tensors["values"])
        elif kind == "sliding":
            _fill_window(layer, facts, tensors)
        else:
            _fill_linear(layer, facts, tensors)
    except KeyError as error:
        raise CorruptFileError(f"a {kind} layer lacks {error}") from None


# --- sliding windows ----------------------------------------------------------------------------------------------


def _read_window(layer: DynamicSlidingWindowLayer) -> tuple[dict, dict[str, Tensor]]:
    # A WindowLayer that has marked a context shows stand-ins as keys and values; its states are behind them.
    keys = layer._keys if isinstance(layer, WindowLayer) else layer.keys
    values = layer._values if isinstance(layer, WindowLayer) else layer.values
    if keys is None or not keys.numel():
        raise CodecError("a sliding layer of the cache holds no tokens; prefill the cache before it is compressed")
    facts, tensors = {"kind": "sliding", "length": layer.cumulative_length}, {"keys": keys, "values": values}
    context = getattr(layer, "_context", None)
    if context is not None:
        facts["context_length"] = context.length
        tensors |= {"context_keys": context.keys, "context_values": context.values}
    return facts, tensors


def _fill_window(layer: WindowLayer, facts: dict, tensors: dict[str, Tensor]) -> None:
    if "context_length" in facts:
        set_states(layer, tensors["context_keys"], tensors["context_values"])
        layer.cumulative_length = int(facts["context_length"])
        layer.mark_context()
        layer._keys, layer._values = tensors["keys"], tensors["values"]
    else:
        set_states(layer, tensors["keys"], tensors["values"])
    layer.cumulative_length = int(facts["length"])


# --- recurrent states ---------------------------------------------------------------------------------------------


def _read_linear(layer: LinearLayer) -> tuple[dict, dict[str, Tensor]]:
    if not layer.is_initialized:
        raise CodecError("a linear-attention layer of the cache has no state; prefill the cache before")
    facts, tensors = {"kind": "linear", "length": layer.state.length}, _moment_tensors(layer.state, "")
    if layer._context is not None:
        facts["context_length"] = layer._context.length
        tensors |= _moment_tensors(layer._context, "context_")
    return facts, tensors


def _moment_tensors(moment, prefix: str) -> dict[str, Tensor]:
    states = {"conv": moment.conv, "recurrent": moment.recurrent}
    return {prefix + name: state for name, state in states.items() if state is not None}


def _fill_linear(layer: LinearLayer, facts: dict, tensors: dict[str, Tensor]) -> None:
    empty = layer.state

    def moment(prefix: str, length: int):
        states = {name: tensors.get(prefix + name) for name in ("conv", "recurrent")}
        return dataclasses.replace(empty, **states, length=int(length))

    if "context_length" in facts:
        layer.state = moment("context_", facts["context_length"])
        layer.mark_context()
    layer.state = moment("", facts["length"])
