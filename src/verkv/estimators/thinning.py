"""Making a Poisson sample smaller without drawing it again: probabilities are lowered, and each kept row thrown a coin.

With r = min(1, c tau), a smaller budget means a smaller c. A token that was kept with probability r, and stays with
probability r' / r by a coin of its own, is kept with probability r', independently of all others: what is left is a
Poisson sample with probabilities r' = min(1, c' tau), as if it had been drawn with them. The coins' probabilities must
not depend on the sample, so the new c follows from the sum of r, never from the number of rows that were drawn.

On the grid r = 2 ** (-level / 8), lowering c by k eighths of an octave adds k to every level. Where c tau > 1, the
*surplus* of the score over what r = 1 needs is used up first: tokens with the highest scores are the last in doubt.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.estimators.sampling import (
    LEVELS_PER_OCTAVE,
    MAX_LEVEL,
    decode_inclusion_probs,
    poisson_sample,
)

MAX_SURPLUS = MAX_LEVEL  # more counts as that much
PROTECTED = 255  # the surplus of tokens that are never thinned: sinks, window, template prefix, outliers
_PROTECTED_BIN = MAX_SURPLUS + MAX_LEVEL + 1
N_BINS = _PROTECTED_BIN + 1  # by level - surplus, and one for protected tokens


@dataclass(frozen=True)
class Thinning:
    """How a layer's sample is to be made smaller.

    Attributes
    ----------
    steps : Tensor, shape (N,), int64
        Eighths of an octave by which each unit's c is lowered.
    kept : Tensor, shape (M,), bool
        The resident rows that stay, in their order.
    """

    steps: Tensor
    kept: Tensor


def surplus_levels(
    scores: Tensor, inclusion_probs: Tensor, levels: Tensor, *, certain: Tensor, absent: Tensor, shared_dims: int = 1
) -> Tensor:
    """By how many levels c can fall before a token with r = 1 is in doubt.

    Parameters
    ----------
    scores : Tensor, shape (..., T), float
        What the probabilities are proportional to.
    inclusion_probs : Tensor, shape (..., T)
        Their exact solution r = clip(c * score, floor, 1), before it was rounded to the grid.
    levels : Tensor, shape (..., T), uint8
        After rounding.
    certain, absent : Tensor broadcastable to ``scores``, bool
        As they were solved with.
    shared_dims : int
        How many trailing axes share one c.

    Returns
    -------
    Tensor, shape (..., T), uint8
        0 at tokens with r < 1 and absent ones, at most 127 elsewhere, 255 at certain ones. Where every token has r = 1,
        c is as small as that allows.
    """
    certain, absent = (mask.expand(scores.shape) for mask in (certain, absent))
    free = ~(certain | absent) & (scores > 0)
    tau, r = scores.double(), inclusion_probs.double()
    batch_shape = scores.shape[: scores.dim() - shared_dims]
    shared = tuple(range(len(batch_shape), scores.dim()))
    # Probabilities at the floor are larger than c times their score, those at 1 smaller: c lies between.
    of_certain = torch.where(free & (r >= 1.0), r / tau, 0.0).amax(shared, keepdim=True)
    least = torch.where(free & (r < 1.0), r / tau, torch.inf).amin(shared, keepdim=True)
    c = torch.where(least.isfinite(), least, of_certain)
    surplus = (c * tau).clamp_min(1.0).log2().mul(LEVELS_PER_OCTAVE).add(1e-6).floor().clamp_max(MAX_SURPLUS)
    surplus = torch.where(free & (levels == 0), surplus, 0.0).to(torch.uint8)
    return torch.where(certain & ~absent, PROTECTED, surplus).to(torch.uint8)


def count_levels(levels: Tensor, surplus: Tensor, is_token: Tensor) -> Tensor:
    """How many tokens have each value of level - surplus, which is all that the sum of r depends on.

    Parameters
    ----------
    levels, surplus : Tensor, shape (N, T), uint8
    is_token : Tensor, shape (N, T), bool

    Returns
    -------
    Tensor, shape (N, 256), int64, on the CPU
        The last column counts protected tokens.
    """
    bins = levels.long() - surplus.long() + MAX_SURPLUS
    bins = torch.where(surplus == PROTECTED, _PROTECTED_BIN, bins)
    counts = torch.zeros(len(levels), N_BINS, dtype=torch.int64, device=levels.device)
    return counts.scatter_add_(1, bins, is_token.long()).cpu()


def expected_rows(counts: Tensor) -> Tensor:
    """Sum of r, (...,), float64, of tokens counted by :func:`count_levels` (..., 256)."""
    return counts.double() @ _probs()


def variance_of_rows(counts: Tensor) -> Tensor:
    """Variance of the number of resident rows, (...,), float64: the sum of r (1 - r)."""
    return counts.double() @ (_probs() * (1.0 - _probs()))


def n_protected(counts: Tensor) -> Tensor:
    """Protected tokens, (...,)."""
    return counts[..., _PROTECTED_BIN]


def thinning_steps(counts: Tensor, target: Tensor) -> Tensor:
    """The least lowering of c, in eighths of an octave, after which the sum of r is within a target.

    Parameters
    ----------
    counts : Tensor, shape (..., 256), int64
    target : Tensor, shape (...), float64
        Not below the protected tokens plus MIN_INCLUSION_PROB for each other one; what is cannot be met, and gets the
        most that is possible.

    Returns
    -------
    Tensor, shape (...), int64
    """
    n_steps = _PROTECTED_BIN - 1  # then all are at the floor
    bins = torch.arange(_PROTECTED_BIN)
    after = (bins[:, None] + torch.arange(n_steps + 1)).clamp_max(n_steps)
    sums = counts[..., :_PROTECTED_BIN].double() @ _probs()[after] + n_protected(counts).double()[..., None]
    return (sums > target[..., None] * (1 + 1e-12)).sum(-1).clamp_max(n_steps)  # sums fall with the step


def thin_counts(counts: Tensor, steps: Tensor) -> Tensor:
    """The counts (..., 256) after c has been lowered by ``steps`` (...)."""
    bins = (torch.arange(_PROTECTED_BIN) + steps[..., None]).clamp_max(_PROTECTED_BIN - 1)
    thinned = torch.zeros_like(counts)
    thinned.scatter_add_(-1, bins, counts[..., :_PROTECTED_BIN])
    thinned[..., _PROTECTED_BIN] = n_protected(counts)
    return thinned


def thin_levels(levels: Tensor, surplus: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Levels and surplus after c has been lowered.

    Parameters
    ----------
    levels, surplus : Tensor, uint8, of one shape
    steps : Tensor broadcastable to it, int64

    Returns
    -------
    levels, surplus : Tensor, uint8
    """
    signed = levels.long() - surplus.long() + steps
    is_protected = surplus == PROTECTED
    lower = torch.where(is_protected, levels.long(), signed.clamp(0, MAX_LEVEL)).to(torch.uint8)
    left = torch.where(is_protected, PROTECTED, (-signed).clamp(0, MAX_SURPLUS)).to(torch.uint8)
    return lower, left


def draw_survivors(levels: Tensor, surplus: Tensor, steps: Tensor, generator: torch.Generator) -> Tensor:
    """Throw the coins of resident rows: which of them stay, with probability r' / r each.

    Parameters
    ----------
    levels, surplus : Tensor, shape (M,), uint8
    steps : Tensor, shape (M,), int64
    generator : torch.Generator

    Returns
    -------
    Tensor, shape (M,), bool
    """
    lower, _ = thin_levels(levels, surplus, steps)
    before, after = (decode_inclusion_probs(x, torch.float64) for x in (levels.cpu(), lower.cpu()))
    return poisson_sample(after / before, generator).to(levels.device)


def _probs() -> Tensor:
    """r of every bin."""
    levels = (torch.arange(_PROTECTED_BIN) - MAX_SURPLUS).clamp_min(0).to(torch.uint8)
    return torch.cat([decode_inclusion_probs(levels, torch.float64), torch.ones(1, dtype=torch.float64)])
