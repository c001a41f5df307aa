"""A pass over a sealed layer by the CUDA kernels, where they can serve it; no other module outside them knows CUDA.

Which implementation serves a context is asked when its first pass comes, and again when it has grown, shrunk or been
copied: what the kernels need of it is kept apart from it, so no copy, branch or file of a context carries it along.

A pass waits for the device once a layer: one copy of 2 Hq + Hkv + 3 counts for the statistics, after all its kernels
are queued. Others wait more often: passes of more than eight query rows a KV head (how many rows are fetched), masks
(whether they hide what was sealed), bounds that are recorded (a second copy), and sketches that torch scores (a few
times, where it picks tokens). A CUDA graph can therefore hold the kernels of a pass, not the pass.
"""

import dataclasses
import functools
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verkv.attention import weighted_attention
from verkv.planning import QueryRows
from verkv.sketches import RopePairSketch
from verkv.stats import LayerRecord
from verkv.tiers import RESIDENT_BIT, HostParts, take_rows

if TYPE_CHECKING:  # on a machine without a GPU nothing of verkv.cuda is loaded
    from verkv.cuda.launch import DeviceLayer, DevicePlan

# Logits of sketches that torch scores are kept for all (query row, token) pairs of a pass: at most 512 MB.
MAX_SCORED_PAIRS = 2**27

_SOURCES = ("host", "rows", "codes", "sketch", "fetch")  # of a context: replaced, never written into

_steps: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by context


def step_of(context, n_rows: int) -> "DeviceStep | None":
    """What takes a pass over a sealed context by the kernels, or None if torch is to take it.

    Warns, once for each reason, where a context on a GPU cannot be served by the kernels.

    Parameters
    ----------
    context : SealedContext
    n_rows : int
        Query rows of a KV head in the pass: query heads of its group, times tokens, times beams.

    Returns
    -------
    DeviceStep or None

    Raises
    ------
    ValueError
        On a GPU, if the environment variable ``VERKV_CUDA`` is neither 0 nor 1.
    """
    if context.fetch is None or not _is_gpu(context.device):
        return None
    step = _steps.get(context)
    if step is None or not step.is_of(context):
        step = _steps[context] = DeviceStep(context)
    return step if step.takes(n_rows) else None


def device_bytes(context) -> dict[str, int]:
    """Bytes by part that the kernels keep on the device for a context, beyond its own tensors."""
    step = _steps.get(context)
    if step is None or step.layer is None or not step.is_of(context):
        return {}
    return {"row_positions": step.layer.row_positions.nbytes}


class DeviceStep:
    """The kernels' view of a sealed context in its present state.

    Attributes
    ----------
    layer : DeviceLayer or None
        None where torch serves the context.
    sketch : dict of Tensor or None
        What the score kernel reads; None where torch scores the sketch.
    """

    def __init__(self, context):
        self._sources = [weakref.ref(getattr(context, name)) for name in _SOURCES]
        self.layer = self.sketch = None
        if _backend(context) == "cuda":
            self.layer, self.sketch = _device_layer(context), _scorable(context)

    def is_of(self, context) -> bool:
        """Whether the context is still what this was made of."""
        return all(source() is getattr(context, name) for source, name in zip(self._sources, _SOURCES, strict=True))

    def takes(self, n_rows: int) -> bool:
        """Whether the kernels can take a pass of ``n_rows`` query rows a KV head; warns, once, where they cannot."""
        from verkv.cuda import dispatch

        if self.layer is None:
            return False
        if self.sketch is None and self.layer.codes.numel() * n_rows > MAX_SCORED_PAIRS:
            dispatch.warn_once("a pass has too many query rows for a sketch that torch scores")
            return False
        row_keys = self.layer.row_keys
        if not dispatch.can_launch(row_keys.device, row_keys.shape[-1], n_rows, row_keys.dtype):
            self.layer = self.sketch = None  # nothing is kept on the device for kernels that cannot be trusted or made
            return False
        return True

    def attend(
        self,
        context,
        rows: Tensor,
        chunks: list[slice],
        tail: tuple[Tensor, Tensor],
        scaling: float,
        record: LayerRecord,
    ) -> tuple[Tensor, Tensor]:
        """Algorithm 2 and attention of all query rows, merged with the tail; fills in the record.

        Parameters
        ----------
        context : SealedContext
        rows : Tensor, shape (N, beams, R, d), float32
        chunks : list of slice
            Of the R rows, in which torch scores a sketch.
        tail : (Tensor, Tensor)
            Logits (N, beams, R, t), masked, and values (N, beams, t, d) of the tokens since sealing.
        scaling : float
        record : LayerRecord
            Counts are set as torch's path does, but for ``bytes_read``: the kernels read a key again that they read
            for the shortlist and then fetch, and it is counted as often.

        Returns
        -------
        output : Tensor, shape (N, beams, R, d), float32
        lse : Tensor, shape (N, beams, R), float32
        """
        from verkv.cuda import launch

        split = lambda tensor: tensor.unflatten(1, (context.beams, -1))  # noqa: E731
        tail_output, tail_lse = weighted_attention([tail])
        flat = rows.flatten(1, 2).contiguous()
        plan = self.plan(context, rows, flat, chunks, tail_lse.flatten(1).contiguous(), scaling)
        output, lse = launch.attend(self.layer, plan, flat, scaling)
        merged = _merged([(split(output), split(lse)), (tail_output, tail_lse)])
        _fill_record(context, plan, record, split)
        return merged

    def plan(
        self, context, rows: Tensor, flat: Tensor, chunks: list[slice], tail_lse: Tensor, scaling: float
    ) -> "DevicePlan":
        """What the kernels decide for all query rows, ``flat`` (N, beams * R, d)."""
        from verkv.cuda import launch

        fetch, epsilon = context.fetch, context._tolerances(rows.shape[2], slice(None))
        epsilon = epsilon.float().contiguous() if isinstance(epsilon, Tensor) else epsilon
        options = {"max_read": fetch.max_read, "paper": fetch.paper, "upper_share": fetch.upper_share}
        if self.sketch is None:
            return _plan_scored(self.layer, context, rows, chunks, tail_lse, scaling, epsilon, options)
        mean = variance = None
        if context.sketch_error is not None:
            moments = context.sketch_error.flat().logit_moments(flat[:, None], scaling)
            mean, variance = (moment[:, 0].contiguous() for moment in moments)
        return launch.plan_rope_pair(
            self.layer,
            self.sketch,
            flat,
            tail_lse,
            scaling,
            epsilon,
            fetch.delta,
            fetch.shortlist,
            mean,
            variance,
            **options,
        )


# --- what serves a context --------------------------------------------------------------------------------------------


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _backend(context) -> str:
    """The answer of the one dispatching function to everything it has to know of a context."""
    from verkv.cuda.dispatch import select_backend

    fetch, host = context.fetch, context.host
    is_plain = not isinstance(host, HostParts) and not host.is_coded
    return select_backend(
        context.device,
        key_dim=context.key_dim,
        value_dim=context.value_dim,
        dtype=context.dtype,
        n_tokens=context.n_tokens,
        n_units=context.n_units,
        shrinkage=fetch.shrinkage,
        target=fetch.target,
        key_rounds=0 if context.sketch.is_oracle else fetch.key_rounds,
        n_segments=len(host.parts) if isinstance(host, HostParts) else 1,
        is_coded=host.is_coded,
        is_whole=not is_plain or (host.keys.is_contiguous() and host.values.is_contiguous()),
        is_pinned=not is_plain or _is_pinned(host),
    )


def _is_pinned(host) -> bool:
    return host.keys.is_pinned() and host.values.is_pinned()


def _device_layer(context) -> "DeviceLayer":
    from verkv.cuda.launch import DeviceLayer

    rows = context.rows
    return DeviceLayer(
        codes=context.codes,
        row_keys=rows.keys,
        row_values=rows.values,
        row_codes=rows.codes,
        row_positions=((context.codes & RESIDENT_BIT) != 0).nonzero()[:, 1].int(),
        row_offsets=rows.offsets,
        host_keys=context.host.keys,
        host_values=context.host.values,
    )


def _scorable(context) -> dict[str, Tensor] | None:
    """The sketch's tensors, if the score kernel knows their layout and its shortlist is long enough."""
    from verkv.cuda.launch import rope_pair_tensors
    from verkv.cuda.layout import MAX_SHORTLIST

    if type(context.sketch) is not RopePairSketch or context.fetch.shortlist > MAX_SHORTLIST:
        return None
    return rope_pair_tensors(context.sketch)


# --- sketches that torch scores ---------------------------------------------------------------------------------------


def _plan_scored(
    layer: "DeviceLayer",
    context,
    rows: Tensor,
    chunks: list[slice],
    tail_lse: Tensor,
    scaling: float,
    epsilon: float | Tensor,
    options: dict,
) -> "DevicePlan":
    """The kernels' plan from logits of any sketch."""
    from verkv.cuda import launch

    index, is_row = context.rows.padded_index()
    planner = context._planner(take_rows(context.rows.keys, index).float(), is_row, scaling)
    score = context._scorer(rows, chunks)
    parts = [
        QueryRows(rows[:, :, chunk].flatten(1, 2), functools.partial(score, chunk), tail_lse, epsilon)
        for chunk in chunks
    ]
    logits, variances, known = planner.score(parts)
    join = lambda found: torch.cat([t.unflatten(1, (context.beams, -1)) for t in found], 2).flatten(1, 2)  # noqa: E731
    variance = None if variances[0] is None else join(variances).contiguous()
    plan = launch.plan_logits(
        layer, join(logits).contiguous(), tail_lse, epsilon, context.fetch.delta, known, variance, **options
    )
    n_read = torch.bincount(planner.pool.units, minlength=context.n_units)
    return dataclasses.replace(plan, n_shortlisted=n_read.int())


# --- results ----------------------------------------------------------------------------------------------------------


def _merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention (..., R, d) and log-sum-exp (..., R) over disjoint sets of tokens, each as one token of that weight."""
    as_tokens = [(lse[..., None, None], output[..., None, :]) for output, lse in parts]
    output, lse = weighted_attention(as_tokens)
    return output[..., 0, :], lse[..., 0]


def _fill_record(context, plan: "DevicePlan", record: LayerRecord, split) -> None:
    """Statistics of a pass, brought to the CPU in one copy; bounds, where they are wanted, in another."""
    n_heads, n_kv_heads = len(record.decisions), context.n_kv_heads
    per_head = lambda rows: context._spread(split(rows), n_heads, record.n_queries).sum((0, 2))  # noqa: E731
    per_kv_head = (plan.n_fetched > 0).unflatten(0, (-1, n_kv_heads)).sum(0)
    totals = torch.stack([count.sum() for count in (plan.n_fetched, plan.n_shortlisted, plan.is_exact)])
    counts = torch.cat([per_head(plan.n_row_fetched > 0), per_head(plan.n_promoted), per_kv_head, totals]).cpu()
    record.fetching, record.promoted, record.kv_fetching, totals = counts.split([n_heads, n_heads, n_kv_heads, 3])
    record.fetched, record.shortlisted, record.exact_heads = totals.tolist()
    host = context.host
    record.bytes_read += record.fetched * host.row_bytes + record.shortlisted * host.key_row_bytes
    if context.stats.record_bounds:
        record.error_bound = context._per_decision(split(plan.error_bound), record)
