"""kvtc on a small model: error of restored keys and values, and what it does to the next tokens, by nominal ratio.

Calibrates on about 40,000 tokens of `pydoc_data.topics`, tests on other topics of it and on another domain. Every
result is one JSON line; a line that is there is not computed again, so the script can be stopped and started. At the
end the lines are written as a Markdown table.

    python experiments/kvtc_table.py --output experiments/results/kvtc_table.jsonl --xquad xquad.en.json
"""

import argparse
import copy
import itertools
import json
import platform
import random
import sys
import time
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics

import torch
from demo_loading import load_demo_model
from transformers import DynamicCache

from verkv import __version__
from verkv.codecs import KVTC, Artefact, KvtcConfig, calibrate, reconstruction_error

CHUNK = 2048
RATIOS = (8, 16, 32, 64)
MODES = ("dynamic", "static")
TEST_EVERY = 4  # every fourth topic, by name, is for testing
CALIBRATED_ON = "pydoc topics"  # what the limits below are for
SCORED = 256  # tokens whose likelihood is compared
# What must hold: K error, V error (dynamic, static), difference of the negative log-likelihood.
LIMITS = {
    8: ((0.050, 0.052), (0.135, 0.137), 0.02),
    16: ((0.085, 0.077), (0.22, 0.20), 0.02),
    32: ((0.13, 0.117), (0.33, 0.31), 0.03),
    64: ((0.175, 0.158), (0.45, 0.42), 0.06),
}


def pydoc_split() -> tuple[list[str], list[str]]:
    """Texts for calibration and for testing, from different topics.

    Topics quote each other, so paragraphs of test topics that also stand in a calibration topic are taken out.
    """
    names = sorted(topics)
    test_names = names[TEST_EVERY - 1 :: TEST_EVERY]
    calibration = [topics[name] for name in names if name not in test_names]
    random.Random(0).shuffle(calibration)  # only the first are used
    seen = {_squeezed(paragraph) for text in calibration for paragraph in text.split("\n\n")}
    test = []
    for name in test_names:
        kept = [p for p in topics[name].split("\n\n") if _squeezed(p) not in seen]
        test.append("\n\n".join(kept))
    return calibration, test


def _squeezed(paragraph: str) -> str:
    return " ".join(paragraph.split())


def chunked(tokenizer, texts: list[str], limit: int | None = None) -> list[torch.Tensor]:
    """Token sequences of CHUNK tokens (the last may be shorter), ``limit`` tokens in all.

    Texts are put behind each other: a sequence of one short text would hold little but its beginning.
    """
    chunks, current = [], []
    for text in texts:
        current += tokenizer(text + "\n\n").input_ids
        while len(current) >= CHUNK:
            chunks.append(torch.tensor(current[:CHUNK]))
            current = current[CHUNK:]
    if len(current) > CHUNK // 2:
        chunks.append(torch.tensor(current))
    if limit is None:
        return chunks
    ends = list(itertools.accumulate(map(len, chunks)))
    return [chunk for chunk, end in zip(chunks, ends, strict=True) if end - len(chunk) < limit]


def xquad_texts(path: Path) -> list[str]:
    """The paragraphs of XQuAD, one text per article."""
    articles = json.loads(path.read_text())["data"]
    return ["\n\n".join(paragraph["context"] for paragraph in article["paragraphs"]) for article in articles]


@torch.inference_mode()
def prefill(model, ids: torch.Tensor) -> DynamicCache:
    """The cache of a sequence (T,)."""
    cache = DynamicCache()
    model.model(input_ids=ids[None], past_key_values=cache)
    return cache


@torch.inference_mode()
def scored_logits(model, cache, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities (SCORED, vocabulary) of what follows each of the last tokens, given the cache before them."""
    return model(input_ids=ids[None, -SCORED - 1 : -1], past_key_values=cache).logits[0].log_softmax(-1)


def error_lines(codecs: dict, caches, domain: str):
    """Frobenius errors over all coded tokens of the test caches."""
    sums: dict[tuple, dict[str, float]] = {}
    for number, cache in enumerate(caches):
        for key, codec in codecs.items():
            found = reconstruction_error(codec, cache)
            total = sums.setdefault(key, dict.fromkeys(found, 0.0))
            for name, value in found.items():
                total[name] += value
        print(f"{domain}: errors of text {number + 1} done", file=sys.stderr, flush=True)
    for (ratio, mode), total in sums.items():
        line = {"kind": "error", "domain": domain, "ratio": ratio, "mode": mode, "n_tokens": int(total["n_tokens"])}
        for side in ("k", "v"):
            line[f"{side}_error"] = (total[f"{side}_squared_error"] / total[f"{side}_energy"]) ** 0.5
            line[f"{side}_centred_error"] = (total[f"{side}_squared_error"] / total[f"{side}_centred_energy"]) ** 0.5
        yield line


def likelihood_lines(model, codecs: dict, chunks, domain: str):
    """Teacher-forced likelihood of the last tokens of each chunk, over the restored context and over the exact one."""
    for number, ids in enumerate(chunks):
        context = prefill(model, ids[: -SCORED - 1])
        targets = ids[-SCORED:, None]
        exact = scored_logits(model, copy.deepcopy(context), ids)
        for (ratio, mode), codec in codecs.items():
            start = time.process_time()
            compressed = codec.compress(context)
            compress_seconds = time.process_time() - start
            start = time.process_time()
            restored = compressed.restore()
            restore_seconds = time.process_time() - start
            logits = scored_logits(model, restored, ids)
            differences = (exact - logits).gather(1, targets)  # of the negative log-likelihoods, token by token
            yield {
                "kind": "likelihood",
                "domain": domain,
                "chunk": number,
                "ratio": ratio,
                "mode": mode,
                "n_context": len(ids) - SCORED - 1,
                "nll": float(-exact.gather(1, targets).mean()),
                "dnll": float(differences.mean()),
                "dnll_variance": float(differences.var()) / SCORED,  # of that mean
                "kl": float((exact.exp() * (exact - logits)).sum(-1).mean()),
                "same_top1": float((exact.argmax(-1) == logits.argmax(-1)).float().mean()),
                **compressed.ratios(),
                "compress_seconds": compress_seconds,
                "restore_seconds": restore_seconds,
            }


def markdown(lines: list[dict]) -> str:
    """The table: errors and likelihoods beside their limits, one line per domain, ratio and mode."""
    rows = [
        "| text | nominal | mode | K error | V error | K centred | V centred | dNLL | KL | same top 1 | "
        "ratio, paper's count | ratio, bytes stored |",
        "|" + "---|" * 12,
    ]
    likelihoods = [line for line in lines if line["kind"] == "likelihood"]
    for line in (line for line in lines if line["kind"] == "error"):
        key = tuple(line[name] for name in ("domain", "ratio", "mode"))
        same = [x for x in likelihoods if tuple(x[name] for name in ("domain", "ratio", "mode")) == key]
        names = ("dnll", "kl", "same_top1", "paper_ratio", "stored_ratio")
        mean = {name: sum(x[name] for x in same) / max(1, len(same)) for name in names}
        standard_error = sum(x.get("dnll_variance", 0.0) for x in same) ** 0.5 / max(1, len(same))
        column = MODES.index(line["mode"])
        k_limit, v_limit, nll_limit = LIMITS[line["ratio"]]
        limits = [f" (≤ {limit:g})" for limit in (k_limit[column], v_limit[column], nll_limit)]
        if line["domain"] != CALIBRATED_ON:
            limits = ["", "", ""]
        cells = [
            line["domain"],
            f"{line['ratio']}x",
            line["mode"],
            f"{line['k_error']:.4f}{limits[0]}",
            f"{line['v_error']:.4f}{limits[1]}",
            f"{line['k_centred_error']:.3f}",
            f"{line['v_centred_error']:.3f}",
            f"{mean['dnll']:+.4f}{f' ± {standard_error:.4f}' if standard_error else ''}{limits[2]}" if same else "–",
            f"{mean['kl']:.4f}" if same else "–",
            f"{mean['same_top1']:.1%}" if same else "–",
            f"{mean['paper_ratio']:.1f}" if same else "–",
            f"{mean['stored_ratio']:.1f}" if same else "–",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def report_progress(stage: str, done: int, total: int) -> None:
    """Print where the calibration is."""
    print(f"{stage}: {done} of {total}", file=sys.stderr, flush=True)


def main() -> None:
    """Calibrate, measure what is not yet in the file, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("experiments/results/kvtc_table.jsonl"))
    parser.add_argument("--artefact", type=Path, help="the calibration, made if it is not there (default: beside it)")
    parser.add_argument("--calibration-tokens", type=int, default=40_000)
    parser.add_argument("--test-tokens", type=int, default=10_000)
    parser.add_argument("--likelihood-chunks", type=int, default=6)
    parser.add_argument("--xquad", type=Path, help="xquad.en.json, for another domain")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    artefact_path = options.artefact or options.output.with_suffix(".safetensors")

    model, tokenizer = load_demo_model()
    calibration, test = pydoc_split()
    if not artefact_path.exists():
        sequences = chunked(tokenizer, calibration, options.calibration_tokens)
        start = time.perf_counter()
        calibrate(model, sequences, artefact_path, sources="pydoc_data.topics", progress=report_progress)
        print(f"calibrated in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    artefact = Artefact(artefact_path)
    codecs = {
        (ratio, mode): KVTC(artefact, model.config, KvtcConfig(ratio=ratio, mode=mode))
        for ratio in RATIOS
        for mode in MODES
    }

    lines = [json.loads(line) for line in options.output.read_text().splitlines()] if options.output.exists() else []
    domains = {CALIBRATED_ON: test}
    if options.xquad:
        domains["XQuAD"] = xquad_texts(options.xquad)
    common = {
        "calibration_tokens": artefact.metadata["n_tokens"],
        "python": platform.python_version(),
        "versions": {"verkv": __version__} | {name: version(name) for name in ("torch", "transformers")},
    }
    with options.output.open("a") as file:

        def keep(line: dict) -> None:
            lines.append(line | common)
            file.write(json.dumps(lines[-1]) + "\n")
            file.flush()

        for domain, texts in domains.items():
            chunks = chunked(tokenizer, texts, options.test_tokens)
            if not any(line["kind"] == "error" and line["domain"] == domain for line in lines):
                for line in error_lines(codecs, (prefill(model, ids) for ids in chunks), domain):
                    keep(line)
            done = {line["chunk"] for line in lines if line["kind"] == "likelihood" and line["domain"] == domain}
            whole = [ids for ids in chunks if len(ids) == CHUNK][: options.likelihood_chunks]
            for number, ids in enumerate(whole):
                if number not in done:
                    found = list(likelihood_lines(model, codecs, [ids], domain))
                    for line in found:
                        keep(line | {"chunk": number})
                    print(f"{domain}: likelihood of text {number + 1} of {len(whole)}", file=sys.stderr, flush=True)
    table = markdown(lines)
    options.output.with_suffix(".md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
