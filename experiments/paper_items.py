"""What the scripts of the paper's tables and figures share: options, answers that are run if missing, files, tables.

``--preset laptop`` (the default) runs offline on SmolLM2-135M-Instruct and shows directions, not the paper's figures:
the model is thirty times smaller, the contexts ten times shorter, the examples few. ``--preset paper`` runs the paper's
models, lengths and sample counts and needs a large GPU, a network and LOFT's data.
"""

import argparse
import csv
import sys
from collections.abc import Iterable
from pathlib import Path

from verkv.report import groups
from verkv.report.picture import save

PAPER = Path(__file__).parent / "paper"
# The paper's names of tasks, and ours.
TASKS = {
    "MK3": "niah_multikey_3",
    "MV": "niah_multivalue",
    "CWE": "cwe",
    "QA1": "qa_1",
    "NQ": "loft_nq",
    "HotpotQA": "loft_hotpotqa",
    "MuSiQue": "loft_musique",
    "QAMPARI": "loft_qampari",
    "QUEST": "loft_quest",
}
METHODS = ("kvzip", "fastkvzip", "poissoncomp", "verkv", "verkv_fastkvzip")  # columns of appendix_c.csv
LAPTOP_TASKS = ("niah_single_2", "niah_multikey_1")  # of scripts that sweep tolerances
PAPER_RULER = ("niah_multikey_3", "niah_multivalue", "cwe", "qa_1")


def parser(description: str, output: str) -> argparse.ArgumentParser:
    """Options that all scripts have.

    Parameters
    ----------
    description : str
    output : str
        Name of the script's files, without suffix.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--preset", choices=("laptop", "paper"), default="laptop", help="what is run (default: laptop)")
    default = Path("experiments/results") / f"{output}.csv"
    made.add_argument("--output", type=Path, default=default, help=f"CSV; pictures beside it (default: {default})")
    return made


def answer_parser(description: str, output: str) -> argparse.ArgumentParser:
    """The same, for scripts that need answers to tasks."""
    made = parser(description, output)
    made.add_argument("--results", type=Path, help="JSONL of `verkv eval` (default: the preset's)")
    made.add_argument("--no-run", action="store_true", help="show what RESULTS holds; run nothing")
    made.add_argument("--model", nargs="+", dest="models", help="instead of the preset's")
    made.add_argument("--n-examples", type=int, help="of every task, instead of the preset's")
    made.add_argument("--data-dir", help="data of the QA and LOFT tasks (default: the variable VERKV_DATA)")
    made.add_argument("--device", help="cpu, cuda, ... (default: a GPU where there is one)")
    return made


def main(run, options: argparse.Namespace) -> None:
    """Run a script; what cannot be run ends it with one line and status 2, what fails on the way with status 1.

    Parameters
    ----------
    run : function
        Takes the options.
    options : argparse.Namespace
    """
    try:
        run(options)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)


# --- answers ----------------------------------------------------------------------------------------------------------


def answers(options: argparse.Namespace, methods: Iterable[str] | None = None, **axes) -> list[dict]:
    """Answers of the preset, or of a part or an extension of it; missing ones are run first.

    Parameters
    ----------
    options : argparse.Namespace
        Of :func:`answer_parser`.
    methods : iterable of str, optional
        Names of methods of the preset; all by default.
    **axes
        Keys of ``verkv eval``'s settings (tasks, compression, epsilon, delta, n_examples, ...) that override the
        preset's.

    Returns
    -------
    list of dict
        Lines of the results file that fit.

    Raises
    ------
    ValueError
        If there are none, or something cannot be run.
    """
    from verkv.evaluation.plan import load_tasks
    from verkv.evaluation.results import read_results
    from verkv.evaluation.runner import run_eval
    from verkv.evaluation.settings import make_settings, preset_path, read_settings

    preset = read_settings(preset_path(options.preset))
    given = {"models": options.models, "n_examples": options.n_examples, "data_dir": options.data_dir}
    given |= {"device": options.device, "output": None if options.results is None else str(options.results)}
    flags = axes | {key: value for key, value in given.items() if value is not None}
    if methods is not None:
        flags["methods"] = [entry for entry in preset["methods"] if _method_name(entry) in ("dense", *methods)]
    settings = make_settings(preset, flags, load_tasks().TASKS)
    if not options.no_run:
        run_eval(settings)
    wanted = {key: set(axes[key]) for key in ("tasks", "compression", "epsilon", "delta") if key in axes}
    lines = [line for line in read_results(settings.output) if _fits(line, methods, wanted, options.models)]
    if not any(map(groups.is_dense, lines)):
        raise ValueError(f"{settings.output} has no answers of dense attention here; leave out --no-run to run them")
    return lines


def _method_name(entry) -> str:
    return entry if isinstance(entry, str) else next(iter(entry))


def _fits(line: dict, methods, wanted: dict[str, set], models: list[str] | None) -> bool:
    if models is not None and line["model"] not in {
        Path(name).name if Path(name).is_dir() else name for name in models
    }:
        return False
    if "tasks" in wanted and line["task"] not in wanted["tasks"]:
        return False
    if groups.is_dense(line):
        return True
    if methods is not None and line["method"] not in methods:
        return False
    axes = ("compression", "epsilon", "delta")
    return all(line[key] is None or line[key] in wanted[key] for key in axes if key in wanted)


def benchmark(line: dict) -> str:
    """The paper's name of where a task comes from."""
    return "LOFT" if line["task"].startswith("loft_") else "RULER"


def by_setting(lines: list[dict]) -> dict[tuple[str, str, int], list[dict]]:
    """Answers by (model, benchmark, length), the paper's twelve settings."""
    return groups.by(lines, lambda line: (line["model"], benchmark(line), line["n_tokens"]))


# --- the paper's figures ----------------------------------------------------------------------------------------------


def paper_table(name: str) -> list[dict]:
    """A table of ``experiments/paper``, numbers as float and empty cells as None.

    Parameters
    ----------
    name : str
        Of the file, without suffix.
    """
    with (PAPER / f"{name}.csv").open() as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return [{key: _value(text) for key, text in row.items()} for row in rows]


def _value(text: str) -> float | str | None:
    try:
        return float(text) if text else None
    except ValueError:
        return text


def paper_fraction(method: str, rate: float, model: str | None = None) -> float:
    """Share of dense's quality that a method keeps in the paper, in percent, by the numbers of Appendix C.

    Mean score over dense's mean score in each setting of benchmark and length, averaged over the settings and, without
    a model, over the three models; the paper's text says the same of Table 1.
    """
    rows = [r for r in paper_table("appendix_c") if r["rate"] == rate and model in (None, r["model"])]
    shares = [
        sum(r[method] for r in setting) / sum(r["dense"] for r in setting)
        for setting in groups.by(rows, lambda r: (r["model"], r["benchmark"], r["context_k"])).values()
    ]
    return 100.0 * sum(shares) / len(shares)


def paper_model(name: str) -> str | None:
    """The paper's short name of one of its models; None for another."""
    names = dict.fromkeys(row["model"] for row in paper_table("appendix_c"))
    return next((short for short in names if short in name), None)


# --- files and tables -------------------------------------------------------------------------------------------------


def write(options: argparse.Namespace, rows: list[dict], figure=None) -> None:
    """Print the rows, write them as CSV, and the picture beside it.

    Parameters
    ----------
    options : argparse.Namespace
        With ``output``.
    rows : list of dict
        With the same keys.
    figure : matplotlib.figure.Figure, optional
    """
    print(as_text(rows))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows([{key: _rounded(value) for key, value in row.items()} for row in rows])
    written = [options.output, *(save(figure, options.output) if figure is not None else [])]
    print("Written: " + ", ".join(map(str, written)))


def _rounded(value):
    return float(f"{value:.6g}") if isinstance(value, float) else value


def as_text(rows: list[dict]) -> str:
    """Rows as an aligned table; numbers with four digits, nothing for None."""
    cells = [list(rows[0]), *([_shown(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    is_text = [isinstance(value, str) for value in rows[0].values()]
    aligned = lambda row: "  ".join(  # noqa: E731
        cell.ljust(width) if left else cell.rjust(width) for cell, width, left in zip(row, widths, is_text, strict=True)
    ).rstrip()
    return "\n".join([aligned(cells[0]), "-" * (sum(widths) + 2 * len(widths) - 2), *map(aligned, cells[1:])])


def _shown(value) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def interval(estimate, scale: float = 1.0) -> dict[str, float | None]:
    """The ends of an interval, for a row."""
    ends = (estimate.low, estimate.high) if estimate is not None else (None, None)
    return dict(zip(("low", "high"), (None if end is None else scale * end for end in ends), strict=True))
