"""What kvtc is compared with: each takes the exact cache of a context and gives one to go on with, and its bytes.

Floating-point numbers are counted as 16 bit, as those of the uncompressed cache are; everything that is needed to
restore is counted: scales, shifts, windows, and for singular value decompositions the bases of that one prompt.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from kvpress import ObservedAttentionPress, TOVAPress
from kvpress.presses.base_press import BasePress
from torch import Tensor
from transformers import DynamicCache

from verkv.rotary import Rotary

HALF = 2  # bytes of a number that is not quantised
E4M3_MAX = 448.0
_PACKED_TOGETHER = 4  # codes of 2 bits in a byte


@dataclass(frozen=True)
class Stored:
    """A restored cache, and the bytes that it was kept in."""

    cache: DynamicCache
    n_bytes: int


def full_bytes(cache) -> int:
    """Bytes of a cache at 16 bit."""
    return sum(HALF * (layer.keys.numel() + layer.values.numel()) for layer in cache.layers)


def by_side(cache, keys: Callable, values: Callable) -> Stored:
    """Apply functions of a tensor (1, H, T, d) that return (restored, bytes) to every layer."""
    layers, n_bytes = [], 0
    for layer in cache.layers:
        (k, k_bytes), (v, v_bytes) = keys(layer.keys), values(layer.values)
        layers.append((k, v))
        n_bytes += k_bytes + v_bytes
    return Stored(DynamicCache(layers), n_bytes)


# --- FP8 --------------------------------------------------------------------------------------------------------------


def fp8_states(states: Tensor) -> tuple[Tensor, int]:
    """E4M3 with a float16 scale per token and head: states (..., d) restored, and their bytes."""
    scale = (states.abs().amax(-1, keepdim=True) / E4M3_MAX).half().float()
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = (states / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.to(states.dtype) * scale, codes.numel() + HALF * scale.numel()


def fp8(cache) -> Stored:
    """FP8 of keys and values."""
    return by_side(cache, fp8_states, fp8_states)


# --- groups of integers, as KIVI --------------------------------------------------------------------------------------


def quantise_groups(states: Tensor, bits: int, group: int) -> tuple[Tensor, int]:
    """Asymmetric integers in groups along the last axis, each with a float16 shift and scale.

    Parameters
    ----------
    states : Tensor, shape (..., n)
        n a multiple of ``group``.
    bits, group : int

    Returns
    -------
    restored : Tensor, shape (..., n)
    n_bytes : int
    """
    grouped = states.unflatten(-1, (-1, group))
    low, high = (t.unsqueeze(-1) for t in grouped.aminmax(dim=-1))
    shift, scale = low.half().float(), ((high - low) / (2**bits - 1)).half().float()
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = ((grouped - shift) / scale).round().clamp(0, 2**bits - 1)
    n_bytes = states.numel() * bits // 8 + 2 * HALF * shift.numel()
    return (codes * scale + shift).flatten(-2), n_bytes


def kivi(cache, bits: int = 2, group: int = 32, residual: int = 128) -> Stored:
    """KIVI's quantiser: keys per channel over groups of tokens, values per token over groups of channels.

    The last ``residual`` tokens, and of the keys what fills no group before them, are kept as they are.
    """

    def keys(states: Tensor) -> tuple[Tensor, int]:
        n_coded = max(0, states.shape[2] - residual) // group * group
        coded, rest = states[:, :, :n_coded], states[:, :, n_coded:]
        restored, n_bytes = quantise_groups(coded.transpose(2, 3), bits, group)
        return torch.cat([restored.transpose(2, 3), rest], 2), n_bytes + HALF * rest.numel()

    def values(states: Tensor) -> tuple[Tensor, int]:
        n_coded = max(0, states.shape[2] - residual)
        coded, rest = states[:, :, :n_coded], states[:, :, n_coded:]
        restored, n_bytes = quantise_groups(coded, bits, min(group, states.shape[3]))
        return torch.cat([restored, rest], 2), n_bytes + HALF * rest.numel()

    return by_side(cache, keys, values)


# --- transformers' QuantizedCache -------------------------------------------------------------------------------------


def quantised_layer(backend: str, bits: int):
    """A layer of transformers' ``QuantizedCache`` with groups of 64: here, one head of one token.

    Raises
    ------
    ImportError
        If the backend's package is not installed.
    """
    from transformers.cache_utils import HQQQuantizedLayer, QuantoQuantizedLayer

    layer_class, axis = {"quanto": (QuantoQuantizedLayer, 0), "hqq": (HQQQuantizedLayer, 1)}[backend]
    return layer_class(nbits=bits, axis_key=axis, axis_value=axis, q_group_size=64, residual_length=128)


def transformers_quantised(cache, backend: str, bits: int) -> Stored:
    """What ``QuantizedCache`` makes of a prompt: all of it is quantised, the tokens after it are exact.

    hqq packs whole bytes over all groups and fails on other numbers of them: up to three last tokens stay exact.
    """
    layers, n_bytes = [], 0
    for full in cache.layers:
        n_tokens = full.keys.shape[2]
        n_coded = n_tokens // _PACKED_TOGETHER * _PACKED_TOGETHER if backend == "hqq" else n_tokens
        layer = quantised_layer(backend, bits)
        layer.update(full.keys[:, :, :n_coded], full.values[:, :, :n_coded])
        restored = []
        for quantised, exact in ((layer._quantized_keys, full.keys), (layer._quantized_values, full.values)):
            rest = exact[:, :, n_coded:]
            restored.append(torch.cat([layer._dequantize(quantised).to(exact.dtype), rest], dim=2))
            n_bytes += quantised_bytes(quantised) + HALF * rest.numel()
        layers.append(tuple(restored))
    return Stored(DynamicCache(layers), n_bytes)


def quantised_bytes(quantised) -> int:
    """Bytes of what a backend keeps: packed codes as they are, scales and zero points at 16 bit."""
    if isinstance(quantised, tuple):  # hqq
        codes, meta = quantised
        return codes.numel() * codes.element_size() + HALF * (meta["scale"].numel() + meta["zero"].numel())
    packed = quantised._data._data  # quanto
    return packed.numel() * packed.element_size() + HALF * (quantised._scale.numel() + quantised._shift.numel())


# --- singular values over layers, as xKV ------------------------------------------------------------------------------


def low_rank(rows: Tensor, rank: int) -> tuple[Tensor, int]:
    """Best approximation of rows (T, p) of a rank, as two factors; and the factors' bytes (or the rows', if fewer)."""
    rank = min(rank, *rows.shape)
    _, basis = torch.linalg.eigh(rows.T @ rows)
    basis = basis[:, -rank:]
    n_bytes = HALF * rank * (rows.shape[0] + rows.shape[1])
    return rows @ basis @ basis.T, min(n_bytes, HALF * rows.numel())


def cross_layer_svd(cache, rotary: Rotary, layers_per_group: int, k_share: float, v_share: float) -> Stored:
    """Joint decomposition of this prompt's keys, without RoPE, and of its values over groups of layers.

    Parameters
    ----------
    cache : DynamicCache
    rotary : Rotary
    layers_per_group : int
    k_share, v_share : float
        Rank over the number of features of a group.
    """
    positions = torch.arange(cache.get_seq_length())
    layers, n_bytes = [], 0
    for start in range(0, len(cache.layers), layers_per_group):
        group = cache.layers[start : start + layers_per_group]
        k, k_bytes = _joint([rotary.undo(layer.keys[0], positions) for layer in group], k_share)
        v, v_bytes = _joint([layer.values[0] for layer in group], v_share)
        layers += [(rotary.apply(a, positions)[None], b[None]) for a, b in zip(k, v, strict=True)]
        n_bytes += k_bytes + v_bytes
    return Stored(DynamicCache(layers), n_bytes)


def _joint(states: list[Tensor], share: float) -> tuple[list[Tensor], int]:
    """States (H, T, d) of several layers through one decomposition of their heads side by side."""
    stacked = torch.stack(states)  # (layers, H, T, d)
    rows = stacked.permute(2, 0, 1, 3).flatten(1)
    restored, n_bytes = low_rank(rows, max(1, round(share * rows.shape[1])))
    restored = restored.unflatten(1, (stacked.shape[0], stacked.shape[1], stacked.shape[3]))
    return list(restored.permute(1, 2, 0, 3)), n_bytes


# --- eviction, with KVPress' scores -----------------------------------------------------------------------------------


class ScoreRecorder(BasePress):
    """Has KVPress' H2O and TOVA score the tokens in one prefill, and leaves the cache as it is.

    Presses prune a layer after its own attention, so scores in an unpruned prefill are those of a pruned one. H2O needs
    attention weights, which only eager attention gives.

    Attributes
    ----------
    scores : dict of str to list of Tensor, shape (1, Hkv, T)
        By method, then by layer.
    """

    def __init__(self):
        self.presses = {"h2o": ObservedAttentionPress(), "tova": TOVAPress()}
        self.scores: dict[str, list[Tensor]] = {name: [] for name in self.presses}

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        """Score, and keep everything."""
        for name, press in self.presses.items():
            self.scores[name].append(press.score(module, hidden_states, keys, values, attentions, kwargs))
        return keys, values


@torch.inference_mode()
def prefill_scored(model, ids: Tensor) -> tuple[DynamicCache, dict[str, list[Tensor]]]:
    """The exact cache of a context (1, T), and both methods' scores, in one pass with eager attention."""
    recorder, cache = ScoreRecorder(), DynamicCache()
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with recorder(model):
            model.model(input_ids=ids, past_key_values=cache)
    finally:
        model.set_attn_implementation(before)
    return cache, recorder.scores


def evict(cache, scores: list[Tensor], ratio: float) -> Stored:
    """Keep the 1 / ratio best tokens of every head (at least one), in their order."""
    layers = []
    for layer, score in zip(cache.layers, scores, strict=True):
        n_kept = max(1, int(score.shape[-1] / ratio))
        index = score.topk(n_kept, dim=-1).indices.sort(-1).values[..., None]
        layers.append(tuple(t.gather(2, index.expand(-1, -1, -1, t.shape[-1])) for t in (layer.keys, layer.values)))
    kept = DynamicCache(layers)
    return Stored(kept, full_bytes(kept))
