"""Prefill in chunks: a context several times the device's budget is read piece by piece, and each piece sealed."""

import torch
from torch import Tensor

from verkv.cache import check_cache, counted_apart, empty_cache, layer_kinds, make_cache
from verkv.checks import check_count
from verkv.hybrid import LinearLayer
from verkv.presses.prompt import left_padding
from verkv.presses.resealing import chunked_prefill
from verkv.presses.sealing_press import SealingPress, without_adapters
from verkv.window import WindowLayer

ATTENTION = ("exact", "verified")


@torch.no_grad()
def prefill(
    model,
    input_ids: Tensor,
    *,
    chunk_size: int,
    press: SealingPress,
    attention: str = "exact",
    cache=None,
    attention_mask: Tensor | None = None,
):
    """Read a prompt chunk after chunk, sealing each: on the device stay what the budget pays for, and one chunk.

    A chunk is scored when the tokens up to its end have been read and no others, and drawn with its own share of the
    budget. The last ``n_local`` tokens are never sealed but stay in the tail.

    Parameters
    ----------
    model : PreTrainedModel
    input_ids : Tensor, shape (B, T), int64
    chunk_size : int
        Tokens read at once, more than the press' ``n_local``. All chunks are about equally long, none longer than this.
        Every segment has a sketch with a basis of its own, which does not shrink with it: chunks of fewer than some
        thousand tokens cost memory.
    press : SealingPress
        Not active on the model at the same time.
    attention : {"exact", "verified"}
        How a chunk attends to the chunks before it: to all their tokens, which are streamed from the host in blocks, or
        as later queries do. All of a chunk's queries share what is fetched, so "verified" reads nearly everything, too,
        and plans besides; see ``docs/segments.md`` for when it pays.
    cache : transformers.Cache, optional
        Empty, or sealed by the press: the tokens are appended then. A new one by default.
    attention_mask : Tensor, shape (B, T), optional
        0 at left padding; with a cache that holds tokens, of these, too.

    Returns
    -------
    VerKVCache, or the given cache
        Ready for questions. ``cache.stats.chunks`` counts what the chunks have read from the host.

    Raises
    ------
    ValueError
        If an argument is out of range, padding is longer than the first chunk without its window, or the cache holds
        tokens that are not sealed.
    NotImplementedError
        If the model or the cache cannot be sealed.
    """
    _check_arguments(press, input_ids, chunk_size, attention)
    cache = make_cache(model.config) if cache is None else cache
    _check_given_cache(cache, model, attention)
    batch, n_tokens = input_ids.shape
    n_before = cache.get_seq_length()
    if attention_mask is not None and tuple(attention_mask.shape) != (batch, n_before + n_tokens):
        expected = batch, n_before + n_tokens
        raise ValueError(f"attention_mask must have shape {expected}, got {tuple(attention_mask.shape)}")
    n_chunks = -(-n_tokens // chunk_size)
    size = -(-n_tokens // n_chunks)
    if not n_before and attention_mask is not None:
        _check_padding(attention_mask, size, press)
    inner = without_adapters(model)
    backbone = getattr(inner, "model", None) or inner.base_model
    records = [getattr(layer, "record", None) for layer in cache.layers]
    token = chunked_prefill.set(True)
    try:
        with press(model):
            for start in range(0, n_tokens, size):
                chunk = input_ids[:, start : start + size]
                placed = _placed(attention_mask, n_before + start, chunk.shape[1])
                _read(backbone, cache, chunk, placed, exact=attention == "exact")
    except BaseException:
        _forget(cache, n_before, records)
        raise
    finally:
        chunked_prefill.reset(token)
    _finish(cache)
    return cache


def _read(backbone, cache, chunk: Tensor, placed: dict[str, Tensor], exact: bool) -> None:
    """Run one chunk and seal it. The press itself seals the first one, unless all of it is protected."""
    was_sealed = _is_sealed(cache)
    with counted_apart(cache, "chunks", exact=exact):
        backbone(input_ids=chunk, past_key_values=cache, use_cache=True, **placed)
    if was_sealed or _can_seal_late(cache):
        cache.resealer.run(cache, attention_mask=placed.get("attention_mask"))


def _forget(cache, n_before: int, records: list) -> None:
    """Take out what was read of a prompt: half of one must not be taken for a whole one."""
    try:
        if n_before:
            cache.crop(n_before)
            for layer, record in zip(cache.layers, records, strict=True):
                if record is not None:
                    layer.record = record  # of the tail there was, which has come back
            return
    except ValueError:  # a layer cannot go back
        pass
    empty_cache(cache)


def _check_arguments(press, input_ids: Tensor, chunk_size: int, attention: str) -> None:
    if not isinstance(press, SealingPress):
        raise ValueError(f"press must be one of VerKV's presses, got {type(press).__name__}")
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or not input_ids.numel():
        raise ValueError("input_ids must have shape (B, T), with at least one token")
    if attention not in ATTENTION:
        raise ValueError(f"attention must be one of {list(ATTENTION)}, got {attention!r}")
    window = press.window(input_ids.shape[1], 0)
    if check_count("chunk_size", chunk_size, least=1) <= window:
        raise ValueError(
            f"chunk_size={chunk_size} must be larger than the press' window of {window} tokens, which are not sealed; "
            f"use larger chunks or a smaller n_local"
        )


def _check_given_cache(cache, model, attention: str) -> None:
    check_cache(cache, layer_kinds(model.config))
    if not cache.get_seq_length():
        return
    if not _is_sealed(cache):
        raise ValueError(
            "past tokens of the cache are not sealed: pass an empty cache, or one that a press or prefill has sealed"
        )
    has_host = all(layer.context.host is not None for layer in cache.layers if getattr(layer, "sealed", False))
    if attention == "exact" and not has_host:
        raise ValueError(
            "attention='exact' needs the sealed tokens on the host, where this cache keeps none; pass "
            "attention='verified' to attend to its sample"
        )


def _check_padding(attention_mask: Tensor, size: int, press: SealingPress) -> None:
    n_padding, n_sealed = left_padding(attention_mask, *attention_mask.shape), size - press.window(size, 0)
    if int(n_padding.max()) >= n_sealed:
        raise ValueError(
            f"attention_mask has {int(n_padding.max())} tokens of left padding, but the first chunk seals {n_sealed}: "
            f"use larger chunks, or prefill rows of so different lengths by themselves"
        )


def _placed(attention_mask: Tensor | None, start: int, n_new: int) -> dict[str, Tensor]:
    """Mask and positions of a chunk, where there is padding."""
    if attention_mask is None or bool(attention_mask.all()):
        return {}
    mask = attention_mask[:, : start + n_new]
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)[:, -n_new:]}


def _is_sealed(cache) -> bool:
    return any(getattr(layer, "sealed", False) for layer in cache.layers)


def _can_seal_late(cache) -> bool:
    """Whether a first chunk was all protected, so that the whole is still to be sealed, and can be by now."""
    resealer = getattr(cache, "resealer", None)
    return resealer is not None and not _is_sealed(cache) and resealer.can_seal_first(cache)


def _finish(cache) -> None:
    """Keep no more than the press asks for; questions may go back to this point."""
    if not _is_sealed(cache):
        return
    for layer in cache.layers:
        if isinstance(layer, (WindowLayer, LinearLayer)):
            layer.mark_context()
        elif getattr(layer, "sealed", False) and layer.context.fetch is None and not layer.context.audit:
            layer.context.host = None
