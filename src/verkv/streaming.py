"""Exact attention over a sealed context: keys and values come from the host block by block, and are not kept."""

import torch
from torch import Tensor

from verkv.attention import weighted_attention
from verkv.tiers import host_parts

BLOCK_BYTES = 2**26  # of keys and values in float32 that are on the device at a time
MAX_PAIRS = 2**24  # logits that are formed at a time


def attend(
    context, rows: Tensor, query: Tensor, tail_keys: Tensor, tail_values: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Attention of new queries over all of a context and the tail, with no estimate anywhere.

    Parameters
    ----------
    context : SealedContext
        With a host tier.
    rows : Tensor, shape (N, beams, R, d), float32
        The queries, R = G * Tq rows for each KV head.
    query, tail_keys, tail_values, mask, scaling
        As :meth:`SealedContext.attend` takes them.

    Returns
    -------
    Tensor, shape (B, Hq, Tq, d), dtype of the query
    """
    merged = _Merged()
    bytes_read = 0
    is_token = context.is_token().repeat_interleave(context.n_kv_heads, 0)  # (N, T)
    for start, keys, values in _blocks(context):
        bytes_read += keys.nbytes + values.nbytes
        hidden = ~is_token[:, None, None, start : start + keys.shape[2]]
        keys, values = keys.to(context.device).flatten(0, 1)[:, None], values.to(context.device).flatten(0, 1)[:, None]
        merged.add(_attention(rows, keys.float(), values, scaling, hidden))
    tail_k, tail_v = (context._tail_to_units(tail) for tail in (tail_keys, tail_values))
    hidden = context._tail_bias(mask, query, tail_keys.shape[2]) < 0
    merged.add(_attention(rows, tail_k.float(), tail_v, scaling, hidden))
    record = context._new_record(query)
    record.bytes_read = bytes_read
    record.fetched = context.n_units * context.n_tokens
    record.decisions = torch.zeros_like(record.decisions)  # nothing was left to decide
    context.stats.record(record)
    return context._from_units(merged.output, query).to(query.dtype)


class _Merged:
    """Attention over the parts that were added, put together by their log-sum-exp."""

    output = lse = None

    def add(self, part: tuple[Tensor, Tensor]) -> None:
        """Output (..., R, dv) and log-sum-exp (..., R) of disjoint tokens."""
        output, lse = part
        if self.output is None:
            self.output, self.lse = output, lse
            return
        total = torch.logaddexp(self.lse, lse)
        shift = torch.where(torch.isfinite(total), total, 0.0)
        own, new = (self.lse - shift).exp()[..., None], (lse - shift).exp()[..., None]
        self.output, self.lse = own * self.output + new * output, total


def _attention(rows: Tensor, keys: Tensor, values: Tensor, scaling: float, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of rows (N, beams, R, d) over one block of tokens (N, 1 or beams, t, d), some rows at a time."""
    n_rows = rows.shape[2]
    step = max(1, MAX_PAIRS // max(1, rows.shape[0] * rows.shape[1] * keys.shape[2]))
    outputs, lses = [], []
    for start in range(0, n_rows, step):
        block = slice(start, start + step)
        logits = rows[:, :, block] @ keys.mT * scaling
        logits.masked_fill_(hidden if hidden.shape[2] == 1 else hidden[:, :, block], -torch.inf)
        output, lse = weighted_attention([(logits, values)])
        outputs.append(output)
        lses.append(lse)
    return torch.cat(outputs, 2), torch.cat(lses, 2)


def _blocks(context):
    """Start, keys and values (C, Hkv, t, d) of consecutive tokens, on the host."""
    token_bytes = 4 * context.n_units * (context.key_dim + context.value_dim)
    step = max(1, BLOCK_BYTES // token_bytes)
    for first, part in host_parts(context.host):
        keys, values = part.keys, part.values
        for start in range(0, keys.shape[2], step):
            yield first + start, keys[:, :, start : start + step], values[:, :, start : start + step]
