"""What was decided, read and kept: statistics of sealed caches, and the memory report."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class LayerRecord:
    """One layer's part of one forward pass.

    Attributes
    ----------
    layer_idx, n_queries : int
        Query tokens of the pass: 1 in decoding, more in a question pass.
    decisions, fetching : Tensor, shape (Hq,), int64
        Attention decisions (one query head, one query token) and those that fetch at least one token.
    kv_fetching : Tensor, shape (Hkv,), int64
        Contexts of the batch (0 .. B) whose KV head fetched, after the union over its query heads.
    n_contexts : int
        B: how many contexts a KV head may have fetched for.
    promoted : Tensor, shape (Hq,), int64
        k* summed over the decisions.
    full_bytes : int
        Bytes of the layer's full cache, of all contexts there were at this pass.
    fetched, shortlisted, keys_first : int
        Rows read from the host: promoted and not resident (key and value), shortlisted (key), and promoted by an
        earlier plan of the same pass (key, to plan again). A key is read, and its bytes are counted, once.
    bytes_read : int
    exact_heads : int
        KV heads (of all contexts) for which everything was read: by their plans, or because no bound held.
    violations : int
        Audit with ``on_violation``: decisions whose true error exceeds the tolerance.
    error_bound : Tensor, shape (B, Hq, Tq), optional
        The certificate of every decision before fetching.
    relative_error, output_error : Tensor, shape (B, Hq, Tq), optional
        Audit: |D^ - D| / D and ||o^ - o|| / ||o||, both against exact attention.
    output_bound : Tensor, shape (B, Hq, Tq), optional
        Audit with ``target="output"``: what the plan promised of ||o^ - o||, over ||o||.
    """

    layer_idx: int
    n_queries: int
    decisions: Tensor
    fetching: Tensor
    kv_fetching: Tensor
    n_contexts: int
    promoted: Tensor
    full_bytes: int
    fetched: int = 0
    shortlisted: int = 0
    keys_first: int = 0
    bytes_read: int = 0
    exact_heads: int = 0
    violations: int = 0
    error_bound: Tensor | None = None
    relative_error: Tensor | None = None
    output_error: Tensor | None = None
    output_bound: Tensor | None = None

    @property
    def has_details(self) -> bool:
        """Whether something is kept of every decision."""
        return self.error_bound is not None or self.relative_error is not None

    def plus(self, other: "LayerRecord") -> "LayerRecord":
        """Counts of both, of the same layer; ``n_queries`` tells the phase only."""
        names = ("decisions", "fetching", "kv_fetching", "n_contexts", "promoted", "full_bytes", "fetched")
        names += ("shortlisted", "keys_first", "bytes_read", "exact_heads", "violations")
        return dataclasses.replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass
class FetchStats:
    """Statistics of one sealed cache, over all forward passes since sealing.

    Parameters
    ----------
    method : str
        Name of the press.
    epsilon, delta : float or None
        Of the certificate; None for methods without one.
    sketch : str or None
    full_bytes : int
        Bytes of the full cache of all sealed layers, in its own dtype.
    sealed_layers : tuple of int
        Empty if the cache was left exact.
    n_segments : int
        Stretches of tokens that were sealed, each with a draw of its own.
    notes : list of str
        What a reader of the figures must know (what is not counted, why a cache was not sealed, ...).
    record_bounds : bool
        Keep the bound of every decision in the records.
    passes : list of list of LayerRecord
        Passes whose records are kept one by one: all with bounds or an audit, otherwise only the last.
    chunks, replays : FetchStats or None
        The same of forward passes that answer nothing and are in no other figure: the chunks of a chunked prefill, and
        the replays that score later segments.

    Examples
    --------
    >>> FetchStats(method="dense").kv_read_per_forward
    0.0
    """

    method: str
    epsilon: float | None = None
    delta: float | None = None
    sketch: str | None = None
    full_bytes: int = 0
    sealed_layers: tuple[int, ...] = ()
    n_segments: int = 0
    notes: list[str] = field(default_factory=list)
    record_bounds: bool = False
    passes: list[list[LayerRecord]] = field(default_factory=list, repr=False)
    chunks: "FetchStats | None" = field(default=None, repr=False)
    replays: "FetchStats | None" = field(default=None, repr=False)
    _totals: dict[tuple[int, bool], LayerRecord] = field(default_factory=dict, repr=False)
    _n_totalled: int = field(default=0, repr=False)

    def apart(self, name: str) -> "FetchStats":
        """The statistics of "chunks" or "replays", begun if there are none."""
        if getattr(self, name) is None:
            setattr(self, name, FetchStats(self.method, self.epsilon, self.delta, self.sketch))
        found = getattr(self, name)
        found.sealed_layers, found.full_bytes = self.sealed_layers, self.full_bytes
        return found

    def record(self, record: LayerRecord) -> None:
        """Add a layer's record. The first sealed layer opens a new pass; one that was cut short is forgotten."""
        if not self.passes or record.layer_idx == self.sealed_layers[0]:
            self._close_pass()
            self.passes.append([])
        self.passes[-1].append(record)

    def _close_pass(self) -> None:
        """Add the last pass to the totals, so that long generations need no more memory, unless it has details."""
        if not self.passes:
            return
        if len(self.passes[-1]) < len(self.sealed_layers):
            self.passes.pop()
        elif not any(record.has_details for record in self.passes[-1]):
            self._n_totalled += 1
            for record in self.passes.pop():
                key = record.layer_idx, record.n_queries > 1
                self._totals[key] = self._totals[key].plus(record) if key in self._totals else record

    def drop_pass_until(self, layer_idx: int) -> None:
        """Forget the forward pass that failed in a layer; it was opened by an earlier layer, if there is one."""
        if self.passes and layer_idx != self.sealed_layers[0]:
            self.passes.pop()

    # --- counts -----------------------------------------------------------------------------------------------------

    @property
    def n_passes(self) -> int:
        """Forward passes since sealing, question passes and decode steps."""
        return self._n_totalled + len(self.passes)

    def records(self, phase: str = "all") -> Iterable[LayerRecord]:
        """Records of a phase: "question" (several query tokens), "decode" (one), or "all".

        One per layer and pass where bounds or an audit are kept, otherwise sums over passes.
        """
        if phase not in ("all", "question", "decode"):
            raise ValueError(f"phase must be 'all', 'question' or 'decode', got {phase!r}")
        wanted = {"all": (True, False), "question": (True,), "decode": (False,)}[phase]
        kept = [record for records in (self._totals.values(), *self.passes) for record in records]
        return [record for record in kept if (record.n_queries > 1) in wanted]

    def decisions(self, phase: str = "all") -> int:
        """Attention decisions: one query head of one layer at one query token."""
        return sum(int(r.decisions.sum()) for r in self.records(phase))

    def fetch_rate(self, phase: str = "all") -> float:
        """Share of decisions that fetch at least one token."""
        return _share(sum(int(r.fetching.sum()) for r in self.records(phase)), self.decisions(phase))

    def kv_head_fetch_rate(self, phase: str = "all") -> float:
        """The same per KV head and forward pass, after the union over its query heads and query tokens."""
        records = self.records(phase)
        return _share(
            sum(int(r.kv_fetching.sum()) for r in records), sum(r.n_contexts * len(r.kv_fetching) for r in records)
        )

    def promoted(self, phase: str = "all") -> int:
        """k* summed over decisions: tokens made exact, resident or not."""
        return sum(int(r.promoted.sum()) for r in self.records(phase))

    def fetched(self, phase: str = "all") -> int:
        """Rows (key and value) read from the host, after the unions."""
        return sum(r.fetched for r in self.records(phase))

    def shortlisted(self, phase: str = "all") -> int:
        """Keys read from the host for the shortlist."""
        return sum(r.shortlisted for r in self.records(phase))

    def keys_first(self, phase: str = "all") -> int:
        """Keys read from the host to plan again before their values."""
        return sum(r.keys_first for r in self.records(phase))

    def exact_rate(self, phase: str = "all") -> float:
        """Share of KV heads' passes for which everything was read, because no smaller plan met the tolerance."""
        records = self.records(phase)
        return _share(sum(r.exact_heads for r in records), sum(r.n_contexts * len(r.kv_fetching) for r in records))

    def bytes_read(self, phase: str = "all") -> int:
        """Bytes read from the host."""
        return sum(r.bytes_read for r in self.records(phase))

    # --- shares -----------------------------------------------------------------------------------------------------

    @property
    def kv_read_per_forward(self) -> float:
        """Bytes read from the host over bytes of the full cache, mean over all forward passes."""
        return _share(self.bytes_read(), sum(r.full_bytes for r in self.records()))

    @property
    def kv_read_per_token(self) -> float:
        """The same, mean over decode steps (forward passes with one query token)."""
        return _share(self.bytes_read("decode"), sum(r.full_bytes for r in self.records("decode")))

    def violation_rate(self, epsilon: float | None = None, phase: str = "all") -> float:
        """Audit: share of decisions whose true relative error of the denominator exceeds epsilon.

        Raises
        ------
        ValueError
            Without audited decisions, or without an epsilon.
        """
        epsilon = self.epsilon if epsilon is None else epsilon
        if epsilon is None:
            raise ValueError(f"epsilon must be given: {self.method} has no tolerance of its own")
        errors = self.relative_errors(phase)
        return float((~(errors <= epsilon)).float().mean())  # a NaN keeps no tolerance

    def relative_errors(self, phase: str = "all") -> Tensor:
        """Audit: |D^ - D| / D of every decision, flat."""
        return self._audited("relative_error", phase)

    def output_errors(self, phase: str = "all") -> Tensor:
        """Audit: ||o^ - o|| / ||o|| of every decision, flat."""
        return self._audited("output_error", phase)

    def output_bounds(self, phase: str = "all") -> Tensor:
        """Audit with ``target="output"``: the promised error of every decision's output over its norm, flat."""
        return self._audited("output_bound", phase)

    def bounds(self) -> Tensor:
        """The bound of every decision before fetching, flat; needs ``record_bounds``."""
        kept = [r.error_bound.flatten() for r in self.records() if r.error_bound is not None]
        if not kept:
            raise ValueError("no bounds were recorded; set record_bounds=True on the press")
        return torch.cat(kept)

    def by_head(self) -> dict[str, Tensor]:
        """Fetch rate and, where recorded, mean bound of every layer and query head, each (n_layers, Hq)."""
        if self.n_passes == 0:
            raise ValueError("no forward pass since sealing, so there is nothing to show by head")
        layers = {idx: [r for r in self.records() if r.layer_idx == idx] for idx in self.sealed_layers}
        rate = [
            torch.stack([r.fetching for r in rs]).sum(0) / torch.stack([r.decisions for r in rs]).sum(0)
            for rs in layers.values()
        ]
        maps = {"fetch_rate": torch.stack(rate)}
        if all(r.error_bound is not None for r in self.records()):
            bound = [torch.cat([r.error_bound.mean(0).mT for r in rs]).mean(0) for rs in layers.values()]
            maps["error_bound"] = torch.stack(bound)
        return maps

    def summary(self) -> dict[str, object]:
        """Everything in one flat dictionary of plain numbers, for a JSON line."""
        out: dict[str, object] = {
            "method": self.method,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "sketch": self.sketch,
            "sealed_layers": len(self.sealed_layers),
            "segments": self.n_segments,
            "forward_passes": self.n_passes,
            "full_bytes": self.full_bytes,
            "kv_read_per_forward": self.kv_read_per_forward,
            "kv_read_per_token": self.kv_read_per_token,
        }
        for phase in ("question", "decode"):
            out[f"{phase}_decisions"] = self.decisions(phase)
            out[f"{phase}_fetch_rate"] = self.fetch_rate(phase)
            out[f"{phase}_kv_head_fetch_rate"] = self.kv_head_fetch_rate(phase)
            out[f"{phase}_promoted"] = self.promoted(phase)
            out[f"{phase}_fetched"] = self.fetched(phase)
            out[f"{phase}_shortlisted"] = self.shortlisted(phase)
            out[f"{phase}_keys_first"] = self.keys_first(phase)
            out[f"{phase}_exact_rate"] = self.exact_rate(phase)
            out[f"{phase}_bytes_read"] = self.bytes_read(phase)
        if any(r.relative_error is not None for r in self.records()):
            if self.epsilon is not None:
                out["violation_rate"] = self.violation_rate()
            out["output_error_q90"] = float(self.output_errors().quantile(0.9))
        for name in ("chunks", "replays"):
            found = getattr(self, name)
            if found is not None:
                out |= {f"{name}_forward_passes": found.n_passes, f"{name}_bytes_read": found.bytes_read()}
        out["notes"] = list(self.notes)
        return out

    def _audited(self, name: str, phase: str) -> Tensor:
        kept = [getattr(r, name).flatten() for r in self.records(phase) if getattr(r, name) is not None]
        if not kept:
            raise ValueError("nothing was audited; set audit=True on the press")
        return torch.cat(kept)


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a cache by tier and part, the sum of its live tensors.

    Attributes
    ----------
    device : dict of str to int
        Parts charged to the budget: ``row_keys``, ``row_values``, ``row_codes``, ``token_codes``, ``sketch_*``,
        ``row_offsets``. Layers that were not sealed count as ``unsealed``.
    device_uncharged : dict of str to int
        On the device, but not growing with the context (``sketch_channels``, ``window_states``: what sliding layers can
        go back to, ``linear_states``: the states of linear-attention layers and those they can go back to), or new
        since sealing (``tail``).
    host : dict of str to int
        The full cache, ``host_keys`` and ``host_values``.
    full_bytes : int
        Bytes the sealed contexts take uncompressed, in their own dtype.
    """

    device: dict[str, int]
    device_uncharged: dict[str, int]
    host: dict[str, int]
    full_bytes: int

    @property
    def resident_share(self) -> float:
        """Charged bytes on the device over bytes of the full cache."""
        return _share(sum(self.device.values()), self.full_bytes)

    def __str__(self) -> str:
        lines = [f"resident {100 * self.resident_share:.2f} % of {self.full_bytes:,} bytes"]
        for field_ in dataclasses.fields(self)[:3]:
            parts = getattr(self, field_.name)
            lines += [f"  {field_.name:<17}{part:<16}{size:>15,}" for part, size in sorted(parts.items())]
        return "\n".join(lines)


def memory_report(cache) -> MemoryReport:
    """Count what a cache keeps on the device and on the host.

    Parameters
    ----------
    cache : transformers.Cache
        With or without sealed layers.

    Returns
    -------
    MemoryReport
    """
    totals: dict[str, dict[str, int]] = {"device": {}, "device_uncharged": {}, "host": {}}
    full_bytes = 0
    for layer in cache.layers:
        parts, full = _layer_memory(layer)
        full_bytes += full
        for tier, sizes in parts.items():
            for part, size in sizes.items():
                totals[tier][part] = totals[tier].get(part, 0) + size
    return MemoryReport(**totals, full_bytes=full_bytes)


def _layer_memory(layer) -> tuple[dict[str, dict[str, int]], int]:
    if getattr(layer, "sealed", False):
        return layer.memory(), layer.full_bytes
    if hasattr(layer, "memory") and not hasattr(layer, "sealed"):  # a layer that is left as it is
        parts = layer.memory()
        return parts, parts["device"].get("unsealed", 0)
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    size = sum(t.nbytes for t in (keys, values) if isinstance(t, Tensor))
    return {"device": {"unsealed": size}}, size


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
