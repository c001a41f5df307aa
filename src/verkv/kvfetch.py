"""Algorithm 2 as a function of planning logits, inclusion probabilities and a tolerance; it knows no cache.

The one place where a faster backend would be dispatched to. Everything here is blind to the draw: no function takes the
sample, so shrinkage, order and k* cannot depend on it (Theorem 2).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from verkv.checks import check_count
from verkv.estimators.certificate import check_delta
from verkv.estimators.fetching import check_epsilon, fetch_plan
from verkv.estimators.shrinkage import binary_shrinkage, optimal_shrinkage

SHRINKAGE_RULES = {"binary": binary_shrinkage, "optimal": optimal_shrinkage}

# Query rows are planned and attended to in chunks of at most this many (row, token) pairs: 64 MB per temporary. Only
# the log-weights of the resident rows are kept for all query rows of a pass.
MAX_PLANNED_PAIRS = 2**24


@dataclass(frozen=True)
class FetchConfig:
    """How a sealed layer verifies and fetches.

    Parameters
    ----------
    epsilon : float > 0
        Tolerance of the relative error of the softmax denominator.
    delta : float in (0, 1)
        Probability with which the tolerance may be missed.
    shortlist : int >= 0
        Tokens per KV head and forward pass whose keys are read and scored exactly before planning.
    shrinkage : {"binary", "optimal"}
        Appendix A.2, as deployed in the paper, or Definition 2.
    paper : bool
        Plan as Appendix A.1: with exact weights for all resident tokens and a shortlist of non-resident ones. The plan
        then depends on the draw, which Theorem 2 forbids; for comparison only.

    Raises
    ------
    ValueError
        If a value is out of range.
    """

    epsilon: float = 0.05
    delta: float = 0.1
    shortlist: int = 128
    shrinkage: Literal["binary", "optimal"] = "binary"
    paper: bool = False

    def __post_init__(self):
        for name in ("epsilon", "delta"):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, float(value))
            except (TypeError, ValueError):
                raise ValueError(f"{name} must be a number, got {value!r}") from None
        check_epsilon(self.epsilon)
        check_delta(self.delta)
        check_count("shortlist", self.shortlist)
        if not isinstance(self.shrinkage, str) or self.shrinkage not in SHRINKAGE_RULES:
            raise ValueError(f"shrinkage must be one of {sorted(SHRINKAGE_RULES)}, got {self.shrinkage!r}")


@dataclass(frozen=True)
class Decision:
    """What KVFetch decided for R query rows of N KV heads.

    Attributes
    ----------
    shrinkage : Tensor, shape (N, R, T)
        lambda of every token; 1 outside the residual set.
    promoted : Tensor, shape (N, R, T), bool
        Each row's own promoted tokens, before any union.
    n_promoted : Tensor, shape (N, R), int64
    error_bound, planned_bound : Tensor, shape (N, R)
        The certificate before and after promoting.
    """

    shrinkage: Tensor
    promoted: Tensor
    n_promoted: Tensor
    error_bound: Tensor
    planned_bound: Tensor


def decide(
    planning_logits: Tensor, tail_lse: Tensor, inclusion_probs: Tensor, residual: Tensor, config: FetchConfig
) -> Decision:
    """Shrink, certify and choose what to fetch: Algorithm 2 of [1]_, lines 2-10.

    Parameters
    ----------
    planning_logits : Tensor, shape (N, R, T), float32
        Scaled logits to plan with: exact where a rule blind to the draw made them exact, a sketch's elsewhere; -inf at
        positions that are not tokens.
    tail_lse : Tensor, shape (N, R), float32
        log-sum-exp of the logits of tokens that are always exact and lie outside ``planning_logits``; -inf if none.
    inclusion_probs : Tensor, shape (N, T), float32
    residual : Tensor, shape (N, T), bool
        Tokens with 0 < r < 1.
    config : FetchConfig

    Returns
    -------
    Decision

    References
    ----------
    .. [1] Jha et al., "Verify Before You Fetch", arXiv:2611.11319v1.
    """
    # One common scale per row, from planning logits only: like them it is blind to the draw (up to float rounding).
    peak = torch.maximum(planning_logits.amax(-1), tail_lse)
    peak = torch.where(torch.isfinite(peak), peak, 0.0)
    weights = (planning_logits - peak[..., None]).exp()
    denominator = weights.sum(-1) + (tail_lse - peak).exp()

    r, residual = inclusion_probs[:, None, :], residual[:, None, :].expand_as(weights)
    shrinkage = SHRINKAGE_RULES[config.shrinkage](weights, r, residual)
    plan = fetch_plan(weights, r, shrinkage, residual, denominator, config.epsilon, config.delta)
    return Decision(shrinkage, plan.promoted, plan.n_promoted, plan.error_bound, plan.planned_bound)


def row_chunks(n_units: int, n_rows: int, n_tokens: int) -> list[slice]:
    """Slices of the query rows, each small enough to plan at once."""
    step = max(1, MAX_PLANNED_PAIRS // max(1, n_units * n_tokens))
    return [slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step)]
