"""One layer's sealed context: what is kept where, and attention over it with or without KVFetch."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verkv import compiled_step, device_step, segments, streaming
from verkv.attention import allowed_tokens, weighted_attention
from verkv.compiled_attention import attend_in_place, reads_in_place
from verkv.estimators.sampling import LEVELS_PER_OCTAVE
from verkv.estimators.thinning import Thinning
from verkv.kvfetch import FetchConfig, row_chunks
from verkv.planning import KeyPool, Planner, QueryRows
from verkv.sketches import Sketch
from verkv.sketches.fit import FittedSketch, build_sketch
from verkv.sketches.segmented import SegmentedSketch
from verkv.stats import FetchStats, LayerRecord
from verkv.tiers import LEVEL_MASK, HostTier, ResidentRows, Segment, host_parts, pad_rows, take_rows
from verkv.values import ValueNorms

LOG_PER_LEVEL = math.log(2.0) / LEVELS_PER_OCTAVE  # -log r of one level


@dataclass(frozen=True)
class SealPlan:
    """Everything one layer needs to be sealed, decided before any layer is.

    Attributes
    ----------
    codes : Tensor, shape (C, Hkv, T), uint8
        Resident bit and level of every token; 0 where the token is absent (padding, or evicted).
    n_padding : Tensor, shape (C,), int64
        Left padding of each context.
    fetch : FetchConfig or None
        None: attention from the resident rows alone.
    sketch : Sketch or None
        Recipe of the sketch; needed with ``fetch``.
    fitted : FittedSketch or None
        What came of the recipe, where it was needed before sealing.
    tolerances : Tensor, shape (C, Hq), optional
        Calibrated tolerance of each query head, instead of ``fetch.epsilon``.
    keep_host : bool
        Keep the full context on the host. Always with ``fetch``.
    audit : bool
        Compare every decision with exact attention; needs the host.
    on_violation : {"exact", "warn", "raise"} or None
        What an audited step does when the true error of ``violation_target`` exceeds ``fetch.epsilon``: give the exact
        output, warn, raise :class:`ToleranceViolation`, or only record it.
    violation_target : {"denominator", "output"}
    beams : int
        Batch rows that share one context: rows c * beams .. (c + 1) * beams - 1 belong to context c.
    is_token : Tensor, shape (C, T), bool, optional
        Of a later segment: False at tokens that the attention mask hides, whose codes are 0.
    surplus : Tensor, shape (C, Hkv, T), uint8, optional
        Of :func:`~verkv.estimators.thinning.surplus_levels`, where the sample may be thinned later.
    thinning : Thinning, optional
        Of a later segment: what becomes of the earlier ones' sample.
    host : object, optional
        A host tier that holds the tokens already, coded: rows on the device are then taken from it, too.
    """

    codes: Tensor
    n_padding: Tensor
    fetch: FetchConfig | None = None
    sketch: Sketch | None = None
    fitted: FittedSketch | None = None
    tolerances: Tensor | None = None
    keep_host: bool = True
    audit: bool = False
    on_violation: str | None = None
    violation_target: str = "denominator"
    beams: int = 1
    is_token: Tensor | None = None
    surplus: Tensor | None = None
    thinning: Thinning | None = None
    host: object = None

    def host_tier(self, keys: Tensor, values: Tensor):
        """The host's copy of the tokens that are sealed."""
        return self.host if self.host is not None else HostTier.copy_from(keys, values)

    def states(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (C, Hkv, T, d) as they will be read: restored ones, where the host's are coded."""
        if self.host is None:
            return keys, values
        return self.host.keys.to(keys.device), self.host.values.to(values.device)


class ToleranceViolation(RuntimeError):
    """An audited step's true error exceeds the tolerance, and ``on_violation="raise"``."""


class SealedContext:
    """A context split over device and host, and the attention of later queries over it.

    It grows by :meth:`append`. Its tensors are never written into, so that a shallow copy is a branch: growing or
    shrinking one leaves the other as it is.
    """

    @torch.no_grad()  # rows and host copy of a prefill with gradients would hold its graph
    def __init__(self, keys: Tensor, values: Tensor, plan: SealPlan, layer_idx: int, stats: FetchStats):
        assert plan.codes.shape == keys.shape[:3], f"codes {tuple(plan.codes.shape)} for keys {tuple(keys.shape)}"
        self.layer_idx, self.stats = layer_idx, stats
        self.fetch, self.audit, self.beams = plan.fetch, plan.audit, plan.beams
        self.on_violation, self.violation_target = plan.on_violation, plan.violation_target
        self.n_contexts, self.n_kv_heads, self.n_tokens, _ = keys.shape
        self.device, self.dtype = keys.device, keys.dtype
        self.full_bytes = keys.nbytes + values.nbytes
        self.key_dim, self.value_dim = keys.shape[-1], values.shape[-1]
        self.n_padding = plan.n_padding.to(self.device)

        keys, values = plan.states(keys, values)
        codes = plan.codes.to(self.device)
        surplus = None if plan.surplus is None else plan.surplus.to(self.device)
        self.rows = ResidentRows.gather(keys, values, codes, surplus)
        self.host = plan.host_tier(keys, values) if plan.keep_host or plan.fetch or plan.audit else None
        self.codes = codes.flatten(0, 1) if plan.fetch else None
        self.value_norms = None
        if plan.fetch and plan.fetch.target == "output":
            is_token = torch.arange(self.n_tokens, device=self.device) >= self.n_padding[:, None]
            self.value_norms = ValueNorms.measure(values, is_token)
        self.tolerances = None if plan.tolerances is None else plan.tolerances.to(self.device)
        self.sketch = self.sketch_error = None
        if plan.fetch and plan.fitted:
            self.sketch, self.sketch_error = plan.fitted.sketch, plan.fitted.error
        elif plan.fetch:
            is_oracle = plan.sketch.is_oracle
            self.sketch = build_sketch(plan.sketch, self.host.keys if is_oracle else keys, plan.n_padding)
        self.segments = (Segment(self.n_tokens, counts=segments.counted(codes, surplus)),)
        self.hidden = None  # (2, M), contexts and positions of hidden tokens that are no left padding
        self.is_streaming = False  # attention is exact, with keys and values from the host block by block

    # --- growing ----------------------------------------------------------------------------------------------------

    def append(self, keys: Tensor, values: Tensor, plan: SealPlan) -> None:
        """Seal a further segment; see :func:`verkv.segments.append`."""
        segments.append(self, keys, values, plan)

    def drop_last(self) -> tuple[Tensor, Tensor] | None:
        """Take the last segment out again; see :func:`verkv.segments.drop_last`."""
        return segments.drop_last(self)

    def is_token(self) -> Tensor:
        """(C, T), False at left padding and at hidden tokens."""
        seen = torch.arange(self.n_tokens, device=self.device) >= self.n_padding[:, None]
        if self.hidden is not None:
            seen[self.hidden[0], self.hidden[1]] = False
        return seen

    @property
    def level_counts(self) -> Tensor | None:
        """Tokens of all segments by their probabilities, (N, 256), where the sample may be thinned."""
        counts = [segment.counts for segment in self.segments]
        return None if counts[0] is None else sum(counts)

    @property
    def n_units(self) -> int:
        """KV heads of all contexts."""
        return self.n_contexts * self.n_kv_heads

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes by tier and part; the sum over the tensors this object holds."""
        seen: set[int] = set()  # segments share some tensors
        rows = {f"row_{name}": tensor for name, tensor in vars(self.rows).items() if tensor is not None}
        device = _sizes(rows, seen)
        uncharged = _sizes({"n_padding": self.n_padding}, seen)
        if self.codes is not None:
            device["token_codes"] = self.codes.nbytes
        for part in (self.value_norms, *self._sketches()):
            if part is not None:
                _add(device, _sizes(part.tensors(), seen))
                _add(uncharged, _sizes(part.uncharged_tensors(), seen))
        if self.sketch_error is not None:
            uncharged |= _sizes(self.sketch_error.tensors(), seen)
        uncharged |= device_step.device_bytes(self)
        others = {"tolerances": self.tolerances, "hidden_tokens": self.hidden}
        uncharged |= _sizes({name: tensor for name, tensor in others.items() if tensor is not None}, seen)
        if len(self.segments) > 1:
            uncharged |= _sizes({"segment_rows": [segment.n_rows for segment in self.segments[1:]]}, seen)
        host = {}
        for _, part in host_parts(self.host) if self.host is not None else []:
            _add(host, {"host_keys": part.nbytes("k"), "host_values": part.nbytes("v")})
        for segment in self.segments:
            if segment.counts is not None:
                _add(host, {"level_counts": segment.counts.nbytes})
        return {"device": device, "device_uncharged": uncharged, "host": host}

    def select(self, indices: Tensor) -> "SealedContext":
        """The contexts of batch rows ``indices`` (copied), one per row."""
        contexts = indices.to(self.device) // self.beams
        chosen = object.__new__(SealedContext)
        chosen.__dict__.update(self.__dict__)
        chosen.beams, chosen.n_contexts = 1, len(contexts)
        chosen.n_padding = self.n_padding[contexts]
        chosen.full_bytes = self.full_bytes // self.n_contexts * len(contexts)
        chosen.rows = self.rows.select(contexts, self.n_kv_heads)
        if self.codes is not None:
            chosen.codes = self.codes.unflatten(0, (-1, self.n_kv_heads))[contexts].flatten(0, 1)
        if self.host is not None:
            chosen.host = self.host.select(contexts)
        if self.sketch is not None:
            is_oracle = self.sketch.is_oracle
            chosen.sketch = segments.oracle(self.sketch, chosen.host) if is_oracle else self.sketch.select(contexts)
        units = torch.arange(self.n_units, device=self.device).view(-1, self.n_kv_heads)[contexts].flatten()
        chosen.segments = tuple(segment.select(units) for segment in self.segments)
        if self.hidden is not None:
            chosen.hidden = segments.hidden_positions(self.is_token()[contexts], chosen.n_padding)
        if self.value_norms is not None:
            chosen.value_norms = self.value_norms.select(units)
        if self.sketch_error is not None:
            chosen.sketch_error = self.sketch_error.select(contexts)
        if self.tolerances is not None:
            chosen.tolerances = self.tolerances[contexts]
        return chosen

    def _sketches(self) -> list:
        """The sketches of all segments."""
        if isinstance(self.sketch, SegmentedSketch):
            return list(self.sketch.parts)
        return [] if self.sketch is None else [self.sketch]

    # --- attention --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def attend(
        self, query: Tensor, tail_keys: Tensor, tail_values: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor:
        """Attention of new queries over the sealed context and the tail.

        Parameters
        ----------
        query : Tensor, shape (B, Hq, Tq, d)
            The last Tq of the tail's tokens.
        tail_keys, tail_values : Tensor, shape (B, Hkv, t, d)
            Tokens since sealing, always exact.
        mask : Tensor or None
            What transformers made: (B or 1, 1, Tq, T + t), bool or additive; or (B, T + t) padding; or None (causal).
        scaling : float
            Factor of <k, q>.

        Returns
        -------
        Tensor, shape (B, Hq, Tq, d), dtype of the query
        """
        rows = self._to_units(query)  # (N, beams, G * Tq, d), float32
        if self.is_streaming:
            return streaming.attend(self, rows, query, tail_keys, tail_values, mask, scaling)
        tail_k, tail_v = self._tail_to_units(tail_keys), self._tail_to_units(tail_values)  # (N, beams, t, d)
        tail_logits = rows @ tail_k.float().mT * scaling + self._tail_bias(mask, query, tail_keys.shape[2])
        chunks = row_chunks(self.n_units * self.beams, rows.shape[2], self.n_tokens)
        record, tail = self._new_record(query), (tail_logits, tail_v)

        step = device_step.step_of(self, rows.shape[1] * rows.shape[2])
        if step is None and compiled_step.serves(self):
            step = compiled_step
        if step is not None:
            output, lse = step.attend(self, rows, chunks, tail, scaling, record)
            return self._concluded(query, rows, chunks, tail, output, lse, scaling, record)
        index, is_row = self.rows.padded_index()
        resident_k = take_rows(self.rows.keys, index).float()
        if self.fetch is None:
            promotion = None
            log_weights = [self._log_inverse_probs(index, is_row)[:, None, None]] * len(chunks)
        else:
            promotion = self._plan(rows, chunks, resident_k, index, tail, is_row, scaling, record)
            log_weights = promotion.log_weights
        if reads_in_place(self.rows, self.host if promotion else None):
            attend_chunk = self._in_place(rows, tail, promotion, scaling)
        else:
            attend_chunk = self._by_torch(rows, resident_k, index, tail, promotion, scaling)
        outputs, lses = zip(*map(attend_chunk, chunks, log_weights), strict=True)
        return self._concluded(query, rows, chunks, tail, torch.cat(outputs, 2), torch.cat(lses, 2), scaling, record)

    def _concluded(
        self,
        query: Tensor,
        rows: Tensor,
        chunks: list[slice],
        tail: tuple[Tensor, Tensor],
        output: Tensor,
        lse: Tensor,
        scaling: float,
        record: LayerRecord,
    ) -> Tensor:
        """Audit a pass, if that is wanted, and add it to the statistics; its output as ``attend`` returns it."""
        if self.audit:
            exact = self._audit(rows, chunks, *tail, output, lse, scaling, record)
            output = self._answer_violations(output, exact, record)
        self.stats.record(record)
        return self._from_units(output, query).to(query.dtype)

    def _by_torch(
        self,
        rows: Tensor,
        resident_k: Tensor,
        index: Tensor,
        tail: tuple[Tensor, Tensor],
        promotion: "_Promotion | None",
        scaling: float,
    ) -> Callable[[slice, Tensor], tuple[Tensor, Tensor]]:
        """Attention of some rows by torch; what is fetched is copied to the device, once for all of them."""
        resident_v = take_rows(self.rows.values, index)[:, None]
        resident_k = resident_k[:, None]
        if promotion is not None:
            fetched_k, is_fetched = pad_rows(self._fetched_keys(promotion), promotion.units, self.n_units)
            values = self.host.read_values(promotion.units, promotion.positions, self.device)
            fetched_v = pad_rows(values, promotion.units, self.n_units)[0][:, None]
            fetched_k, absent = fetched_k.float()[:, None], torch.where(is_fetched, 0.0, -torch.inf)[:, None, None]

        def attend_chunk(chunk: slice, log_weights: Tensor) -> tuple[Tensor, Tensor]:
            part = rows[:, :, chunk]
            parts = [(part @ resident_k.mT * scaling + log_weights, resident_v), (tail[0][:, :, chunk], tail[1])]
            if promotion is not None:
                parts.append((part @ fetched_k.mT * scaling + absent, fetched_v))
            return weighted_attention(parts)

        return attend_chunk

    def _in_place(
        self, rows: Tensor, tail: tuple[Tensor, Tensor], promotion: "_Promotion | None", scaling: float
    ) -> Callable[[slice, Tensor], tuple[Tensor, Tensor]]:
        """Attention of some rows by compiled loops, which read what is fetched where it is."""
        host, fetched = None, None
        if promotion is not None:
            host, fetched = (self.host.keys, self.host.values), torch.stack([promotion.units, promotion.positions], 1)

        def attend_chunk(chunk: slice, log_weights: Tensor) -> tuple[Tensor, Tensor]:
            return attend_in_place(
                rows[:, :, chunk], self.rows, log_weights, host, fetched, (tail[0][:, :, chunk], tail[1]), scaling
            )

        return attend_chunk

    def _planner(self, resident_k: Tensor, is_row: Tensor, scaling: float) -> Planner:
        """Of this context; resident keys (N, S, d) in float32, and which of them are rows."""
        read_keys = lambda units, positions: self.host.read_keys(units, positions, self.device)  # noqa: E731
        error = self.sketch_error and self.sketch_error.flat()
        return Planner(self.codes, resident_k, is_row, read_keys, self.fetch, self.sketch.is_oracle, error, scaling)

    def _plan(
        self,
        rows: Tensor,
        chunks: list[slice],
        resident_k: Tensor,
        index: Tensor,
        tail: tuple[Tensor, Tensor],
        is_row: Tensor,
        scaling: float,
        record: LayerRecord,
    ) -> "_Promotion":
        """Algorithm 2 for all query rows; the union over a KV head's rows is read and exact for each of them."""
        planner, score = self._planner(resident_k, is_row, scaling), self._scorer(rows, chunks)
        norms, output = self.value_norms, None
        if norms is not None:
            output = planner.output_context(norms.decode(), norms.centre, take_rows(self.rows.values, index))
        plan = planner.run(
            [
                QueryRows(
                    rows[:, :, chunk].flatten(1, 2),
                    functools.partial(score, chunk),
                    torch.logsumexp(tail[0][:, :, chunk], dim=-1).flatten(1),
                    self._tolerances(rows.shape[2], chunk),
                    output=output and dataclasses.replace(output, tail_offset=self._tail_offset(tail, chunk)),
                )
                for chunk in chunks
            ]
        )
        slots = planner.slot_positions
        is_exact = (plan.promoted | ~planner.residual).gather(1, slots)[:, None, None]  # (N, 1, 1, S)
        log_probs = planner.inclusion_probs.gather(1, slots).log()[:, None, None]
        absent = torch.where(is_row, 0.0, -torch.inf)[:, None, None]
        split = lambda tensor: tensor.unflatten(1, (self.beams, -1))  # noqa: E731
        log_weights = [
            torch.where(is_exact, 0.0, split(decision.shrinkage).log() - log_probs) + absent
            for decision in plan.decisions
        ]

        fetched = plan.promoted & ~planner.resident
        units, positions = fetched.nonzero(as_tuple=True)
        record.fetched, record.shortlisted, record.keys_first = len(units), plan.n_shortlisted, plan.n_keys_first
        n_held = int(fetched[plan.pool.units, plan.pool.positions].sum())  # their keys were read to plan
        record.bytes_read += (len(plan.pool.units) - n_held) * self.host.key_row_bytes
        record.bytes_read += len(units) * self.host.row_bytes
        record.exact_heads = int(plan.is_exact.sum())
        self._record_decisions(
            record,
            [split(fetching) for fetching in plan.fetching],
            [split(decision.n_promoted) for decision in plan.decisions],
            [split(decision.error_bound) for decision in plan.decisions],
            fetched.any(-1),
        )
        if self.audit and self.value_norms is not None:  # relative to the true output's norm once that is known
            record.output_bound = torch.cat([split(decision.planned_bound) for decision in plan.decisions], 2)
        return _Promotion(log_weights, units, positions, plan.pool)

    def _tail_offset(self, tail: tuple[Tensor, Tensor], chunk: slice) -> Tensor:
        """Attention over the tail alone, minus the centre, (N, R, dv); 0 where there is no tail."""
        tail_output, tail_lse = weighted_attention([(tail[0][:, :, chunk], tail[1])])  # (N, beams, R, dv)
        has_tail = torch.isfinite(tail_lse)[..., None]
        return torch.where(has_tail, tail_output - self.value_norms.centre[:, None, None], 0.0).flatten(1, 2)

    def _fetched_keys(self, promotion: "_Promotion") -> Tensor:
        """Keys (M, d) of fetched tokens: those of the pool, and the others from the host."""
        pool, units, positions = promotion.pool, promotion.units, promotion.positions
        is_held, place = pool.find(units, positions)
        keys = pool.keys.new_empty(len(units), self.key_dim)
        keys[is_held] = pool.keys[place]
        missing = ~is_held
        keys[missing] = self.host.read_keys(units[missing], positions[missing], self.device).to(keys.dtype)
        return keys

    def _tolerances(self, n_rows: int, chunk: slice) -> float | Tensor:
        """Of a chunk's rows, (N, R): the config's, or a calibrated one for each query head."""
        if self.tolerances is None:
            return self.fetch.epsilon
        by_head = self.tolerances.view(self.n_units, 1, -1, 1)  # (C, Hq) -> (N, 1, G, 1)
        by_row = by_head.expand(-1, self.beams, -1, n_rows // by_head.shape[2]).flatten(2)
        return by_row[:, :, chunk].flatten(1)

    def _scorer(self, rows: Tensor, chunks: list[slice]) -> Callable[[slice], Tensor]:
        """Unscaled sketch logits (N, R, T) by chunk. A single chunk's are kept: shortlist and plans all need them."""

        def score(chunk: slice) -> Tensor:
            per_head = rows[:, :, chunk].flatten(1, 2).unflatten(0, (self.n_contexts, self.n_kv_heads))
            return self.sketch.logits(per_head).flatten(0, 1)

        return score if len(chunks) > 1 else _once(score, chunks[0])

    def _log_inverse_probs(self, index: Tensor, is_row: Tensor) -> Tensor:
        """Horvitz-Thompson log-weights -log r of the padded rows, (N, S), -inf where there is no row."""
        levels = (self.rows.codes[index] & LEVEL_MASK).float()
        return torch.where(is_row, levels * LOG_PER_LEVEL, -torch.inf)

    def _tail_bias(self, mask: Tensor | None, query: Tensor, n_tail: int) -> Tensor:
        """Additive mask of the tail for every row, (N, beams, G * Tq, t)."""
        batch, n_heads, n_queries, _ = query.shape
        causal = torch.ones(n_queries, n_tail, dtype=torch.bool, device=query.device).tril(n_tail - n_queries)
        is_short = self.is_streaming and mask is not None and mask.shape[-1] == n_tail  # see get_mask_sizes
        n_masked = 0 if is_short else self.n_tokens
        allowed = allowed_tokens(mask, n_masked + n_tail)
        if allowed is None:
            tail_allowed = causal
        else:
            if not is_short:
                self._check_context_mask(allowed[..., :n_masked], batch, n_queries)
            tail_allowed = allowed[..., n_masked:]
            if mask.dim() == 2:  # padding only: causality is ours
                tail_allowed = tail_allowed & causal
        bias = torch.where(tail_allowed, 0.0, -torch.inf).expand(batch, n_queries, n_tail)
        group = n_heads // self.n_kv_heads
        bias = bias.view(self.n_contexts, 1, self.beams, 1, n_queries, n_tail)
        bias = bias.expand(-1, self.n_kv_heads, -1, group, -1, -1)
        return bias.reshape(self.n_units, self.beams, group * n_queries, n_tail)

    def _check_context_mask(self, context_allowed: Tensor, batch: int, n_queries: int) -> None:
        """The sealed tokens are seen by every query, but for the left padding that the prefill's mask hid."""
        is_token = self.is_token().repeat_interleave(self.beams, 0)
        shape = (batch, n_queries, self.n_tokens)
        if not torch.equal(context_allowed.expand(shape), is_token[:, None].expand(shape)):
            raise NotImplementedError(
                "attention_mask hides sealed context tokens, or shows padding, differently from the masks they were "
                "sealed with; only the prefill's left padding may be hidden, and what was hidden when it was sealed"
            )

    def _audit(
        self,
        rows: Tensor,
        chunks: list[slice],
        tail_logits: Tensor,
        tail_values: Tensor,
        output: Tensor,
        lse: Tensor,
        scaling: float,
        record: LayerRecord,
    ) -> Tensor:
        """Compare denominator and output of every decision with exact attention over the host's copy; returns it."""
        keys = self.host.keys.to(self.device).flatten(0, 1)[:, None]
        values = self.host.values.to(self.device).flatten(0, 1)[:, None]
        padding = ~self.is_token().repeat_interleave(self.n_kv_heads, 0)
        relative_errors, output_errors, norms, outputs = [], [], [], []
        for chunk in chunks:
            logits = (rows[:, :, chunk] @ keys.float().mT * scaling).masked_fill(padding[:, None, None], -torch.inf)
            exact, exact_lse = weighted_attention([(logits, values), (tail_logits[:, :, chunk], tail_values)])
            relative_errors.append((lse[:, :, chunk] - exact_lse).expm1().abs())
            norm = exact.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
            output_errors.append((output[:, :, chunk] - exact).norm(dim=-1) / norm)
            norms.append(norm)
            outputs.append(exact)
        record.relative_error = self._per_decision(torch.cat(relative_errors, 2), record)
        record.output_error = self._per_decision(torch.cat(output_errors, 2), record)
        if record.output_bound is not None:
            record.output_bound = self._per_decision(record.output_bound / torch.cat(norms, 2), record)
        return torch.cat(outputs, 2)

    def _answer_violations(self, output: Tensor, exact: Tensor, record: LayerRecord) -> Tensor:
        """The output to go on with, where ``on_violation`` says what to do about errors above the tolerance."""
        if self.on_violation is None or self.fetch is None:
            return output
        name = "relative_error" if self.violation_target == "denominator" else "output_error"
        violated = ~(getattr(record, name) <= self.fetch.epsilon)  # (B, Hq, Tq); a NaN keeps no tolerance
        record.violations = int(violated.sum())
        if not record.violations:
            return output
        message = (
            f"layer {self.layer_idx}: the true error of the {self.violation_target} exceeds epsilon="
            f"{self.fetch.epsilon:g} in {record.violations} of {violated.numel()} decisions"
        )
        if self.on_violation == "raise":
            raise ToleranceViolation(message)
        if self.on_violation == "warn":
            warnings.warn(message, stacklevel=2)
            return output
        split = (self.n_contexts, self.beams, self.n_kv_heads, -1, violated.shape[2])
        by_row = violated.to(self.device).view(split).transpose(1, 2).flatten(3).flatten(0, 1)  # (N, beams, G * Tq)
        return torch.where(by_row[..., None], exact, output)

    # --- statistics -------------------------------------------------------------------------------------------------

    def _new_record(self, query: Tensor) -> LayerRecord:
        batch, n_heads, n_queries, _ = query.shape
        zeros = torch.zeros(n_heads, dtype=torch.int64, device="cpu")
        return LayerRecord(
            layer_idx=self.layer_idx,
            n_queries=n_queries,
            decisions=torch.full((n_heads,), batch * n_queries, dtype=torch.int64, device="cpu"),
            fetching=zeros,
            kv_fetching=torch.zeros(self.n_kv_heads, dtype=torch.int64, device="cpu"),
            n_contexts=self.n_contexts,
            promoted=zeros.clone(),
            full_bytes=self.full_bytes,
        )

    def _record_decisions(
        self,
        record: LayerRecord,
        fetching: list[Tensor],
        n_promoted: list[Tensor],
        bounds: list[Tensor],
        unit_fetches: Tensor,
    ) -> None:
        n_heads = len(record.decisions)

        def per_head(rows: list[Tensor]) -> Tensor:  # (N, beams, G * Tq) summed to (Hq,)
            return self._spread(torch.cat(rows, 2), n_heads, record.n_queries).sum((0, 2)).cpu()

        record.fetching = per_head(fetching)
        record.promoted = per_head(n_promoted)
        record.kv_fetching = unit_fetches.unflatten(0, (-1, self.n_kv_heads)).sum(0).cpu()
        if self.stats.record_bounds:
            record.error_bound = self._per_decision(torch.cat(bounds, 2), record)

    def _per_decision(self, values: Tensor, record: LayerRecord) -> Tensor:
        """(N, beams, G * Tq) -> (B, Hq, Tq), on the CPU."""
        return self._spread(values, len(record.decisions), record.n_queries).cpu()

    # --- layouts ----------------------------------------------------------------------------------------------------

    def _to_units(self, query: Tensor) -> Tensor:
        """(B, Hq, Tq, d) -> (N, beams, G * Tq, d): all rows that share a KV head together."""
        batch, _, n_queries, head_dim = query.shape
        if batch != self.n_contexts * self.beams:
            raise ValueError(
                f"query has a batch of {batch}, but {self.n_contexts} contexts were sealed for {self.beams} row(s) each"
            )
        split = query.float().view(self.n_contexts, self.beams, self.n_kv_heads, -1, n_queries, head_dim)
        return split.transpose(1, 2).reshape(self.n_units, self.beams, -1, head_dim)

    def _tail_to_units(self, tail: Tensor) -> Tensor:
        """(B, Hkv, t, d) -> (N, beams, t, d)."""
        split = tail.unflatten(0, (self.n_contexts, self.beams))
        return split.transpose(1, 2).flatten(0, 1)

    def _from_units(self, output: Tensor, query: Tensor) -> Tensor:
        """(N, beams, G * Tq, d) -> (B, Hq, Tq, d)."""
        n_heads, n_queries = query.shape[1], query.shape[2]
        split = output.view(self.n_contexts, self.n_kv_heads, self.beams, -1, n_queries, output.shape[-1])
        return split.transpose(1, 2).reshape(-1, n_heads, n_queries, output.shape[-1])

    def _spread(self, values: Tensor, n_heads: int, n_queries: int) -> Tensor:
        """(N, beams, G * Tq) -> (B, Hq, Tq)."""
        split = values.reshape(self.n_contexts, self.n_kv_heads, self.beams, -1, n_queries)
        return split.transpose(1, 2).reshape(-1, n_heads, n_queries)


@dataclass(frozen=True)
class _Promotion:
    """Log-weights of the resident rows, (N, beams, rows, S) per chunk, what is fetched, and keys that are read."""

    log_weights: list[Tensor]
    units: Tensor
    positions: Tensor
    pool: KeyPool


def _sizes(tensors: dict, seen: set[int]) -> dict[str, int]:
    """Bytes by name, of tensors or lists of them, those counted before (by ``id``) left out."""
    sizes = {}
    for name, found in tensors.items():
        found = {id(t): t for t in (found if isinstance(found, list) else [found]) if id(t) not in seen}
        sizes[name] = sum(t.nbytes for t in found.values())
        seen.update(found)
    return sizes


def _add(total: dict[str, int], sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        total[name] = total.get(name, 0) + size


def _once(score: Callable[[slice], Tensor], chunk: slice) -> Callable[[slice], Tensor]:
    """The score of the only chunk, computed now."""
    logits = score(chunk)
    return lambda _: logits
