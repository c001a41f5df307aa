"""True errors of a sealed layer for decode steps with known queries, by nominal tolerance.

What calibration is made of, with queries of the prompt itself, and how adherence is measured on many steps at once.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from verkv.context import SealedContext
from verkv.kvfetch import OutputContext
from verkv.planning import Plan, Planner, QueryRows
from verkv.tiers import LEVEL_MASK


@dataclass(frozen=True)
class DecodeErrors:
    """Relative errors of every query at one nominal tolerance, (C, M, Hq) each.

    Attributes
    ----------
    denominator : Tensor
        |D^ - D| / D.
    output : Tensor
        ||o^ - o|| / ||o||.
    kv_read : Tensor, shape (C, M)
        Bytes read from the host over bytes of the context.
    exact_rate : float
        Share of (KV head, position) pairs for which everything is read.
    output_bound : Tensor, optional
        With ``target="output"``: what the plan promised of the output's error.
    """

    denominator: Tensor
    output: Tensor
    kv_read: Tensor
    exact_rate: float
    output_bound: Tensor | None = None


class DecodeReplay:
    """Plays decode steps on a sealed layer, all at once, each with a union and reads of its own.

    A query of the prompt is answered as if the context ended ``n_local`` tokens before it: these are exact, as the
    local window and the tail are for a later query, and what comes after it is hidden. A query after the context sees
    all of it, and the tail up to its own token. The plan, its key rounds and the draw are those of decoding; the union
    is over the query heads of one position.

    Parameters
    ----------
    context : SealedContext
        With a host tier.
    queries : Tensor, shape (C, Hq, M, d), float32
        Times the model's scaling, as attention sees them.
    positions : Tensor, shape (M,), int64
        Of the queries among the tokens of context and tail.
    n_local : int
        Tokens of the context up to and including the query's own that are exact.
    tail : (Tensor, Tensor), shapes (C, Hkv, t, d) and (C, Hkv, t, dv), optional
        Keys and values of the tokens after the context.
    """

    def __init__(
        self,
        context: SealedContext,
        queries: Tensor,
        positions: Tensor,
        n_local: int,
        tail: tuple[Tensor, Tensor] | None = None,
    ):
        self.context, self.n_positions, self.n_repeats = context, len(positions), len(positions)
        queries, positions = queries.to(context.device), positions.to(context.device)
        states = [t.to(context.device) for t in (context.host.keys, context.host.values)]
        if tail is not None:
            states = [torch.cat(pair, 2) for pair in zip(states, tail, strict=True)]
        self.keys, self.values = (t.flatten(0, 1) for t in states)  # (N, T + t, d)
        n_heads = queries.shape[1]
        self.group = n_heads // context.n_kv_heads
        # One virtual KV head for each position: (C, Hkv, M, G, d) -> (N * M, G, d).
        split = queries.float().unflatten(1, (context.n_kv_heads, self.group)).transpose(2, 3)
        self.rows = split.reshape(-1, self.group, queries.shape[-1])
        token = torch.arange(self.keys.shape[1], device=context.device)
        shown = torch.nn.functional.pad(context.is_token(), (0, len(token) - context.n_tokens), value=True)
        shown = shown.repeat_interleave(context.n_kv_heads, 0)[:, None]  # (N, 1, T + t)
        after = token > positions[:, None]  # (M, T + t)
        local = ((token >= context.n_tokens) | (token > positions[:, None] - n_local)) & ~after
        is_token = shown.expand(-1, self.n_positions, -1)  # (N, M, T + t)
        self.hidden = (~is_token | after | local).flatten(0, 1)[:, None]  # (N * M, 1, T + t): from the plan
        self.local = (is_token & local).flatten(0, 1)[:, None]
        self.logits = self._exact_logits()
        self.scores = self._score()
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

    def errors(self, tolerance: float | Tensor) -> DecodeErrors:
        """What every query's errors are at a nominal tolerance, or at one for each query head, (C, Hq)."""
        context = self.context
        if isinstance(tolerance, Tensor):
            tolerance = self._repeat(tolerance.view(-1, self.group))
        tail_logits = self.logits.masked_fill(~self.local, -torch.inf)
        hidden = self.hidden[..., : context.n_tokens]
        output = self._output_context(tail_logits) if context.fetch.target == "output" else None
        rows = QueryRows(self.rows, lambda: self.scores, tail_logits.logsumexp(-1), tolerance, hidden, output)
        plan = self.planner.run([rows])
        decision = plan.decisions[0]
        lse = self.logits.masked_fill(self.hidden & ~self.local, -torch.inf).logsumexp(-1, keepdim=True)
        weights = (self.logits - lse).exp().masked_fill(self.hidden & ~self.local, 0.0)  # w / D
        estimates = self._factors(plan.promoted, decision.shrinkage) * weights
        relative = estimates.sum(-1)  # D^ / D
        exact, estimated = self._outputs(weights), self._outputs(estimates) / relative[..., None]
        norm = exact.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        return DecodeErrors(
            self._by_query((relative - 1.0).abs()),
            self._by_query((estimated - exact).norm(dim=-1) / norm),
            self._kv_read(plan),
            float(plan.is_exact.float().mean()),
            None if output is None else self._by_query(decision.planned_bound / norm),
        )

    def _score(self) -> Tensor:
        per_head = self.rows.unflatten(0, (self.context.n_contexts, self.context.n_kv_heads, self.n_positions))
        logits = self.context.sketch.logits(per_head.flatten(2, 3))  # (C, Hkv, M * G, T)
        return logits.unflatten(2, (self.n_positions, self.group)).flatten(0, 2)

    def _output_context(self, tail_logits: Tensor) -> OutputContext:
        """As a decode step has it, of every virtual KV head."""
        norms = self.context.value_norms
        centre = self._repeat(norms.centre)
        index, _ = self.context.rows.padded_index()
        resident_v = self._repeat(self.context.rows.values[index])
        output = self.planner.output_context(self._repeat(norms.decode()), centre, resident_v)
        return dataclasses.replace(output, tail_offset=self._outputs(tail_logits.softmax(-1)) - centre[:, None])

    def _factors(self, promoted: Tensor, shrinkage: Tensor) -> Tensor:
        """The factor of every token's weight in the estimates, (N * M, G, T)."""
        planner = self.planner
        probs = planner.inclusion_probs.gather(1, planner.slot_positions)[:, None]
        sampled = torch.where(planner.is_row[:, None], shrinkage / probs, 0.0)
        index = planner.slot_positions[:, None].expand_as(sampled)
        # Slots that are no row add 0 to token 0; every row has its own place.
        factor = torch.zeros_like(self.logits).scatter_add(-1, index, sampled)
        is_exact = promoted | ((self.codes & LEVEL_MASK) == 0)
        factor[..., : self.context.n_tokens].masked_fill_(is_exact[:, None], 1.0)
        return factor.masked_fill(self.local, 1.0)

    def _kv_read(self, plan: Plan) -> Tensor:
        """Share of the context's bytes that every position reads, (C, M)."""
        host = self.context.host
        fetched = plan.promoted & ~self.planner.resident
        key_read = fetched.clone()
        key_read[plan.pool.units, plan.pool.positions] = True
        key_bytes = host.key_row_bytes
        read = key_read.sum(-1) * key_bytes + fetched.sum(-1) * (host.row_bytes - key_bytes)  # (N * M,)
        by_context = read.view(self.context.n_contexts, self.context.n_kv_heads, self.n_positions).sum(1)
        return by_context / (self.context.n_kv_heads * self.context.n_tokens * host.row_bytes)

    def _outputs(self, weights: Tensor) -> Tensor:
        """Weighted sums of values, (N * M, G, T + t) -> (N * M, G, dv)."""
        by_head = weights.unflatten(0, (-1, self.n_positions)).flatten(1, 2)  # (N, M * G, T + t)
        return (by_head @ self.values.float()).unflatten(1, (self.n_positions, self.group)).flatten(0, 1)

    def _by_query(self, values: Tensor) -> Tensor:
        """(N * M, G) -> (C, M, Hq)."""
        split = values.view(self.context.n_contexts, self.context.n_kv_heads, self.n_positions, self.group)
        return split.transpose(1, 2).flatten(2)
