"""What the experiments of kvtc share: lines kept as they are measured, the setting, one judged forward pass."""

import json
import platform
import statistics
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from demo_loading import load_demo_model
from kvtc_table import CHUNK, chunked, prefill, pydoc_split, report_progress
from torch import Tensor
from transformers import DynamicCache

from verkv import __version__
from verkv.codecs import Artefact, calibrate

DEFAULT_ARTEFACT = Path("experiments/results/kvtc_table.safetensors")
N_SCORED = 256  # tokens of a text whose distributions are compared


class Lines:
    """A JSONL file to which every measurement is added at once, so that an interrupted run can go on.

    Parameters
    ----------
    path : Path
        What it holds already is read; half a last line, as a killed process leaves it, is cut off.
    common : dict, optional
        Fields of every new line.
    """

    def __init__(self, path: Path, common: dict | None = None):
        self.path, self.common, self.lines = path, common or {}, []
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            text = path.read_text()
            whole = text[: text.rfind("\n") + 1]
            self.lines = [json.loads(line) for line in whole.splitlines()]
            if whole != text:
                path.write_text(whole)

    def has(self, **keys) -> bool:
        """Whether a line with these fields is there."""
        return bool(self.find(**keys))

    def find(self, **keys) -> list[dict]:
        """Lines with these fields."""
        return [line for line in self.lines if all(line.get(key) == value for key, value in keys.items())]

    def add(self, line: dict) -> None:
        """Keep a line."""
        line = line | self.common
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.lines.append(line)


@dataclass(frozen=True)
class Setting:
    """The model, its tokenizer and its calibration."""

    model: object
    tokenizer: object
    artefact: Artefact

    def common(self) -> dict:
        """Fields of every line."""
        return {
            "calibration_tokens": self.artefact.metadata["n_tokens"],
            "python": platform.python_version(),
            "versions": {"verkv": __version__} | {name: version(name) for name in ("torch", "transformers")},
        }


def open_setting(artefact_path: Path, calibration_tokens: int = 40_000) -> Setting:
    """The demo model with the calibration of ``kvtc_table.py``, which is made if it is not there."""
    model, tokenizer = load_demo_model()
    if not artefact_path.exists():
        artefact_path.parent.mkdir(parents=True, exist_ok=True)
        sequences = calibration_sequences(tokenizer, calibration_tokens)
        calibrate(model, sequences, artefact_path, sources="pydoc_data.topics", progress=report_progress)
    return Setting(model, tokenizer, Artefact(artefact_path))


def calibration_sequences(tokenizer, n_tokens: int) -> list[Tensor]:
    """Token sequences of the topics that are for calibration."""
    return chunked(tokenizer, pydoc_split()[0], n_tokens)


@dataclass(frozen=True)
class Text:
    """A text in two parts: what is compressed, and what is read after it.

    Attributes
    ----------
    cache : DynamicCache
        Of the first part, exact.
    rest : Tensor, shape (1, 1 + N_SCORED)
        The second part; predictions of all of it but the first are compared.
    exact : Tensor, shape (N_SCORED, V)
        Log-probabilities over the exact cache.
    """

    cache: DynamicCache
    rest: Tensor
    exact: Tensor


def test_texts(tokenizer, n_texts: int) -> list[Tensor]:
    """Whole chunks (CHUNK,) of the topics that are for testing."""
    return [ids for ids in chunked(tokenizer, pydoc_split()[1]) if len(ids) == CHUNK][:n_texts]


def split_text(model, ids: Tensor) -> Text:
    """Prefill a text but for its last tokens, and predict those."""
    cache = prefill(model, ids[: -N_SCORED - 1])
    rest = ids[None, -N_SCORED - 1 :]
    exact = log_probabilities(model, fork(cache), rest[:, :-1], cache.get_seq_length())
    return Text(cache, rest, exact)


def fork(cache) -> DynamicCache:
    """A cache of its own; tensors are shared, since layers append by concatenation."""
    return DynamicCache([(layer.keys, layer.values) for layer in cache.layers])


@torch.inference_mode()
def log_probabilities(model, cache, ids: Tensor, position: int) -> Tensor:
    """Log-probabilities (n, V) after each of the tokens (1, n), of which ``position`` is the first's."""
    positions = torch.arange(position, position + ids.shape[1])[None]
    return model(input_ids=ids, past_key_values=cache, position_ids=positions).logits[0].log_softmax(-1)


def compare(exact: Tensor, found: Tensor, targets: Tensor) -> dict[str, float]:
    """How far predictions (n, V) are from the exact cache's, and what it costs on the text that follows (n,).

    Returns
    -------
    dict
        "kl" in nats, >= 0; "same_top1" in [0, 1]; "nll" over the exact cache; "dnll", the difference; "dnll_variance",
        of that mean; "n_scored".
    """
    exact, found = exact.double(), found.double()
    differences = (exact - found).gather(1, targets[:, None])
    return {
        "kl": float((exact.exp() * (exact - found)).sum(-1).mean().clamp_min(0)),
        "same_top1": float((exact.argmax(-1) == found.argmax(-1)).double().mean()),
        "nll": float(-exact.gather(1, targets[:, None]).mean()),
        "dnll": float(differences.mean()),
        "dnll_variance": float(differences.var()) / len(targets) if len(targets) > 1 else 0.0,
        "n_scored": len(targets),
    }


def judge(model, text: Text, cache) -> dict[str, float]:
    """:func:`compare` for a text over another cache of its first part."""
    found = log_probabilities(model, fork(cache), text.rest[:, :-1], text.cache.get_seq_length())
    return compare(text.exact, found, text.rest[0, 1:])


# --- tables -----------------------------------------------------------------------------------------------------------


def mean_of(lines: list[dict], name: str) -> float:
    """Mean of a field."""
    return statistics.fmean(line[name] for line in lines)


def interval(values: list[float]) -> str:
    """Mean and, from three examples on, its 95 % half-width by Student's t."""
    mean = statistics.fmean(values)
    if len(values) < 3:
        return f"{mean:.3g}"
    from scipy import stats

    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:.3g} ± {half:.2g}"


def dnll_cell(lines: list[dict]) -> str:
    """Mean difference of the negative log-likelihood and its standard error over the tokens of these texts."""
    error = sum(line["dnll_variance"] for line in lines) ** 0.5 / len(lines)
    return f"{mean_of(lines, 'dnll'):+.3f} ± {error:.3f}"


def markdown(header: list[str], rows: list[list]) -> str:
    """A Markdown table; floats with three significant digits."""
    cells = [
        [f"{cell:.3g}" if isinstance(cell, float) else "–" if cell is None else str(cell) for cell in row]
        for row in rows
    ]
    lines = ["| " + " | ".join(row) + " |" for row in [header, *cells]]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]]) + "\n"


def say(message: str) -> None:
    """Progress, to standard error."""
    print(message, file=sys.stderr, flush=True)
