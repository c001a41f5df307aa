"""Does the certificate hold with a real sketch, and what does it read? Violations and traffic against the tolerance.

Every context is prefilled and scored once, kept on disk, and each setting is sealed on it. The decode steps are those
of dense attention's own greedy continuation: their queries are what the theorem speaks of, fixed before the draw. Each
step is planned by itself, all of them at once (``--through-model`` feeds them token by token through the model and the
cache instead, which is slower), and every attention decision is compared with exact attention. One JSON line per
context, draw and setting; an interrupted run continues where it was.

    python experiments/figure_adherence.py --output docs/results/adherence.jsonl
"""

import argparse
import copy
import json
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from contexts import build_context
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from verkv import KVzipPress, VerKVPress, __version__, record_queries
from verkv.demo import encode_task
from verkv.demo_model import demo_model_path
from verkv.replay import DecodeReplay

EPSILONS = (0.01, 0.05, 0.1, 0.3)
OUTPUT_EPSILONS = (0.1, 0.2, 0.3)
COMMON = {"compression_ratio": 0.9375, "n_sink": 32, "n_local": 32}
PLAIN = {"alpha": 0.0, "sketch": "rope_pair", "outliers": 0.0, "error_aware": False, "shortlist": 32, "sided": False}
# Name: options of VerKVPress. "paper" and "default" are the two main columns; the others change one thing.
METHODS = {
    "paper": {"paper": True, "shortlist": 32},
    "default": {},
    "exact sketch": {"sketch": "exact"},
    "blind": PLAIN,
    "paper + mixture": {"paper": True, "alpha": 0.5, "shortlist": 32},
    "blind + mixture": PLAIN | {"alpha": 0.5},
    "blind + transform sketch": PLAIN | {"sketch": "transform"},
    "blind + outliers": PLAIN | {"outliers": 0.004},
    "blind + moments": PLAIN | {"error_aware": True},
    "blind + keys first": PLAIN | {"key_rounds": 1},
    "blind + sided": PLAIN | {"sided": True},
    "default, sides alike": {"sided": False},
    "sides alike + shortlist": {"sided": False, "shortlist": 32},
    "sides alike + moments everywhere": {"sided": False, "error_aware": True},
    "sides alike + moments + keys first": {"sided": False, "error_aware": True, "key_rounds": 1},
    "sides alike, 2-bit sketch": {"sided": False, "sketch": "rope_pair"},
    "default, calibrated D": {"target": "denominator", "calibrate": "layer"},
    "calibrated output": {"target": "output", "calibrate": "layer"},
    "bounded output": {"target": "output"},
}
OUTPUT_METHODS = ("calibrated output", "bounded output")
HISTOGRAM = torch.linspace(-6.0, 2.0, 161)  # bins of log10 of the output error, so that contexts can be pooled


@dataclass(frozen=True)
class Prefix:
    """A prefilled and scored context, and what dense attention says next."""

    cache: DynamicCache
    scores: dict[int, torch.Tensor]
    queries: dict[int, torch.Tensor]
    prefix_length: int
    question_ids: torch.Tensor
    answer_ids: torch.Tensor


@torch.inference_mode()
def make_prefix(model, tokenizer, kind: str, n_tokens: int, seed: int, n_steps: int) -> Prefix:
    """Prefill, score, and continue with dense attention for ``n_steps`` tokens."""
    context_ids, question_ids = encode_task(tokenizer, build_context(kind, tokenizer, n_tokens, seed), model.device)
    cache, source = DynamicCache(), KVzipPress(tokenizer=tokenizer).source()
    source.prepare(model)
    with record_queries(model) as queries:
        model.model(input_ids=context_ids, past_key_values=cache)
    scores = source.after_prefill(model, cache, context_ids, None)
    dense, next_ids, answer = copy.deepcopy(cache), question_ids, []
    for _ in range(n_steps):
        next_ids = model(input_ids=next_ids, past_key_values=dense, logits_to_keep=1).logits[:, -1:].argmax(-1)
        answer.append(next_ids)
    return Prefix(cache, scores, dict(queries), source.prefix_length, question_ids, torch.cat(answer, 1))


def load_prefix(folder: Path, make, *key) -> Prefix:
    """From disk, or made now."""
    path = folder / ("_".join(map(str, key)) + ".pt")
    if not path.exists():
        prefix = make(*key)
        state = vars(prefix) | {"cache": [(layer.keys, layer.values) for layer in prefix.cache.layers]}
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)
    state = torch.load(path, weights_only=True)
    return Prefix(**state | {"cache": DynamicCache(state["cache"])})


@torch.inference_mode()
def dense_steps(model, prefix: Prefix) -> tuple[DynamicCache, dict[int, torch.Tensor]]:
    """Question and answer in one dense pass: the cache with both, and the queries of the answer's tokens."""
    cache = copy.deepcopy(prefix.cache)
    with record_queries(model, prefix.answer_ids.shape[1]) as queries:
        model.model(input_ids=torch.cat([prefix.question_ids, prefix.answer_ids], 1), past_key_values=cache)
    return cache, dict(queries)


@torch.inference_mode()
def replayed(model, prefix: Prefix, steps, press: VerKVPress) -> dict:
    """Seal a copy of the prefix and play all decode steps on every layer; the errors of all decisions."""
    cache = copy.deepcopy(prefix.cache)
    press.seal(model, cache, prefix.scores, prefix_length=prefix.prefix_length, queries=prefix.queries)
    dense, queries = steps
    n_tokens, found = prefix.cache.get_seq_length(), []
    positions = torch.arange(dense.get_seq_length() - prefix.answer_ids.shape[1], dense.get_seq_length())
    for i, layer in enumerate(cache.layers):
        tail = tuple(t[:, :, n_tokens:] for t in (dense.layers[i].keys, dense.layers[i].values))
        replay = DecodeReplay(layer.context, queries[i], positions, 0, tail)
        tolerances = layer.context.tolerances
        found.append(replay.errors(press.epsilon if tolerances is None else tolerances))
    errors = {name: torch.stack([getattr(x, name) for x in found]).flatten() for name in ("denominator", "output")}
    errors["kv_read"] = float(torch.stack([x.kv_read for x in found]).mean())
    errors["exact_rate"] = sum(x.exact_rate for x in found) / len(found)
    if found[0].output_bound is not None:
        errors["output_bound"] = torch.stack([x.output_bound for x in found]).flatten()
    return errors | {"report": press.memory_report()}


@torch.inference_mode()
def audited(model, prefix: Prefix, press: VerKVPress):
    """Seal a copy of the prefix and feed question and answer; the press' statistics."""
    cache = copy.deepcopy(prefix.cache)
    press.seal(model, cache, prefix.scores, prefix_length=prefix.prefix_length, queries=prefix.queries)
    model(input_ids=prefix.question_ids, past_key_values=cache, logits_to_keep=1)
    for i in range(prefix.answer_ids.shape[1]):
        model(input_ids=prefix.answer_ids[:, i : i + 1], past_key_values=cache, logits_to_keep=1)
    stats = press.stats
    errors = {"denominator": stats.relative_errors("decode"), "output": stats.output_errors("decode")}
    errors |= {"kv_read": stats.kv_read_per_token, "exact_rate": stats.exact_rate("decode")}
    if any(record.output_bound is not None for record in stats.records("decode")):
        errors["output_bound"] = stats.output_bounds("decode")
    return errors | {"report": press.memory_report()}


def result(errors: dict, epsilon: float) -> dict:
    """What one run adds to the tables: counts, so that runs can be pooled."""
    output, report = errors["output"], errors["report"]
    histogram = torch.histogram(output.clamp_min(1e-6).log10().clamp(-6, 2), HISTOGRAM).hist
    found = {
        "decisions": len(output),
        "denominator_violations": int((errors["denominator"] > epsilon).sum()),
        "output_violations": int((output > epsilon).sum()),
        "kv_read": errors["kv_read"],
        "exact_rate": errors["exact_rate"],
        "output_error_histogram": [int(n) for n in histogram],
        "resident_share": report.resident_share,
        "uncharged_bytes": sum(report.device_uncharged.values()) - report.device_uncharged.get("tail", 0),
        "full_bytes": report.full_bytes,
    }
    if "output_bound" in errors:
        found["bound_failures"] = int((output > errors["output_bound"]).sum())
    return found


def cells(options) -> list[tuple[str, float, float, int]]:
    """(method, epsilon, delta, draws) of every cell; the two main columns get more draws."""
    found = []
    for name in options.methods:
        is_main = name in ("paper", "default")
        draws = options.draws if is_main else max(1, options.draws // 2)
        epsilons = OUTPUT_EPSILONS if name in OUTPUT_METHODS else options.epsilons
        found += [(name, epsilon, 0.1, draws) for epsilon in epsilons]
        if name in ("paper", "default"):
            found += [(name, epsilon, 0.05, draws) for epsilon in options.epsilons]
    return found


def run(options) -> list[dict]:
    """All cells on all contexts; results that are there already are kept."""
    name = options.model or str(demo_model_path())
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name).eval()
    versions = {"verkv": __version__, "python": platform.python_version()}
    versions |= {package: version(package) for package in ("torch", "transformers", "kvpress")}
    lines = read_lines(options.output)
    done = {line_key(line) for line in lines}
    make = lambda *key: make_prefix(model, tokenizer, *key)  # noqa: E731
    tasks = [
        (kind, seed, cell, draw)
        for kind in options.kinds
        for seed in options.seeds
        for cell in cells(options)
        for draw in range(cell[3])
    ]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    loaded = None
    with options.output.open("a") as file:
        for kind, seed, (method, epsilon, delta, _), draw in tqdm(tasks):
            key = (kind, options.tokens, seed, draw, method, epsilon, delta)
            if key in done:
                continue
            if loaded is None or loaded[0] != (kind, seed):
                arguments = (kind, options.tokens, seed, options.steps)
                prefix = load_prefix(options.prefixes, make, *arguments)
                loaded = (kind, seed), prefix, dense_steps(model, prefix)
            press = VerKVPress(
                KVzipPress(), epsilon=epsilon, delta=delta, seed=1000 * seed + draw, **COMMON | METHODS[method]
            )
            if options.through_model:
                press.audit = True
                errors = audited(model, loaded[1], press)
            else:
                errors = replayed(model, loaded[1], loaded[2], press)
            line = dict(zip(KEY, key, strict=True)) | result(errors, epsilon)
            line |= {"versions": versions, "model": options.model or "SmolLM2-135M-Instruct"}
            file.write(json.dumps(line) + "\n")
            file.flush()
            lines.append(line)
    return lines


KEY = ("kind", "n_tokens", "seed", "draw", "method", "epsilon", "delta")


def line_key(line: dict) -> tuple:
    """What identifies a line."""
    return tuple(line[name] for name in KEY)


def read_lines(path: Path) -> list[dict]:
    """Earlier results; a last line that was cut off is left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


# --- tables -----------------------------------------------------------------------------------------------------------


def rate_with_interval(lines: list[dict], name: str, n_resamples: int = 2000) -> tuple[float, float, float]:
    """Pooled rate, and a 95 % interval by resampling clusters: a context with one draw is a cluster."""
    counts = torch.tensor([[line[name], line["decisions"]] for line in lines], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(counts), (n_resamples, len(counts)), generator=generator)
    resampled = counts[picks].sum(1)
    rates = resampled[:, 0] / resampled[:, 1]
    low, high = rates.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(counts[:, 0].sum() / counts[:, 1].sum()), low, high


def output_quantile(lines: list[dict], share: float) -> float:
    """A quantile of the output error, from pooled histograms, interpolated within the bin (log scale)."""
    counts = torch.tensor([line["output_error_histogram"] for line in lines], dtype=torch.float64).sum(0)
    cumulative = torch.cat([torch.zeros(1), counts.cumsum(0) / counts.sum()])
    i = int(torch.searchsorted(cumulative, share)) - 1
    inside = (share - cumulative[i]) / (cumulative[i + 1] - cumulative[i])
    return float(10 ** (HISTOGRAM[i] + inside * (HISTOGRAM[i + 1] - HISTOGRAM[i])))


def mean(lines: list[dict], name: str) -> float:
    """Mean over lines; every line has the same number of steps."""
    return sum(line[name] for line in lines) / len(lines)


def markdown(lines: list[dict]) -> str:
    """One row per method, delta and figure, one column per tolerance."""
    epsilons = sorted({line["epsilon"] for line in lines})
    rows = ["| method | delta | | " + " | ".join(f"eps {e:g}" for e in epsilons) + " |"]
    rows.append("|---" * (3 + len(epsilons)) + "|")
    for method, delta in dict.fromkeys((line["method"], line["delta"]) for line in lines):
        by_epsilon = {
            e: [x for x in lines if (x["method"], x["delta"], x["epsilon"]) == (method, delta, e)] for e in epsilons
        }
        figures = {
            "decisions": lambda ls: f"{sum(x['decisions'] for x in ls):,}",
            "violations of D [95 %]": lambda ls: "{:.2%} [{:.2%}, {:.2%}]".format(
                *rate_with_interval(ls, "denominator_violations")
            ),
            "KV read per token": lambda ls: f"{mean(ls, 'kv_read'):.1%}",
            "output error, 90th percentile": lambda ls: f"{output_quantile(ls, 0.9):.3f}",
            "output error > eps": lambda ls: f"{rate_with_interval(ls, 'output_violations')[0]:.1%}",
        }
        for title, figure in figures.items():
            cells_ = [figure(by_epsilon[e]) if by_epsilon[e] else "" for e in epsilons]
            rows.append(f"| {method} | {delta:g} | {title} | " + " | ".join(cells_) + " |")
    return "\n".join(rows)


# Colours of Okabe and Ito, which differ for colour-blind readers, too; each line also has a marker of its own.
STYLES = {
    "paper": ("#D55E00", "o", "as published (2-bit sketch)"),
    "blind": ("#E69F00", "v", "blind plan alone"),
    "default": ("#0072B2", "s", "VerKV, default"),
    "default, calibrated D": ("#56B4E9", "D", "VerKV, calibrated denominator"),
    "exact sketch": ("#000000", "x", "exact sketch (oracle)"),
    "calibrated output": ("#009E73", "^", "VerKV, calibrated output"),
    "bounded output": ("#CC79A7", "P", "VerKV, bounded output"),
}


def plot(lines: list[dict], path: Path) -> None:
    """Violations and traffic against the tolerance, output error against traffic; SVG and PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13.5, 4.2), layout="constrained")
    for method, (colour, marker, label) in STYLES.items():
        chosen = [line for line in lines if line["method"] == method and line["delta"] == 0.1]
        by_epsilon = {e: [x for x in chosen if x["epsilon"] == e] for e in sorted({x["epsilon"] for x in chosen})}
        if not by_epsilon:
            continue
        style = {"color": colour, "marker": marker, "label": label, "linewidth": 1.5, "markersize": 5}
        read = [mean(ls, "kv_read") for ls in by_epsilon.values()]
        if method not in OUTPUT_METHODS:
            rates = [rate_with_interval(ls, "denominator_violations") for ls in by_epsilon.values()]
            middle, low, high = (torch.tensor(r).clamp_min(1e-5) for r in zip(*rates, strict=True))
            axes[0].errorbar(list(by_epsilon), middle, [middle - low, high - middle], capsize=2, **style)
            axes[1].plot(list(by_epsilon), read, **style)
        axes[2].plot(read, [output_quantile(ls, 0.9) for ls in by_epsilon.values()], **style)
    axes[0].axhline(0.1, color="grey", linestyle="--", linewidth=1)
    axes[0].text(0.3, 0.105, "delta", color="grey", va="bottom", ha="right")
    labels = [
        ("tolerance epsilon of the denominator", "decisions beyond epsilon (share)"),
        ("tolerance epsilon of the denominator", "KV read per token (share of the cache)"),
        ("KV read per token (share of the cache)", "output error, 90th percentile (relative)"),
    ]
    for axis, (x_label, y_label) in zip(axes, labels, strict=True):
        axis.set(xscale="log", yscale="log", xlabel=x_label, ylabel=y_label)
        axis.grid(True, which="major", alpha=0.3)
    axes[0].set_ylim(bottom=8e-6)
    handles = {}
    for axis in axes:
        handles |= dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=150)
    plt.close(figure)


def main() -> None:
    """Run all settings, print the table, draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--kinds", nargs="+", default=["prose", "code", "records"])
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--draws", type=int, default=2, help="of the two main columns; half as many of the others")
    parser.add_argument("--steps", type=int, default=32, help="decode steps per run")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--epsilons", type=float, nargs="+", default=list(EPSILONS))
    parser.add_argument("--through-model", action="store_true", help="feed every token through the model")
    parser.add_argument("--output", type=Path, default=Path("experiments/results/adherence.jsonl"))
    parser.add_argument("--prefixes", type=Path, default=Path("experiments/results/prefixes"))
    options = parser.parse_args()
    lines = run(options)
    print(markdown(lines))
    plot(lines, options.output)


if __name__ == "__main__":
    main()
