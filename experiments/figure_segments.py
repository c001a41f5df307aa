"""Violations over segments: a context sealed in three segments against one seal of the same tokens, on the demo model.

Prints one JSON line for each context and setting, and writes them to ``docs/results/segments.jsonl``. With ``--bases``
the error of later segments' sketches instead, in a basis of their own or in the first segment's.

    python experiments/figure_segments.py --kinds prose code --seeds 0 1
    python experiments/figure_segments.py --kinds prose code --seeds 0 --tokens 2400 --bases
"""

import argparse
import itertools
import json
import time
from pathlib import Path

import torch
import transformers
from contexts import build_context
from demo_loading import load_demo_model
from transformers import DynamicCache

import verkv
from verkv import KVzipPress, VerKVPress
from verkv.cache import make_cache
from verkv.demo import encode_task
from verkv.presses import record_queries
from verkv.rotary import rotary_from_config
from verkv.sketches import TransformSketch
from verkv.sketches.key_basis import fit_key_basis

OUT = Path(__file__).parent.parent / "docs" / "results" / "segments.jsonl"
PROTECTED = {"n_sink": 32, "n_local": 32}
# How the context is read: at once, or in chunks that attend to what came before exactly or as later queries do.
SETTINGS = {
    "one seal": {},
    "segments": {"attention": "exact"},
    "segments, verified": {"attention": "verified"},
    "segments, first basis": {"attention": "exact", "reuse": True},
    "segments, same draw": {"attention": "exact", "redraw": True},
}


@torch.inference_mode()
def dense_answer(model, ids: torch.Tensor, question: torch.Tensor, n_steps: int) -> torch.Tensor:
    """What dense attention says next, greedily."""
    cache, next_ids, answer = DynamicCache(), torch.cat([ids, question], 1), []
    for _ in range(n_steps):
        next_ids = model(next_ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        answer.append(next_ids)
    return torch.cat(answer, 1)


@torch.inference_mode()
def first_bases(model, ids: torch.Tensor) -> dict:
    """Bases fitted to the first segment alone."""
    cache, rotary = DynamicCache(), rotary_from_config(model.config)
    with record_queries(model) as queries:
        model.model(ids, past_key_values=cache)
    positions = torch.arange(ids.shape[1])
    keys = {i: rotary.undo(layer.keys[0], positions) for i, layer in enumerate(cache.layers)}
    return {i: fit_key_basis(keys[i], queries[i][0], rotary) for i in keys}


class SameDraw(VerKVPress):
    """Draws every segment with the random numbers of the first: what must not be done."""

    def _plans(self, *args):
        args[-1].manual_seed(0)
        return super()._plans(*args)


def sealed(model, tokenizer, ids: torch.Tensor, chunk_size: int, seed: int, setting: dict) -> tuple:
    """A press and a cache of the context that it has sealed."""
    make = SameDraw if setting.get("redraw") else VerKVPress
    press = make(KVzipPress(tokenizer=tokenizer), 0.9375, seed=seed, audit=True, **PROTECTED)
    if setting.get("reuse"):
        press.bases = first_bases(model, ids[:, :chunk_size])
    if "attention" in setting:
        return press, verkv.prefill(model, ids, chunk_size=chunk_size, press=press, attention=setting["attention"])
    cache = make_cache(model.config)
    with torch.inference_mode(), press(model):
        model.model(ids, past_key_values=cache)
    return press, cache


@torch.inference_mode()
def measure(model, cache, question: torch.Tensor, answer: torch.Tensor) -> dict:
    """Errors of the answer's decode steps, with the answer's tokens given."""
    model(question, past_key_values=cache)
    for step in range(answer.shape[1]):
        model(answer[:, step : step + 1], past_key_values=cache)
    stats, report = cache.stats, cache.memory_report()
    errors, outputs = stats.relative_errors("decode"), stats.output_errors("decode")
    return {
        "decisions": len(errors),
        "violations": stats.violation_rate(phase="decode"),
        "output_error_q90": float(outputs.quantile(0.9)),
        "kv_read_per_token": stats.kv_read_per_token,
        "resident_share": report.resident_share,
        "uncharged": {k: v for k, v in report.device_uncharged.items() if k.startswith("sketch")},
        "full_bytes": report.full_bytes,
        "host_bytes": sum(report.host.values()),
        "n_segments": len(cache.layers[0].context.segments),
        "chunk_kv_read": stats.chunks.kv_read_per_forward if stats.chunks else None,
        "replay_bytes_read": stats.replays.bytes_read() if stats.replays else None,
    }


@torch.inference_mode()
def basis_errors(model, ids: torch.Tensor, n_behind: int = 128) -> dict:
    """Centred logit RMSE of the second and third segments' sketches by basis, for the queries behind them."""
    n = ids.shape[1] - n_behind
    ends = [0, n // 3, 2 * n // 3, n, ids.shape[1]]
    cache, recorded, rotary = DynamicCache(), [], rotary_from_config(model.config)
    for start, stop in itertools.pairwise(ends):
        with record_queries(model) as queries:
            model.model(ids[:, start:stop], past_key_values=cache)
        recorded.append(dict(queries))
    found: dict[str, list] = {}
    for layer in range(0, len(cache.layers), 3):
        keys, queries = cache.layers[layer].keys, [q[layer] for q in recorded]
        rows = queries[3].unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
        first = rotary.undo(keys[0, :, : ends[1]], torch.arange(ends[1]))
        reused = TransformSketch(rotary, basis=fit_key_basis(first, queries[0][0], rotary))
        for number in (1, 2):
            positions = torch.arange(ends[number], ends[number + 1])
            own = keys[:, :, positions]
            ways = {"own": queries[number], "own, first queries": queries[0], "own, no queries": None}
            built = {w: TransformSketch(rotary).build(own, q, positions[None]) for w, q in ways.items()}
            built["first basis"] = reused.build(own, None, positions[None])
            exact = rows @ own.mT
            for way, sketch in built.items():
                error = sketch.logits(rows) - exact
                error = (error - error.mean(-1, keepdim=True)).square()
                weighted = (exact.softmax(-1) * error).sum(-1).mean().sqrt()
                found.setdefault(way, []).append((float(error.mean().sqrt()), float(weighted)))
    return {way: torch.tensor(pairs).mean(0).tolist() for way, pairs in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=["prose", "code"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--bases", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_demo_model()
    facts = {"torch": torch.__version__, "transformers": transformers.__version__, "verkv": verkv.__version__}
    for kind in args.kinds:
        for seed in args.seeds:
            task = build_context(kind, tokenizer, args.tokens, seed)
            ids, question = encode_task(tokenizer, task, model.device)
            if args.bases:
                print(json.dumps({"kind": kind, "seed": seed, "logit_rmse": basis_errors(model, ids)}), flush=True)
                continue
            answer = dense_answer(model, ids, question, args.steps)
            for name in args.settings:
                start = time.perf_counter()
                chunk_size = -(-ids.shape[1] // 3)
                press, cache = sealed(model, tokenizer, ids, chunk_size, seed, SETTINGS[name])
                read = time.perf_counter() - start
                found = measure(model, cache, question, answer)
                line = {
                    "kind": kind,
                    "seed": seed,
                    "setting": name,
                    "n_tokens": ids.shape[1],
                    "seconds": round(read, 1),
                }
                line |= found | {"epsilon": press.epsilon, "delta": press.delta} | facts
                print(json.dumps(line), flush=True)
                with args.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                del press, cache


if __name__ == "__main__":
    main()
