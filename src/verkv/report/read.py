"""Read and check the JSONL lines that ``verkv eval`` writes."""

import json
import math
from pathlib import Path

REQUIRED = {
    "id": str,
    "model": str,
    "task": str,
    "n_tokens": int,
    "example": int,
    "seed": (int, type(None)),
    "context_tokens": int,
    "method": str,
    "label": str,
    "compression": (int, float, type(None)),
    "answers": list,
    "prediction": str,
    "score": (int, float),
}


class ReportError(ValueError):
    """The results cannot be shown; the message is one line and says what to do."""


def read_results(path: str | Path, model: str | None = None) -> list[dict]:
    """The answers in a results file, checked; an answer that is there twice counts once.

    Parameters
    ----------
    path : path-like
        JSONL, one answer per line.
    model : str, optional
        Keep the answers of this model only.

    Returns
    -------
    list of dict
        In the order of the file; at least one.

    Raises
    ------
    ReportError
        If the file cannot be read or is empty, a line is damaged, the model has no answers, or there are answers of
        several models and ``model`` is not given.
    """
    lines = list(_checked_lines(Path(path)))
    models = list(dict.fromkeys(line["model"] for line in lines))
    if model is not None and model not in models:
        raise ReportError(f"{path} has no answers of {_quote(model)}, only of {_names(models)}")
    if model is None and len(models) > 1:
        raise ReportError(f"{path} has answers of {len(models)} models ({_names(models)}); choose one with --model")
    chosen = [line for line in lines if model in (None, line["model"])]
    return list({line["id"]: line for line in reversed(chosen)}.values())[::-1]


def _checked_lines(path: Path):
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ReportError(f"{path} is not UTF-8 text, so not a results file of verkv eval") from error
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}; run verkv eval first") from error
    numbered = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not numbered:
        raise ReportError(f"{path} is empty; run verkv eval first")
    for number, line in numbered:
        yield _parse(line, f"{path}, line {number}")


def _parse(text: str, where: str) -> dict:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise ReportError(f"{where} is not JSON; if it was cut off, remove it and run verkv eval again") from error
    if not isinstance(line, dict):
        raise ReportError(f"{where} is not a JSON object")
    for name, kind in REQUIRED.items():
        if name not in line:
            raise ReportError(f"{where} has no {name!r}, so it is no result of verkv eval")
        if not isinstance(line[name], kind) or isinstance(line[name], bool):
            raise ReportError(f"{where}: {name!r} has the wrong type, {type(line[name]).__name__}")
    if not 0.0 <= line["score"] <= 1.0:
        raise ReportError(f"{where}: the score must be in [0, 1], got {line['score']}")
    if line["compression"] is not None and not 0.0 < line["compression"] < math.inf:
        raise ReportError(f"{where}: the compression must be a number > 0, got {line['compression']}")
    return line


def _names(models: list[str]) -> str:
    shown = ", ".join(_quote(name) for name in models[:4])
    return shown + (", ..." if len(models) > 4 else "")


def _quote(name: str) -> str:
    """Without line breaks, whatever the file holds."""
    return repr(name if len(name) <= 80 else name[:77] + "...")
