"""Attention over resident rows, rows read in place from the host's copy, and the tail."""

import math

import numpy as np

from verkv.loops import compiled
from verkv.loops.rows import as_float


@compiled(any_order=True)
def attend_units(
    query,
    row_keys,
    row_values,
    offsets,
    log_weights,
    host_keys,
    host_values,
    fetched,
    tail_logits,
    tail_values,
    scaling,
    output,
    lse,
):
    """Attention of every KV head's query rows; all float32, but rows may be bfloat16.

    query (N, B, R, d) of B beams; row_keys and row_values (M, d), those of unit n from offsets[n] to offsets[n + 1];
    log_weights (N, B, R, S), S at least as many as a unit has rows; host_keys and host_values (N, T, d), of which
    fetched (F, 2) lists the (unit, position) to read, ascending; tail_logits (N, B, R, t) and tail_values (N, B, t, d).
    Written: output (N, B, R, d), 0 when called, and lse (N, B, R).
    """
    n_units, n_beams, n_rows, _ = query.shape
    n_tail = tail_logits.shape[3]
    begin = 0
    for unit in range(n_units):
        end = begin
        while end < len(fetched) and fetched[end, 0] == unit:
            end += 1
        first, n_resident, n_fetched = offsets[unit], offsets[unit + 1] - offsets[unit], end - begin
        weights = np.empty((n_rows, n_resident + n_fetched + n_tail), np.float32)
        for beam in range(n_beams):
            rows, summed = query[unit, beam], output[unit, beam]
            for j in range(n_resident):
                score(rows, row_keys[first + j], scaling, weights, j)
            for j in range(n_fetched):
                score(rows, host_keys[unit, fetched[begin + j, 1]], scaling, weights, n_resident + j)
            for row in range(n_rows):
                for j in range(n_resident):
                    weights[row, j] += log_weights[unit, beam, row, j]
                for j in range(n_tail):
                    weights[row, n_resident + n_fetched + j] = tail_logits[unit, beam, row, j]
                lse[unit, beam, row] = normalise(weights[row])
            for j in range(n_resident):
                add(weights, j, row_values[first + j], summed)
            for j in range(n_fetched):
                add(weights, n_resident + j, host_values[unit, fetched[begin + j, 1]], summed)
            for j in range(n_tail):
                add(weights, n_resident + n_fetched + j, tail_values[unit, beam, j], summed)
        begin = end


@compiled(any_order=True)
def score(rows, key, scaling, logits, place):
    """The logits of one key."""
    for row in range(len(rows)):
        product = np.float32(0.0)
        for channel in range(len(key)):
            product += rows[row, channel] * as_float(key[channel])
        logits[row, place] = product * scaling


@compiled(any_order=True)
def add(weights, place, value, summed):
    """One value to the outputs of all rows."""
    for row in range(len(summed)):
        weight = weights[row, place]
        for channel in range(len(value)):
            summed[row, channel] += weight * as_float(value[channel])


@compiled(any_order=True)
def normalise(logits):
    """Logits to weights that sum to 1, in place, and the log of what they summed to; all 0 where all are -inf."""
    largest = np.float32(-np.inf)
    for logit in logits:
        largest = max(largest, logit)
    total = 0.0
    if largest == -np.inf:  # or none is a number
        for logit in logits:
            total += 0.0 if logit == -np.inf else np.nan
        for j in range(len(logits)):
            logits[j] = total
        return largest + np.float32(total)
    for j in range(len(logits)):
        logits[j] = np.exp(logits[j] - largest)
        total += logits[j]
    factor = np.float32(1.0 / total)
    for j in range(len(logits)):
        logits[j] *= factor
    return largest + np.float32(math.log(total))
