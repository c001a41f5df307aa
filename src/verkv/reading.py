"""How a conversation takes in tokens: at once or in chunks, with what a budget does not pay for yet left exact."""

import contextlib
import copy
import math
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from verkv.branching import branch
from verkv.cache import make_cache, reseal, unsealed_keys

WAITING = "the tail was not sealed between turns while the budget did not pay for its fixed parts"


@contextlib.contextmanager
def active(press, model, cache) -> Iterator[None]:
    """The block of a press, or of none, for a cache that it may have seen before."""
    if press is None:
        yield
        return
    with press(model):
        press._stats = getattr(cache, "stats", None)  # or it would take the cache's tokens for somebody else's
        yield


@torch.no_grad()
def forward(model, press, cache, ids: Tensor, chunk_size: int | None):
    """Forward tokens that nothing is generated for.

    Parameters
    ----------
    model : PreTrainedModel
    press : SealingPress or None
    cache : transformers.Cache
    ids : Tensor, shape (1, T), int64
    chunk_size : int or None
        Most tokens forwarded at once. Chunks are sealed, but for the window.

    Returns
    -------
    transformers.Cache
        With the tokens: the one that was given, or a branch of it.
    """
    if press is None or cache.get_seq_length():
        return _forward_chunks(model, press, cache, ids, chunk_size)
    from verkv.presses.budget import BudgetTooSmall

    try:
        return _forward_chunks(model, press, cache, ids, chunk_size)
    except BudgetTooSmall as error:
        return _start_exact(model, press, ids, str(error))


def seal_tail(model, press, cache, least: int) -> None:
    """Seal the tail if ``least`` of its tokens can be; what the budget does not pay for waits, and a note says so."""
    if press is None or _n_sealable(model, press, cache) < least:
        return
    from verkv.presses.budget import BudgetTooSmall

    try:
        reseal(cache)
    except BudgetTooSmall:
        if WAITING not in cache.stats.notes:
            cache.stats.notes.append(WAITING)


def seals_by_itself(press) -> bool:
    """Whether a press seals tails at the end of forward passes."""
    return press is not None and any(x not in (None, math.inf) for x in (press.reseal_every, press.max_tail))


def _forward_chunks(model, press, cache, ids: Tensor, chunk_size: int | None):
    n_chunk = chunk_size or ids.shape[1]
    while ids.shape[1]:
        if press is not None and chunk_size is not None and _can_prefill(cache):
            return _prefill(model, press, cache, ids, chunk_size)
        with active(press, model, cache):
            _forward_once(model, cache, ids[:, :n_chunk])
        ids = ids[:, n_chunk:]
        if ids.shape[1]:
            seal_tail(model, press, cache, 1)
    return cache


def _forward_once(model, cache, ids: Tensor) -> None:
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)


def _is_sealed(cache) -> bool:
    return any(getattr(layer, "sealed", False) for layer in cache.layers)


def _can_prefill(cache) -> bool:
    """Whether ``prefill`` takes a cache: empty, or sealed."""
    return _is_sealed(cache) or not cache.get_seq_length()


def _prefill(model, press, cache, ids: Tensor, chunk_size: int):
    """Chunk after chunk, on a branch: a prefill that fails may empty its cache."""
    from verkv.chunked import prefill

    sealed = [layer.context for layer in cache.layers if getattr(layer, "sealed", False)]
    attention = "exact" if all(context.host is not None for context in sealed) else "verified"
    return prefill(model, ids, chunk_size=chunk_size, press=press, attention=attention, cache=branch(cache))


def _start_exact(model, press, ids: Tensor, reason: str):
    """Begin with tokens that are too few for the budget: all are protected, until more can be sealed with them."""
    cache, protecting = make_cache(model.config), copy.copy(press)
    protecting.n_sink = ids.shape[1]
    with protecting(model):
        _forward_once(model, cache, ids)
    press.take_over(model, cache)
    warnings.warn(f"the conversation begins uncompressed: {reason}", stacklevel=2)
    cache.stats.notes.append(WAITING)
    return cache


def _n_sealable(model, press, cache) -> int:
    """Tokens of the tail that need not stay in it."""
    resealer = getattr(cache, "resealer", None)
    if resealer is None or not press.seals_tails:
        return 0
    first = cache.layers[press.full_layers(model)[0]]
    place = first.get_seq_length(), resealer.prefix_length
    n_kept = press.window(*place) + (0 if first.sealed else press.n_protected_first(*place))
    return unsealed_keys(first).shape[2] - n_kept
