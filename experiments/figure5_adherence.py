"""Figure 5 on a small model: how often the true error of the softmax denominator exceeds epsilon.

Every context is prefilled and scored once; each setting is sealed and audited on that prefix: a question pass and the
teacher-forced tokens of dense attention's own answer. One JSON line per setting; at the end a Markdown table, and our
violations beside the paper's as CSV, SVG and PNG.

    python experiments/figure5_adherence.py
    python experiments/figure5_adherence.py --preset paper

The context is English prose with needles; the paper's is RULER.
"""

import argparse
import copy
import json
import platform
from importlib.metadata import version
from pathlib import Path

import torch
from paper_items import main, paper_table, write
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from verkv import KVzipPress, PoissonCompPress, VerKVPress, __version__
from verkv.demo import build_task, encode_task
from verkv.demo_model import demo_model_path
from verkv.report import groups, plots

EPSILONS = (0.01, 0.05, 0.1, 0.3)
PLANS = {  # name: (sketch, paper)
    "exact sketch": ("exact", False),
    "2-bit sketch, blind plan": ("rope_pair", False),
    "2-bit sketch, paper's plan": ("rope_pair", True),
}

PAPER_PLANS = {  # ours: the paper's
    "no fetch": "no fetch",
    "exact sketch": "perfect sketch",
    "2-bit sketch, paper's plan": "2-bit sketch",
}
PRESETS = {  # model, lengths, protected tokens at either end, shortlist
    "laptop": (None, [2400, 3200], 32, 32),
    "paper": ("Qwen/Qwen3-4B-Instruct-2507", [32768], 64, 128),
}


@torch.inference_mode()
def dense_answer(model, cache, question_ids, n_tokens: int) -> torch.Tensor:
    """Dense attention's greedy answer, (1, n_tokens)."""
    cache = copy.deepcopy(cache)
    next_ids, answer = question_ids, []
    for _ in range(n_tokens):
        logits = model(input_ids=next_ids, past_key_values=cache, logits_to_keep=1).logits
        next_ids = logits[:, -1:].argmax(-1)
        answer.append(next_ids)
    return torch.cat(answer, 1)


@torch.inference_mode()
def audited_stats(press, model, cache, scores, prefix_length, question_ids, answer_ids):
    """Seal a copy of the prefix, run the question and the answer on it, return the statistics."""
    cache = copy.deepcopy(cache)
    press.seal(model, cache, scores, prefix_length=prefix_length)
    model(input_ids=question_ids, past_key_values=cache, logits_to_keep=1)
    for i in range(answer_ids.shape[1]):
        model(input_ids=answer_ids[:, i : i + 1], past_key_values=cache, logits_to_keep=1)
    return press.stats


def settings(compression_ratio: float, alphas: list[float], seed: int, ends: int = 32, shortlist: int = 32):
    """Every press to audit, with what identifies it."""
    plain = {"outliers": 0.0, "error_aware": False}
    common = {"compression_ratio": compression_ratio, "n_sink": ends, "n_local": ends, "seed": seed, "audit": True}
    for alpha in alphas:
        yield {"plan": "no fetch", "alpha": alpha}, PoissonCompPress(KVzipPress(), alpha=alpha, **common)
        for plan, (sketch, paper) in PLANS.items():
            for epsilon in EPSILONS:
                options = {"alpha": alpha, "sketch": sketch, "paper": paper, "shortlist": shortlist} | plain | common
                press = VerKVPress(KVzipPress(), epsilon=epsilon, **options)
                yield {"plan": plan, "alpha": alpha, "epsilon": epsilon}, press


def result_lines(setting: dict, stats) -> list[dict]:
    """One result per tolerance; without fetching one run serves them all."""
    epsilons = [setting["epsilon"]] if "epsilon" in setting else EPSILONS
    return [
        setting
        | {
            "epsilon": epsilon,
            "violation_rate": stats.violation_rate(epsilon),
            "violation_rate_question": stats.violation_rate(epsilon, "question"),
            "violation_rate_decode": stats.violation_rate(epsilon, "decode"),
            "decisions": stats.decisions(),
            "decode_decisions": stats.decisions("decode"),
            "kv_read_per_forward": stats.kv_read_per_forward,
            "kv_read_per_token": stats.kv_read_per_token,
            "fetch_rate": stats.fetch_rate(),
            "output_error_q90": float(stats.output_errors().quantile(0.9)),
        }
        for epsilon in epsilons
    ]


def markdown(lines: list[dict]) -> str:
    """Violations, bytes read and output error by plan, alpha and tolerance, averaged over the contexts."""
    rows = [
        "| plan | alpha | | " + " | ".join(f"eps {e:g}" for e in EPSILONS) + " |",
        "|---" * (3 + len(EPSILONS)) + "|",
    ]
    figures = {
        "violations, all": ("violation_rate", "{:.2%}"),
        "violations, decode steps": ("violation_rate_decode", "{:.2%}"),
        "KV read per decoded token": ("kv_read_per_token", "{:.1%}"),
        "output error, 90th percentile": ("output_error_q90", "{:.3f}"),
    }
    for plan, alpha in dict.fromkeys((line["plan"], line["alpha"]) for line in lines):
        for title, (key, form) in figures.items():
            cells = []
            for epsilon in EPSILONS:
                values = [x[key] for x in lines if (x["plan"], x["alpha"], x["epsilon"]) == (plan, alpha, epsilon)]
                cells.append(form.format(sum(values) / len(values)))
            rows.append(f"| {plan} | {alpha:g} | {title} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def rows_of(lines: list[dict]) -> list[dict]:
    """One row for each plan, alpha and tolerance, averaged over the contexts, with the paper's figure if it has one."""
    told = {(row["plan"], row["epsilon"]): row["violations"] for row in paper_table("figure5_adherence")}
    found = []
    for (plan, alpha, epsilon), group in groups.by(lines, lambda x: (x["plan"], x["alpha"], x["epsilon"])).items():
        violations = 100.0 * sum(line["violation_rate"] for line in group) / len(group)
        row = {"plan": plan, "alpha": alpha, "epsilon": epsilon, "violations %": violations}
        row["paper's %"] = told.get((PAPER_PLANS.get(plan), epsilon)) if alpha == 0 else None
        found.append(row | {"decisions": sum(line["decisions"] for line in group)})
    return found


@plots.styled
def picture(rows: list[dict]):
    """Violations against the tolerance with alpha 0, as published: ours filled, the paper's open and dotted."""
    named = groups.by((row for row in rows if row["alpha"] == min(r["alpha"] for r in rows)), lambda row: row["plan"])
    figure, axes = plots.start(2 * len(named))
    for (plan, group), colour, marker in zip(
        named.items(), ("#56B4E9", "#009E73", "#E69F00", "#D55E00"), "D^vs", strict=False
    ):
        x, style = [row["epsilon"] for row in group], {"color": colour, "marker": marker}
        axes.plot(x, [row["violations %"] for row in group], label=plan, **style)
        if all(row["paper's %"] is not None for row in group):
            style |= {"linestyle": ":", "markerfacecolor": "white"}
            axes.plot(x, [row["paper's %"] for row in group], label=f"the paper: {PAPER_PLANS[plan]}", **style)
    axes.axhline(10, color=plots.GREY, linestyle="--", linewidth=1.2, label="δ = 10 %")
    axes.set(xscale="log", xlabel="tolerance ε (relative error of the softmax denominator)")
    axes.set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
    axes.set_xticks([], minor=True)
    axes.set(ylabel="decisions beyond ε (%)", ylim=(0, None))
    plots.legend_below(figure, axes)
    return figure


def run(options: argparse.Namespace) -> None:
    """Run all settings on all contexts."""
    preset_model, preset_tokens, ends, shortlist = PRESETS[options.preset]
    options.model, options.tokens = options.model or preset_model, options.tokens or preset_tokens
    name = options.model or str(demo_model_path())
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name).eval()
    if torch.cuda.is_available():
        model = model.cuda()
    versions = {"verkv": __version__, "python": platform.python_version()}
    versions |= {package: version(package) for package in ("torch", "transformers", "kvpress")}
    options.output.parent.mkdir(parents=True, exist_ok=True)

    contexts = [(n, seed) for n in options.tokens for seed in options.seeds]
    n_settings = len(options.alphas) * (1 + len(PLANS) * len(EPSILONS))
    lines = []
    with options.output.open("w") as file, tqdm(total=len(contexts) * n_settings) as bar:
        for n_tokens, seed in contexts:
            context_ids, question_ids = encode_task(tokenizer, build_task(tokenizer, n_tokens, seed), model.device)
            cache, source = DynamicCache(), KVzipPress(tokenizer=tokenizer).source()
            source.prepare(model)
            with torch.inference_mode():
                model.model(input_ids=context_ids, past_key_values=cache)
                scores = source.after_prefill(model, cache, context_ids, None)
            answer_ids = dense_answer(model, cache, question_ids, n_tokens=8)
            for setting, press in settings(options.compression_ratio, options.alphas, seed, ends, shortlist):
                stats = audited_stats(press, model, cache, scores, source.prefix_length, question_ids, answer_ids)
                for line in result_lines(setting, stats):
                    line |= {
                        "model": options.model or "SmolLM2-135M-Instruct",
                        "n_tokens": context_ids.shape[1],
                        "seed": seed,
                        "compression_ratio": options.compression_ratio,
                        "delta": 0.1,
                        "n_sink": ends,
                        "n_local": ends,
                        "shortlist": shortlist,
                        "device": str(model.device),
                        "versions": versions,
                    }
                    file.write(json.dumps(line) + "\n")
                    lines.append(line)
                file.flush()
                bar.update()
    print(markdown(lines), end="\n\n")
    options.output = options.output.with_suffix(".csv")
    rows = rows_of(lines)
    write(options, rows, picture(rows))


def options_parser() -> argparse.ArgumentParser:
    """Options of this script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=list(PRESETS), default="laptop", help="model and lengths (default: laptop)")
    parser.add_argument("--model", help="default: the preset's")
    parser.add_argument("--tokens", type=int, nargs="+", help="default: the preset's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.0, 0.3])
    parser.add_argument("--compression-ratio", type=float, default=0.9375)
    parser.add_argument("--output", type=Path, default=Path("experiments/results/figure5.jsonl"))
    return parser


if __name__ == "__main__":
    main(run, options_parser().parse_args())
