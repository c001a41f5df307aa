"""Answers grouped by what is compared: the method with its options, the compression, the length."""

import json
from collections.abc import Callable, Iterable

import numpy as np

DENSE = "dense"
# The order of rows and legends; presses of others follow in the order of the file.
METHODS = ("dense", "dense_offloaded", "verkv_everything", "kvzip", "fastkvzip", "poissoncomp", "verkv")
METHODS += ("verkv_fastkvzip", "verkv_default", "verkv_exact")

UNRATED = 0.0
USUAL = (0.05, 0.1)  # epsilon and delta of the paper's main results

Lines = list[dict]


def by(lines: Iterable[dict], key: Callable[[dict], object]) -> dict:
    """Lines by a key, in the order in which the keys appear."""
    groups: dict = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line)
    return groups


def question(line: dict) -> tuple:
    """What tells one question from another; every method answers it, and all draws of a question are averaged."""
    return line["task"], line["n_tokens"], line.get("data_seed"), line["example"]


def rate(line: dict) -> float:
    """The compression; ``UNRATED`` for a press of others that takes none."""
    return UNRATED if line["compression"] is None else float(line["compression"])


def is_dense(line: dict) -> bool:
    """Whether it is the reference that others are compared with."""
    return line["method"] == DENSE


def dense_lines(lines: Lines) -> Lines:
    """The reference's answers."""
    return [line for line in lines if is_dense(line)]


def variants(lines: Lines) -> dict[str, Lines]:
    """Answers by the name of their method, in the order of the tables.

    A name is the label, and what tells two settings of one label apart: tolerances, then other options.

    Parameters
    ----------
    lines : list of dict

    Returns
    -------
    dict of str to list of dict
    """
    ordered = sorted(lines, key=_rank)  # stable: what is not ranked stays in the order of the file
    settings = {label: by(group, _setting) for label, group in by(ordered, lambda line: line["label"]).items()}
    named: dict[str, Lines] = {}
    for label, groups in settings.items():
        for setting, group in groups.items():
            named.setdefault(_name(label, setting, list(groups)), []).extend(group)
    return named


def main_setting(lines: Lines) -> Lines:
    """Of every label the answers of one setting: the one with the most, of equals the nearest to the usual tolerance.

    Pictures and summaries show these; tables show all.
    """
    chosen = set()
    named = variants(lines)
    for names in by(named, lambda name: named[name][0]["label"]).values():
        chosen.add(min(names, key=lambda name: (-len(named[name]), _distance_from_usual(named[name][0]))))
    kept = {id(line) for name in chosen for line in named[name]}
    return [line for line in lines if id(line) in kept]


def _distance_from_usual(line: dict) -> tuple[float, float]:
    """Of the tolerances, from the paper's 0.05 and 0.1."""
    epsilon, delta = line.get("epsilon"), line.get("delta")
    return abs((USUAL[0] if epsilon is None else epsilon) - USUAL[0]), abs(
        (USUAL[1] if delta is None else delta) - USUAL[1]
    )


def _rank(line: dict) -> tuple:
    known = METHODS.index(line["method"]) if line["method"] in METHODS else len(METHODS)
    return known, line.get("epsilon") or 0.0, line.get("delta") or 0.0


def _setting(line: dict) -> tuple:
    """Tolerances and options; sinks and windows are scaled to the length, and so they are no setting."""
    options = {k: v for k, v in (line.get("options") or {}).items() if k not in ("n_sink", "n_local")}
    return line.get("epsilon"), line.get("delta"), json.dumps(options, sort_keys=True)


def _name(label: str, setting: tuple, settings: list[tuple]) -> str:
    """The label, with the tolerances and options that differ among its settings."""
    shown = []
    for place, symbol in ((0, "ε"), (1, "δ")):
        if len({other[place] for other in settings}) > 1 and setting[place] is not None:
            shown.append(f"{symbol}\u00a0{setting[place]:g}")
    options = json.loads(setting[2])
    others = [json.loads(other[2]) for other in settings]
    for key in sorted({key for other in others for key in other}):
        if len({json.dumps(other.get(key)) for other in others}) > 1:
            shown.append(f"{key} {options.get(key)}")
    return ", ".join([label, *shown])


def strata(lines: Lines, *values: Callable[[dict], float]) -> list[np.ndarray]:
    """Figures of every question, task by task: arrays (n_questions, len(values)); draws are averaged."""
    tables = []
    for group in by(lines, lambda line: line["task"]).values():
        answers = by(group, question).values()
        tables.append(np.array([[np.mean([value(x) for x in draws]) for value in values] for draws in answers]))
    return tables


def paired_strata(lines: Lines, others: Lines, value: Callable[[dict], float]) -> dict[str, np.ndarray]:
    """A figure of both on the questions that both answered, by task: arrays (n_questions, 2); draws are averaged."""
    ours, theirs = by(lines, question), by(others, question)
    pairs: dict[str, list] = {}
    for key, draws in ours.items():
        if key in theirs:
            pair = [np.mean([value(x) for x in answers]) for answers in (draws, theirs[key])]
            pairs.setdefault(key[0], []).append(pair)
    return {task: np.array(rows) for task, rows in pairs.items()}


def score(line: dict) -> float:
    """The answer's task score on the scale of the tables, 0 to 100."""
    return 100.0 * line["score"]
