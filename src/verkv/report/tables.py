"""The figures of the tables: quality, divergence from dense, what was fetched, and who beats whom."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from verkv.report import groups
from verkv.report.bootstrap import Estimate, difference, estimate, ratio
from verkv.report.groups import Lines

SOLVED = 50.0  # a task counts as solved by dense from this mean score on


@dataclass(frozen=True)
class Quality:
    """A method at one compression: score (0 to 100), and share of dense's on the same questions (1 is dense's)."""

    name: str
    compression: float
    score: Estimate
    fraction: Estimate | None
    fraction_on_solved: Estimate | None


def quality(lines: Lines) -> list[Quality]:
    """Quality of every method at every compression; dense is at 1, and at each other on the questions asked there.

    Parameters
    ----------
    lines : list of dict
        Of one model and one length.

    Returns
    -------
    list of Quality
    """
    dense, rows = groups.dense_lines(lines), []
    named = groups.variants(lines)
    for name, group in named.items():
        by_compression = groups.by(group, groups.rate)
        if all(map(groups.is_dense, group)):
            by_compression = {1.0: group} | {c: _asked_at(group, lines, c) for c in compressions(lines)}
        rows += [_quality(name, rate, chosen, dense) for rate, chosen in sorted(by_compression.items())]
    return rows


def compressions(lines: Lines) -> list[float]:
    """Rates in rising order, without 1 (everything kept)."""
    return sorted({groups.rate(line) for line in lines} - {1.0, groups.UNRATED})


def _at(lines: Lines, compression: float) -> Lines:
    return [line for line in lines if groups.rate(line) == compression]


def _asked_at(group: Lines, lines: Lines, compression: float) -> Lines:
    """Those of the group's answers whose question some method answered at this compression."""
    asked = {groups.question(line) for line in _at(lines, compression)}
    return [line for line in group if groups.question(line) in asked]


def _quality(name: str, compression: float, lines: Lines, dense: Lines) -> Quality:
    solved = solved_tasks(dense)
    on_solved = [line for line in lines if line["task"] in solved]
    whole = estimate(groups.strata(lines, groups.score))
    return Quality(name, compression, whole, fraction(lines, dense), fraction(on_solved, dense))


def fraction(lines: Lines, dense: Lines) -> Estimate | None:
    """Mean score over dense's on the same questions; None where there are none, or dense solves nothing."""
    pairs = list(groups.paired_strata(lines, dense, groups.score).values())
    if not pairs or not any(pair[:, 1].any() for pair in pairs):
        return None
    return estimate(pairs, ratio)


def solved_tasks(dense: Lines) -> list[str]:
    """Tasks that dense solves: mean score of at least 50 of 100."""
    tasks = groups.by(dense, lambda line: line["task"])
    return [task for task, group in tasks.items() if np.mean([groups.score(line) for line in group]) >= SOLVED]


@dataclass(frozen=True)
class Divergence:
    """A method at one compression, teacher-forced on dense's answer: KL in nats per token, share of equal tokens."""

    name: str
    compression: float
    kl: Estimate
    same_next: Estimate


def divergence(lines: Lines) -> list[Divergence]:
    """Divergence from dense of every method at every compression; methods that keep everything are at 1."""
    measured = [line for line in lines if line.get("divergence") and not groups.is_dense(line)]
    rows = []
    for name, group in groups.variants(measured).items():
        for compression, chosen in sorted(groups.by(group, groups.rate).items()):
            figures = [
                estimate(groups.strata(chosen, lambda line, key=key: line["divergence"][key]))
                for key in ("kl", "same_next")
            ]
            rows.append(Divergence(name, compression, *figures))
    return rows


@dataclass(frozen=True)
class Fetching:
    """What a method keeps and reads at one compression; shares in [0, 1].

    ``tokens_*`` are the tokens made exact by a fetching decision over the context's tokens; reads are bytes from the
    host over bytes of the full cache.
    """

    name: str
    compression: float
    sketch: str | None
    n_answers: int
    resident: float | None
    decisions_question: float
    decisions_decode: float
    kv_heads_question: float
    kv_heads_decode: float
    tokens_question: float
    tokens_decode: float
    read_per_forward: Estimate
    read_per_token: Estimate


def fetching(lines: Lines) -> list[Fetching]:
    """Fetch statistics, of the methods that have any."""
    measured = [line for line in lines if (line.get("stats") or {}).get("decode_decisions")]
    rows = []
    for name, group in groups.variants(measured).items():
        if not any(line["stats"]["question_promoted"] or line["stats"]["decode_promoted"] for line in group):
            continue  # nothing is ever fetched: no certificate
        for compression, chosen in sorted(groups.by(group, groups.rate).items()):
            rows.append(_fetching(name, compression, chosen))
    return rows


def _fetching(name: str, compression: float, lines: Lines) -> Fetching:
    stat = lambda key: [line["stats"][key] for line in lines]  # noqa: E731
    pooled = {}
    for phase in ("question", "decode"):
        counts = np.array(stat(f"{phase}_decisions"), dtype=float)
        fetching_counts = counts * stat(f"{phase}_fetch_rate")
        tokens = np.array(stat(f"{phase}_promoted")) / [line["context_tokens"] for line in lines]
        pooled[f"decisions_{phase}"] = _share(fetching_counts.sum(), counts.sum())
        steps = counts if phase == "decode" else counts > 0  # the question is one pass, however long
        pooled[f"kv_heads_{phase}"] = _share((steps * stat(f"{phase}_kv_head_fetch_rate")).sum(), steps.sum())
        pooled[f"tokens_{phase}"] = _share(tokens.sum(), fetching_counts.sum())
    read = [
        estimate(groups.strata(lines, lambda line, key=key: line["stats"][key]))
        for key in ("kv_read_per_forward", "kv_read_per_token")
    ]
    memory = [line["memory"] for line in lines if (line.get("memory") or {}).get("full")]
    resident = float(np.mean([m["device"] / m["full"] for m in memory])) if memory else None
    return Fetching(
        name,
        compression,
        lines[0].get("sketch"),
        len(lines),
        resident,
        **pooled,
        read_per_forward=read[0],
        read_per_token=read[1],
    )


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0


@dataclass(frozen=True)
class TaskScore:
    """A method's mean score on one task at one compression."""

    name: str
    compression: float
    task: str
    score: float
    n_examples: int


def per_task(lines: Lines) -> list[TaskScore]:
    """Mean scores task by task; dense's compression is 1."""
    rows = []
    for name, group in groups.variants(lines).items():
        for (compression, task), chosen in groups.by(group, lambda x: (groups.rate(x), x["task"])).items():
            means = groups.strata(chosen, groups.score)[0]
            rows.append(TaskScore(name, compression, task, float(means.mean()), len(means)))
    return rows


@dataclass(frozen=True)
class Comparison:
    """``better`` minus ``worse`` in points, on the questions both answered, at one compression.

    ``exceptions`` are the tasks on which ``better`` scores less, with the difference in points.
    """

    better: str
    worse: str
    compression: float
    points: Estimate
    exceptions: dict[str, float]

    @property
    def verdict(self) -> str:
        """What the sample says, in words."""
        low, high, value = self.points.low, self.points.high, self.points.value
        answer = "yes" if value > 0 else "no" if value < 0 else "equal"
        if low is None or high is None:
            return f"{answer}; no interval, for a task has one example"
        if low > 0 or high < 0:
            return f"{answer}, beyond the noise"
        return answer if low == high == 0 else f"{answer}, within the noise of this sample"


def order(lines: Lines, chain: tuple[str, ...] = ("kvzip", "poissoncomp", "verkv", "verkv_exact")) -> list[Comparison]:
    """Whether each method of a chain is at least as good as the one before it, at every compression.

    Parameters
    ----------
    lines : list of dict
        Of one model and one length.
    chain : tuple of str
        Method names, the worst first; those without answers are skipped.

    Returns
    -------
    list of Comparison
        Of the main setting, where a method ran with several.
    """
    found, named = [], groups.variants(groups.main_setting(lines))
    for compression in compressions(lines):
        here = {name: _at(group, compression) for name, group in named.items()}
        present = [(name, g) for method in chain for name, g in here.items() if g and g[0]["method"] == method]
        for (worse, below), (better, above) in pairwise(present):
            pairs = groups.paired_strata(above, below, groups.score)
            if pairs:
                found.append(_compared(better, worse, compression, pairs))
    return found


def _compared(better: str, worse: str, compression: float, pairs: dict[str, np.ndarray]) -> Comparison:
    differences = {task: float(difference(pair.mean(0))) for task, pair in pairs.items()}
    exceptions = {task: value for task, value in differences.items() if value < 0}
    return Comparison(better, worse, compression, estimate(list(pairs.values()), difference), exceptions)


@dataclass(frozen=True)
class Tolerance:
    """What a method does at a tolerance and compression; ``violations`` is None where nothing was audited."""

    label: str
    compression: float
    delta: float
    epsilon: float
    read_per_token: Estimate
    violations: Estimate | None
    n_decisions: int


def tolerances(lines: Lines) -> list[Tolerance]:
    """Traffic and, where audited, violations by tolerance."""
    with_epsilon = [x for x in lines if x.get("epsilon") is not None and (x.get("stats") or {}).get("decode_decisions")]
    key = lambda x: (x["label"], groups.rate(x), x.get("delta") or 0.0, float(x["epsilon"]))  # noqa: E731
    rows = []
    for setting, group in sorted(groups.by(with_epsilon, key).items()):
        audited = [line for line in group if (line.get("audit") or {}).get("violation_rate") is not None]
        violations = estimate([_violations(audited)], ratio) if audited else None
        read = estimate(groups.strata(group, lambda line: line["stats"]["kv_read_per_token"]))
        n_decisions = sum(line["audit"]["n_decisions"] for line in audited)
        rows.append(Tolerance(*setting, read, violations, n_decisions))
    return rows


def _violations(audited: Lines) -> np.ndarray:
    """Violations and decisions of every question, (n_examples, 2): the pooled rate is their ratio."""
    rows = []
    for draws in groups.by(audited, groups.question).values():
        counts = np.array([line["audit"]["n_decisions"] for line in draws], dtype=float)
        rates = np.array([line["audit"]["violation_rate"] for line in draws])
        rows.append([(rates * counts).sum(), counts.sum()])
    return np.array(rows)
