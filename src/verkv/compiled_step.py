"""A pass over a sealed layer on a CPU by compiled loops, where numba is installed and they can serve it.

The same decisions as :mod:`planning` makes with tensor operations, of which a decode step of a small model has so many
that torch's own overhead is most of its time. What loops cannot serve, torch does, and nothing else changes: sums are
taken in float64 here, so a plan may have a few tokens fewer than torch's, which has to allow for rounding.
"""

import functools

import numpy
import torch
from torch import Tensor

from verkv import loops
from verkv.compiled_attention import as_array, attend_in_place, reads_in_place
from verkv.estimators.certificate import log_terms
from verkv.estimators.sampling import decode_inclusion_probs
from verkv.stats import LayerRecord
from verkv.tiers import LEVEL_MASK


def serves(context) -> bool:
    """Whether the loops can take a pass over a sealed context: else torch does.

    Parameters
    ----------
    context : SealedContext

    Returns
    -------
    bool
    """
    fetch = context.fetch
    if fetch is None or fetch.target != "denominator" or fetch.shrinkage != "binary":
        return False
    if fetch.key_rounds and not context.sketch.is_oracle:
        return False
    return context.device.type == "cpu" and reads_in_place(context.rows, context.host)


def attend(
    context, rows: Tensor, chunks: list[slice], tail: tuple[Tensor, Tensor], scaling: float, record: LayerRecord
) -> tuple[Tensor, Tensor]:
    """Algorithm 2 and attention of all query rows, the tail included; fills in the record.

    Parameters
    ----------
    context : SealedContext
        One that the loops serve.
    rows : Tensor, shape (N, beams, R, d), float32
    chunks : list of slice
        Of the R rows, each planned at once.
    tail : (Tensor, Tensor)
        Logits (N, beams, R, t), masked, and values (N, beams, t, d) of the tokens since sealing.
    scaling : float
        Factor of <k, q>.
    record : LayerRecord

    Returns
    -------
    output : Tensor, shape (N, beams, R, d), float32
    lse : Tensor, shape (N, beams, R), float32
    """
    step = CompiledStep(context, rows, chunks, tail, scaling)
    fetched = step.plan()
    step.fill(record, fetched)
    outputs, lses = zip(*(step.attend(number, fetched) for number in range(len(chunks))), strict=True)
    return torch.cat(outputs, 2), torch.cat(lses, 2)


class CompiledStep:
    """One pass over one layer: :func:`attend` in its parts."""

    def __init__(self, context, rows: Tensor, chunks: list[slice], tail: tuple[Tensor, Tensor], scaling: float):
        self.context, self.rows, self.chunks, self.tail = context, rows, chunks, tail
        self.scaling, self.loops = numpy.float32(scaling), loops.load()["step"]
        self.codes = context.codes.numpy()
        self.keys, self.offsets = as_array(context.rows.keys), context.rows.offsets.numpy()
        self.slots = numpy.full((len(self.codes), int(context.rows.offsets.diff().max())), -1, numpy.int64)
        self.loops.find_slots(self.codes, self.slots)
        self.union, self.chosen, self.known = (numpy.zeros(self.codes.shape, bool) for _ in range(3))
        self.shrinkage: list[numpy.ndarray] = []  # of resident rows, (N, beams * R, S) by chunk; then their log-weights
        self.results: list[numpy.ndarray] = []  # (N, beams * R, 4) by chunk

    def plan(self) -> Tensor:
        """Plan all rows; unit and position of every token to fetch, (F, 2)."""
        fetch, is_oracle = self.context.fetch, self.context.sketch.is_oracle
        score = self.context._scorer(self.rows, self.chunks)
        if not is_oracle:
            if fetch.shortlist:
                best = torch.stack([score(chunk).amax(1) for chunk in self.chunks]).amax(0)
                size = min(fetch.shortlist, best.shape[1])
                self.loops.choose_shortlist(best.numpy(), self.codes, fetch.paper, size, self.chosen)
            self.loops.find_known(self.codes, self.chosen, fetch.paper, self.known)
        for chunk in self.chunks:
            self._plan_chunk(chunk, score(chunk))
        results = numpy.concatenate(self.results, 1)
        self.is_exact, self.counts = numpy.empty(len(self.codes), bool), numpy.zeros((len(self.codes), 3), numpy.int64)
        self.loops.settle(self.codes, self.chosen, results, fetch.max_read, self.union, self.is_exact, self.counts)
        fetched = self.rows.new_empty(int(self.counts[:, 0].sum()), 2, dtype=torch.int64)
        self.loops.list_fetched(self.codes, self.union, fetched.numpy())
        return fetched

    def _plan_chunk(self, chunk: slice, scores: Tensor) -> None:
        context, rows = self.context, self.rows[:, :, chunk].flatten(1, 2).contiguous()
        mean = variance = rows.new_empty(0, 0)
        if context.sketch_error is not None:
            moments = context.sketch_error.flat().logit_moments(rows[:, None], float(self.scaling))
            mean, variance = (moment[:, 0].contiguous() for moment in moments)
        scores, host_keys = scores.contiguous(), context.host.keys.flatten(0, 1)
        logits = torch.empty_like(scores)
        self.loops.planning_logits(
            scores.numpy(),
            mean.numpy(),
            self.scaling,
            rows.numpy(),
            self.codes,
            self.known,
            self.keys,
            self.offsets,
            as_array(host_keys),
            logits.numpy(),
        )
        tail_lse = torch.logsumexp(self.tail[0][:, :, chunk], dim=-1).flatten(1)
        # One common scale per row, from planning logits only: like them it is blind to the draw.
        peak = torch.maximum(logits.amax(-1), tail_lse)
        peak = torch.where(torch.isfinite(peak), peak, 0.0)
        weights = logits.sub_(peak[..., None]).exp_()
        tail_weights = (tail_lse - peak).exp_()
        epsilon = context._tolerances(self.rows.shape[2], chunk)
        tolerance = torch.as_tensor(epsilon, dtype=torch.float64, device="cpu").expand(tail_weights.shape).contiguous()
        self.shrinkage.append(numpy.empty((*tail_weights.shape, self.slots.shape[1]), numpy.float32))
        self.results.append(numpy.empty((*tail_weights.shape, 4)))
        fetch, levels = context.fetch, self.codes & LEVEL_MASK
        loops.load()["plan"].plan_units(
            weights.numpy(),
            levels,
            _inclusion_probs(),
            (levels > 0) & ~self.known,
            variance.numpy(),
            tail_weights.double().numpy(),
            tolerance.numpy(),
            log_terms(fetch.delta, fetch.upper_share),
            self.slots,
            self.union,
            self.shrinkage[-1],
            self.results[-1],
        )

    def attend(self, number: int, fetched: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of the rows of a chunk."""
        context, chunk, weights = self.context, self.chunks[number], self.shrinkage[number]
        self.loops.log_weights(self.codes, self.union, self.slots, _log_inclusion_probs(), weights)
        return attend_in_place(
            self.rows[:, :, chunk],
            context.rows,
            torch.from_numpy(weights).unflatten(1, (context.beams, -1)),
            (context.host.keys, context.host.values),
            fetched,
            (self.tail[0][:, :, chunk], self.tail[1]),
            float(self.scaling),
        )

    def fill(self, record: LayerRecord, fetched: Tensor) -> None:
        """Statistics of the pass."""
        context, host = self.context, self.context.host
        n_fetched, n_shortlisted, n_held = self.counts.sum(0).tolist()
        record.fetched, record.shortlisted, record.exact_heads = n_fetched, n_shortlisted, int(self.is_exact.sum())
        record.bytes_read += (n_shortlisted - n_held) * host.key_row_bytes + n_fetched * host.row_bytes
        results = [torch.from_numpy(found).unflatten(1, (context.beams, -1)) for found in self.results]
        context._record_decisions(
            record,
            [found[..., 1].bool() for found in results],
            [found[..., 0].long() for found in results],
            [found[..., 2].float() for found in results],
            torch.from_numpy(self.counts[:, 0] > 0),
        )


@functools.cache
def _inclusion_probs() -> numpy.ndarray:
    """r of each level, float32."""
    return decode_inclusion_probs(torch.arange(LEVEL_MASK + 1, device="cpu").to(torch.uint8)).numpy()


@functools.cache
def _log_inclusion_probs() -> numpy.ndarray:
    """log r of each level, float32."""
    return numpy.log(_inclusion_probs())
