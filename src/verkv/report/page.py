"""The page: a head with what came out, the sections for every length, and how it was made."""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from verkv import __version__
from verkv.report import groups, sections, tables
from verkv.report.bootstrap import LEVEL, N_RESAMPLES
from verkv.report.groups import Lines
from verkv.report.html import Html, document, element, join, table

SECTIONS = (
    ("glance", "At a glance", sections.glance),
    ("quality", "Quality", sections.quality),
    ("order", "Step by step", sections.order),
    ("tasks", "Task by task", sections.task_by_task),
    ("divergence", "Divergence from dense", sections.divergence),
    ("fetching", "What is kept and read", sections.fetching),
    ("heads", "Fetching by layer and head", sections.heads),
    ("guarantee", "Tolerance, traffic and true error", sections.guarantee),
    ("answers", "Answers that differ from dense's", sections.answers),
)


def page(lines: Lines, source: str) -> str:
    """The whole report.

    Parameters
    ----------
    lines : list of dict
        Answers of one model.
    source : str
        Name of the results file, to be shown.

    Returns
    -------
    str
        HTML that needs nothing else. The same answers give the same page.
    """
    model = lines[0]["model"]
    by_length = dict(sorted(groups.by(lines, lambda line: line["n_tokens"]).items()))
    title = f"VerKV: {Path(model).name}"
    body = [element("header", element("h1", title), _introduction(lines, list(by_length))), _contents()]
    for key, heading, make in SECTIONS:
        body.append(_section(key, heading, [(n, make(group)) for n, group in by_length.items()]))
    body.append(_section("made", "How this was made", [(None, made(lines, source))]))
    return document(title, *body)


def _introduction(lines: Lines, lengths: list[int]) -> Html:
    tasks = {line["task"] for line in lines}
    text = f"{len(lines):,} answers of {lines[0]['model']}: {len(tasks)} tasks, prompts of up to "
    text += (
        f"{' and '.join(f'{n:,}' for n in lengths)} tokens, {len(groups.variants(lines))} methods and settings. All "
    )
    return element("p", text + "answer the same questions; dense attention on the full cache is the reference.")


def _contents() -> Html:
    entries = [*((key, heading) for key, heading, _ in SECTIONS), ("made", "How this was made")]
    links = [element("li", element("a", heading, href=f"#{key}")) for key, heading in entries]
    return element("nav", element("ul", *links), aria_label="Contents")


def _section(key: str, heading: str, parts: list[tuple[int | None, Html]]) -> Html:
    """A section; with several lengths, each has a heading of its own."""
    body = []
    for n_tokens, part in parts:
        if len(parts) > 1:
            body.append(element("h3", f"Prompts of up to {n_tokens:,} tokens"))
        body.append(part)
    return element("section", element("h2", heading), *body, id=key)


def made(lines: Lines, source: str) -> Html:
    """Where the figures come from: sample sizes, seeds, options, versions, commands."""
    facts = [
        ("results", source),
        ("model", lines[0]["model"]),
        ("device and type", _values(lines, lambda x: f"{x.get('device')}, {x.get('dtype')}")),
        ("versions", _values(lines, lambda x: ", ".join(f"{k} {v}" for k, v in (x.get("versions") or {}).items()))),
        ("context tokens", _range([line["context_tokens"] for line in lines])),
        ("answers' length", f"{_range([line.get('n_new_tokens', 0) for line in lines])} tokens"),
        ("seeds of the draws", _values(lines, lambda x: "" if x["seed"] is None else str(x["seed"]))),
        ("seeds of the examples", _values(lines, lambda x: str(x.get("data_seed", "")))),
        ("tolerances", _values(lines, lambda x: _tolerance(x))),
        (
            "intervals",
            f"{100 * LEVEL:g} %, percentiles of {N_RESAMPLES:,} bootstrap resamples with seed 0; examples are "
            "resampled within each task, n - 1 of n, all draws of a question together. They speak of these tasks, "
            "and say nothing about others.",
        ),
    ]
    counts = groups.by(lines, lambda line: (line["n_tokens"], line["task"]))
    body = [[task, f"{n:,}", len(groups.by(group, groups.question)), len(group)] for (n, task), group in counts.items()]
    notes = _different(note for line in lines for note in line.get("notes") or [])
    parts = [
        table("Facts.", ["what", "value"], [[name, value] for name, value in facts], text={0, 1}),
        table("Sample sizes.", ["task", "length (tokens)", "questions", "answers"], body),
        _settings(lines),
        element("h3", "Commands"),
        element("p", "The flags that ask for all of this; a preset or settings file may have asked for less of it."),
        element("pre", f"{_command(lines, source)}\nverkv report {shlex.quote(source)}"),
    ]
    if notes:
        parts += [element("h3", "Notes in the results"), element("ul", *(element("li", note) for note in notes))]
    return join([*parts, element("p", f"Made by verkv {__version__}.")])


def _different(notes: Iterable[str]) -> list[str]:
    """Notes that differ in more than their numbers, each as it came first."""
    return list({re.sub(r"\d[\d.,]*", "#", note): note for note in reversed(list(notes))}.values())[::-1]


def _settings(lines: Lines) -> Html:
    rows = []
    for name, group in groups.variants(lines).items():
        options = _values(group, lambda x: ", ".join(f"{k}={v}" for k, v in (x.get("options") or {}).items()))
        used = ", ".join(sections.rate_name(c) for c in sorted(set(map(groups.rate, group))))
        shown = element("div", options, class_="wide")
        rows.append([name, group[0].get("press") or NO_PRESS, group[0].get("sketch") or NO_PRESS, used, shown])
    return table("Methods.", ["method", "scores of", "sketch", "compression", "options"], rows, text=set(range(5)))


NO_PRESS = "–"


def _command(lines: Lines, source: str) -> str:
    """The flags of ``verkv eval`` that give these answers, and perhaps more of them."""
    listed = lambda values: " ".join(shlex.quote(f"{v:g}" if isinstance(v, float) else str(v)) for v in values)  # noqa: E731
    every = lambda key: listed(dict.fromkeys(x[key] for x in lines if x.get(key) is not None))  # noqa: E731
    flags = {
        "model": every("model"),
        "tasks": every("task"),
        "n-tokens": every("n_tokens"),
        "n-examples": str(1 + max(line["example"] for line in lines)),
        "methods": every("method"),
        "compression": listed(tables.compressions(lines)),
        "epsilon": every("epsilon"),
        "delta": every("delta"),
        "seeds": every("seed"),
        "data-seed": every("data_seed"),
        "max-new-tokens": str(max(line.get("max_new_tokens") or 0 for line in lines) or ""),
        "output": shlex.quote(source),
    }
    audit = " --audit" if any(line.get("audit") for line in lines) else ""
    return "verkv eval " + " ".join(f"--{name} {value}" for name, value in flags.items() if value) + audit


def _values(lines: Lines, value) -> str:
    return "; ".join(filter(None, dict.fromkeys(map(value, lines))))


def _range(values: list[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _tolerance(line: dict) -> str:
    return "" if line.get("epsilon") is None else f"ε {line['epsilon']:g}, δ {line.get('delta'):g}"
