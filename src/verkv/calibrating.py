"""True errors of a sealed layer for queries of its own prompt, by nominal tolerance: what calibration is made of."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.context import SealedContext
from verkv.planning import Planner, QueryRows
from verkv.tiers import LEVEL_MASK


@dataclass(frozen=True)
class CalibrationErrors:
    """Relative errors of every calibration query at one nominal tolerance, (C, M, Hq) each.

    Attributes
    ----------
    denominator : Tensor
        |D^ - D| / D.
    output : Tensor
        ||o^ - o|| / ||o||.
    """

    denominator: Tensor
    output: Tensor


class LayerCalibration:
    """Plays decode steps of the past on a sealed layer.

    A query of the prompt is answered as if the context ended ``n_local`` tokens before it: these are exact, as the
    local window and the tail are for a later query, and what comes after it is hidden. The plan, its key rounds and
    the draw are those of decoding; the union is over the query heads of one position.

    Parameters
    ----------
    context : SealedContext
        With a host tier.
    queries : Tensor, shape (C, Hq, M, d), float32
        Times the model's scaling, as attention sees them.
    positions : Tensor, shape (M,), int64
        Of the queries among the context's tokens.
    n_local : int
        Tokens up to and including the query's own that are exact.
    """

    def __init__(self, context: SealedContext, queries: Tensor, positions: Tensor, n_local: int):
        self.context, self.n_positions = context, len(positions)
        self.n_repeats = self.n_positions
        self.keys = context.host.keys.to(context.device).flatten(0, 1)  # (N, T, d)
        self.values = context.host.values.to(context.device).flatten(0, 1)
        n_heads = queries.shape[1]
        self.group = n_heads // context.n_kv_heads
        # One virtual KV head for each position: (C, Hkv, M, G, d) -> (N * M, G, d).
        split = queries.float().unflatten(1, (context.n_kv_heads, self.group)).transpose(2, 3)
        self.rows = split.reshape(-1, self.group, queries.shape[-1])
        token = torch.arange(context.n_tokens, device=context.device)
        padding = context.n_padding.repeat_interleave(context.n_kv_heads)[:, None, None]
        after = token > positions[:, None]  # (M, T)
        local = (token > positions[:, None] - n_local) & ~after
        is_token = (token >= padding).expand(-1, self.n_positions, -1)  # (N, M, T)
        self.hidden = (~is_token | after | local).flatten(0, 1)[:, None]  # (N * M, 1, T)
        self.local = (is_token & local).flatten(0, 1)[:, None]
        self.logits = self._exact_logits()
        self.planner, self.codes = self._planner(), self._repeat(context.codes)

    def _repeat(self, tensor: Tensor) -> Tensor:
        return tensor.repeat_interleave(self.n_repeats, 0)

    def _exact_logits(self) -> Tensor:
        rows = self.rows.unflatten(0, (-1, self.n_positions)).flatten(1, 2)  # (N, M * G, d)
        return (rows @ self.keys.float().mT).unflatten(1, (self.n_positions, self.group)).flatten(0, 1)

    def _planner(self) -> Planner:
        context = self.context
        index, is_row = context.rows.padded_index()
        error = context.sketch_error and context.sketch_error.flat().repeat(self.n_repeats)
        return Planner(
            self._repeat(context.codes),
            self._repeat(context.rows.keys[index].float()),
            self._repeat(is_row),
            lambda units, positions: self.keys[units // self.n_repeats, positions],
            context.fetch,
            context.sketch.is_oracle,
            error,
            scaling=1.0,
        )

    def errors(self, tolerance: float) -> CalibrationErrors:
        """What every query's errors would have been at a nominal tolerance."""
        tail_lse = self.logits.masked_fill(~self.local, -torch.inf).logsumexp(-1)
        plan = self.planner.run([QueryRows(self.rows, self._score, tail_lse, tolerance, self.hidden)])
        decision = plan.decisions[0]
        lse = self.logits.masked_fill(self.hidden & ~self.local, -torch.inf).logsumexp(-1, keepdim=True)
        weights = (self.logits - lse).exp().masked_fill(self.hidden & ~self.local, 0.0)  # w / D
        factor = self._factors(plan.promoted, decision.shrinkage)
        return self._relative(weights, factor)

    def _score(self) -> Tensor:
        per_head = self.rows.unflatten(0, (self.context.n_contexts, self.context.n_kv_heads, self.n_positions))
        logits = self.context.sketch.logits(per_head.flatten(2, 3))  # (C, Hkv, M * G, T)
        return logits.unflatten(2, (self.n_positions, self.group)).flatten(0, 2)

    def _factors(self, promoted: Tensor, shrinkage: Tensor) -> Tensor:
        """The factor of every token's weight in the estimates, (N * M, G, T)."""
        planner = self.planner
        probs = planner.inclusion_probs.gather(1, planner.slot_positions)[:, None]
        sampled = torch.where(planner.is_row[:, None], shrinkage / probs, 0.0)
        index = planner.slot_positions[:, None].expand_as(sampled)
        # Slots that are no row add 0 to token 0; every row has its own place.
        factor = torch.zeros_like(self.logits).scatter_add(-1, index, sampled)
        is_exact = promoted | ((self.codes & LEVEL_MASK) == 0)
        return factor.masked_fill(is_exact[:, None] | self.local, 1.0)

    def _relative(self, weights: Tensor, factor: Tensor) -> CalibrationErrors:
        estimate = (factor * weights).sum(-1)  # D^ / D
        shape = (-1, self.n_positions * self.group, self.context.n_tokens)
        exact, sampled = ((w.reshape(shape) @ self.values.float()) for w in (weights, factor * weights))
        sampled = sampled / estimate.view(len(sampled), -1, 1)
        norm = exact.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        by_query = lambda t: (  # noqa: E731  (N, M * G) -> (C, M, Hq)
            t.view(self.context.n_contexts, self.context.n_kv_heads, self.n_positions, self.group)
            .transpose(1, 2)
            .flatten(2)
        )
        return CalibrationErrors(by_query((estimate - 1.0).abs()), by_query((sampled - exact).norm(dim=-1) / norm))
