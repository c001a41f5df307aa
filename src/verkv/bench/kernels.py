"""A decode step's kernels on a GPU: the time of each stage, and how near it comes to the bandwidths of the machine.

The layer has a model's shape and synthetic keys, so the number of rows that it fetches is no model's; times by kernel
and by row are what carries over. Stages are timed as parts of a step: a CUDA graph ends after each of them, and what it
takes longer than the one before is the stage's time. Each graph goes through several layers of the same sizes, with
device and host memory of their own, more than a GPU's cache holds, and shared scratch, as a model's layers have it.

A stage's bandwidth is that of the bytes that it must move, its inputs and results, so its share of the ceiling tells
how far it is from a stage that only moves data. Those of the whole step are the sum over the stages.
"""

import functools
import itertools
import random
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch

from verkv.bench.kernel_layer import DELTA, QWEN3_4B, UPPER_SHARES, KernelStep, Traffic, make_layer, traffic
from verkv.bench.settings import BenchSettings, BenchSkipped
from verkv.bench.timing import Comparison, percentile
from verkv.cuda.layout import safe_epsilon

MODEL, DTYPE = QWEN3_4B, torch.bfloat16
TOKENS, QUICK_TOKENS, MIN_TOKENS = 32_768, 2048, 8
N_LAYERS, QUICK_LAYERS = 8, 2
CEILING_BYTES, QUICK_CEILING_BYTES = 2**30, 2**26
STEP = "whole step"
STAGES = {
    "score": ("score",),
    "shortlist": ("shortlist",),
    "plan": ("plan",),
    "emit + settle": ("emit", "settle"),
    "attend": ("attend",),
}


def run(settings: BenchSettings) -> list[Comparison]:
    """Time the stages of one layer's decode step, with the two sides bounded apart and by Eq. (7).

    Parameters
    ----------
    settings : BenchSettings
        ``tokens`` are those of the layer: 32,768 by default, 2,048 with ``quick``.

    Returns
    -------
    list of Comparison
        Seconds of GPU time for one layer, by stage and of the whole step, which a ratio is the share of. ``facts``
        has the ceilings and, by stage, bytes, bandwidths and their shares of the ceilings.

    Raises
    ------
    BenchSkipped
        If there is no GPU, or it cannot run the kernels.
    ValueError
        If there are fewer than eight tokens.
    """
    device = settings.torch_device
    if not _is_gpu(device):
        raise BenchSkipped("needs a CUDA device")
    from verkv.cuda import CudaUnavailable, dispatch

    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        dispatch.warmup(MODEL.head_dim, MODEL.n_heads // MODEL.n_kv_heads, DTYPE, index)
    except CudaUnavailable as error:
        raise BenchSkipped(f"the kernels cannot run on this device: {error}") from error
    with torch.cuda.device(index):
        return _run(settings)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _run(settings: BenchSettings) -> list[Comparison]:
    rounds = settings.n_rounds(25)
    device = torch.empty(0, device=settings.torch_device).device  # with its number
    steps = _make_steps(settings, device)
    n_bytes = QUICK_CEILING_BYTES if settings.quick else CEILING_BYTES
    limits = ceilings(device, rounds, n_bytes)
    comparisons = []
    for upper_share, bound in zip(UPPER_SHARES[::-1], ("the two sides apart (default)", "Eq. (7)"), strict=True):
        for step in steps:
            step.upper_share = upper_share
        seconds = time_stages(steps, settings.epsilon, rounds, settings.seed)
        first = steps[0]
        first.clear()
        first(tuple(first.stages), safe_epsilon(settings.epsilon))  # its results, for the bytes
        title = f"kernels: {MODEL.name}'s layer, {first.sizes.n_tokens:,} tokens, {bound}"
        comparison = Comparison(title, STEP, seconds, "GPU")
        comparisons.append(replace(comparison, facts=_facts(comparison, first, settings.epsilon, limits)))
    return comparisons


def _make_steps(settings: BenchSettings, device: torch.device) -> list[KernelStep]:
    """Of as many layers as a graph goes through; all have the same content."""
    n_tokens = settings.tokens or (QUICK_TOKENS if settings.quick else TOKENS)
    if n_tokens < MIN_TOKENS:
        raise ValueError(f"--tokens must be at least {MIN_TOKENS} for kernels, got {n_tokens}")
    kept = 1 - settings.compression_ratio
    layer = make_layer(MODEL, n_tokens, 1, DTYPE, device, settings.seed, kept)
    first, n_layers = KernelStep(layer), QUICK_LAYERS if settings.quick else N_LAYERS
    return [first, *(first.copy(own_host=True) for _ in range(n_layers - 1))]


# --- time -----------------------------------------------------------------------------------------------------------


def time_stages(steps: list[KernelStep], epsilon: float, rounds: int, seed: int) -> dict[str, list[float]]:
    """Seconds of one layer, by stage and of the whole step, in interleaved rounds.

    Parameters
    ----------
    steps : list of KernelStep
        Of layers of the same sizes, which a graph goes through one after the other.
    epsilon : float
        Tolerance.
    rounds : int
        In each round every graph is timed once, in an order drawn anew; a first round is not counted.
    seed : int
        Of the order.

    Returns
    -------
    dict of str to list of float
        One number a round. A stage's is a difference, and may be below zero where noise is larger than the stage.
    """
    names = list(itertools.accumulate(STAGES.values()))  # each is a step up to the end of a stage

    def go(stages: tuple[str, ...]) -> None:
        for step in steps:
            step(stages, safe_epsilon(epsilon))

    steps[0].clear()
    graphs = [captured(functools.partial(go, stages), steps[0].layer.query.device) for stages in names]
    seconds: dict[str, list[float]] = {name: [] for name in (STEP, *STAGES)}
    order = random.Random(seed)
    for number in range(rounds + 1):
        until = [0.0] * len(graphs)
        for i in order.sample(range(len(graphs)), len(graphs)):
            steps[0].clear()
            until[i] = elapsed(graphs[i], before=graphs[i]) / len(steps)
        if number:
            seconds[STEP].append(until[-1])
            for name, end, begin in zip(STAGES, until, [0.0, *until], strict=False):
                seconds[name].append(end - begin)
    return seconds


def captured(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A CUDA graph of some work, as a function that replays it.

    Parameters
    ----------
    work : function
        Only queues work of fixed shapes. It is called twice: what it loads or compiles, it does before the capture.
    device : torch.device
        Where it queues it.

    Returns
    -------
    function
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def elapsed(work: Callable[[], None], before: Callable[[], None] | None = None) -> float:
    """Seconds between two events of the current stream around some work.

    Parameters
    ----------
    work : function
        Queues what is timed.
    before : function, optional
        Queues other work first, so that the device is busy until what is timed has been queued: its launch is not
        counted then.

    Returns
    -------
    float
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if before is not None:
        before()
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def ceilings(device: torch.device, rounds: int, n_bytes: int = CEILING_BYTES) -> dict[str, float]:
    """Bandwidths that no kernel can beat: a copy on the device, and pinned host memory to the device.

    Parameters
    ----------
    device : torch.device
    rounds : int
        The median of so many; one more is not counted.
    n_bytes : int
        Of the copy; half as many are read from the host.

    Returns
    -------
    dict of str to float
        GB/s (10^9 bytes); a copy reads and writes, and both count.
    """
    source = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    host = torch.empty(n_bytes // 2, dtype=torch.uint8, pin_memory=source.is_cuda)
    times = {
        "copy": lambda: target.copy_(source),
        "read": lambda: target[: len(host)].copy_(host, non_blocking=True),
    }
    copy, read = (statistics.median([elapsed(work) for _ in range(rounds + 1)][1:]) for work in times.values())
    return {"device_copy_GBps": 2 * n_bytes / copy / 1e9, "pinned_read_GBps": len(host) / read / 1e9}


# --- facts ----------------------------------------------------------------------------------------------------------


def _facts(comparison: Comparison, step: KernelStep, epsilon: float, limits: dict[str, float]) -> dict[str, object]:
    """Everything but the times."""
    moved = traffic(step, epsilon)
    moved[STEP] = sum(moved.values(), Traffic(0))
    n_units, group, head_dim = step.layer.query.shape
    return {
        "query heads": n_units * group,
        "KV heads": n_units,
        "head dim": head_dim,
        "epsilon": epsilon,
        "delta": DELTA,
        "upper share of delta": "none" if step.upper_share is None else step.upper_share,
        "resident rows of a KV head": len(step.layer.rows.codes) / n_units,
        "fetched rows of a KV head": float(step.arrays["n_fetched"].double().mean()),
        "promoted tokens of a query head": float(step.arrays["n_promoted"].double().mean()),
        "ceilings, GB/s": {"device copy": limits["device_copy_GBps"], "pinned read": limits["pinned_read_GBps"]},
    } | {f"{name}, of one layer": _achieved(comparison, name, moved[name], limits) for name in (*STAGES, STEP)}


def _achieved(comparison: Comparison, stage: str, moved: Traffic, limits: dict[str, float]) -> dict[str, float]:
    """Spread of a stage's time, and its bandwidths at the median."""
    ordered, median = sorted(comparison.seconds[stage]), comparison.median(stage)
    found = {"us, 10 %": 1e6 * percentile(ordered, 0.1), "us, 90 %": 1e6 * percentile(ordered, 0.9)}
    for side, ceiling, n_bytes in (("device", "device_copy", moved.device), ("pinned", "pinned_read", moved.host)):
        if n_bytes == 0:
            continue
        found[f"bytes that must move, {side}"] = n_bytes
        if median > 0:  # noise can hide a stage
            rate = n_bytes / median / 1e9
            found[f"GB/s, {side}"] = rate
            found[f"share of the ceiling, {side}"] = rate / limits[f"{ceiling}_GBps"]
    return found
