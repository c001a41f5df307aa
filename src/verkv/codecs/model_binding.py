"""What ties a calibration and a stored cache to a model: hashes of its configuration and of a few of its weights."""

import hashlib
import json
import re

import torch
from torch import nn

from verkv.codecs.errors import MismatchError
from verkv.codecs.tensor_store import tensor_bytes

# Fields that fix what keys and values mean, by any name transformers' configs use.
_LAYOUT_FIELDS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "sliding_window",
    "rope_parameters",
    "partial_rotary_factor",
)
_KV_WEIGHT = re.compile(r"layers\.(\d+)\..*(k_proj|v_proj|qkv_proj)\.weight$")


def config_hash(config) -> str:
    """sha256 of the fields of a config that fix the cache's layout and the rotation of its keys.

    Parameters
    ----------
    config : transformers.PreTrainedConfig

    Returns
    -------
    str
        64 hexadecimal digits.
    """
    text = config.get_text_config(decoder=True)
    fields = {name: getattr(text, name, None) for name in _LAYOUT_FIELDS}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def weights_hash(model: nn.Module) -> str:
    """sha256 of the key and value projections of a model's first and last layer that have them.

    They are hashed in bfloat16, so that a model loaded in float32 and in bfloat16 is the same one.

    Parameters
    ----------
    model : nn.Module

    Returns
    -------
    str
        64 hexadecimal digits.
    """
    found: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in model.named_parameters():
        match = _KV_WEIGHT.search(name)
        if match:
            found.setdefault(int(match[1]), []).append((match[0], parameter))
    digest = hashlib.sha256()
    for layer in sorted({min(found), max(found)}) if found else ():
        for name, parameter in sorted(found[layer], key=lambda item: item[0]):
            digest.update(name.encode())
            weights = parameter.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16)
            digest.update(weights.numpy().tobytes())
    return digest.hexdigest()


def hash_tokens(token_ids, n_tokens: int) -> str | None:
    """sha256 of token ids (T,) as little-endian int64; None without ids.

    Raises
    ------
    MismatchError
        If there are not ``n_tokens`` of them.
    """
    if token_ids is None:
        return None
    ids = torch.as_tensor(token_ids).detach().to("cpu", torch.int64).reshape(-1)
    if len(ids) != n_tokens:
        raise MismatchError(f"token_ids are {len(ids)}, but the cache holds {n_tokens} tokens")
    return hashlib.sha256(tensor_bytes(ids)).hexdigest()
