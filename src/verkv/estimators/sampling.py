"""Which tokens are kept: inclusion probabilities (Eq. 3), their one-byte grid, and the Poisson sample (Algorithm 1)."""

import functools

import torch
from torch import Tensor

# Inclusion probabilities live on the grid r = 2 ** (-level / 8) with a 7-bit level, so that one byte a token holds the
# probability and a "resident" bit. Level 0 is r = 1.
LEVELS_PER_OCTAVE = 8
MAX_LEVEL = 127
MIN_INCLUSION_PROB = 2.0 ** (-MAX_LEVEL / LEVELS_PER_OCTAVE)


def defensive_mixture(scores: Tensor, alpha: float, eligible: Tensor | None = None) -> Tensor:
    """Mix importance scores with their mean over the tokens: tau' = (1 - alpha) tau + alpha mean(tau).

    Scores of many tokens can be nearly zero while their attention weight is not; w (1 - r) / r then explodes and they
    must be fetched. A share of uniform sampling bounds it. ``alpha = 0`` is the paper's algorithm.

    Parameters
    ----------
    scores : Tensor, shape (..., T), float
        Importance scores, >= 0.
    alpha : float in [0, 1]
        Share of the uniform part.
    eligible : Tensor, shape broadcastable to (..., T), bool, optional
        Tokens over which the mean is taken (all by default). Others are returned unchanged.

    Returns
    -------
    Tensor, shape (..., T)

    Raises
    ------
    ValueError
        If ``alpha`` is outside [0, 1].

    Examples
    --------
    >>> import torch
    >>> defensive_mixture(torch.tensor([0.0, 1.0]), alpha=0.5)
    tensor([0.2500, 0.7500])
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must be in [0, 1], got {alpha}")
    if alpha == 0.0:
        return scores
    if eligible is None:
        eligible = torch.ones_like(scores, dtype=torch.bool)
    eligible = eligible.expand_as(scores)
    count = eligible.sum(-1, keepdim=True).clamp_min(1)
    mean = torch.where(eligible, scores, 0.0).sum(-1, keepdim=True) / count
    return torch.where(eligible, (1.0 - alpha) * scores + alpha * mean, scores)


def inclusion_probabilities(
    scores: Tensor,
    budget: float | Tensor,
    *,
    certain: Tensor | None = None,
    absent: Tensor | None = None,
    floor: float = 0.0,
    shared_dims: int = 1,
) -> Tensor:
    """Inclusion probabilities r = min(1, c * score) that add up to a budget, Eq. (3) of [1]_.

    Certain tokens get r = 1 first and the constant c is solved for the others: with c < 1 a score of 1 alone would not
    keep them. With a floor, r = clip(c * score, floor, 1). The solution is exact: whichever bound is violated more is
    fixed, c is solved again for the tokens that remain, until none violates a bound (variable fixing for a
    one-constraint allocation).

    Parameters
    ----------
    scores : Tensor, shape (..., T), float
        Importance scores, finite and >= 0. A common factor cancels.
    budget : float or Tensor broadcastable to the shape of ``scores`` without its last ``shared_dims`` axes
        Expected number of kept tokens, certain ones included.
    certain : Tensor broadcastable to ``scores``, bool, optional
        Tokens that are always kept (sinks, local window, template prefix).
    absent : Tensor broadcastable to ``scores``, bool, optional
        Positions that are not tokens (padding). They get r = 0 and do not count.
    floor : float in [0, 1)
        Smallest r of a token that is neither certain nor absent.
    shared_dims : int, default 1
        How many trailing axes share one budget. With scores of shape (B, L, H, T): 1 solves per head, 2 per layer, 3
        per model.

    Returns
    -------
    Tensor, shape of ``scores``, float64 for float64 scores, otherwise float32
        In [0, 1]. Tokens with score 0 get the floor; where the tokens with a positive score do not use up the budget,
        those without share the rest evenly (the limit c -> infinity).

    Raises
    ------
    ValueError
        If scores hold NaN, infinite or negative values, if ``floor`` is outside [0, 1), or if the budget is smaller
        than the certain tokens plus the floor of the others, or larger than the number of tokens.

    References
    ----------
    .. [1] Jha et al., "Verify Before You Fetch", arXiv:2611.11319v1.

    Examples
    --------
    >>> import torch
    >>> inclusion_probabilities(torch.tensor([4.0, 1.0, 1.0, 0.0]), budget=2.0)
    tensor([1.0000, 0.5000, 0.5000, 0.0000])
    """
    _check_scores(scores)
    if not 0.0 <= floor < 1.0:
        raise ValueError(f"floor must be in [0, 1), got {floor}")
    certain = _mask(certain, scores)
    absent = _mask(absent, scores)
    certain = certain & ~absent

    batch_shape = scores.shape[: scores.dim() - shared_dims]
    dtype = torch.float64  # a sum over 10^6 tokens must meet the budget to far less than one token
    tau = scores.reshape(*batch_shape, -1).to(dtype)
    certain, absent = certain.reshape(tau.shape), absent.reshape(tau.shape)
    free = ~(certain | absent)
    n_certain, n_free = certain.sum(-1, dtype=dtype), free.sum(-1, dtype=dtype)  # int64 * floor would be float32
    budget = torch.as_tensor(budget, dtype=dtype, device=tau.device).expand(batch_shape)
    _check_budget(budget, n_certain, n_free, floor)

    left = (budget - n_certain).clamp(min=n_free * floor, max=n_free)  # rounding of the caller's budget only
    r = torch.where(certain, 1.0, torch.zeros_like(tau))
    r = _fix_variables(tau, left, free, floor, r)
    return r.reshape(scores.shape).to(torch.promote_types(scores.dtype, torch.float32))


def _fix_variables(tau: Tensor, left: Tensor, free: Tensor, floor: float, r: Tensor) -> Tensor:
    """Solve clip(c tau, floor, 1) over the free tokens; each round fixes the side that is violated more."""
    left = left.clone()
    while bool(free.any()):
        share = torch.where(free, tau, 0.0)
        top = share.amax(-1, keepdim=True)
        share = share / torch.where(top > 0, top, 1.0)  # in units of the largest score, or c may overflow
        mass = share.sum(-1)
        count = free.sum(-1)
        even = left / count.clamp_min(1)  # no positive score left: share evenly
        c = left / torch.where(mass > 0, mass, 1.0)
        value = torch.where((mass > 0)[..., None], c[..., None] * share, even[..., None])
        value = torch.where(free, value, 0.0)
        above, below = free & (value > 1.0), free & (value < floor)
        excess = torch.where(above, value - 1.0, 0.0).sum(-1)
        lack = torch.where(below, floor - value, 0.0).sum(-1)
        fix_above = above & (excess >= lack)[..., None]
        fix_below = below & (lack > excess)[..., None]
        if not (fix_above.any() or fix_below.any()):
            return torch.where(free, value, r)
        r = torch.where(fix_above, 1.0, torch.where(fix_below, floor, r))
        left = (left - fix_above.sum(-1) - floor * fix_below.sum(-1, dtype=left.dtype)).clamp_min(0.0)
        free = free & ~(fix_above | fix_below)
    return r


def quantize_inclusion_probs(
    inclusion_probs: Tensor, *, absent: Tensor | None = None, shared_dims: int = 1
) -> tuple[Tensor, Tensor]:
    """Round probabilities to the one-byte grid r = 2 ** (-level / 8) without exceeding their sum.

    Rounding happens *before* the draw, and the draw uses the rounded values, so estimators stay exactly unbiased. All
    probabilities are rounded down, then those nearest to the next level are raised while the sum allows it: the sum
    stays below the unrounded one by less than one step of one token.

    Parameters
    ----------
    inclusion_probs : Tensor, shape (..., T), float
        In [MIN_INCLUSION_PROB, 1], or 0 where absent.
    absent : Tensor broadcastable to ``inclusion_probs``, bool, optional
        Positions that are not tokens.
    shared_dims : int
        How many trailing axes share one sum.

    Returns
    -------
    levels : Tensor, shape (..., T), uint8
        In [0, 127]; 0 is r = 1. Absent positions hold 0 and are told apart by the resident bit.
    inclusion_probs : Tensor, shape (..., T), same dtype but at least float32
        The rounded probabilities, 0 where absent.

    Raises
    ------
    ValueError
        If a probability of a token is not in [MIN_INCLUSION_PROB, 1].

    Examples
    --------
    >>> import torch
    >>> levels, r = quantize_inclusion_probs(torch.tensor([1.0, 0.5, 0.3]))
    >>> levels.tolist(), [round(x, 3) for x in r.tolist()]
    ([0, 8, 14], [1.0, 0.5, 0.297])
    """
    absent = _mask(absent, inclusion_probs)
    tokens = inclusion_probs[~absent]
    if tokens.numel() and not bool(((tokens >= MIN_INCLUSION_PROB * (1 - 1e-6)) & (tokens <= 1)).all()):
        raise ValueError(
            f"inclusion_probs must be in [{MIN_INCLUSION_PROB:.3g}, 1]; pass floor=MIN_INCLUSION_PROB when solving"
        )
    r = torch.where(absent, 1.0, inclusion_probs.double())
    exact_level = -r.log2() * LEVELS_PER_OCTAVE
    # Values within 1e-6 of a level, float32 rounding on the grid, are that level: they give nothing away and stay.
    on_grid = (exact_level - exact_level.round()).abs() <= 1e-6
    exact_level = torch.where(on_grid, exact_level.round(), exact_level)
    low = exact_level.ceil().clamp(0, MAX_LEVEL)  # larger level = smaller r
    step_up = _grid(low - 1) - _grid(low)
    can_rise = (low > 0) & ~absent
    room = torch.where(absent, 0.0, _grid(exact_level) - _grid(low))

    batch_shape = r.shape[: r.dim() - shared_dims]
    flat = lambda x: x.reshape(*batch_shape, -1)  # noqa: E731
    # Largest remainders first. `room` is each token's share of the sum that rounding down gave away.
    remainder = torch.where(flat(can_rise), flat(room) / flat(step_up), -1.0)
    order = remainder.argsort(dim=-1, descending=True, stable=True)
    cost = torch.where(flat(can_rise), flat(step_up), torch.inf).gather(-1, order)
    slack = flat(room).sum(-1, keepdim=True)
    rises = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, cost.cumsum(-1) <= slack)
    levels = (low - rises.reshape(low.shape).to(low.dtype)).clamp_min(0)
    levels = torch.where(absent, 0, levels).to(torch.uint8)
    rounded = decode_inclusion_probs(levels, torch.promote_types(inclusion_probs.dtype, torch.float32))
    return levels, torch.where(absent, 0.0, rounded)


def decode_inclusion_probs(levels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Probabilities of 7-bit levels: r = 2 ** (-level / 8).

    Parameters
    ----------
    levels : Tensor, any shape, uint8
        In [0, 127] (mask a resident bit off first).
    dtype : torch.dtype
        Of the result.

    Returns
    -------
    Tensor, same shape, in [MIN_INCLUSION_PROB, 1]

    Examples
    --------
    >>> import torch
    >>> decode_inclusion_probs(torch.tensor([0, 8, 16], dtype=torch.uint8))
    tensor([1.0000, 0.5000, 0.2500])
    """
    return _grid_table(levels.device, dtype).index_select(0, levels.reshape(-1).int()).view(levels.shape)


def poisson_sample(inclusion_probs: Tensor, generator: torch.Generator) -> Tensor:
    """Independent Bernoulli draws, Algorithm 1 line 4 of [1]_.

    Parameters
    ----------
    inclusion_probs : Tensor, any shape, float
        In [0, 1].
    generator : torch.Generator
        Created once per run. Its device may differ from the probabilities': a CPU generator gives the same sample on
        every device.

    Returns
    -------
    Tensor, same shape, bool
        True where the token is kept; always at r = 1, never at r = 0.

    References
    ----------
    .. [1] Jha et al., "Verify Before You Fetch", arXiv:2611.11319v1.
    """
    uniform = torch.rand(
        inclusion_probs.shape, generator=generator, device=generator.device, dtype=torch.float64
    )  # in [0, 1): float64, so that r near 1e-5 is not coarsened by a 24-bit uniform
    return uniform.to(inclusion_probs.device) < inclusion_probs


@functools.lru_cache(maxsize=16)
def _grid_table(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Of all levels, made on the CPU: the same number for the same level on every device, also without float64."""
    return _grid(torch.arange(MAX_LEVEL + 1, dtype=torch.float64, device="cpu")).to(device, dtype)


def _grid(levels: Tensor) -> Tensor:
    return torch.exp2(-levels / LEVELS_PER_OCTAVE)


def _mask(mask: Tensor | None, like: Tensor) -> Tensor:
    if mask is None:
        return torch.zeros(like.shape, dtype=torch.bool, device=like.device)
    return mask.expand(like.shape)


def _check_scores(scores: Tensor) -> None:
    if not scores.is_floating_point():
        raise ValueError(f"scores must be floating point, got {scores.dtype}")
    if not bool(torch.isfinite(scores).all()):
        raise ValueError("scores hold NaN or infinite values; check the press that made them")
    if bool((scores < 0).any()):
        raise ValueError("scores must be >= 0; apply a softmax over the tokens first")


def _check_budget(budget: Tensor, n_certain: Tensor, n_free: Tensor, floor: float) -> None:
    least, most = n_certain + floor * n_free, n_certain + n_free
    tolerance = 1e-9 * most.clamp_min(1)
    if bool((budget.isnan() | (budget < least - tolerance)).any()):
        worst = (budget - least).argmin()
        raise ValueError(
            f"budget of {budget.flatten()[worst].item():.6g} tokens is too small: certain tokens and the floor already "
            f"need {least.flatten()[worst].item():.6g}"
        )
    if bool((budget > most + tolerance).any()):
        worst = (budget - most).argmax()
        raise ValueError(
            f"budget of {budget.flatten()[worst].item():.6g} tokens is larger than the "
            f"{most.flatten()[worst].item():.0f} tokens there are"
        )
