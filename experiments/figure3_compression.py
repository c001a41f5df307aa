"""Figure 3: mean score against compression for every method, in each setting of model, benchmark and length.

python experiments/figure3_compression.py
python experiments/figure3_compression.py --preset paper --data-dir LOFT
"""

from paper_items import METHODS, answer_parser, answers, by_setting, interval, main, paper_model, paper_table, write

from verkv.report import groups, plots, tables

RATES = (8.0, 16.0, 32.0)


def rows_of(lines: list[dict]) -> list[dict]:
    """One row for each setting, method and rate, on the tasks that were run at every rate."""
    found = []
    for (model, benchmark, n_tokens), group in by_setting(lines).items():
        for row in tables.quality(plots.on_common_tasks(groups.main_setting(group))):
            if row.compression in RATES:
                method = _method(group, row.name)
                found.append(
                    {
                        "model": model,
                        "benchmark": benchmark,
                        "n_tokens": n_tokens,
                        "method": row.name,
                        "rate": row.compression,
                        "score": row.score.value,
                        **interval(row.score),
                        "paper's score": paper_score(model, benchmark, n_tokens, method, row.compression),
                        "questions": row.score.n_examples,
                    }
                )
    return found


def _method(lines: list[dict], name: str) -> str:
    return groups.variants(groups.main_setting(lines))[name][0]["method"]


def paper_score(model: str, benchmark: str, n_tokens: int, method: str, rate: float) -> float | None:
    """Mean over the paper's tasks; for a model that it does not have, Qwen3-4B at 32K."""
    named, context = paper_model(model), round(n_tokens / 1024)
    if named is None:
        named, context = "Qwen3-4B", 32
    here = (named, benchmark, context, rate)
    key = lambda row: (row["model"], row["benchmark"], row["context_k"], row["rate"])  # noqa: E731
    if method == "verkv_exact":
        read = [row["verkv_exact"] for row in paper_table("figure3_perfect_sketch") if key(row) == here]
        return read[0] if read else None
    rows = [row for row in paper_table("appendix_c") if key(row) == here]
    if not rows or method not in ("dense", *METHODS):
        return None
    return sum(row[method] for row in rows) / len(rows)


@plots.styled
def picture(rows: list[dict], lines: list[dict]):
    """A panel for every setting; on a model of another size, a second one with the paper's Qwen3-4B."""
    from matplotlib.figure import Figure

    panels = {
        f"{model}, {benchmark}, {n_tokens:,} tokens": (group, "score")
        for (model, benchmark, n_tokens), group in groups.by(
            rows, lambda row: (row["model"], row["benchmark"], row["n_tokens"])
        ).items()
    }
    for title, (group, _) in list(panels.items()):
        told = [row for row in group if row["paper's score"] is not None]
        if told:
            named = paper_model(group[0]["model"])
            of = title if named else f"Qwen3-4B, {group[0]['benchmark']}-32K"
            panels[f"the paper: {of}"] = (told, "paper's score")
    n_columns = min(2, len(panels))
    n_rows = -(-len(panels) // n_columns)
    figure = Figure(figsize=(plots.WIDTH * n_columns, 3.2 * n_rows + 0.9), layout="constrained")
    grid = figure.subplots(n_rows, n_columns, squeeze=False).flatten()
    look = plots.styles(groups.main_setting(lines))
    for axes, (title, (group, key)) in zip(grid, panels.items(), strict=False):
        _panel(axes, title, group, key, look)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=10)
    return figure


def _panel(axes, title: str, rows: list[dict], key: str, look: dict) -> None:
    named = groups.by(rows, lambda row: row["method"])
    for (name, group), shift in zip(named.items(), plots.shifts(len(named)), strict=True):
        colour, marker = look[name]
        x = [row["rate"] * 2**shift for row in group]
        style = {"color": colour, "marker": marker, "label": plots.plain(name), "capsize": 2}
        bars = None
        if key == "score" and all(row["low"] is not None for row in group):
            bars = [[max(0.0, r[key] - r["low"]) for r in group], [max(0.0, r["high"] - r[key]) for r in group]]
        axes.errorbar(x, [row[key] for row in group], bars, **style)
    plots.compression_axis(axes, [row["rate"] for row in rows])
    axes.set(ylabel="mean score (0 to 100)", ylim=(-3, 103))
    axes.set_title(plots.plain(title), fontsize=11)


def run(options) -> None:
    """Run, print, write."""
    lines = answers(options)
    rows = rows_of(lines)
    write(options, rows, picture(rows, lines))


if __name__ == "__main__":
    main(run, answer_parser(__doc__, "figure3_compression").parse_args())
