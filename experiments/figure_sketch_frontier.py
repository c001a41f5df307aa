"""Logit error of every key sketch against its bytes, on a real model.

Contexts of three kinds are prefilled: prose with needles, XQuAD paragraphs (if VERKV_DATA names a folder that holds
xquad.en.json), and Python source. Sketches are fitted with the queries of the last context positions and tested with
those of the question and of the model's own answer. One JSON line per context, sketch and size; lines that are there
are not computed again. A CSV table, a figure (PNG and SVG), and a Markdown table on standard output at the end.

    python experiments/figure_sketch_frontier.py --output docs/results/sketch_frontier
"""

import argparse
import csv
import json
import os
import platform
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from verkv import __version__
from verkv.attention import observe_attention
from verkv.demo import Task, build_task, encode_task
from verkv.demo_model import demo_model_path
from verkv.rotary import Rotary, rotary_from_config
from verkv.sketches import (
    PageMinMaxSketch,
    ProductQuantizationSketch,
    QueryPCASketch,
    RopePairSketch,
    Sketch,
    TransformSketch,
    fit_key_basis,
)

SIZES = (0.5, 1.0, 2.0)  # times the 2-bit RoPE pair sketch's bytes
N_FIRST = 16  # tokens left out of the error: always exact, and unlike all others
N_BEST = 64  # of the tokens with the largest logits, how many the sketch finds
OUTPUT = Path("experiments/results/sketch_frontier")
# Title, colour (Okabe and Ito's, which colour-blind readers can tell apart) and marker in the figure.
STYLES = {
    "rope_pair": ("2-bit RoPE pairs (paper)", "#000000", "o"),
    "query_pca": ("query-weighted PCA per head", "#E69F00", "s"),
    "product_quantization": ("product quantisation (PQCache)", "#009E73", "^"),
    "page_minmax": ("page minima and maxima (Quest)", "#CC79A7", "D"),
    "transform": ("transform", "#0072B2", "*"),
}


@dataclass(frozen=True)
class Capture:
    """What attention saw of one context.

    Attributes
    ----------
    keys : list of Tensor, shape (1, Hkv, T, d), per layer
    fit, test : list of Tensor, shape (1, Hq, M, d), per layer
        Queries of the last context positions; of question and answer.
    scaling : list of float, per layer
    """

    keys: list[Tensor]
    fit: list[Tensor]
    test: list[Tensor]
    scaling: list[float]


def tasks(tokenizer, n_tokens: int, seed: int) -> dict[str, Task]:
    """A context and a question of each kind there is text for."""
    found = {"prose": build_task(tokenizer, n_tokens, seed)}
    source = Path(sysconfig.get_paths()["stdlib"], ("argparse.py", "typing.py", "tarfile.py")[seed % 3])
    question = "\nWhich class does this module define first, and what is it for?"
    found["code"] = Task(_cut(tokenizer, source.read_text(), n_tokens), question, " The first class", "")
    path = Path(os.environ.get("VERKV_DATA", ""), "xquad.en.json")
    if "VERKV_DATA" in os.environ and path.exists():
        articles = json.loads(path.read_text())["data"]
        paragraphs = [paragraph for article in articles[10 * seed :] for paragraph in article["paragraphs"]]
        text = "\n\n".join(paragraph["context"] for paragraph in paragraphs)
        question = "\n" + paragraphs[0]["qas"][0]["question"]
        found["XQuAD"] = Task(_cut(tokenizer, text, n_tokens), question, " The answer is", "")
    return found


def _cut(tokenizer, text: str, n_tokens: int) -> str:
    return tokenizer.decode(tokenizer.encode(text[: 12 * n_tokens], add_special_tokens=False)[:n_tokens])


@torch.inference_mode()
def capture(model, tokenizer, task: Task, n_fit: int, n_answer: int) -> Capture:
    """Prefill, ask, answer greedily with dense attention; keep keys and queries."""
    context_ids, next_ids = encode_task(tokenizer, task, model.device)
    queries, scalings = {}, {}

    def observe(module, query, key, scaling):
        queries.setdefault(module.layer_idx, []).append(query)
        scalings[module.layer_idx] = scaling

    cache = DynamicCache()
    with observe_attention(observe):
        model(input_ids=context_ids, past_key_values=cache, logits_to_keep=1)
        fit = {layer: seen[0][:, :, -n_fit:].clone() for layer, seen in queries.items()}
        keys = {layer: cache.layers[layer].keys.clone() for layer in fit}
        queries.clear()
        for _ in range(1 + n_answer):
            logits = model(input_ids=next_ids, past_key_values=cache, logits_to_keep=1).logits
            next_ids = logits[:, -1:].argmax(-1)
    layers = sorted(keys)
    test = [torch.cat(queries[layer], dim=2) for layer in layers]
    return Capture([keys[i] for i in layers], [fit[i] for i in layers], test, [scalings[i] for i in layers])


def recipes(rotary: Rotary, head_dim: int, bases: list) -> Iterator[tuple[str, float, Callable[[int], Sketch]]]:
    """(name, size, recipe of a layer) of everything that is compared; ``bases`` are another context's."""
    default = RopePairSketch(rotary_dim=rotary.rotary_dim)
    n_bits = default.charged_bytes(default.group_size, head_dim) * 8 // default.group_size
    for size in SIZES:
        bits = round(size * n_bits)
        rope_pair = RopePairSketch(fraction=size * default.fraction, rotary_dim=rotary.rotary_dim)
        sketches = [
            rope_pair,
            QueryPCASketch(bits),
            ProductQuantizationSketch(bits),
            PageMinMaxSketch(bits_per_token=bits),
            TransformSketch(rotary, bits),
        ]
        for sketch in sketches:
            yield sketch.name, size, lambda layer, sketch=sketch: sketch
    yield "transform, keys as cached", 1.0, lambda layer: TransformSketch(None)
    yield "transform, without queries", 1.0, lambda layer: _WithoutQueries(TransformSketch(rotary))
    yield "transform, basis of another kind of context", 1.0, lambda layer: TransformSketch(rotary, basis=bases[layer])


@dataclass(frozen=True)
class _WithoutQueries:
    sketch: Sketch

    def build(self, keys: Tensor, queries: Tensor) -> Sketch:
        return self.sketch.build(keys)


def measure(data: Capture, recipe: Callable[[int], Sketch]) -> dict:
    """Errors of one sketch, averaged over layers and KV heads; bytes; time relative to dense scoring."""
    errors, absolute, found = [], [], []
    for layer, (keys, test, scaling) in enumerate(zip(data.keys, data.test, data.scaling, strict=True)):
        sketch = recipe(layer).build(keys, data.fit[layer])
        rows = test.unflatten(1, (keys.shape[1], -1)).flatten(2, 3).float()  # (1, Hkv, G * M, d)
        exact = (rows @ keys.float().mT)[..., N_FIRST:] * scaling
        sketched = sketch.logits(rows)[..., N_FIRST:] * scaling
        error = sketched - exact
        error -= error.mean(-1, keepdim=True)
        errors.append(error.square().mean((0, 2, 3)).sqrt())
        absolute.append(error.abs().mean((0, 2, 3)))
        best = torch.zeros_like(exact, dtype=torch.bool).scatter(-1, exact.topk(N_BEST).indices, True)
        found.append(best.gather(-1, sketched.topk(N_BEST).indices).float().mean((0, 2, 3)))
    n_tokens, head_dim = keys.shape[2:]
    assert sketch.nbytes == keys.shape[1] * sketch.charged_bytes(n_tokens, head_dim)
    some = rows[:, :, : test.shape[1] // keys.shape[1]]  # one position's queries
    return {
        "n_tokens": n_tokens,
        "bytes_per_token": sketch.nbytes / n_tokens / keys.shape[1],
        "uncharged_bytes_per_layer": sketch.uncharged_nbytes,
        "rmse": float(torch.stack(errors).mean()),
        "mean_abs": float(torch.stack(absolute).mean()),
        "recall": float(torch.stack(found).mean()),
        "rmse_by_layer": [round(float(e.mean()), 4) for e in errors],
        "time_relative_to_dense": relative_time(sketch, some, keys.float()),
    }


def relative_time(sketch: Sketch, rows: Tensor, keys: Tensor, repeats: int = 40) -> float:
    """Time to score all tokens over that of the dense product: fastest of runs that take turns."""
    functions = (lambda: sketch.logits(rows), lambda: rows @ keys.mT)
    fastest = [float("inf")] * 2
    for _ in range(repeats):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            if keys.is_cuda:
                torch.cuda.synchronize()
            fastest[i] = min(fastest[i], time.perf_counter() - start)
    return fastest[0] / fastest[1]


def summary(lines: list[dict]) -> list[dict]:
    """Means over the contexts, by sketch and size."""
    figures = ("bytes_per_token", "uncharged_bytes_per_layer", "rmse", "mean_abs", "recall", "time_relative_to_dense")
    rows = []
    for name, size in dict.fromkeys((line["sketch"], line["size"]) for line in lines):
        group = [line for line in lines if (line["sketch"], line["size"]) == (name, size)]
        means = {figure: sum(line[figure] for line in group) / len(group) for figure in figures}
        rows.append({"sketch": name, "size": size, "contexts": len(group)} | means)
    return rows


def markdown(rows: list[dict], lines: list[dict]) -> str:
    """The table of the results page, with the RMSE of every kind of context."""
    kinds = list(dict.fromkeys(line["context"] for line in lines))
    reference = {row["size"]: row["rmse"] for row in rows if row["sketch"] == "rope_pair"}
    titles = ["sketch", "bytes", "RMSE", "of 2-bit", *kinds, "mean abs", f"top {N_BEST} found", "basis, KB", "time"]
    table = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for row in rows:
        chosen = [line for line in lines if (line["sketch"], line["size"]) == (row["sketch"], row["size"])]
        by_kind = [[line["rmse"] for line in chosen if line["context"] == kind] for kind in kinds]
        cells = [
            STYLES.get(row["sketch"], (row["sketch"],))[0],
            f"{row['bytes_per_token']:.2f}",
            f"{row['rmse']:.3f}",
            f"{row['rmse'] / reference[row['size']]:.2f}",
            *(f"{sum(values) / len(values):.3f}" if values else "-" for values in by_kind),
            f"{row['mean_abs']:.3f}",
            f"{row['recall']:.0%}",
            f"{row['uncharged_bytes_per_layer'] / 1000:.1f}",
            f"{row['time_relative_to_dense']:.1f}",
        ]
        table.append("| " + " | ".join(cells) + " |")
    return "\n".join(table)


def draw(rows: list[dict], path: Path) -> None:
    """Error and recall against bytes, as PNG and SVG."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "verkv"  # the same file for the same figures
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for name, (title, colour, marker) in STYLES.items():
        points = sorted((r["bytes_per_token"], r["rmse"], r["recall"]) for r in rows if r["sketch"] == name)
        for axis, values in zip(axes, ([p[1] for p in points], [100 * p[2] for p in points]), strict=True):
            size = 11 if marker == "*" else 6
            axis.plot([p[0] for p in points], values, color=colour, marker=marker, markersize=size, label=title)
    ticks = sorted({round(row["bytes_per_token"], 2) for row in rows if row["sketch"] == "rope_pair"})
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{tick:.2f}" for tick in ticks])
        axis.set_xlabel("sketch size (bytes per token and KV head)")
        axis.grid(alpha=0.3)
    axes[0].set_yscale("log")
    low, high = axes[0].get_ylim()
    ticks = [tick for tick in (0.1, 0.2, 0.3, 0.5, 1, 2, 3, 5, 10) if low <= tick <= high]
    axes[0].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    for axis in axes:
        axis.minorticks_off()
    axes[0].set_ylabel("centred logit error, RMS (nats)")
    axes[1].set_ylabel(f"found of the {N_BEST} largest logits (%)")
    axes[1].set_ylim(0, 100)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path.with_suffix(".png"), dpi=150, metadata={"Software": None})
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})


def main() -> None:
    """Measure what is not there yet, then write table and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--fit-queries", type=int, default=64, help="context positions whose queries fit the sketch")
    parser.add_argument("--answer-tokens", type=int, default=12)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="path of the results, without suffix")
    options = parser.parse_args()

    output = options.output.with_suffix(".jsonl")
    output.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    name = options.model or str(demo_model_path())
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name).eval()
    rotary = rotary_from_config(model.config)
    packages = {package: version(package) for package in ("torch", "transformers")}
    setting = {
        "model": options.model or "SmolLM2-135M-Instruct",
        "tokens": options.tokens,
        "fit_queries": options.fit_queries,
        "answer_tokens": options.answer_tokens,
        "device": str(model.device),
        "versions": {"verkv": __version__, "python": platform.python_version(), **packages},
    }
    for seed in options.seeds:
        chosen = tasks(tokenizer, options.tokens, seed)
        captures = {}
        for kind, task in tqdm(chosen.items(), desc="prefill"):
            captures[kind] = capture(model, tokenizer, task, options.fit_queries, options.answer_tokens)
        kinds = list(captures)
        for i, kind in enumerate(kinds):
            data, other = captures[kind], captures[kinds[(i + 1) % len(kinds)]]
            bases = [
                fit_key_basis(rotary.undo(keys[0], torch.arange(keys.shape[2])), queries[0], rotary)
                for keys, queries in zip(other.keys, other.fit, strict=True)
            ]
            for sketch, size, recipe in tqdm(list(recipes(rotary, data.keys[0].shape[-1], bases)), desc=kind):
                key = {"context": kind, "seed": seed, "sketch": sketch, "size": size}
                if any((key | setting).items() <= line.items() for line in lines):
                    continue
                lines.append(key | measure(data, recipe) | setting)
                with output.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")

    rows = summary(lines)
    with output.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, output)
    print(markdown(rows, lines))


if __name__ == "__main__":
    main()
