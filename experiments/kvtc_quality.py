"""kvtc beside other ways to keep a cache small, on a small model: the paper's Table 2 in the small.

Every context is prefilled once, with eager attention (H2O reads its weights), and every method starts from that cache
or from scores that were taken in that pass. A method's cache then answers the task's question; and, more sensitive than
a score, its next-token distributions along the uncompressed cache's own answer are compared with that cache's. The task
"text" has no question: there the distributions are compared along 256 tokens of the text that follows.

Each measurement is one JSON line; one that is there is not repeated. At the end the tables are printed.

    python experiments/kvtc_quality.py --output experiments/results/kvtc_quality.jsonl
"""

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import kvtc_baselines as baselines
import torch
from kvtc_baselines import Stored, full_bytes
from kvtc_common import (
    DEFAULT_ARTEFACT,
    N_SCORED,
    Lines,
    Setting,
    compare,
    dnll_cell,
    fork,
    interval,
    log_probabilities,
    markdown,
    mean_of,
    open_setting,
    say,
    test_texts,
)
from paper_items import paper_table
from torch import Tensor
from transformers import DynamicCache

from verkv.codecs import KVTC, KvtcConfig
from verkv.evaluation import tasks
from verkv.evaluation.prompts import PromptEncoder, read_examples

TEXT = "text"
TASKS = ("niah_single_2", "niah_multikey_1", "vt", TEXT)
RATIOS = (8, 16, 32, 64)
EVICTION_RATIO = 8  # as the paper
# The paper groups 4 of 32 layers or 5 of 40 with ranks of 1/8 and 3/16 of the features.
SVD = {"layers_per_group": 5, "k_share": 1 / 8, "v_share": 3 / 16}
PAPER_MODEL = "Llama 3.1 8B"


@dataclass(frozen=True)
class Case:
    """A context, what is read after it, and what an answer is judged by.

    Attributes
    ----------
    task : str
    index : int
    context_ids, question_ids : Tensor, shape (1, T), (1, Q)
    targets : Tensor, shape (A,), optional
        Of "text": what follows. Elsewhere the uncompressed cache's own answer is used.
    answers : tuple of str
    max_new_tokens : int
    """

    task: str
    index: int
    context_ids: Tensor
    question_ids: Tensor
    targets: Tensor | None
    answers: tuple[str, ...] = ()
    max_new_tokens: int = 0


def cases(tokenizer, task: str, n_tokens: int, n_examples: int, max_new_tokens: int) -> list[Case]:
    """Examples of a task of this project, or texts."""
    if task == TEXT:
        texts = test_texts(tokenizer, n_examples)
        start = -N_SCORED - 1
        return [
            Case(task, i, ids[None, :start], ids[None, start : start + 1], ids[start + 1 :])
            for i, ids in enumerate(texts)
        ]
    encoder = PromptEncoder(tokenizer)
    examples = read_examples(tasks, task, tokenizer, n_tokens, n_examples, 0, None)
    made = []
    for example in examples:
        limit = min(example.max_new_tokens, max_new_tokens)
        ids = encoder.context(example.context), encoder.question(example)
        made.append(Case(task, example.index, *ids, None, example.answers, limit))
    return made


# --- methods ----------------------------------------------------------------------------------------------------------

Method = Callable[[DynamicCache, dict], Stored]  # of the exact cache and the eviction scores


def make_methods(setting: Setting) -> dict[str, Method]:
    """All methods by name; transformers' backends only where their packages are installed."""
    methods: dict[str, Method] = {"none": lambda cache, scores: Stored(cache, full_bytes(cache))}
    for ratio in RATIOS:
        codec = KVTC(setting.artefact, setting.model.config, KvtcConfig(ratio=ratio))
        methods[f"kvtc_{ratio}"] = partial(through_kvtc, codec)
    methods["fp8"] = lambda cache, scores: baselines.fp8(cache)
    methods["kivi_2"] = lambda cache, scores: baselines.kivi(cache)
    for backend in ("quanto", "hqq"):
        for bits in (4, 2):
            try:
                baselines.quantised_layer(backend, bits)
            except ImportError as error:
                say(f"left out: {error}")
                continue
            methods[f"{backend}_{bits}"] = partial(_through_transformers, backend, bits)
    for name in ("h2o", "tova"):
        methods[name] = partial(_evicted, name)
    rotary = setting.artefact.rotary
    methods["xkv"] = lambda cache, scores: baselines.cross_layer_svd(cache, rotary, **SVD)
    return methods


def _through_transformers(backend: str, bits: int, cache, scores: dict) -> Stored:
    return baselines.transformers_quantised(cache, backend, bits)


def _evicted(name: str, cache, scores: dict) -> Stored:
    return baselines.evict(cache, scores[name], EVICTION_RATIO)


@dataclass(frozen=True)
class StoredByKvtc(Stored):
    """With the ratio as the paper counts it, and how far the context is from the calibration."""

    ratios: dict
    residual_ratio: dict


def through_kvtc(codec: KVTC, cache, scores: dict | None = None) -> StoredByKvtc:
    """Compressed and restored. Rows kept as they are count 16 bit, though this model's are float32."""
    compressed = codec.compress(cache)
    sizes = compressed.sizes()
    wider = cache.layers[0].keys.element_size() // baselines.HALF
    n_bytes = sizes["file"] - sizes["exact_rows"] + sizes["exact_rows"] // wider
    restored = compressed.restore()
    return StoredByKvtc(fork(restored), n_bytes, compressed.ratios(), compressed.residual_ratio())


# --- one context ------------------------------------------------------------------------------------------------------


def measure(setting: Setting, case: Case, methods: dict[str, Method]) -> Iterator[dict]:
    """One line for every method."""
    model, start = setting.model, time.perf_counter()
    cache, scores = baselines.prefill_scored(model, case.context_ids)
    n_context, prefill_s = cache.get_seq_length(), time.perf_counter() - start
    targets = case.targets
    if targets is None:
        targets = torch.tensor(continue_greedily(model, fork(cache), case.question_ids, n_context, case.max_new_tokens))
    exact = forced(model, fork(cache), case.question_ids, targets, n_context)
    for name, method in methods.items():
        start = time.perf_counter()
        stored = method(cache, scores)
        seconds = time.perf_counter() - start
        given = stored.cache
        found = forced(model, fork(given), case.question_ids, targets, n_context)
        line = {
            "task": case.task,
            "example": case.index,
            "method": name,
            "n_context": n_context,
            "bytes": stored.n_bytes,
            "stored_ratio": full_bytes(cache) / stored.n_bytes,
            **compare(exact, found, targets),
            "prefill_s": round(prefill_s, 2),
            "method_s": round(seconds, 3),
        }
        if isinstance(stored, StoredByKvtc):
            line |= {"paper_ratio": stored.ratios["paper_ratio"], "deflate_gain": stored.ratios["deflate_gain"]}
            line |= {"residual_ratio": stored.residual_ratio}
        if case.answers:
            line |= scored(setting, case, given, n_context, found, targets)
        yield line


def forced(model, cache, question_ids: Tensor, targets: Tensor, position: int) -> Tensor:
    """Log-probabilities (A, V) of each target, given the question and the targets before it."""
    ids = torch.cat([question_ids, targets[None, :-1]], dim=1)
    return log_probabilities(model, cache, ids, position)[-len(targets) :]


def scored(setting: Setting, case: Case, cache, n_context: int, found: Tensor, targets: Tensor) -> dict:
    """The method's own greedy answer and its score; it is the reference's as long as it says the same."""
    choices = found.argmax(-1)
    n_same = int((choices == targets).long().cumprod(0).sum())
    tokens = targets.tolist()
    if n_same < len(tokens):
        begun = [*tokens[:n_same], int(choices[n_same])]
        left = case.max_new_tokens - len(begun)
        ids = torch.cat([case.question_ids, torch.tensor([begun])], dim=1)
        tokens = begun
        if left > 0 and not is_stop(setting.model, begun[-1]):
            tokens = begun + continue_greedily(setting.model, fork(cache), ids, n_context, left)
    text = setting.tokenizer.decode(tokens, skip_special_tokens=True)
    return {"score": tasks.score(case.task, text, list(case.answers)), "prediction": text}


def is_stop(model, token: int) -> bool:
    """Whether a token ends an answer."""
    stop = model.generation_config.eos_token_id
    return token in (stop if isinstance(stop, list) else [stop])


@torch.inference_mode()
def continue_greedily(model, cache, ids: Tensor, position: int, n_tokens: int) -> list[int]:
    """At most ``n_tokens`` further tokens."""
    tokens: list[int] = []
    while len(tokens) < n_tokens and not (tokens and is_stop(model, tokens[-1])):
        tokens.append(int(log_probabilities(model, cache, ids, position)[-1].argmax()))
        position, ids = position + ids.shape[1], torch.tensor([tokens[-1:]])
    return tokens


# --- all of them ------------------------------------------------------------------------------------------------------


def run(setting: Setting, all_cases: list[Case], methods: dict[str, Method], lines: Lines) -> None:
    """Measure what is not there yet: first examples of all tasks first, so that a part of a run is of use."""
    for case in sorted(all_cases, key=lambda case: case.index):
        key = {"task": case.task, "example": case.index}
        missing = {name: method for name, method in methods.items() if not lines.has(**key, method=name)}
        if missing:
            for line in measure(setting, case, missing):
                lines.add(line)
            say(f"{case.task} {case.index}: {len(missing)} methods")


def complete(lines: Lines) -> Lines:
    """The examples that every method has answered: an interrupted run leaves one that not all have."""
    shown, methods = copy.copy(lines), {line["method"] for line in lines.lines}
    answered: dict[tuple, set] = {}
    for line in lines.lines:
        answered.setdefault((line["task"], line["example"]), set()).add(line["method"])
    shown.lines = [line for line in lines.lines if answered[line["task"], line["example"]] == methods]
    return shown


def tables(lines: Lines) -> str:
    """Scores and ratios by method beside the paper's, then distances from the uncompressed cache."""
    lines = complete(lines)
    names = list(dict.fromkeys(line["method"] for line in lines.lines))
    present = list(dict.fromkeys(line["task"] for line in lines.lines))
    asked = [task for task in present if task != TEXT]
    paper = {row["method"]: row for row in paper_table("kvtc_table2") if row["model"] == PAPER_MODEL}
    paper_columns = ("gsm8k", "mmlu", "qasper", "litm", "vt")
    score_rows, distance_rows = [], []
    for name in names:
        own, theirs = lines.find(method=name), paper.get(name, {})
        counted = [line["paper_ratio"] for line in own if "paper_ratio" in line]
        cells = [mean_of(lines.find(method=name, task=task), "score") for task in asked]
        ratio = sum(counted) / len(counted) if counted else None
        score_rows.append([name, mean_of(own, "stored_ratio"), ratio, *cells, theirs.get("ratio")])
        score_rows[-1] += [theirs.get(column) for column in paper_columns]
        row = [name, mean_of(own, "stored_ratio")]
        for task in present:
            found = lines.find(method=name, task=task)
            row += [interval([line["kl"] for line in found]), f"{mean_of(found, 'same_top1'):.1%}"]
        if TEXT in present:
            row.append(dnll_cell(lines.find(method=name, task=TEXT)))
        distance_rows.append(row)
    header = ["method", "ratio, all bytes", "ratio, paper's count", *asked, "paper: ratio"]
    first = markdown(header + [f"paper: {column}" for column in paper_columns], score_rows)
    header = ["method", "ratio, all bytes"] + [f"{task}: {what}" for task in present for what in ("KL", "same next")]
    second = markdown(header + ["text: dNLL"] * (TEXT in present), distance_rows)
    counts = ", ".join(f"{task} {len({x['example'] for x in lines.find(task=task)})}" for task in present)
    return f"Examples: {counts}.\n\n{first}\n{second}"


def main() -> None:
    """Run what is missing, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("experiments/results/kvtc_quality.jsonl"))
    parser.add_argument("--artefact", type=Path, default=DEFAULT_ARTEFACT, help="the calibration, made if missing")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=[*tasks.RULER_TASKS, TEXT])
    parser.add_argument("--methods", nargs="+", help="by default all that can be run")
    parser.add_argument("--n-tokens", type=int, default=2000, help="of a task's prompt and answer")
    parser.add_argument("--n-examples", type=int, default=8, help="of every task")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--no-run", action="store_true", help="print the tables of what is there")
    options = parser.parse_args()
    lines = Lines(options.output)
    if not options.no_run:
        setting = open_setting(options.artefact)
        lines.common = setting.common()
        methods = make_methods(setting)
        if options.methods:
            methods = {name: methods[name] for name in options.methods}
        sizes = options.n_tokens, options.n_examples, options.max_new_tokens
        found = [case for task in options.tasks for case in cases(setting.tokenizer, task, *sizes)]
        run(setting, found, methods, lines)
    print(tables(lines))


if __name__ == "__main__":
    main()
