"""Appendix C: scores task by task, for every model, benchmark, length, method and rate.

python experiments/appendix_c.py
python experiments/appendix_c.py --preset paper --data-dir LOFT
"""

from paper_items import METHODS, TASKS, answer_parser, answers, by_setting, main, paper_model, paper_table, write

from verkv.report import groups, plots, tables


def rows_of(lines: list[dict]) -> list[dict]:
    """One row for each setting, rate, task and method."""
    found = []
    for (model, benchmark, n_tokens), group in by_setting(lines).items():
        chosen = groups.main_setting(group)
        methods = {name: lines_[0]["method"] for name, lines_ in groups.variants(chosen).items()}
        for row in tables.per_task(chosen):
            found.append(
                {
                    "model": model,
                    "benchmark": benchmark,
                    "n_tokens": n_tokens,
                    "rate": row.compression,
                    "task": row.task,
                    "method": row.name,
                    "score": row.score,
                    "paper's score": paper_score(model, n_tokens, row, methods[row.name]),
                    "questions": row.n_examples,
                }
            )
    return sorted(found, key=lambda r: (r["model"], r["benchmark"], r["n_tokens"], r["rate"], r["task"]))


def paper_score(model: str, n_tokens: int, row: tables.TaskScore, method: str) -> float | None:
    """The paper's figure for the task; for a model that it does not have, Qwen3-4B's at 32K."""
    named, context = paper_model(model), round(n_tokens / 1024)
    if named is None:
        named, context = "Qwen3-4B", 32
    rate = 8.0 if method == "dense" else row.compression  # dense is the same at all
    for told in paper_table("appendix_c"):
        is_here = (told["model"], told["context_k"], told["rate"]) == (named, context, rate)
        if is_here and TASKS[told["task"]] == row.task and method in ("dense", *METHODS):
            return told[method]
    return None


@plots.styled
def picture(rows: list[dict], lines: list[dict], rate: float = 16.0):
    """Scores by task at one rate, a marker for each method; of the setting with the most tasks."""
    settings = groups.by(rows, lambda row: (row["model"], row["benchmark"], row["n_tokens"]))
    most = max(settings.values(), key=lambda group: len({row["task"] for row in group}))
    here = [row for row in most if row["rate"] in (1.0, rate)]
    tasks = list(dict.fromkeys(row["task"] for row in here))
    named = groups.by(here, lambda row: row["method"])
    figure, axes = plots.start(len(named), height=1.0 + 0.42 * len(tasks))
    look = plots.styles(groups.main_setting(lines))
    for i, (name, group) in enumerate(named.items()):
        aside = 0.12 * (i - (len(named) - 1) / 2)
        places = [tasks.index(row["task"]) + aside for row in group]
        colour, marker = look[name]
        style = {"color": colour, "marker": marker, "label": plots.plain(name), "linestyle": "", "clip_on": False}
        axes.plot([row["score"] for row in group], places, **style)
    axes.set_yticks(range(len(tasks)), tasks)
    axes.set(ylim=(len(tasks) - 0.5, -0.5), xlabel=f"mean score (0 to 100) at {rate:g}×", xlim=(-2, 102))
    plots.legend_below(figure, axes)
    return figure


def run(options) -> None:
    """Run, print, write."""
    lines = answers(options)
    rows = rows_of(lines)
    write(options, rows, picture(rows, lines))


if __name__ == "__main__":
    main(run, answer_parser(__doc__, "appendix_c").parse_args())
