"""Made-up lines of ``verkv eval``, for the report's tests: the right keys, plausible figures, any size."""

import hashlib
import json
import random
from pathlib import Path

# Name: label, press, sketch, epsilon, share of dense's successes kept, KL divergence. None: no such thing.
METHODS = {
    "dense": ("Dense", "dense", None, None, 1.0, 0.0),
    "kvzip": ("KVzip", "KVzip", None, None, 0.2, 2.0),
    "poissoncomp": ("PoissonComp", "KVzip", None, None, 0.6, 0.6),
    "verkv": ("VerKV (2-bit)", "KVzip", "rope_pair", 0.05, 0.95, 0.03),
    "verkv_exact": ("VerKV (exact)", "KVzip", "exact", 0.05, 1.0, 0.003),
}


def answer(method: str, task: str = "niah_single_1", example: int = 0, compression: float = 16.0, **changes) -> dict:
    """One line; ``changes`` replace keys."""
    label, press, sketch, epsilon, kept, kl = METHODS[method]
    compression = 1.0 if method == "dense" else compression
    epsilon = changes.get("epsilon", epsilon)
    rng = random.Random(f"{method} {task} {example} {compression} {epsilon} {changes.get('seed', 0)}")
    solved = random.Random(f"{task} {example}").random() < 0.85
    line = {
        "model": "SmolLM2-135M-Instruct",
        "task": task,
        "n_tokens": 3000,
        "example": example,
        "data_seed": 0,
        "seed": None if method in ("dense", "kvzip") else 0,
        "context_tokens": 2900 + example,
        "method": method,
        "label": label,
        "press": press,
        "sketch": sketch,
        "compression": compression,
        "epsilon": epsilon,
        "delta": None if epsilon is None else 0.1,
        "options": {} if method == "dense" else {"n_sink": 8, "n_local": 8},
        "max_new_tokens": 32,
        "answers": ["12345"],
        "prediction": " 12345.",
        "score": float(solved and rng.random() < kept),
        "n_new_tokens": 9,
        "divergence": {"kl": kl * rng.uniform(0.5, 1.5) * compression / 16, "same_next": 1 - 0.2 * kl, "n_tokens": 32},
        "stats": {} if method == "dense" else _stats(rng, epsilon),
        "notes": [],
        "memory": {"device": int(1e6 / compression), "device_uncharged": 10, "host": 10**6, "full": 10**6},
        "versions": {"verkv": "0.1.0", "torch": "2.13.0", "transformers": "5.2.0", "python": "3.11.2"},
        "device": "cpu",
        "dtype": "float32",
        "timing": {"prefill_s": 9.0},
    }
    if epsilon is not None:
        line["by_head"] = {
            "fetch_rate": [[min(1.0, 0.3 * rng.random() + 0.02 * i) for _ in range(9)] for i in range(30)]
        }
        pairs = [[b := 10 ** rng.uniform(-3, 0), min(epsilon, b) * 10 ** rng.uniform(-2, 0.1)] for _ in range(64)]
        line["audit"] = {"violation_rate": 0.02 * rng.random(), "n_decisions": 2700, "pairs": pairs}
    line |= changes
    line["id"] = hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()[:16]
    return line


def _stats(rng: random.Random, epsilon: float | None) -> dict:
    read = 0.0 if epsilon is None else 0.004 / epsilon * rng.uniform(0.8, 1.2)
    rate = 0.0 if epsilon is None else rng.uniform(0.5, 0.8)
    stats = {"kv_read_per_forward": read, "kv_read_per_token": 0.8 * read}
    for phase, decisions in (("question", 5400), ("decode", 2700)):
        stats |= {f"{phase}_decisions": decisions, f"{phase}_fetch_rate": rate, f"{phase}_kv_head_fetch_rate": rate}
        stats[f"{phase}_promoted"] = int(decisions * rate * 0.03 * 2900)
    return stats


def answers(
    n_examples: int = 4, tasks=("niah_single_1", "niah_multikey_1", "vt", "qa_1"), epsilons=(0.05,)
) -> list[dict]:
    """All methods on all tasks at 16x, and on half of them at 8x and 32x."""
    lines = []
    for i, task in enumerate(tasks):
        for example in range(n_examples):
            lines.append(answer("dense", task, example))
            for compression in (8.0, 16.0, 32.0) if 2 * i < len(tasks) else (16.0,):
                for method in list(METHODS)[1:]:
                    for epsilon in epsilons if METHODS[method][3] else (None,):
                        lines.append(answer(method, task, example, compression, epsilon=epsilon))
    return lines


def write(path: Path, lines: list[dict]) -> Path:
    """Lines as a results file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
