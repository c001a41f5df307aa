"""Algorithm 2 as a function of planning logits, inclusion probabilities and a tolerance; it knows no cache.

By tensor operations, on any device: what `compiled_step` and `device_step` do for whole passes, where they can, follows
this. Everything here is blind to the draw: no function takes the sample, so shrinkage, order and k* cannot depend on it
(Theorem 2).
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from verkv.checks import check_count
from verkv.estimators.certificate import check_delta, check_upper_share
from verkv.estimators.compiled_plan import compiled_plan, compiles
from verkv.estimators.distances import value_distances
from verkv.estimators.fetching import check_epsilon, fetch_plan
from verkv.estimators.linear_plan import linear_plan
from verkv.estimators.output_bound import output_fetch_plan
from verkv.estimators.shrinkage import binary_shrinkage, optimal_shrinkage

SHRINKAGE_RULES = {"binary": binary_shrinkage, "optimal": optimal_shrinkage}
TARGETS = ("denominator", "output")

# Query rows are planned and attended to in chunks of at most this many (row, token) pairs: 64 MB per temporary. Only
# the log-weights of the resident rows are kept for all query rows of a pass.
MAX_PLANNED_PAIRS = 2**24

# On a CPU, sorting shorter rows is faster than the many small steps of the linear plan.
LEAST_FOR_LINEAR = 2048


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
    key_rounds : int >= 0
        How often promoted tokens' keys are read and the plan is made again with their exact weights, before values are
        read for what is still promoted.
    target : {"denominator", "output"}
        What is bounded: the denominator's relative error, or the output's error in units of a scale that the values
        known exactly give (needs norms of all values).
    max_read : float in (0, 1]
        Share of a KV head's context above which a plan is not followed: everything is read and the step is exact.
    upper_share : float in (0, 1), optional
        Part of ``delta`` for denominators estimated too large, where the two sides are to be bounded apart; None is
        Eq. (7). Without effect with ``target="output"``, whose error has no sides.

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
    key_rounds: int = 0
    max_read: float = 1.0
    target: Literal["denominator", "output"] = "denominator"
    upper_share: float | None = None

    def __post_init__(self):
        for name in ("epsilon", "delta", "max_read"):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, float(value))
            except (TypeError, ValueError):
                raise ValueError(f"{name} must be a number, got {value!r}") from None
        check_epsilon(self.epsilon)
        check_delta(self.delta)
        check_upper_share(self.upper_share)
        if not 0.0 < self.max_read <= 1.0:
            raise ValueError(f"max_read must be in (0, 1], got {self.max_read}: it is a share of the context")
        check_count("shortlist", self.shortlist)
        check_count("key_rounds", self.key_rounds)
        if self.target not in TARGETS:
            raise ValueError(f"target must be 'denominator' or 'output', got {self.target!r}")
        if self.paper and self.target == "output":
            raise ValueError("target must be 'denominator' with paper=True: the paper bounds nothing else")
        if self.paper and self.key_rounds:
            raise ValueError("key_rounds must be 0 with paper=True: the paper plans once")
        if not isinstance(self.shrinkage, str) or self.shrinkage not in SHRINKAGE_RULES:
            raise ValueError(f"shrinkage must be one of {list(SHRINKAGE_RULES)}, got {self.shrinkage!r}")


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
        The certificate before and after promoting: relative, of the denominator, or with ``target="output"`` of the
        output and absolute.
    """

    shrinkage: Tensor
    promoted: Tensor | None
    n_promoted: Tensor
    error_bound: Tensor
    planned_bound: Tensor

    def at(self, positions: Tensor) -> "Decision":
        """Shrinkage at positions (N, S) only, (N, R, S), and no ``promoted``: what must be kept of a decision."""
        positions = positions[:, None].expand(-1, self.shrinkage.shape[1], -1)
        return dataclasses.replace(self, shrinkage=self.shrinkage.gather(-1, positions), promoted=None)


@dataclass(frozen=True)
class OutputContext:
    """What a bound of the output needs besides weights, for N KV heads and R query rows.

    Attributes
    ----------
    norms : Tensor, shape (N, T)
        At least ||v_i - c||.
    centre : Tensor, shape (N, dv)
    certain : Tensor, shape (N, T), bool
        Tokens with r = 1, whose values are resident.
    certain_values : Tensor, shape (N, S, dv)
        Their values minus the centre, padded; 0 where there is none.
    certain_positions : Tensor, shape (N, S), int64
    tail_offset : Tensor, shape (N, R, dv)
        Attention over the tokens after the context alone, minus the centre; 0 if there are none. None while the rows
        are not known yet.
    """

    norms: Tensor
    centre: Tensor
    certain: Tensor
    certain_values: Tensor
    certain_positions: Tensor
    tail_offset: Tensor | None = None


def decide(
    planning_logits: Tensor,
    tail_lse: Tensor,
    inclusion_probs: Tensor,
    residual: Tensor,
    config: FetchConfig,
    epsilon: float | Tensor | None = None,
    unknown: Tensor | None = None,
    logit_variance: Tensor | None = None,
    output: OutputContext | None = None,
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
    epsilon : float or Tensor, shape (N, R), optional
        Tolerance of each row, instead of the config's.
    unknown : Tensor, shape (N, T), bool, optional
        Residual tokens whose logit is a sketch's.
    logit_variance : Tensor, shape (N, R), float32, optional
        Variance s of the sketch's logit error, taken as Gaussian. Unknown tokens then enter the denominator with
        E[w] = w^ exp(s / 2), and bias, variance, maximum and order with E[w^2]^(1/2) = w^ exp(s).
    output : OutputContext, optional
        Bound and plan the output's error instead of the denominator's.

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
    tail_weight = (tail_lse - peak).exp()
    denominator = weights.sum(-1) + tail_weight
    exact_weights = weights
    if logit_variance is not None:
        unknown_sum = (weights @ unknown[..., None].to(weights.dtype))[..., 0]
        denominator = denominator + unknown_sum * (logit_variance / 2).expm1()
        weights = weights * torch.where(unknown[:, None], logit_variance.exp()[..., None], 1.0)
    epsilon = config.epsilon if epsilon is None else epsilon
    if output is not None:
        return _decide_output(
            weights, exact_weights, tail_weight, denominator, inclusion_probs, residual, config, epsilon, output
        )
    r, residual = inclusion_probs[:, None, :], residual[:, None, :]  # not expanded: the query heads share what they can
    is_compiled = weights.is_cpu and compiles()
    if weights.is_cpu and not is_compiled and weights.shape[-1] < LEAST_FOR_LINEAR:
        r, residual = r.expand_as(weights), residual.expand_as(weights)
        shrinkage = SHRINKAGE_RULES[config.shrinkage](weights, r, residual)
        plan = fetch_plan(weights, r, shrinkage, residual, denominator, epsilon, config.delta, config.upper_share)
    else:
        make_plan = compiled_plan if is_compiled else linear_plan
        shrinkage = None if config.shrinkage == "binary" else optimal_shrinkage(weights, r, residual)
        plan = make_plan(weights, r, residual, denominator, epsilon, config.delta, shrinkage, config.upper_share)
        shrinkage = plan.shrinkage
    return Decision(shrinkage, plan.promoted, plan.n_promoted, plan.error_bound, plan.planned_bound)


def _decide_output(
    weights: Tensor,
    exact_weights: Tensor,
    tail_weight: Tensor,
    denominator: Tensor,
    inclusion_probs: Tensor,
    residual: Tensor,
    config: FetchConfig,
    epsilon: float | Tensor,
    output: OutputContext,
) -> Decision:
    """The plan of ``docs/output_bound.md``: distances from the certain values and the norms, none from the draw."""
    positions = output.certain_positions[:, None].expand(-1, weights.shape[1], -1)
    known_sum = (
        exact_weights.gather(-1, positions) @ output.certain_values + tail_weight[..., None] * output.tail_offset
    )
    distances = value_distances(
        output.norms[:, None], weights, denominator, known=output.certain[:, None], known_sum=known_sum
    )
    scale = (output.centre[:, None] + known_sum / denominator[..., None]).norm(dim=-1)
    r, residual = (t[:, None].expand_as(weights) for t in (inclusion_probs, residual))
    shrinkage = SHRINKAGE_RULES[config.shrinkage](weights * distances, r, residual)
    plan = output_fetch_plan(
        weights, r, shrinkage, residual, denominator, distances, epsilon, scale, config.delta, form="chernoff"
    )
    return Decision(shrinkage, plan.promoted, plan.n_promoted, plan.error_bound, plan.planned_bound)


def row_chunks(n_units: int, n_rows: int, n_tokens: int) -> list[slice]:
    """Slices of the query rows, each small enough to plan at once."""
    step = max(1, MAX_PLANNED_PAIRS // max(1, n_units * n_tokens))
    return [slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step)]
