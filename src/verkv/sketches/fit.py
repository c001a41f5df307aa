"""Fitting a sketch to a prefilled layer: padding, positions, outliers, and what is left of the error."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verkv.sketches.base import Sketch
from verkv.sketches.error import SketchError, worst_sketched
from verkv.sketches.segmented import SegmentSketch, hidden_first


@dataclass(frozen=True)
class FittedSketch:
    """A sketch built on a layer's keys, with what was learnt on the way.

    Attributes
    ----------
    sketch : Sketch
    error : SketchError or None
        Moments of its error over the tokens that are planned with it.
    outliers : Tensor, shape (C, Hkv, T), bool, or None
        Tokens it codes worst.
    """

    sketch: Sketch
    error: SketchError | None = None
    outliers: Tensor | None = None


def build_sketch(
    recipe: Sketch, keys: Tensor, n_padding: Tensor, queries: Tensor | None = None, first: Tensor | None = None
) -> Sketch:
    """Build a sketch of keys (C, Hkv, T, d) whose rows have ``n_padding`` (C,) tokens of left padding.

    Each row's padding is replaced by its first token and position: what stands there must not choose the sketch's
    channels, nor widen its ranges; it may even be NaN. ``first`` (C,) are the positions of the rows' first tokens, 0 by
    default.
    """
    n_tokens = keys.shape[2]
    positions = torch.arange(n_tokens, device=keys.device) - n_padding.to(keys.device)[:, None]  # (C, T)
    if bool((positions < 0).any()):
        index = n_padding.to(keys.device).clamp_max(n_tokens - 1)  # of a row without tokens, any will do
        stand_in = keys[torch.arange(len(keys), device=keys.device), :, index]
        keys = torch.where((positions < 0)[:, None, :, None], stand_in[:, :, None], keys)
    positions = positions.clamp_min(0)
    if first is not None:
        positions = positions + first.to(keys.device)[:, None]
    return recipe.build(keys, queries=queries, positions=positions)


def build_segment(recipe: Sketch, keys: Tensor, is_token: Tensor, first: Tensor) -> SegmentSketch:
    """Build the sketch of a later segment; arguments as in :func:`fit_segment`."""
    none = torch.zeros(len(keys), dtype=torch.int64, device="cpu")
    return fit_segment(recipe, keys, is_token, first, None, none, None).sketch


def fit_segment(
    recipe: Sketch,
    keys: Tensor,
    is_token: Tensor,
    first: Tensor,
    queries: Tensor | None,
    n_outliers: Tensor,
    least_variance: float | None,
) -> FittedSketch:
    """Fit the sketch of a later segment of a context, of which no token is protected.

    Parameters
    ----------
    recipe, queries, n_outliers, least_variance
        As in :func:`fit_sketch`.
    keys : Tensor, shape (C, Hkv, t, d)
    is_token : Tensor, shape (C, t), bool
        False at tokens that the attention mask hides, wherever they are.
    first : Tensor, shape (C,), int64
        Position of each row's first token that is not hidden; the others follow it.

    Returns
    -------
    FittedSketch
        With a :class:`SegmentSketch`.
    """
    is_token = is_token.to(keys.device)
    n_hidden, moved = (~is_token).sum(-1), hidden_first(is_token)
    if moved is not None:
        keys = keys.gather(2, moved[0][:, None, :, None].expand_as(keys))
    protected = torch.zeros_like(is_token)
    fitted = fit_sketch(recipe, keys, n_hidden, queries, protected, n_outliers, least_variance, first)
    if moved is None:
        return replace(fitted, sketch=SegmentSketch(fitted.sketch))
    outliers = fitted.outliers.gather(2, moved[1][:, None].expand_as(fitted.outliers))
    return FittedSketch(SegmentSketch(fitted.sketch, moved[1]), fitted.error, outliers)


def fit_sketch(
    recipe: Sketch,
    keys: Tensor,
    n_padding: Tensor,
    queries: Tensor | None,
    protected: Tensor,
    n_outliers: Tensor,
    least_variance: float | None,
    first: Tensor | None = None,
) -> FittedSketch:
    """Build a sketch, find the tokens it codes worst, and measure its error on the others.

    Parameters
    ----------
    recipe : Sketch
        Not an oracle.
    keys : Tensor, shape (C, Hkv, T, d)
    n_padding : Tensor, shape (C,), int64
    queries : Tensor, shape (C, Hq, M, d), optional
        Times the model's scaling, as attention sees them.
    protected : Tensor, shape (C, T), bool
        Tokens that are always kept.
    n_outliers : Tensor, shape (C,), int64
        How many tokens to name as outliers, for each KV head.
    least_variance : float or None
        Measure the error, and let its covariance enter the plan of those KV heads whose logit variance over the queries
        is above it; without queries, of all. None: do not measure.
    first : Tensor, shape (C,), int64, optional
        Positions of the rows' first tokens; 0 by default.

    Returns
    -------
    FittedSketch
        Without error and outliers for a sketch that is not linear: it has no decoded keys to compare with.
    """
    sketch = build_sketch(recipe, keys, n_padding, queries, first)
    outliers = torch.zeros(keys.shape[:3], dtype=torch.bool, device=keys.device)
    if not sketch.is_linear or (least_variance is None and not bool(n_outliers.any())):
        return FittedSketch(sketch, None, outliers)
    decoded = sketch.decode()
    is_token = torch.arange(keys.shape[2], device=keys.device) >= n_padding.to(keys.device)[:, None]
    free = is_token & ~protected.to(keys.device)
    if bool(n_outliers.any()):
        outliers = worst_sketched(keys, decoded, queries, free, n_outliers)
    if least_variance is None:
        return FittedSketch(sketch, None, outliers)
    error = SketchError.measure(keys, decoded, free[:, None] & ~outliers)
    if queries is not None:
        rows = queries.float().unflatten(1, (keys.shape[1], -1)).flatten(2, 3)  # (C, Hkv, G * M, d)
        n_rows = (rows != 0).any(-1).sum(-1).clamp_min(1)  # those of padding are 0 and have no part in the mean
        error = error.where(error.logit_moments(rows, scaling=1.0)[1].sum(-1) / n_rows > least_variance)
    return FittedSketch(sketch, error, outliers)
