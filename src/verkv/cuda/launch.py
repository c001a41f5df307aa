"""Algorithm 2 and attention of one layer on a CUDA device: checks at the border, buffers, and chunks of query rows.

Nothing here waits for the device, but for passes whose query rows need more than one tile: those copy the fetched rows
to the device once, and must know how many there are.
"""

import math
import weakref
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from verkv.cuda import layout
from verkv.cuda.dispatch import unsupported_because
from verkv.cuda.layout import MAX_GRID_Y, MAX_SHORTLIST, SKETCH_GROUP, Sizes, safe_epsilon
from verkv.cuda.operators import empty_buffers, n_multiprocessors
from verkv.estimators.certificate import check_delta, check_upper_share, log_terms
from verkv.estimators.fetching import check_epsilon
from verkv.sketches import RopePairSketch

# Rows are planned in chunks of at most this many (row, token) pairs, each of 12 bytes of scratch: 400 MB.
MAX_PLANNED_PAIRS = 2**25


@dataclass(frozen=True)
class DeviceLayer:
    """A sealed layer as the kernels read it: N units of T tokens.

    Attributes
    ----------
    codes : Tensor, shape (N, T), uint8
        Resident bit and level; 0 where there is no token.
    row_keys, row_values : Tensor, shape (M, d), bfloat16 or float16
        Resident rows in (unit, position) order.
    row_codes : Tensor, shape (M,), uint8
    row_positions : Tensor, shape (M,), int32
        Position of each resident row in the context.
    row_offsets : Tensor, shape (N + 1,), int64
        Rows of unit u are row_offsets[u] .. row_offsets[u + 1].
    host_keys, host_values : Tensor, shape (C, Hkv, T, d) or (N, T, d), same dtype, pinned
        The whole context.

    Raises
    ------
    ValueError
        If a tensor has the wrong shape, dtype, device or layout.
    """

    codes: Tensor
    row_keys: Tensor
    row_values: Tensor
    row_codes: Tensor
    row_positions: Tensor
    row_offsets: Tensor
    host_keys: Tensor
    host_values: Tensor

    def __post_init__(self):
        n_units, n_tokens = self.codes.shape
        n_rows, head_dim = self.row_keys.shape
        dtype = self.row_keys.dtype
        if reason := unsupported_because(head_dim, self.row_values.shape[-1], dtype, n_tokens):
            raise ValueError(f"the kernels cannot serve this layer: {reason}")
        if n_tokens < 1 or not 1 <= n_units <= MAX_GRID_Y:
            raise ValueError(f"codes must have 1 to {MAX_GRID_Y} units and at least one token, got {self.codes.shape}")
        device = self.codes.device
        _check_device(device)
        _check(self.codes, "codes", (n_units, n_tokens), torch.uint8, device)
        _check(self.row_keys, "row_keys", (n_rows, head_dim), dtype, device)
        _check(self.row_values, "row_values", (n_rows, head_dim), dtype, device)
        _check(self.row_codes, "row_codes", (n_rows,), torch.uint8, device)
        _check(self.row_positions, "row_positions", (n_rows,), torch.int32, device)
        _check(self.row_offsets, "row_offsets", (n_units + 1,), torch.int64, device)
        for name in ("host_keys", "host_values"):
            tensor = getattr(self, name)
            shape = (*tensor.shape[:-2], n_tokens, head_dim)
            if tensor.numel() != n_units * n_tokens * head_dim:
                raise ValueError(f"{name} must hold {n_units} units of {n_tokens} rows, got {tuple(tensor.shape)}")
            _check(tensor, name, shape, dtype, torch.device("cpu"))
            _check_pinned(tensor, name)
        if device.type == "cuda":
            # A kernel may still read host rows when the last reference to them goes: freed pinned memory is given out
            # again at once, and would be overwritten under it.
            weakref.finalize(self, torch.cuda.synchronize, device).atexit = False

    def __reduce__(self) -> tuple:
        """Copies and unpickled ones are checked, too: copied tensors need not be pinned."""
        return DeviceLayer, tuple(getattr(self, field.name) for field in fields(self))

    @property
    def head_dim(self) -> int:
        """Channels of a row."""
        return self.row_keys.shape[-1]

    def sizes(self, rows_all: int, n_rows: int, n_shortlist: int = 0) -> Sizes:
        """Sizes of a pass of ``rows_all`` query rows a unit, planned ``n_rows`` at a time."""
        n_units, n_tokens = self.codes.shape
        tiles = -(-rows_all // layout.tile_of(rows_all))
        splits = layout.splits_of(n_units, tiles, n_multiprocessors(self.codes.device))
        return Sizes(n_units, n_tokens, rows_all, n_rows, self.head_dim, n_shortlist, splits)


@dataclass(frozen=True)
class DevicePlan:
    """What the kernels decided for the R query rows of each unit; masks are bits, 32 tokens to a word.

    Attributes
    ----------
    promoted : Tensor, shape (N, words), int32
        Union of the promoted sets of a unit's rows.
    shrunk : Tensor, shape (N, R, words), int32
        Tokens with lambda = r.
    n_promoted : Tensor, shape (N, R), int32
        k* of each row.
    n_row_fetched : Tensor, shape (N, R), int32
        Tokens that a row promotes and that are not resident.
    error_bound : Tensor, shape (N, R), float32
        The certificate before anything is promoted.
    fetch_positions : Tensor, shape (N, T), int32
        Positions of the rows to read, ascending; ``n_fetched`` of them count.
    n_fetched : Tensor, shape (N,), int32
    is_exact : Tensor, shape (N,), int32
        1 where all residual tokens are promoted: by the rows' own plans, or because these exceeded ``max_read``.
    n_shortlisted : Tensor, shape (N,), int32
        Keys that were read for the shortlist and are not resident; 0 without one.
    tickets, unit_counts : Tensor, int32
        Counters of the kernels, zero between them.
    """

    promoted: Tensor
    shrunk: Tensor
    n_promoted: Tensor
    n_row_fetched: Tensor
    error_bound: Tensor
    fetch_positions: Tensor
    n_fetched: Tensor
    is_exact: Tensor
    n_shortlisted: Tensor
    tickets: Tensor
    unit_counts: Tensor


def rope_pair_tensors(sketch: RopePairSketch) -> dict[str, Tensor] | None:
    """What the score kernel reads of a built sketch, or None if its layout is another than the kernel's.

    Parameters
    ----------
    sketch : RopePairSketch
        Built on keys of N = C * Hkv units.

    Returns
    -------
    dict of Tensor or None
        As :func:`plan_rope_pair` takes it. The kernel knows the defaults only: a quarter of the channels, in groups of
        128 tokens. Logits of any other sketch can go to :func:`plan_logits`.
    """
    tensors = sketch.tensors() | sketch.uncharged_tensors()
    parts = {name: tensors[f"sketch_{name}"].flatten(0, 1) for name in ("channels", "codes", "zero", "scale")}
    has_default_groups = sketch.group_size == SKETCH_GROUP and sketch.fraction == RopePairSketch.fraction
    return parts if has_default_groups and parts["channels"].dtype == torch.uint8 else None


def plan_rope_pair(
    layer: DeviceLayer,
    sketch: dict[str, Tensor],
    query: Tensor,
    tail_lse: Tensor,
    scaling: float,
    epsilon: float | Tensor,
    delta: float,
    n_shortlist: int,
    logit_mean: Tensor | None = None,
    logit_variance: Tensor | None = None,
    max_read: float = 1.0,
    paper: bool = False,
    upper_share: float | None = None,
) -> DevicePlan:
    """Score all tokens by the 2-bit sketch, read the shortlist's keys, and decide: Algorithm 2 of [1]_, lines 1-10.

    Parameters
    ----------
    layer : DeviceLayer
    sketch : dict of Tensor
        Of :func:`rope_pair_tensors`: ``channels`` (N, C) uint8, ``codes`` (N, T, C / 4) uint8, ``zero`` and ``scale``
        (N, groups, C) float16, with C = d / 4 and groups of 128 tokens.
    query : Tensor, shape (N, R, d), float32
        All query rows that share a KV head.
    tail_lse : Tensor, shape (N, R), float32
        log-sum-exp of the logits of tokens outside the layer, which are exact; -inf if there are none.
    scaling : float
        Factor of <k, q>.
    epsilon : float or Tensor, shape (N, R), float32
        Tolerance, of all rows or of each.
    delta : float
        Probability with which it may be missed.
    n_shortlist : int in [0, 1024]
        Residual tokens per unit that are scored exactly. A pass of so many rows that it is planned in chunks has a
        shortlist for each chunk.
    logit_mean, logit_variance : Tensor, shape (N, R), float32, optional
        Moments of the sketch's error, per query row, as in :func:`plan_logits`; the mean is added to its logits.
    max_read : float in (0, 1]
        Share of a unit's tokens above which a plan is not followed and everything is promoted.
    paper : bool
        Plan with the exact weights of all resident tokens, and shortlist others. Depends on the draw.
    upper_share : float in (0, 1), optional
        Part of ``delta`` for denominators estimated too large, where the two sides of the error are to be bounded
        apart; None is Eq. (7). The order in which tokens are promoted is that of Eq. (9) in either case.

    Returns
    -------
    DevicePlan

    Raises
    ------
    ValueError
        If an argument has the wrong shape, dtype, device, layout or range.

    References
    ----------
    .. [1] Jha et al., "Verify Before You Fetch", arXiv:2611.11319v1.
    """
    rows_all = _check_query(layer, query, tail_lse)
    _check_sketch(layer, sketch)
    if not 0 <= n_shortlist <= MAX_SHORTLIST:
        raise ValueError(f"n_shortlist must be in [0, {MAX_SHORTLIST}], got {n_shortlist}")
    _check_moments(layer, rows_all, logit_mean=logit_mean, logit_variance=logit_variance)
    plan, peaks = _empty_plan(layer, rows_all)
    settings = _settings(layer, rows_all, epsilon, delta, upper_share, max_read, paper)
    n_read = []
    for first, n_rows in _row_chunks(layer, rows_all):
        sizes = layer.sizes(rows_all, n_rows, n_shortlist)
        scores = empty_buffers(layout.score_buffers(sizes), query.device, ("logits", "known", "n_read"))
        peak = peaks[: sizes.n_units * n_rows]
        torch.ops.verkv.kvfetch_score(
            query,
            layer.codes,
            *(sketch[name] for name in ("channels", "codes", "zero", "scale")),
            *_rows_of(layer),
            layer.host_keys,
            logit_mean,
            scores["logits"],
            scores["known"],
            scores["n_read"],
            peak,
            plan.tickets,
            scaling,
            first,
            n_shortlist,
            paper,
        )
        known = scores["known"] if n_shortlist else None
        n_read.append(scores["n_read"])
        _plan_chunk(layer, plan, scores["logits"], tail_lse, known, logit_variance, peak, False, first, settings)
    if not n_shortlist:
        return plan
    return replace(plan, n_shortlisted=n_read[0] if len(n_read) == 1 else torch.stack(n_read).sum(0, dtype=torch.int32))


def plan_logits(
    layer: DeviceLayer,
    logits: Tensor,
    tail_lse: Tensor,
    epsilon: float | Tensor,
    delta: float,
    known: Tensor | None = None,
    logit_variance: Tensor | None = None,
    max_read: float = 1.0,
    paper: bool = False,
    upper_share: float | None = None,
) -> DevicePlan:
    """Decide from planning logits of any origin: Algorithm 2 of [1]_, lines 2-10.

    Parameters
    ----------
    layer : DeviceLayer
    logits : Tensor, shape (N, R, T), float32
        Scaled planning logits; those at positions that are not tokens are not read.
    tail_lse : Tensor, shape (N, R), float32
        log-sum-exp of the logits of tokens outside the layer, which are exact; -inf if there are none.
    epsilon : float or Tensor, shape (N, R), float32
        Tolerance, of all rows or of each.
    delta : float
        Probability with which it may be missed.
    known : Tensor, shape (N, T), bool, optional
        Tokens of the residual set whose logits are exact. None by default; those with r = 1 always are.
    logit_variance : Tensor, shape (N, R), float32, optional
        Error variance s of the other residual tokens' logits, per query row: they are planned with exp(logit + s)
        and enter the denominator as exp(logit + s / 2).
    max_read : float in (0, 1]
        Share of a unit's tokens above which a plan is not followed and everything is promoted.
    paper : bool
        Logits of all resident tokens are exact.
    upper_share : float in (0, 1), optional
        Part of ``delta`` for denominators estimated too large, where the two sides of the error are to be bounded
        apart; None is Eq. (7). The order in which tokens are promoted is that of Eq. (9) in either case.

    Returns
    -------
    DevicePlan

    Raises
    ------
    ValueError
        If an argument has the wrong shape, dtype, device, layout or range.

    References
    ----------
    .. [1] Jha et al., "Verify Before You Fetch", arXiv:2611.11319v1.
    """
    n_units, n_tokens = layer.codes.shape
    device, rows_all = layer.codes.device, logits.shape[1]
    _check(logits, "logits", (n_units, rows_all, n_tokens), torch.float32, device)
    _check(tail_lse, "tail_lse", (n_units, rows_all), torch.float32, device)
    _check_moments(layer, rows_all, logit_variance=logit_variance)
    if known is not None:
        _check(known, "known", (n_units, n_tokens), torch.bool, device)
        known = pack_bits(known)
    plan, peaks = _empty_plan(layer, rows_all)
    settings = _settings(layer, rows_all, epsilon, delta, upper_share, max_read, paper)
    for first, n_rows in _row_chunks(layer, rows_all):
        part = logits if n_rows == rows_all else logits[:, first : first + n_rows].contiguous()
        peak = peaks[: n_units * n_rows]
        _plan_chunk(layer, plan, part, tail_lse, known, logit_variance, peak, True, first, settings)
    return plan


def attend(layer: DeviceLayer, plan: DevicePlan, query: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention of query rows over resident and fetched rows with the plan's log-weights: Algorithm 2 of [1]_, line 11.

    Fetched rows are read in place from pinned host memory.

    Parameters
    ----------
    layer : DeviceLayer
    plan : DevicePlan
        Of these query rows.
    query : Tensor, shape (N, R, d), float32
    scaling : float
        Factor of <k, q>.

    Returns
    -------
    output : Tensor, shape (N, R, d), float32
    lse : Tensor, shape (N, R), float32
        Log of the denominator, to merge the tail with; -inf where there is no row at all (the output is 0 there).

    Raises
    ------
    ValueError
        If an argument has the wrong shape, dtype, device or layout.

    References
    ----------
    .. [1] Jha et al., "Verify Before You Fetch", arXiv:2611.11319v1.
    """
    rows_all = _check_query(layer, query, None)
    if plan.n_promoted.shape != query.shape[:2]:
        raise ValueError(f"plan is of rows {tuple(plan.n_promoted.shape)}, the query of {tuple(query.shape[:2])}")
    sizes = layer.sizes(rows_all, rows_all)
    results = empty_buffers(layout.attend_buffers(sizes), query.device, ("output", "lse"))
    staged_keys = staged_values = None
    if sizes.n_tiles > 1:  # each tile reads all rows: copy the fetched ones over once
        capacity = max(1, int(plan.n_fetched.max()))
        shape = (sizes.n_units, capacity, layer.head_dim)
        staged_keys, staged_values = (torch.empty(shape, dtype=layer.row_keys.dtype, device=query.device) for _ in "kv")
    torch.ops.verkv.kvfetch_attend(
        query,
        *_rows_of(layer),
        layer.row_values,
        layer.host_keys,
        layer.host_values,
        staged_keys,
        staged_values,
        plan.promoted,
        plan.shrunk,
        plan.fetch_positions,
        plan.n_fetched,
        plan.tickets,
        results["output"],
        results["lse"],
        scaling,
    )
    return results["output"], results["lse"]


def pack_bits(mask: Tensor) -> Tensor:
    """A mask (..., T) as bits, (..., ceil(T / 32)) int32, the lowest bit first."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 32)).unflatten(-1, (-1, 32))
    place = torch.arange(32, device=mask.device)
    words = (padded.long() << place).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def unpack_bits(words: Tensor, n_tokens: int) -> Tensor:
    """Bits (..., words) as a mask (..., T)."""
    place = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words[..., None] >> place & 1).flatten(-2)[..., :n_tokens].bool()


# --- buffers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Settings:
    """How to plan, as the kernels take it: tolerances of rows, if they differ, or one for all.

    Log terms are l of Eq. (7), and of the upper and the lower side, 0 where these are not bounded apart.
    """

    tolerances: Tensor | None
    epsilon: float
    log_terms: tuple[float, float, float]
    max_read: float
    paper: bool


def _settings(
    layer: DeviceLayer,
    rows_all: int,
    epsilon: float | Tensor,
    delta: float,
    upper_share: float | None,
    max_read: float,
    paper: bool,
) -> _Settings:
    check_delta(delta)
    check_upper_share(upper_share)
    if not 0.0 < max_read <= 1.0:
        raise ValueError(f"max_read must be in (0, 1], got {max_read}")
    tolerances = None
    if isinstance(epsilon, Tensor):
        _check(epsilon, "epsilon", (layer.codes.shape[0], rows_all), torch.float32, layer.codes.device)
        tolerances, epsilon = safe_epsilon(epsilon), 0.0
    else:
        check_epsilon(epsilon)
        epsilon = safe_epsilon(epsilon)
    return _Settings(tolerances, epsilon, log_terms(delta, upper_share), max_read, paper)


def _empty_plan(layer: DeviceLayer, rows_all: int) -> tuple[DevicePlan, Tensor]:
    """Buffers of a plan, and the row maxima. What must be zero is cleared at once."""
    device = layer.codes.device
    results = ("mask", "shrunk", "n_promoted", "n_row_fetched", "bound", "fetch_positions", "n_fetched", "is_exact")
    buffers = empty_buffers(layout.plan_buffers(layer.sizes(rows_all, rows_all)), device, results)
    largest_chunk = layer.sizes(rows_all, _row_chunks(layer, rows_all)[0][1])
    shapes = [shape for shape, _ in layout.zeroed_buffers(largest_chunk).values()] + [(largest_chunk.n_units,)]
    lengths = [math.prod(shape) for shape in shapes]
    zeros = torch.zeros(sum(lengths), dtype=torch.int32, device=device).split(lengths)
    peaks, tickets, unit_counts, n_shortlisted = zeros
    return DevicePlan(*buffers.values(), n_shortlisted, tickets, unit_counts), peaks


def _plan_chunk(
    layer: DeviceLayer,
    plan: DevicePlan,
    logits: Tensor,
    tail_lse: Tensor,
    known: Tensor | None,
    logit_variance: Tensor | None,
    peak: Tensor,
    find_peak: bool,
    first_row: int,
    settings: _Settings,
) -> None:
    torch.ops.verkv.kvfetch_plan(
        logits,
        layer.codes,
        tail_lse,
        known,
        logit_variance,
        settings.tolerances,
        peak,
        plan.tickets,
        plan.unit_counts,
        plan.promoted,
        plan.shrunk,
        plan.n_promoted,
        plan.n_row_fetched,
        plan.error_bound,
        plan.fetch_positions,
        plan.n_fetched,
        plan.is_exact,
        find_peak,
        settings.epsilon,
        *settings.log_terms,
        settings.max_read,
        first_row,
        settings.paper,
        layer.head_dim,
        layer.row_keys.dtype == torch.float16,
    )


def _row_chunks(layer: DeviceLayer, rows_all: int) -> list[tuple[int, int]]:
    """First row and number of rows of each chunk that is planned at once."""
    n_units, n_tokens = layer.codes.shape
    step = max(1, min(MAX_PLANNED_PAIRS // (n_units * n_tokens), MAX_GRID_Y // n_units))
    return [(first, min(step, rows_all - first)) for first in range(0, rows_all, step)]


def _rows_of(layer: DeviceLayer) -> tuple[Tensor, ...]:
    return layer.row_keys, layer.row_codes, layer.row_positions, layer.row_offsets


# --- checks at the border -------------------------------------------------------------------------------------------


def _check(tensor: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError unless a tensor is what a kernel will take it for."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous; pass {name}.contiguous()")
    if torch.compiler.is_compiling():  # tensors have no address yet, and will be aligned
        return
    if tensor.numel() and tensor.data_ptr() % 16:
        raise ValueError(f"{name} must start at a multiple of 16 bytes; pass {name}.clone()")


def _check_query(layer: DeviceLayer, query: Tensor, tail_lse: Tensor | None) -> int:
    n_units, device = layer.codes.shape[0], layer.codes.device
    rows_all = query.shape[1] if query.dim() == 3 else 0
    _check(query, "query", (n_units, rows_all, layer.head_dim), torch.float32, device)
    if not rows_all:
        raise ValueError("query must have at least one row per unit")
    if tail_lse is not None:
        _check(tail_lse, "tail_lse", (n_units, rows_all), torch.float32, device)
    return rows_all


def _check_moments(layer: DeviceLayer, rows_all: int, **moments: Tensor | None) -> None:
    for name, moment in moments.items():
        if moment is not None:
            _check(moment, name, (layer.codes.shape[0], rows_all), torch.float32, layer.codes.device)


def _check_sketch(layer: DeviceLayer, sketch: dict[str, Tensor]) -> None:
    (n_units, n_tokens), device = layer.codes.shape, layer.codes.device
    n_channels, n_groups = layer.head_dim // 4, -(-n_tokens // SKETCH_GROUP)
    _check(sketch["channels"], "sketch['channels']", (n_units, n_channels), torch.uint8, device)
    _check(sketch["codes"], "sketch['codes']", (n_units, n_tokens, n_channels // 4), torch.uint8, device)
    for name in ("zero", "scale"):
        _check(sketch[name], f"sketch['{name}']", (n_units, n_groups, n_channels), torch.float16, device)


def _check_device(device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(f"the kernels need tensors on a CUDA device, got {device}")


def _check_pinned(tensor: Tensor, name: str) -> None:
    if tensor.numel() and not tensor.is_pinned():
        raise ValueError(f"{name} must be in pinned memory, which alone a kernel can read; use {name}.pin_memory()")
