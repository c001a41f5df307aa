"""Certificate adherence against sketch bytes: every sketch at half, the default and double size.

On the contexts and decode steps of ``figure_adherence.py``, with the default plan at one tolerance. The budget is the
same for all, so a larger sketch leaves a smaller sample.

    python experiments/figure_sketch_adherence.py --output docs/results/sketch_adherence.jsonl
"""

import argparse
import json
from pathlib import Path

import figure_adherence as adherence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from verkv import KVzipPress, VerKVPress
from verkv.demo_model import demo_model_path
from verkv.sketches import (
    PageMinMaxSketch,
    ProductQuantizationSketch,
    QueryPCASketch,
    RopePairSketch,
    TransformSketch,
)

RECIPES = {  # bits per token and KV head to a sketch, at head dim 64
    "rope_pair": lambda bits: RopePairSketch(fraction=0.25 * bits / 36),
    "query_pca": lambda bits: QueryPCASketch(bits_per_token=bits),
    "page_minmax": lambda bits: PageMinMaxSketch(bits_per_token=bits),
    "product_quantization": lambda bits: ProductQuantizationSketch(bits_per_token=bits),
    "transform": lambda bits: TransformSketch(rotary=None, bits_per_token=bits),
}
BITS = (18, 36, 72)
EPSILON = 0.05


def markdown(lines: list[dict]) -> str:
    """One row per sketch and figure, one column per size."""
    rows = ["| sketch | | " + " | ".join(f"{bits / 8:g} bytes" for bits in BITS) + " |", "|---" * (2 + len(BITS)) + "|"]
    for name in dict.fromkeys(line["sketch"] for line in lines):
        cells = {bits: [x for x in lines if (x["sketch"], x["bits"]) == (name, bits)] for bits in BITS}
        figures = {
            "violations [95 %]": lambda ls: "{:.2%} [{:.2%}, {:.2%}]".format(
                *adherence.rate_with_interval(ls, "denominator_violations")
            ),
            "KV read per token": lambda ls: f"{adherence.mean(ls, 'kv_read'):.1%}",
            "output error, 90th percentile": lambda ls: f"{adherence.output_quantile(ls, 0.9):.3f}",
        }
        for title, figure in figures.items():
            rows.append(f"| {name} | {title} | " + " | ".join(figure(ls) if ls else "" for ls in cells.values()) + " |")
    return "\n".join(rows)


def main() -> None:
    """Run all sketches and sizes on all contexts, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--kinds", nargs="+", default=["prose", "code", "records"])
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--output", type=Path, default=Path("experiments/results/sketch_adherence.jsonl"))
    parser.add_argument("--prefixes", type=Path, default=Path("experiments/results/prefixes"))
    options = parser.parse_args()

    name = options.model or str(demo_model_path())
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name).eval()
    lines = adherence.read_lines(options.output)
    done = {(line["kind"], line["seed"], line["sketch"], line["bits"]) for line in lines}
    make = lambda *key: adherence.make_prefix(model, tokenizer, *key)  # noqa: E731
    options.output.parent.mkdir(parents=True, exist_ok=True)
    bar = tqdm(total=len(options.kinds) * len(options.seeds) * len(RECIPES) * len(BITS))
    with options.output.open("a") as file:
        for kind, seed in [(kind, seed) for kind in options.kinds for seed in options.seeds]:
            prefix = adherence.load_prefix(options.prefixes, make, kind, options.tokens, seed, options.steps)
            steps = adherence.dense_steps(model, prefix)
            for sketch, bits in [(sketch, bits) for sketch in RECIPES for bits in BITS]:
                bar.update()
                if (kind, seed, sketch, bits) in done:
                    continue
                press = VerKVPress(
                    KVzipPress(), sketch=RECIPES[sketch](bits), epsilon=EPSILON, seed=seed, **adherence.COMMON
                )
                errors = adherence.replayed(model, prefix, steps, press)
                line = {"kind": kind, "n_tokens": options.tokens, "seed": seed, "sketch": sketch, "bits": bits}
                line |= {"epsilon": EPSILON, "delta": press.delta} | adherence.result(errors, EPSILON)
                file.write(json.dumps(line) + "\n")
                file.flush()
                lines.append(line)
    print(markdown(lines))


if __name__ == "__main__":
    main()
