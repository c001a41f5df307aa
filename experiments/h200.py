"""A decode step of KVFetch on a data-centre GPU: is it right, how long does each kernel take, what does dense cost.

One prepared run of under eight minutes, which needs torch and verkv only. Keys are synthetic, so the share of rows that
is fetched is that of the keys made here; times per row and per kernel are what carries over. Attention only: weights,
projections and sampling are left out everywhere.

    python experiments/h200.py --output h200.json --table h200.md
    python experiments/h200.py --dry-run            # on a CPU: tiny sizes through the torch reference
"""

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from verkv.bench.kernel_layer import DELTA, QWEN3_4B, SHORTLIST, UPPER_SHARES, KernelStep, Layer, Model, make_layer
from verkv.bench.kernels import captured, ceilings, elapsed
from verkv.context import SealedContext, SealPlan
from verkv.cuda import layout
from verkv.estimators.fetching import FetchPlan, fetch_plan
from verkv.estimators.sampling import decode_inclusion_probs
from verkv.estimators.shrinkage import binary_shrinkage
from verkv.kvfetch import FetchConfig
from verkv.sketches import RopePairSketch
from verkv.stats import FetchStats
from verkv.tiers import LEVEL_MASK, RESIDENT_BIT

CHECKED = ((5000, 0.05), (4096, 0.3), (20000, 0.01))  # tokens and epsilon
N_OWN_LAYERS = 8  # layers with device memory of their own, so that no cache keeps one for the next

MODELS = [
    QWEN3_4B,
    Model("Qwen3.5-9B", 8, 16, 4, 256),
    Model("Ministral-3-8B", 34, 32, 8, 128),
]
TINY = [Model("tiny", 4, 4, 2, 64)]


# --- what is timed --------------------------------------------------------------------------------------------------


class TorchStep:
    """The same step in plain torch: what a machine without the kernels computes, and the dry run times."""

    stages = {"decide": (), "attend": ()}  # noqa: RUF012

    def __init__(self, layer: Layer, shared: dict | None = None):
        self.layer, self.shared, self.arrays = layer, shared or {}, {}

    def copy(self) -> "TorchStep":
        """Itself: a CPU's caches are no concern of a dry run."""
        return self

    def __call__(self, stages: tuple[str, ...], epsilon: float) -> None:
        """Run some stages."""
        layer = self.layer
        if "decide" in stages:
            logits = layer.sketch.logits(layer.query[None])[0] * layer.scaling
            plan, shrinkage = solve(layer, logits, epsilon, torch.float32, KernelStep.upper_share)
            self.arrays |= {"union": plan.promoted.any(1), "shrunk": shrinkage < 1}
        if "attend" in stages:
            self.arrays["output"] = exact_attention(layer, self.arrays["union"], self.arrays["shrunk"], torch.float32)
            missing = self.arrays["union"] & ((layer.codes & RESIDENT_BIT) == 0)
            self.arrays["n_fetched"] = missing.sum(-1)


def solve(
    layer: Layer, logits: Tensor, epsilon: float, dtype: torch.dtype, upper_share: float | None
) -> tuple[FetchPlan, Tensor]:
    """The sort-based plan on given logits, and its shrinkage."""
    levels = layer.codes & LEVEL_MASK
    logits = logits.to(dtype)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    r = decode_inclusion_probs(levels, dtype)[:, None]
    residual = (levels > 0)[:, None].expand_as(weights)
    shrinkage = binary_shrinkage(weights, r, residual)
    plan = fetch_plan(weights, r, shrinkage, residual, weights.sum(-1), epsilon, DELTA, upper_share)
    return plan, shrinkage


def exact_attention(layer: Layer, union: Tensor, shrunk: Tensor, dtype: torch.dtype) -> Tensor:
    """Attention over resident and promoted tokens with their log-weights, (N, G, d)."""
    device = layer.query.device
    resident = (layer.codes & RESIDENT_BIT) != 0
    log_weight = (layer.codes & LEVEL_MASK).to(dtype)[:, None] * (math.log(2) / 8)
    log_weight = torch.where(shrunk | union[:, None], 0.0, log_weight)
    log_weight = torch.where((resident | union)[:, None], log_weight, -torch.inf)
    keys, values = layer.keys.to(device, dtype), layer.values.to(device, dtype)
    return (layer.query.to(dtype) @ keys.mT * layer.scaling + log_weight).softmax(-1) @ values


def timed(work: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Median time of some work, in microseconds; on a GPU as a CUDA graph."""
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return 1e6 * sorted(times)[repeats // 2]
    return replayed(captured(work, device), repeats)


def replayed(work: Callable[[], None], repeats: int) -> float:
    """Median time of some work on the current stream, in microseconds; one more is not counted."""
    return 1e6 * statistics.median([elapsed(work) for _ in range(repeats + 1)][1:])


# --- measurements ---------------------------------------------------------------------------------------------------


def check_kernels(model: Model, dtype: torch.dtype, device: torch.device, cases=CHECKED) -> list[dict]:
    """Kernels against float64, on the logits that they planned with."""
    from verkv.cuda.launch import unpack_bits

    results = []
    for (n_tokens, epsilon), upper_share in product(cases, UPPER_SHARES):
        layer = make_layer(model, n_tokens, 1, dtype, device, seed=n_tokens)
        step = KernelStep(layer)
        step.upper_share = upper_share
        epsilon = layout.safe_epsilon(epsilon)
        step(("score", "shortlist"), epsilon)
        logits = step.arrays["logits"].clone()
        step(("plan", "emit", "settle", "attend"), epsilon)
        plan, shrinkage = solve(layer, logits, epsilon, torch.float64, upper_share)
        union, shrunk = (unpack_bits(step.arrays[name], n_tokens) for name in ("mask", "shrunk"))
        output = exact_attention(layer, union, shrunk, torch.float64)
        error = (step.arrays["output"] - output).norm(dim=-1) / output.norm(dim=-1)
        results.append(
            {
                "model": model.name,
                "dtype": str(dtype),
                "n_tokens": n_tokens,
                "epsilon": epsilon,
                "upper_share": upper_share,
                "rows": plan.n_promoted.numel(),
                "k_differs": int((step.arrays["n_promoted"] != plan.n_promoted).sum()),
                "k_largest_difference": int((step.arrays["n_promoted"] - plan.n_promoted).abs().max()),
                "union_differs": int((union != plan.promoted.any(1)).sum()),
                "shrinkage_differs": int((shrunk != (shrinkage < 1)).sum()),
                "output_error": float(error.max()),
            }
        )
    return results


def check_contexts(model: Model, dtype: torch.dtype, device: torch.device, n_tokens: int = 5000) -> list[dict]:
    """Passes of a sealed context as a model's attention takes them: by the kernels, and with ``VERKV_CUDA=0``."""
    layer = make_layer(model, n_tokens, 1, dtype, device, seed=7)
    group, results = model.n_heads // model.n_kv_heads, []
    for n_queries, upper_share in product((1, 4), UPPER_SHARES):
        shape = (1, model.n_kv_heads, group, n_queries, model.head_dim)
        query = layer.query.view(*shape[:3], 1, -1).expand(shape).flatten(1, 2)
        query = query * torch.linspace(0.8, 1, n_queries, device=device)[:, None]
        tail = layer.query[:, :1].expand(-1, n_queries, -1).to(dtype)[None]
        (output, stats, by_kernels), (expected, reference, _) = (
            _attended(layer, setting, upper_share, query, tail) for setting in ("1", "0")
        )
        results.append(
            {
                "model": model.name,
                "dtype": str(dtype),
                "n_tokens": n_tokens,
                "n_queries": n_queries,
                "upper_share": upper_share,
                "by_kernels": by_kernels,
                "output_error": float((output - expected).norm() / expected.norm()),
                "bound_error": float((stats.bounds() - reference.bounds()).abs().max()),
                "promoted": [stats.promoted(), reference.promoted()],
                "fetched": [stats.fetched(), reference.fetched()],
                "shortlisted": [stats.shortlisted(), reference.shortlisted()],
            }
        )
    return results


def _attended(
    layer: Layer, setting: str, upper_share: float | None, query: Tensor, tail: Tensor
) -> tuple[Tensor, FetchStats, bool]:
    """Output and statistics of one pass of a new context, and whether the kernels took it."""
    device, n_padding = query.device, torch.zeros(1, dtype=torch.int64)
    stats = FetchStats("VerKV", sealed_layers=(0,), record_bounds=True)
    fetch = FetchConfig(0.05, DELTA, SHORTLIST, upper_share=upper_share)
    plan = SealPlan(layer.codes[None], n_padding, fetch, RopePairSketch())
    before = os.environ.get("VERKV_CUDA")
    os.environ["VERKV_CUDA"] = setting
    try:
        context = SealedContext(layer.keys[None].to(device), layer.values[None].to(device), plan, 0, stats)
        output = context.attend(query, tail, tail, None, layer.scaling)
    finally:
        os.environ.pop("VERKV_CUDA")
        if before is not None:
            os.environ["VERKV_CUDA"] = before
    return output, stats, "row_positions" in context.memory()["device_uncharged"]


def time_step(model: Model, n_tokens: int, batch: int, epsilons, device: torch.device, repeats: int) -> list[dict]:
    """Each stage's time by epsilon, as differences of graphs that end one stage later."""
    kind = KernelStep if device.type == "cuda" else TorchStep
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    first = kind(make_layer(model, n_tokens, batch, dtype, device, seed=1))
    steps = [first, *(first.copy() for _ in range(min(N_OWN_LAYERS, model.n_layers) - 1))]
    stages, results = tuple(kind.stages), []
    for epsilon in epsilons:
        until, record = 0.0, {"model": model.name, "n_tokens": n_tokens, "batch": batch, "epsilon": epsilon}
        record["upper_share"] = KernelStep.upper_share
        for last in range(1, len(stages) + 1):

            def work(names=stages[:last], epsilon=epsilon):
                for step in steps:
                    step(names, epsilon)

            total = timed(work, device, repeats) / len(steps)
            record[f"{stages[last - 1]}_us"] = total - until
            until = total
        fetched = first.arrays["n_fetched"].float().mean().item()
        n_bytes = fetched * first.layer.query.shape[0] * 2 * model.head_dim * 2
        record |= {
            "layer_us": until,
            "step_ms": until * model.n_layers / 1e3,
            "resident_rows": len(first.layer.rows.codes) / first.layer.query.shape[0],
            "fetched_rows": fetched,
            "fetched_MB_per_step": n_bytes * model.n_layers / 1e6,
        }
        if n_bytes > 1e6 and device.type == "cuda":  # resident rows are read meanwhile: a lower bound
            record["fetch_GBps"] = n_bytes / record["attend_us"] / 1e3
        results.append(record)
    return results


def time_dense(model: Model, n_tokens: int, batch: int, device: torch.device, repeats: int) -> dict[str, float]:
    """Attention over the whole cache: on the device, and moved there layer by layer, one ahead of the computation."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (batch, model.n_kv_heads, n_tokens, model.head_dim)
    query = torch.randn(batch, model.n_heads, 1, model.head_dim, dtype=dtype, device=device)
    caches = [[torch.empty(shape, dtype=dtype, device=device).normal_() for _ in "kv"] for _ in range(2)]

    def attend(cache):
        scaled_dot_product_attention(query, *cache, enable_gqa=True)

    resident = timed(lambda: [attend(cache) for cache in caches * 4], device, repeats) / 8
    result = {"dense_ms": resident * model.n_layers / 1e3}
    host = [torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda") for _ in "kv"]
    if device.type != "cuda":
        return result | {"dense_offloaded_ms": result["dense_ms"]}
    copies, copied, used = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()

    def offloaded(n_layers=4):
        main = torch.cuda.current_stream()
        used.record(main)
        for layer in range(n_layers):
            target = caches[layer % 2]
            with torch.cuda.stream(copies):
                copies.wait_event(used)
                for here, there in zip(target, host, strict=True):
                    here.copy_(there, non_blocking=True)
                copied.record(copies)
            main.wait_event(copied)
            attend(target)
            used.record(main)

    per_layer = replayed(offloaded, max(3, repeats // 4)) / 4
    return result | {"dense_offloaded_ms": per_layer * model.n_layers / 1e3}


# --- the run --------------------------------------------------------------------------------------------------------


def table(results: list[dict]) -> str:
    """Markdown: one line a setting."""
    columns = ["model", "tokens", "batch", "ε", "score + shortlist + decide, ms", "attend, ms", "step, ms"]
    columns += ["fetched rows per KV head", "dense, ms", "step / dense", "dense offloaded, ms"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for result in results:
        attend = result["step_ms"] * result["attend_us"] / result["layer_us"]
        cells = [result["model"], result["n_tokens"], result["batch"], result["epsilon"]]
        cells += [f"{result['step_ms'] - attend:.2f}", f"{attend:.2f}", f"{result['step_ms']:.2f}"]
        cells += [f"{result['fetched_rows']:.0f}", f"{result['dense_ms']:.2f}"]
        cells += [f"{result['step_ms'] / result['dense_ms']:.2f}", f"{result['dense_offloaded_ms']:.1f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def environment(device: torch.device) -> dict:
    """Versions and device."""
    found = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    if device.type == "cuda":
        from verkv.cuda.build import nvrtc_bindings

        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "multiprocessors": properties.multi_processor_count}
        found["nvrtc"] = nvrtc_bindings().nvrtcVersion()[1:]
    return found


def main(arguments: list[str] | None = None) -> dict:
    """Run, print the table, write the files; returns everything that was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    parser.add_argument("--table", type=Path, help="where to write the Markdown table")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, in plain torch")
    parser.add_argument("--seconds", type=float, default=420, help="begin no setting after so many seconds")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --dry-run needs none")
    device = torch.device("cpu") if options.dry_run else torch.device("cuda", torch.cuda.current_device())
    models, lengths, batches, epsilons = MODELS, (32768, 131072), (1, 4, 8), (0.5, 0.1, 0.05, 0.01)
    if options.dry_run:
        models, lengths, batches, epsilons, options.repeats = TINY, (256, 700), (1, 2), (0.5, 0.05), 3
    start = time.perf_counter()
    report = {"environment": environment(device), "models": [asdict(model) for model in models], "checks": []}
    report["contexts"] = []
    report |= {"settings": [], "left_out": []}
    report["ceilings"] = ceilings(device, options.repeats) if device.type == "cuda" else {}
    if device.type == "cuda":  # what is wrong is shown first
        for dtype in (torch.bfloat16, torch.float16):
            for model in models[:2]:
                report["checks"] += check_kernels(model, dtype, device)
                report["contexts"] += check_contexts(model, dtype, device)
        print(json.dumps([report["checks"], report["contexts"]], indent=1))
    for n_tokens in lengths:
        for model in models:
            for batch in batches:
                if time.perf_counter() - start > options.seconds:
                    report["left_out"].append([model.name, n_tokens, batch])
                    continue
                steps = time_step(model, n_tokens, batch, epsilons, device, options.repeats)
                dense = time_dense(model, n_tokens, batch, device, options.repeats)
                report["settings"] += [step | dense for step in steps]
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    report["seconds"] = time.perf_counter() - start
    print(table(report["settings"]))
    print(json.dumps({name: report[name] for name in ("environment", "ceilings", "left_out", "seconds")}))
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    if options.table:
        options.table.write_text(table(report["settings"]) + "\n")
    return report


if __name__ == "__main__":
    main()
