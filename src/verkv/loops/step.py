"""What a pass over a layer needs before and after its rows are planned: known tokens, logits, what is fetched.

Tokens are those of N KV heads' contexts, (N, T); ``codes`` hold the resident bit and
the level of each, 0 where there is none.
"""

import numpy as np

from verkv.loops import compiled
from verkv.loops.rows import as_float

RESIDENT, LEVEL = np.uint8(0x80), np.uint8(0x7F)  # bits of a code, as in verkv.tiers


@compiled
def choose_shortlist(best, codes, paper, size, chosen):
    """Mark the ``size`` residual tokens with the best score (N, T); with ``paper`` only those that are not resident.

    Of equal scores the first token is taken; scores that are -inf or not a number never are. Written: chosen (N, T).
    """
    heap = np.empty(size, np.int64)  # the worst of the chosen ones on top
    for unit in range(len(best)):
        scores, n_chosen = best[unit], 0
        for i in range(len(scores)):
            is_residual = (codes[unit, i] & LEVEL) > 0
            if not is_residual or (paper and (codes[unit, i] & RESIDENT) > 0) or not scores[i] > -np.inf:
                continue
            if n_chosen < size:
                heap[n_chosen] = i
                n_chosen += 1
                if n_chosen == size:
                    for start in range(size // 2 - 1, -1, -1):
                        sift_down(scores, heap, start)
            elif scores[i] > scores[heap[0]]:
                heap[0] = i
                sift_down(scores, heap, 0)
        for j in range(n_chosen):
            chosen[unit, heap[j]] = True


@compiled
def sift_down(scores, heap, start):
    """Restore the heap below ``start``: the smallest score first, of equal ones the last token."""
    moving, place, size = heap[start], start, len(heap)
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and is_worse(scores, heap[child + 1], heap[child]):
            child += 1
        if not is_worse(scores, heap[child], moving):
            break
        heap[place] = heap[child]
        place = child
    heap[place] = moving


@compiled
def is_worse(scores, i, j):
    """Whether token i leaves the shortlist before token j."""
    return scores[i] < scores[j] or (scores[i] == scores[j] and i > j)


@compiled
def find_slots(codes, slots):
    """Positions of resident rows, ascending. Written: slots (N, S), filled with -1 when called."""
    for unit in range(len(codes)):
        n_found = 0
        for i in range(codes.shape[1]):
            if (codes[unit, i] & RESIDENT) > 0:
                slots[unit, n_found] = i
                n_found += 1


@compiled
def find_known(codes, chosen, paper, known):
    """Mark tokens whose logits are exact in the plan: r = 1, the shortlist, and with ``paper`` all that is resident."""
    for unit in range(len(codes)):
        for i in range(codes.shape[1]):
            code = codes[unit, i]
            is_certain = (code & LEVEL) == 0 and code > 0
            known[unit, i] = is_certain or chosen[unit, i] or (paper and (code & RESIDENT) > 0)


@compiled(any_order=True)
def planning_logits(scores, mean, scaling, rows, codes, known, row_keys, offsets, host_keys, logits):
    """Logits to plan with: the sketch's scaled scores plus the mean of their error, exact ones of known tokens.

    scores (N, R, T); mean (N, R) or (0, 0); rows (N, R, d), not scaled; row_keys (M, d), those of resident
    tokens in order, of unit n from offsets[n] on; host_keys (N, T, d). Written: logits (N, R, T), -inf where there is
    no token.
    """
    n_units, n_rows, n_tokens = scores.shape
    for unit in range(n_units):
        for row in range(n_rows):
            shift = mean[unit, row] if len(mean) else np.float32(0.0)
            for i in range(n_tokens):
                logits[unit, row, i] = scores[unit, row, i] * scaling + shift
        slot = 0
        for i in range(n_tokens):
            code = codes[unit, i]
            if code == 0:
                for row in range(n_rows):
                    logits[unit, row, i] = -np.inf
            elif (code & RESIDENT) > 0:
                if known[unit, i]:
                    score(rows[unit], row_keys[offsets[unit] + slot], scaling, logits[unit, :, i])
                slot += 1
            elif known[unit, i]:
                score(rows[unit], host_keys[unit, i], scaling, logits[unit, :, i])


@compiled(any_order=True)
def score(rows, key, scaling, logits):
    """The logits of one key."""
    for row in range(len(rows)):
        product = np.float32(0.0)
        for channel in range(len(key)):
            product += rows[row, channel] * as_float(key[channel])
        logits[row] = product * scaling


@compiled
def settle(codes, chosen, results, max_read, union, is_exact, counts):
    """Promote everything where there is no finite bound, or more to promote than ``max_read`` of a KV head's tokens.

    chosen and union (N, T): the shortlist, and what the rows' plans promote; results (N, R, 4) of them. Written: union;
    is_exact (N,); counts (N, 3), 0 when called: what is fetched, keys read for the shortlist, and those of them that
    are fetched.
    """
    for unit in range(len(codes)):
        n_tokens, n_residual, n_promoted = 0, 0, 0
        for i in range(codes.shape[1]):
            n_tokens += codes[unit, i] > 0
            n_residual += (codes[unit, i] & LEVEL) > 0
            n_promoted += union[unit, i]
        everything = n_promoted > np.float32(max_read * n_tokens) or (n_promoted == n_residual and n_residual > 0)
        for row in range(results.shape[1]):
            everything = everything or not np.isfinite(results[unit, row, 3])
        is_exact[unit] = everything
        for i in range(codes.shape[1]):
            code = codes[unit, i]
            if everything:
                union[unit, i] = (code & LEVEL) > 0
            is_away = code > 0 and (code & RESIDENT) == 0
            counts[unit, 0] += is_away and union[unit, i]
            counts[unit, 1] += is_away and chosen[unit, i]
            counts[unit, 2] += is_away and chosen[unit, i] and union[unit, i]


@compiled
def list_fetched(codes, union, fetched):
    """Unit and position of what is promoted and not resident, ascending. Written: fetched (F, 2)."""
    n_found = 0
    for unit in range(len(codes)):
        for i in range(codes.shape[1]):
            if union[unit, i] and (codes[unit, i] & RESIDENT) == 0:
                fetched[n_found, 0], fetched[n_found, 1] = unit, i
                n_found += 1


@compiled
def log_weights(codes, union, slots, log_probs, weights):
    """Turn the shrinkage of resident rows (N, R, S) into log-weights: log(lambda / r), 0 where they are exact."""
    for unit in range(len(codes)):
        for slot in range(slots.shape[1]):
            at = slots[unit, slot]
            if at < 0:
                for row in range(weights.shape[1]):
                    weights[unit, row, slot] = -np.inf
                continue
            level = codes[unit, at] & LEVEL
            for row in range(weights.shape[1]):
                if level == 0 or union[unit, at]:
                    weights[unit, row, slot] = 0.0
                elif weights[unit, row, slot] == 1.0:
                    weights[unit, row, slot] = -log_probs[level]
                else:
                    weights[unit, row, slot] = np.log(weights[unit, row, slot]) - log_probs[level]
