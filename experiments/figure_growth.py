"""Twenty turns under a budget of bytes, on the demo model: device and host bytes, and the time of a token.

Every turn adds prose to the context and seals it; earlier segments are thinned to make room. Prints one JSON line for
each and writes them to ``docs/results/growth.jsonl``, with ``growth.png`` and ``growth.svg`` beside it.

    python experiments/figure_growth.py
    python experiments/figure_growth.py --no-run    # the pictures again
"""

import argparse
import itertools
import json
import math
from pathlib import Path

import torch
import transformers
from contexts import build_context
from demo_loading import load_demo_model
from transformers import DynamicCache

import verkv
from verkv import KVzipPress, VerKVPress
from verkv.bench.timing import compare
from verkv.branching import branch
from verkv.cache import make_cache
from verkv.report import plots
from verkv.report.picture import save

OUT = Path(__file__).parent.parent / "docs" / "results" / "growth.jsonl"
TIMED = (1, 5, 10, 15, 20)  # turns after which a token is timed


@torch.inference_mode()
def decode(model, cache, ids: torch.Tensor) -> None:
    """Tokens one by one."""
    for i in range(ids.shape[1]):
        model(ids[:, i : i + 1], past_key_values=cache, logits_to_keep=1)


@torch.inference_mode()
def audited(model, cache, ids: torch.Tensor) -> dict:
    """Violations and KV read of the tokens that come next, on a branch that is thrown away."""
    twin = branch(cache)
    twin.stats.passes.clear()
    for layer in twin.layers:
        layer.context.audit, layer.context.stats = True, twin.stats
    decode(model, twin, ids)
    records = [record for records in twin.stats.passes for record in records]
    errors = torch.cat([record.relative_error.flatten() for record in records])
    n_layers = len(twin.stats.passes[0])
    read = sum(record.bytes_read for record in records) / len(records) * n_layers / twin.stats.full_bytes
    epsilon = cache.layers[0].context.fetch.epsilon
    return {"decisions": len(errors), "violations": float((errors > epsilon).float().mean()), "kv_read": read}


def state(cache, press, turn: int, n_added: int) -> dict:
    """What the cache takes after a turn."""
    report, memory = press.budget_report(cache), cache.memory_report()
    uncharged = {name: n for name, n in memory.device_uncharged.items() if n}
    line = {"turn": turn, "n_tokens": cache.get_seq_length(), "added": n_added, "segments": cache.stats.n_segments}
    line |= {name: getattr(report, name) for name in ("budget", "expected", "standard_deviation", "realised")}
    line |= {"uncharged": uncharged, "host": memory.host["host_keys"] + memory.host["host_values"]}
    return line | {"full": memory.full_bytes, "parts": memory.device}


def times(model, branches: dict, dense, ids: torch.Tensor, rounds: int) -> dict[int, dict]:
    """Seconds of a decode step and of one scan of the sketch by all layers, by turn, and of dense attention's step."""
    cases, token = {}, itertools.cycle(ids[:, i : i + 1] for i in range(ids.shape[1]))
    for turn, cache in branches.items():
        context = cache.layers[0].context
        group = model.config.num_attention_heads // context.n_kv_heads
        query = torch.randn(1, context.n_kv_heads, group, context.key_dim)
        sketches = [layer.context.sketch for layer in cache.layers]
        cases[f"step {turn}"] = lambda cache=cache: decode(model, cache, next(token))
        cases[f"scan {turn}"] = lambda sketches=sketches, query=query: [sketch.logits(query) for sketch in sketches]
        cases[f"dense {turn}"] = lambda turn=turn: decode(model, dense[turn], next(token))
    with torch.inference_mode():
        found = compare("growth", cases, "step 1", rounds=rounds, seed=0, device=model.device, threads=1)
    kinds = ("step", "scan", "dense")
    return {turn: {f"{kind}_ratio": vars(found.ratio(f"{kind} {turn}")) for kind in kinds} for turn in branches}


@torch.inference_mode()
def run(args) -> list[dict]:
    """Twenty turns; one line for each."""
    model, tokenizer = load_demo_model()
    n_turns, size = args.turns, args.tokens
    task = build_context("prose", tokenizer, (n_turns + 1) * size, args.seed)
    ids = tokenizer(task.context, return_tensors="pt").input_ids
    text = model.config.get_text_config()
    token_bytes = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * 4
    options = {"budget_bytes": int(args.share * n_turns * size * token_bytes), "seed": args.seed, "max_tail": math.inf}
    press = VerKVPress(KVzipPress(tokenizer=tokenizer), n_sink=32, n_local=32, **options)
    cache, dense = make_cache(model.config), DynamicCache()
    lines, branches, denses = [], {}, {}
    facts = {"torch": torch.__version__, "transformers": transformers.__version__, "verkv": verkv.__version__}
    for turn in range(1, n_turns + 1):
        added = ids[:, (turn - 1) * size : turn * size]
        with press(model):
            model.model(added, past_key_values=cache)
        if turn > 1:
            cache.reseal()
        model.model(added, past_key_values=dense)
        line = state(cache, press, turn, size) | {"epsilon": press.epsilon, "delta": press.delta} | facts
        line |= audited(model, cache, ids[:, turn * size : turn * size + args.steps])
        lines.append(line)
        print(json.dumps(line), flush=True)
        if turn in TIMED:
            branches[turn], denses[turn] = branch(cache), DynamicCache()
            for i, layer in enumerate(dense.layers):
                denses[turn].update(layer.keys.clone(), layer.values.clone(), i)
    measured = times(model, branches, denses, ids[:, -size:], args.rounds)
    return [line | measured.get(line["turn"], {}) for line in lines]


@plots.styled
def picture(lines: list[dict]):
    """Bytes on the device against the budget, and the time of a token, by turn."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    turns, mb = [line["turn"] for line in lines], 2.0**20
    column = lambda name: torch.tensor([line[name] for line in lines]) / mb  # noqa: E731
    expected, spread = column("expected"), 3 * column("standard_deviation")
    left.axhline(lines[0]["budget"] / mb, color="black", linewidth=1, label="budget")
    left.fill_between(turns, expected - spread, expected + spread, alpha=0.3, label="expected ± 3 standard deviations")
    left.plot(turns, column("realised"), "o", color="#D55E00", markersize=4, label="realised")
    whole = column("realised") + torch.tensor([sum(line["uncharged"].values()) for line in lines]) / mb
    left.plot(turns, whole, "--", color="#0072B2", label="with tail, decoding matrices, moments")
    left.plot(turns, column("full"), ":", color="#666666", label="uncompressed")
    left.set(xlabel="turn", ylabel="on the device (MiB)", yscale="log", xticks=[1, 5, 10, 15, 20])
    left.set_yticks([20, 50, 100, 200], ["20", "50", "100", "200"])
    left.set_yticks([], minor=True)
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize="small")
    timed = [line for line in lines if "step_ratio" in line]
    kinds = (("step", "VerKV", "#D55E00"), ("dense", "dense", "#666666"), ("scan", "sketch scan alone", "#0072B2"))
    for kind, label, colour in kinds:
        ratios = [line[f"{kind}_ratio"] for line in timed]
        middle = [ratio["median"] for ratio in ratios]
        right.plot([line["n_tokens"] for line in timed], middle, "o-", label=label, color=colour)
        low, high = ([ratio[name] for ratio in ratios] for name in ("low", "high"))
        right.fill_between([line["n_tokens"] for line in timed], low, high, color=colour, alpha=0.2)
    right.set(xlabel="tokens in the context", ylabel="time of a token (VerKV's after turn 1 = 1)", ylim=(0, None))
    right.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize="small", ncols=3)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=350, help="of a turn (default: 350)")
    parser.add_argument("--share", type=float, default=0.125, help="of the last turn's full cache (default: 0.125)")
    parser.add_argument("--steps", type=int, default=8, help="audited after each turn (default: 8)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-run", action="store_true", help="draw what --output holds")
    parser.add_argument("--output", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.no_run:
        lines = run(args)
        args.output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [json.loads(line) for line in args.output.read_text().splitlines()]
    save(picture(lines), args.output)


if __name__ == "__main__":
    main()
