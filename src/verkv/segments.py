"""How a sealed context grows and shrinks: a segment more, with a draw of its own, or the last one less.

Earlier draws, codes and probabilities are never touched, so the inclusion indicators of all tokens stay independent.
"""

import torch
from torch import Tensor

from verkv.estimators.sampling import decode_inclusion_probs
from verkv.estimators.thinning import Thinning, count_levels, thin_counts, thin_levels
from verkv.sketches.fit import build_segment
from verkv.sketches.segmented import SegmentedSketch
from verkv.tiers import LEVEL_MASK, RESIDENT_BIT, HostParts, HostTier, ResidentRows, Segment, host_parts


@torch.no_grad()
def append(context, keys: Tensor, values: Tensor, plan) -> None:
    """Seal the tokens behind a context as one more segment of it.

    The context is changed at the end, in one step: what fails before leaves it as it was.

    Parameters
    ----------
    context : SealedContext
    keys, values : Tensor, shape (C, Hkv, t, d)
        Of the t >= 1 tokens that follow the context.
    plan : SealPlan
        Codes (C, Hkv, t), and with fetching the segment's sketch, fitted or to be built. What else it says is the
        first segment's business.
    """
    assert plan.codes.shape == keys.shape[:3], f"codes {tuple(plan.codes.shape)} for keys {tuple(keys.shape)}"
    assert (len(keys), plan.beams) == (context.n_contexts, context.beams), "another batch than was sealed"
    n_before, n_new = context.n_tokens, keys.shape[2]
    keys, values = plan.states(keys, values)
    codes = plan.codes.to(context.device)
    surplus = None if plan.surplus is None else plan.surplus.to(context.device)
    before = _thinned(context, plan.thinning)
    is_token = torch.ones(codes.shape[0], n_new, dtype=torch.bool, device=context.device)
    if plan.is_token is not None:
        is_token = plan.is_token.to(context.device)
    rows = ResidentRows.gather(keys, values, codes, surplus)
    grown = {
        "rows": before["rows"].append(rows),
        "n_tokens": n_before + n_new,
        "full_bytes": context.full_bytes + keys.nbytes + values.nbytes,
        "segments": (*before["segments"], Segment(n_new, rows.offsets.diff(), counted(codes, surplus))),
    }
    if not bool(is_token.all()):
        seen = torch.cat([context.is_token(), is_token], 1)
        grown["hidden"] = hidden_positions(seen, context.n_padding)
    part = None
    if context.host is not None:
        part = plan.host_tier(keys, values)
        grown["host"] = HostParts.of(context.host, n_before).append(part, n_new)
    if context.codes is not None:
        grown["codes"] = torch.cat([before["codes"], codes.flatten(0, 1)], 1)
    if context.value_norms is not None:
        grown["value_norms"] = context.value_norms.append(values, is_token)
    if context.sketch is not None:
        grown |= _grown_sketch(context, keys, is_token, plan, part)
    vars(context).update(grown)


def counted(codes: Tensor, surplus: Tensor | None) -> Tensor | None:
    """Tokens of codes (C, Hkv, t) by their probabilities, where the sample may be thinned; see ``Segment.counts``."""
    if surplus is None:
        return None
    codes, surplus = codes.flatten(0, 1), surplus.flatten(0, 1)
    return count_levels(codes & LEVEL_MASK, surplus, codes != 0)


def _thinned(context, thinning: Thinning | None) -> dict[str, object]:
    """Rows, codes and segments of a context after its sample has been thinned; as they are without a thinning."""
    if thinning is None:
        return {name: getattr(context, name) for name in ("rows", "codes", "segments")}
    steps, kept = thinning.steps.to("cpu"), thinning.kept.to(context.device)
    rows = context.rows.thin(steps, kept)
    thinned = {"rows": rows, "codes": None}
    if context.codes is not None:
        thinned["codes"] = _thinned_codes(context.codes, context.rows, steps, kept)
    # Rows of a unit are in the order of its segments, the last of which end where the unit does.
    n_before = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.cumsum(0)])
    end, segments = context.rows.offsets[1:], []
    for segment in reversed(context.segments):
        n_rows = segment.n_rows
        if n_rows is not None:
            start = end - n_rows
            end, n_rows = start, n_before[end] - n_before[start]
        segments.insert(0, Segment(segment.n_tokens, n_rows, thin_counts(segment.counts, steps)))
    return thinned | {"segments": tuple(segments)}


def _thinned_codes(codes: Tensor, rows: ResidentRows, steps: Tensor, kept: Tensor) -> Tensor:
    """Codes (N, T) of all tokens: every one's probability is lowered, and rows that went are resident no more."""
    resident, steps = (codes & RESIDENT_BIT) != 0, steps.to(codes.device)
    lowered, _ = thin_levels(codes & LEVEL_MASK, torch.zeros_like(codes), steps[:, None])
    thinned = torch.where(codes == 0, codes, lowered)  # absent tokens stay absent
    of_rows, _ = thin_levels(rows.codes & LEVEL_MASK, rows.surplus, steps.repeat_interleave(rows.offsets.diff()))
    thinned[resident] = of_rows | (kept.to(torch.uint8) * RESIDENT_BIT)
    return thinned


def _grown_sketch(context, keys: Tensor, is_token: Tensor, plan, part: HostTier) -> dict[str, object]:
    """The sketch with one more segment, and the moments of its error, pooled over the tokens of all segments."""
    if context.sketch.is_oracle:
        return {"sketch": context.sketch.extend(part.keys)}
    error = context.sketch_error
    if plan.fitted is None:
        added = build_segment(plan.sketch, keys, is_token, context.is_token().sum(-1))
    else:
        added = plan.fitted.sketch
        if error is not None and plan.fitted.error is not None:
            error = error.pooled(plan.fitted.error, keys.shape[2] / (context.n_tokens + keys.shape[2]))
    return {"sketch": SegmentedSketch.of(context.sketch).append(added), "sketch_error": error}


@torch.no_grad()
def drop_last(context) -> tuple[Tensor, Tensor] | None:
    """Take the last of several segments out, draw and all.

    The pooled moments of the sketch's error stay as they are: they describe the sketch, not single tokens.

    Parameters
    ----------
    context : SealedContext
        Of two segments at least.

    Returns
    -------
    keys, values : Tensor, shape (C, Hkv, t, d), or None
        Its tokens, on the device. None where no host copy is kept.
    """
    assert len(context.segments) > 1, "the first segment cannot be dropped"
    *kept, last = context.segments
    n_kept = context.n_tokens - last.n_tokens
    token_bytes = context.full_bytes // context.n_tokens
    left = {
        "rows": context.rows.head(last.n_rows),
        "n_tokens": n_kept,
        "full_bytes": n_kept * token_bytes,
        "segments": tuple(kept),
    }
    if context.hidden is not None:
        left["hidden"] = hidden_positions(context.is_token()[:, :n_kept], context.n_padding)
    states = None
    if context.host is not None:
        parts = host_parts(context.host)
        start, part = parts[-1]
        states = tuple(t[:, :, n_kept - start :].to(context.device) for t in (part.keys, part.values))
        left["host"] = host_head(context.host, n_kept)
    if context.codes is not None:
        left["codes"] = context.codes[:, :n_kept].clone()
    if context.value_norms is not None:
        left["value_norms"] = context.value_norms.head(n_kept)
    if context.sketch is not None and context.sketch.is_oracle:
        left["sketch"] = oracle(context.sketch, left["host"])
    elif context.sketch is not None:
        left["sketch"] = context.sketch.head(len(kept))
    vars(context).update(left)
    return states


def last_probs(context) -> Tensor | None:
    """Inclusion probabilities (C, Hkv, t) of the last segment; None where only the rows' own are kept."""
    if context.codes is None:
        return None
    codes = context.codes[:, -context.segments[-1].n_tokens :] & LEVEL_MASK
    return decode_inclusion_probs(codes).unflatten(0, (context.n_contexts, context.n_kv_heads))


def hidden_positions(is_token: Tensor, n_padding: Tensor) -> Tensor | None:
    """(2, M): contexts and positions of tokens (C, T) that are hidden but no left padding; None if there are none."""
    behind_padding = torch.arange(is_token.shape[1], device=is_token.device) >= n_padding[:, None]
    hidden = (behind_padding & ~is_token).nonzero().mT.contiguous()
    return hidden if hidden.numel() else None


def oracle(sketch, host):
    """The exact sketch over a host tier, a reference to the keys of each of its parts."""
    (_, first), *later = host_parts(host)
    built = sketch.build(first.keys)
    for _, part in later:
        built = built.extend(part.keys)
    return built


def host_head(host, n_tokens: int):
    """A host tier's first ``n_tokens``: whole parts, or views of a part that holds more than one segment."""
    lengths, parts = [], []
    for start, part in host_parts(host):
        n_left = n_tokens - start
        if n_left > 0:
            held = part.keys.shape[2]
            lengths.append(min(held, n_left))
            parts.append(part if held <= n_left else HostTier(part.keys[:, :, :n_left], part.values[:, :, :n_left]))
    return parts[0] if len(parts) == 1 else HostParts(tuple(parts), tuple(lengths))
