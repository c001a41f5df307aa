"""Shrinkage, certificate and plan of query rows in time linear in the number of tokens.

Everything is computed in float64, whatever the weights are: loops over tokens need no wide temporaries, and rounding
then hides nothing. The formulas and their order are those of :mod:`verkv.estimators.certificate`, ``shrinkage`` and
``linear_plan``, where they are explained.
"""

import math

import numpy as np

from verkv.loops import compiled

# Digits of a float64 key, from its sign and exponent down to its last bits, and the bins that they need.
_SHIFTS = (52, 41, 30, 19, 8, 0)
_N_BINS = 4096
_FEW = 24  # members that are sorted by insertion


@compiled
def plan_rows(
    weights, r, residual, unit_of, given, denominator, tolerance, log_terms, shrinkage, promoted, counts, bounds
):
    """Plan every row.

    weights (M, T); r and residual (K, T), those of row m in line unit_of[m]; given (M, T) or (0, 0), shrinkage to plan
    with; denominator and tolerance (M,), float64; log_terms: l of Eq. (7), and of the upper and the lower side, 0 where
    the sides are not bounded apart. Written: shrinkage and promoted (M, T), counts (M,), and bounds (M, 2) before and
    after promoting.
    """
    memory = scratch(weights.shape[1])
    last_unit = -1
    for row in range(len(weights)):
        unit = unit_of[row]
        if unit != last_unit:
            ratios(r[unit], residual[unit], memory[0])
            last_unit = unit
        preset = given[row] if given.shape[0] else weights[row, :0]
        rule = (denominator[row], tolerance[row], log_terms)
        counts[row], bounds[row, 0], bounds[row, 1] = plan_row(
            weights[row], r[unit], residual[unit], preset, rule, memory, shrinkage[row], promoted[row]
        )


@compiled
def plan_units(
    weights, levels, probs, unknown, variance, tail_weights, tolerance, log_terms, slots, union, slot_shrinkage, results
):
    """Plan the query rows of N KV heads, and unite what those of a head promote.

    weights (N, R, T), of which those of unknown (N, T) tokens are a sketch's, with a Gaussian error of variance (N, R)
    in the logit where that is not (0, 0); levels (N, T), of probabilities probs[level], 0 outside the residual set;
    tail_weights and tolerance (N, R), float64; slots (N, S), the positions of resident rows, -1 where there is none.
    Written: union (N, T), to which promoted tokens are added; slot_shrinkage (N, R, S); results (N, R, 4): k*, whether
    a token without a slot is promoted, and the bounds before and after promoting.
    """
    n_units, n_rows, n_tokens = weights.shape
    memory = scratch(n_tokens)
    shrinkage, promoted, w = np.empty(n_tokens, np.float32), np.empty(n_tokens, np.bool_), np.empty(n_tokens)
    r, residual = np.empty(n_tokens, np.float32), np.empty(n_tokens, np.bool_)
    for unit in range(n_units):
        for i in range(n_tokens):
            r[i] = probs[levels[unit, i]]
            residual[i] = levels[unit, i] > 0
        ratios(r, residual, memory[0])
        for row in range(n_rows):
            denominator = tail_weights[unit, row]
            for i in range(n_tokens):
                w[i] = weights[unit, row, i]
                denominator += w[i]
            if variance.shape[0]:
                denominator += spread_error(w, unknown[unit], np.float64(variance[unit, row]))
            rule = (denominator, tolerance[unit, row], log_terms)
            found = plan_row(w, r, residual, w[:0], rule, memory, shrinkage, promoted)
            n_resident = 0
            for slot in range(slots.shape[1]):
                at = slots[unit, slot]
                if at >= 0:
                    slot_shrinkage[unit, row, slot] = shrinkage[at]
                    n_resident += promoted[at]
            for i in range(n_tokens):
                union[unit, i] |= promoted[i]
            results[unit, row, 0], results[unit, row, 1] = found[0], found[0] > n_resident
            results[unit, row, 2], results[unit, row, 3] = found[1], found[2]


@compiled
def spread_error(w, unknown, variance):
    """Turn weights of unknown tokens into the roots of their second moments; returns what their means add to D."""
    added, factor = 0.0, math.exp(variance)
    for i in range(len(w)):
        if unknown[i] and w[i] > 0.0:  # where the factor overflows, a weight of 0 stays 0
            added += w[i]
            w[i] *= factor
    return added * math.expm1(variance / 2.0) if added > 0.0 else 0.0


@compiled
def scratch(n_tokens):
    """Memory for :func:`plan_row`: odds and reach of a unit and six terms of a row, two lists of tokens, and bins."""
    zeros, n = np.zeros, n_tokens  # one by one: a tuple of arrays, not an array of rows, lets loops be vectorised
    terms = zeros(n), zeros(n), zeros(n), zeros(n), zeros(n), zeros(n), zeros(n), zeros(n)
    return terms, (np.empty(n, np.int64), np.empty(n, np.int64)), np.empty((4, _N_BINS))


@compiled
def plan_row(w, probs, residual, given, rule, memory, coefficients, chosen):
    """Plan one row, after :func:`ratios` of its unit; returns k* and the bounds before and after promoting.

    A rule is a row's denominator and tolerance, and the log terms.
    """
    terms, lists, bins = memory
    odds, _, spread, bias, variance, deviation, below, key = terms
    for i in range(len(w)):
        spread[i] = w[i] * odds[i]
        coefficients[i] = 1.0
        chosen[i] = False
    if len(given):
        n_shrunk = take_given(given, residual, coefficients, lists[1])
    else:
        n_shrunk = shrink(w, probs, spread, lists[0], coefficients, lists[1])
    shrunk = lists[1][:n_shrunk]
    total = fill_terms(w, coefficients, shrunk, rule[2], terms)
    before = bound_of(total[0], total[1], total[4], total[5], rule)
    after, n_chosen = before, 0
    if not math.isfinite(before):  # neither an order nor a certificate exists
        after = 0.0
        for i in range(len(w)):
            chosen[i] = residual[i]
            n_chosen += residual[i]
    elif not before < rule[1]:
        order_keys(bias, variance, deviation, shrunk, total, rule[2][0], key)
        if rule[2][1] > 0.0:
            for i in range(len(w)):  # what lifts the estimate, instead of the larger of both
                deviation[i] = below[i] * odds[i]
        n_chosen, after = promote(terms, residual, rule, lists[0], bins, chosen)
    for i in shrunk:
        bias[i] = 0.0
    return n_chosen, before, after


@compiled
def ratios(probs, residual, terms):
    """(1 - r) / r and max(r, 1 - r) / r; 0 outside the residual set."""
    odds, reach = terms[0], terms[1]
    for i in range(len(probs)):
        odds[i], reach[i] = 0.0, 0.0
        if residual[i]:
            p = np.float64(probs[i])
            odds[i], reach[i] = (1.0 - p) / p, max(p, 1.0 - p) / p


@compiled
def take_given(given, residual, coefficients, shrunk):
    """Coefficients to plan with, and the tokens where they are not 1; returns how many."""
    n_shrunk = 0
    for i in range(len(given)):
        if residual[i] and given[i] < 1.0:
            coefficients[i] = given[i]
            shrunk[n_shrunk] = i
            n_shrunk += 1
    return n_shrunk


@compiled
def shrink(w, probs, spread, heap, coefficients, shrunk):
    """Binary shrinkage (A.2): tokens by falling u while u > 2 beta, beta the sum of a over those before.

    Lists the tokens that are shrunk, and returns how many.
    """
    best = 0
    largest = spread[0] if len(spread) else 0.0
    for i in range(len(spread)):
        if spread[i] > largest:
            best, largest = i, spread[i]
    if not largest > 0.0:
        return 0
    # The first is always shrunk, and what clearly does not exceed its 2 beta never will be. The others wait in a heap;
    # few of them leave it: each adds its a to beta, so that at most 1 / (2 r) tokens of the smallest r can be shrunk,
    # however long the row is. Whether a token is shrunk is decided by u as the reference rounds it.
    least = 2.0 * np.float64(w[best]) * (1.0 - np.float64(probs[best])) * (1.0 - 1e-12)
    n_waiting = 0
    for i in range(len(spread)):
        if spread[i] > least or i == best:
            spread[i] = np.float64(w[i]) * (1.0 - np.float64(probs[i])) / np.float64(probs[i])
            heap[n_waiting] = i
            n_waiting += 1
    for start in range(n_waiting // 2 - 1, -1, -1):
        sift_down(spread, heap, start, n_waiting)
    beta, n_shrunk = 0.0, 0
    while n_waiting > 0 and spread[heap[0]] > 2.0 * beta:
        i = heap[0]
        coefficients[i] = probs[i]
        shrunk[n_shrunk] = i
        n_shrunk += 1
        beta += np.float64(w[i]) * (1.0 - np.float64(probs[i]))
        n_waiting -= 1
        heap[0] = heap[n_waiting]
        sift_down(spread, heap, 0, n_waiting)
    return n_shrunk


@compiled
def sift_down(spread, heap, start, size):
    """Restore the heap below ``start``: the largest first, of equal ones the first token."""
    moving = heap[start]
    place = start
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and comes_before(spread, heap[child + 1], heap[child]):
            child += 1
        if not comes_before(spread, heap[child], moving):
            break
        heap[place] = heap[child]
        place = child
    heap[place] = moving


@compiled
def comes_before(spread, i, j):
    """Whether token i is visited before token j."""
    return spread[i] > spread[j] or (spread[i] == spread[j] and i < j)


@compiled
def fill_terms(w, coefficients, shrunk, log_terms, terms):
    """Each token's part of Eq. (7); the bias is 0 when called.

    Returns beta, V, the place of the largest deviation, the second largest, and the largest of each side: of both,
    where the sides are not bounded apart.
    """
    odds, reach, spread, bias, variance, deviation, below, _ = terms
    for i in range(len(w)):
        variance[i] = w[i] * spread[i]
        deviation[i] = w[i] * reach[i]
    for i in shrunk:
        coefficient = np.float64(coefficients[i])
        bias[i] = w[i] * (1.0 - coefficient)
        variance[i] *= coefficient * coefficient
        deviation[i] *= coefficient
    total_bias, total_variance, second, most_above, most_below = 0.0, 0.0, 0.0, 0.0, 0.0
    for i in shrunk:
        total_bias += bias[i]
    for i in range(len(w)):
        total_variance += variance[i]
    at = 0
    largest = deviation[0] if len(w) else 0.0
    for i in range(1, len(w)):
        if deviation[i] > second:
            if deviation[i] > largest:
                at, largest, second = i, deviation[i], largest
            else:
                second = deviation[i]
    if log_terms[1] <= 0.0:
        return total_bias, total_variance, at, second, largest, 0.0
    for i in range(len(w)):
        below[i] = w[i] if odds[i] > 0.0 else 0.0
    for i in shrunk:
        below[i] *= np.float64(coefficients[i])
    for i in range(len(w)):
        most_above = max(most_above, below[i] * odds[i])
        most_below = max(most_below, below[i])
    return total_bias, total_variance, at, second, most_above, most_below


@compiled
def tail(variance, largest, log_term):
    """Bernstein's tail."""
    scaled = largest * (log_term / 3.0)
    return scaled + math.sqrt(scaled * scaled + 2.0 * log_term * variance)


@compiled
def bound_of(bias, variance, above, below, rule):
    """Eq. (7), or the larger of the bounds of the two sides."""
    denominator, _, log_terms = rule
    if log_terms[1] <= 0.0:
        return (bias + tail(variance, above, log_terms[0])) / denominator
    upper, lower = tail(variance, above, log_terms[1]), bias + tail(variance, below, log_terms[2])
    return max(upper, lower) / denominator


@compiled
def order_keys(bias, variance, deviation, shrunk, total, log_term, key):
    """Keys in the order of the drops of Eq. (9)."""
    total_variance, at, second = total[1], total[2], total[3]
    scaled, scaled_second = deviation[at] * (log_term / 3.0), second * (log_term / 3.0)
    for i in range(len(key)):
        key[i] = variance[i]
    for i in shrunk:
        key[i] = ordinary_variance(bias[i], variance[i], total_variance, scaled, scaled, log_term)
    if second < deviation[at]:
        key[at] = ordinary_variance(bias[at], variance[at], total_variance, scaled, scaled_second, log_term)


@compiled
def ordinary_variance(bias, variance, total_variance, scaled, scaled_without, log_term):
    """The variance of an ordinary token whose drop is this one's; continued where there is none."""
    root = math.sqrt(scaled * scaled + 2.0 * log_term * total_variance)
    left = max(total_variance - variance, 0.0)
    root_without = math.sqrt(scaled_without * scaled_without + 2.0 * log_term * left)
    squares = 2.0 * log_term * variance + (scaled - scaled_without) * (scaled + scaled_without)
    drop = bias + (scaled - scaled_without) + squares / max(root + root_without, 2.2250738585072014e-308)
    rising = drop * (2.0 * root - drop) if drop < root else root * (2.0 * drop - root)
    return rising / (2.0 * log_term)


@compiled
def promote(terms, residual, rule, members, bins, chosen):
    """Mark the fewest tokens, by falling key, without which the bound is below the tolerance.

    Tokens are kept from the smallest key on. A histogram over the keys' leading digits says in which bin the bound is
    reached; the tokens of that bin alone are looked at again, by their next digits. Returns how many are marked, and
    the bound.
    """
    _, _, _, bias, variance, above, below, key = terms
    n_members, n_chosen = 0, 0
    for i in range(len(key)):
        members[n_members] = i
        n_members += residual[i]
    bits = key.view(np.int64)
    kept = (0.0, 0.0, 0.0, 0.0)
    for shift in _SHIFTS:
        if n_members <= _FEW:
            break
        highest = fill_bins(bits, shift, members[:n_members], terms, rule[2], bins)
        boundary = 0
        while boundary <= highest:
            more = with_tokens(kept, bins[0, boundary], bins[1, boundary], bins[2, boundary], bins[3, boundary])
            if not bound_of(more[0], more[1], more[2], more[3], rule) < rule[1]:
                break
            kept = more
            boundary += 1
        n_left = 0
        for m in range(n_members):
            i = members[m]
            digit = (bits[i] >> shift) & (_N_BINS - 1)
            if digit > boundary:
                chosen[i] = True
                n_chosen += 1
            elif digit == boundary:
                members[n_left] = i
                n_left += 1
        n_members = n_left
    sort_members(key, members, n_members)
    m = 0
    while m < n_members:
        i = members[m]
        more = with_tokens(kept, bias[i], variance[i], above[i], below[i])
        if not bound_of(more[0], more[1], more[2], more[3], rule) < rule[1]:
            break
        kept = more
        m += 1
    for rest in range(m, n_members):
        chosen[members[rest]] = True
    return n_chosen + n_members - m, bound_of(kept[0], kept[1], kept[2], kept[3], rule)


@compiled
def with_tokens(kept, bias, variance, above, below):
    """Sums and maxima over what is kept, with more tokens."""
    return kept[0] + bias, kept[1] + variance, max(kept[2], above), max(kept[3], below)


@compiled
def fill_bins(bits, shift, members, terms, log_terms, bins):
    """Sums and maxima of the members of each bin; returns the highest bin that has any."""
    _, _, _, bias, variance, above, below, _ = terms
    highest = 0
    for i in members:
        highest = max(highest, (bits[i] >> shift) & (_N_BINS - 1))
    for digit in range(highest + 1):
        bins[0, digit], bins[1, digit], bins[2, digit], bins[3, digit] = 0.0, 0.0, 0.0, 0.0
    for i in members:
        digit = (bits[i] >> shift) & (_N_BINS - 1)
        bins[0, digit] += bias[i]
        bins[1, digit] += variance[i]
        bins[2, digit] = max(bins[2, digit], above[i])
    if log_terms[1] > 0.0:
        for i in members:
            digit = (bits[i] >> shift) & (_N_BINS - 1)
            bins[3, digit] = max(bins[3, digit], below[i])
    return highest


@compiled
def sort_members(key, members, n_members):
    """Smallest key first, of equal ones the last token: the first ones are promoted before it."""
    if n_members > _FEW:  # every digit has been looked at, so all keys are equal
        for m in range(n_members // 2):
            members[m], members[n_members - 1 - m] = members[n_members - 1 - m], members[m]
        return
    for m in range(1, n_members):
        i = members[m]
        place = m
        while place > 0:
            before = members[place - 1]
            if key[before] < key[i] or (key[before] == key[i] and before > i):
                break
            members[place] = before
            place -= 1
        members[place] = i
