"""Train Fast KVzip's gates for a model: they learn KVzip's scores, so that a prompt need not be replayed.

Texts are prefilled and replayed once; what enters each attention layer and KVzip's scores of it go to a folder, so that
a run which was interrupted goes on where it stopped. Then every layer's gate is trained on its own, compared with KVzip
on texts it has not seen, and tried in a press. Ends with one JSON line.

    python experiments/train_gates.py                                   # the demo model, within 20 minutes on two cores
    python experiments/train_gates.py --model NAME --text a.txt b.txt   # another model, other texts
    python experiments/train_gates.py --gates FILE --text c.txt d.txt   # how good trained gates are on other texts
"""

import argparse
import json
import math
import platform
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
from gate_data import (
    attention_modules,
    fingerprint,
    load_tensors,
    observe,
    pydoc_texts,
    read_texts,
    split_documents,
    store,
    tokenise,
)
from gate_evaluation import GUESSES, check_task, evaluate, needle_task, presses
from gate_training import LOSSES, GateOptions, load_gates, new_gate, save_gates, train_gate
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
N_REQUEST = 64  # tokens, at most, of what asks for the replay
N_QUESTION = 200  # tokens, at most, that needles, question and answer add to a text


def parser() -> argparse.ArgumentParser:
    """The script's options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", help="name or folder (default: the demo model)")
    made.add_argument("--text", type=Path, nargs="+", help="UTF-8 files (default: Python's language reference)")
    made.add_argument("--documents", type=int, default=10, help="for training (default: %(default)s)")
    made.add_argument("--held-out", type=int, default=6, help="documents for testing (default: %(default)s)")
    made.add_argument("--tokens", type=int, default=1400, help="per document (default: %(default)s)")
    made.add_argument("--data-dir", type=Path, help="where documents are kept (default: results/gates/MODEL here)")
    made.add_argument("--output", type=Path, help="the gates' file (default: gates/MODEL.safetensors here)")
    made.add_argument("--gates", type=Path, help="a file of trained gates: evaluate them, train none")
    made.add_argument("--results", type=Path, help="also append the JSON line to this file")
    standard = GateOptions()
    made.add_argument("--dim", type=int, default=standard.dim, help="channels of a gate (default: %(default)s)")
    made.add_argument("--sink", type=int, default=standard.sink, help="learned sinks (default: %(default)s)")
    made.add_argument("--loss", choices=LOSSES, default=standard.loss, help="(default: %(default)s)")
    made.add_argument("--epochs", type=int, default=standard.epochs, help="(default: %(default)s)")
    made.add_argument("--batch", type=int, default=standard.batch, help="tokens per step (default: %(default)s)")
    made.add_argument("--rate", type=float, default=standard.rate, help="of Adam (default: %(default)s)")
    made.add_argument("--check", type=int, default=3, help="needle contexts for the presses (default: %(default)s)")
    made.add_argument("--compression-ratio", type=float, default=0.875, help="of that (default: %(default)s)")
    made.add_argument("--threads", type=int, default=2, help="of torch (default: %(default)s)")
    made.add_argument("--seed", type=int, default=standard.seed, help="of split, training and draws (default: 0)")
    return made


def check_options(options: argparse.Namespace) -> None:
    """Raise ValueError for an option out of range."""
    for name in ("documents", "held_out", "dim", "sink", "epochs", "batch", "threads"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.tokens < 100:
        raise ValueError(f"--tokens must be at least 100, got {options.tokens}")
    if not 0 <= options.check <= options.held_out:
        raise ValueError(f"--check must be between 0 and --held-out ({options.held_out}), got {options.check}")
    if not (math.isfinite(options.rate) and options.rate > 0):
        raise ValueError(f"--rate must be above 0, got {options.rate}")
    if not 0 <= options.compression_ratio < 1:
        raise ValueError(f"--compression-ratio must be in [0, 1), got {options.compression_ratio}")
    if options.output is not None and options.output.suffix != ".safetensors":
        raise ValueError(f"--output must end in .safetensors, got {str(options.output)!r}")
    if options.gates is not None and not options.gates.is_file():
        raise ValueError(f"--gates {str(options.gates)!r} is not a file")


def load(name: str | None):
    """Model, tokenizer and the name of the model's files.

    Raises
    ------
    ValueError
        If it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from verkv.demo_model import MODEL_NAME, demo_model_path

    path = name or str(demo_model_path())
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {path!r} cannot be loaded: {error}") from error
    finally:
        logging.enable_progress_bar()
    return model, tokenizer, (name.rstrip("/").split("/")[-1] if name else MODEL_NAME).lower()


@contextmanager
def timed(seconds: dict, name: str) -> Iterator[None]:
    """Note wall and CPU seconds (user and system, all threads) of a part."""
    cpu = lambda: sum(resource.getrusage(resource.RUSAGE_SELF)[:2])  # noqa: E731
    start = time.perf_counter(), cpu()
    yield
    seconds[name] = {"wall": round(time.perf_counter() - start[0], 1), "cpu": round(cpu() - start[1], 1)}


def check_length(model, n_tokens: int) -> None:
    """Raise ValueError if the model cannot hold a document and its replay."""
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    needed = 2 * n_tokens + N_REQUEST + N_QUESTION
    if longest is not None and needed > longest:
        raise ValueError(f"--tokens {n_tokens} is too long: with its replay {needed}, the model takes {longest}")


def collect(model, tokenizer, documents: dict[str, list[list[int]]], folder: Path) -> tuple[dict[str, list[Path]], int]:
    """Observe every document that the folder lacks; returns the files, and the length of the template's prefix."""
    from kvpress import ExpectedAttentionPress, KnormPress

    from verkv import KVzipPress
    from verkv.demo import Task, encode_task

    source = KVzipPress(tokenizer=tokenizer).source()
    source.prepare(model)
    before = encode_task(tokenizer, Task("", "", "", ""), model.device)[0].long()  # what the chat template puts first
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, list[Path]] = {name: [] for name in documents}
    with tqdm(total=sum(map(len, documents.values())), desc="documents", unit="document") as bar:
        for split, members in documents.items():
            scorers = {"expected": ExpectedAttentionPress(), "knorm": KnormPress()} if split == "held-out" else {}
            for i, document in enumerate(members):
                ids = torch.cat([before, torch.tensor([document], device=before.device)], 1)
                path = folder / f"{split}-{i:03d}.safetensors"
                make = lambda ids=ids, scorers=scorers: observe(model, source, ids, scorers)  # noqa: E731
                store(path, make, fingerprint(model, ids, scorers))
                files[split].append(path)
                bar.update()
    return files, source.prefix_length


def train(model, paths: list[Path], prefix: int, options: GateOptions) -> tuple[dict, dict[int, list[float]]]:
    """A trained gate of every full-attention layer, and each epoch's loss."""
    gates, losses = {}, {}
    for i in tqdm(attention_modules(model), desc="gates", unit="layer"):
        hidden = torch.cat([t[prefix:] for t in load_tensors(paths, f"hidden.{i}")])
        targets = torch.cat([t[:, prefix:] for t in load_tensors(paths, f"kvzip.{i}")], 1)
        gates[i] = new_gate(i, model.config, options)
        losses[i] = train_gate(gates[i], hidden, targets, options)
    return gates, losses


def try_presses(model, tokenizer, gates, held_out: list[list[int]], options) -> list[dict]:
    """Needle contexts of held-out text through the presses, a row each."""
    rows = []
    for i, document in enumerate(tqdm(held_out[: options.check], desc="presses", unit="context")):
        task = needle_task(tokenizer.decode(document), options.seed + i)
        tried = presses(gates, options.compression_ratio, options.seed)
        rows += [{"context": i, **row} for row in check_task(model, tokenizer, task, tried)]
    return rows


def table(figures: dict) -> str:
    """The held-out figures as Markdown."""
    form = lambda m: f"{m['mean']:.3f}" + ("" if m["low"] is None else f" ({m['low']:.3f} to {m['high']:.3f})")  # noqa: E731
    columns = ("rank_correlation", "pooled_rank_correlation", "top_overlap")
    rows = ["| guess | Spearman, per head | Spearman, model-wide | overlap of the top 10 % |", "|---|---|---|---|"]
    rows += [f"| {GUESSES[g]} | " + " | ".join(form(figures[c][g]) for c in columns) + " |" for g in GUESSES]
    rows += ["", "| layer | Spearman of the gate | overlap of the top 10 % |", "|---|---|---|"]
    for row in figures["layers"]:
        rows.append(f"| {row['layer']} | {form(row['rank_correlation'])} | {form(row['top_overlap'])} |")
    return "\n".join(rows)


def press_table(rows: list[dict]) -> str:
    """The presses' figures as Markdown, means over the contexts."""
    lines = ["| press | mean KL from dense | same next token | dense's whole answer |", "|---|---|---|---|"]
    for name in dict.fromkeys(row["press"] for row in rows):
        own = [row for row in rows if row["press"] == name]
        mean = lambda key, own=own: sum(row[key] for row in own) / len(own)  # noqa: E731
        count = f"{sum(row['same_answer'] for row in own)} of {len(own)}"
        lines.append(f"| {name} | {mean('kl'):.3f} | {mean('same_next_token'):.2f} | {count} |")
    return "\n".join(lines)


def trained_gates(model, name: str, paths: list[Path], prefix: int, options: argparse.Namespace) -> tuple[list, dict]:
    """Train gates, write their file and read it: what is measured is what it holds. Returns what to report, too."""
    chosen = GateOptions(**{field: getattr(options, field) for field in asdict(GateOptions())})
    gates, losses = train(model, paths, prefix, chosen)
    output = options.output or HERE / "gates" / f"{name}.safetensors"
    size = save_gates(output, gates, model.config, {"model": name, **asdict(chosen)})
    first_and_last = [[round(epochs[0], 5), round(epochs[-1], 5)] for epochs in losses.values()]
    return load_gates(output, model.config), {"gate": asdict(chosen), "gates_bytes": size, "losses": first_and_last}


def run(options: argparse.Namespace) -> dict:
    """Collect, train, evaluate and try, and return the JSON line as a dict.

    Raises
    ------
    ValueError
        If an option, the text, the stored documents or the gates cannot be used.
    """
    check_options(options)
    torch.set_num_threads(options.threads)
    texts = pydoc_texts() if options.text is None else read_texts(options.text)
    model, tokenizer, name = load(options.model)
    check_length(model, options.tokens)
    gates = None if options.gates is None else load_gates(options.gates, model.config)
    sizes = {"documents": options.documents, "held_out": options.held_out, "tokens": options.tokens}
    train_ids, held_out_ids = split_documents(tokenise(texts, tokenizer), *sizes.values(), options.seed)
    source = "pydoc topics" if options.text is None else [path.name for path in options.text]
    result = {"model": name, "seed": options.seed, "text": source, **sizes, "threads": options.threads}
    seconds: dict[str, dict] = {}

    folder = options.data_dir or HERE / "results" / "gates" / name
    with timed(seconds, "documents"):
        files, prefix = collect(model, tokenizer, {"held-out": held_out_ids, "train": train_ids}, folder)
    if gates is None:
        with timed(seconds, "training"):
            gates, report = trained_gates(model, name, files["train"], prefix, options)
        result |= report
    with timed(seconds, "evaluation"):
        result["figures"] = evaluate(gates, files["train"], files["held-out"], prefix)
    with timed(seconds, "presses"):
        result["presses"] = try_presses(model, tokenizer, gates, held_out_ids, options)
    versions = {package: version(package) for package in ("verkv", "torch", "transformers", "kvpress", "safetensors")}
    result |= {"compression_ratio": options.compression_ratio, "seconds": seconds}
    return result | {"versions": versions | {"python": platform.python_version()}}


def main(arguments: list[str] | None = None) -> int:
    """Run the script; 2 where something that was passed cannot be used."""
    options = parser().parse_args(arguments)
    try:
        result = run(options)
    except ValueError as error:
        print("train_gates:", *str(error).split(), file=sys.stderr)  # on one line
        return 2
    print(table(result["figures"]))
    if result["presses"]:
        print("\n" + press_table(result["presses"]))
    line = json.dumps(result)
    if options.results is not None:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        with options.results.open("a") as file:
            file.write(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
