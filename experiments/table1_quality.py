"""Table 1: quality as a fraction of dense, memory on the device, and what is read from the host per generated token.

    python experiments/table1_quality.py
    python experiments/table1_quality.py --preset paper --data-dir LOFT

The rows of the paper's Table 1 are not in the text we have; its quality column is computed from Appendix C, which gives
the figures that its introduction states (96 % of dense at 8x, 86 % at 32x for VerKV with Fast KVzip).
"""

import numpy as np
from paper_items import METHODS, answer_parser, answers, by_setting, interval, main, paper_fraction, paper_model, write

from verkv.report import groups, plots, tables
from verkv.report.bootstrap import Estimate


def rows_of(lines: list[dict]) -> list[dict]:
    """One row for each model, method and rate; ours is the mean over settings of benchmark and length."""
    found = []
    for model, of_model in groups.by(lines, lambda line: line["model"]).items():
        dense = groups.dense_lines(of_model)
        for name, group in groups.variants(groups.main_setting(of_model)).items():
            for rate, chosen in sorted(groups.by(group, groups.rate).items()):
                if rate not in (1.0, groups.UNRATED):
                    found.append(_row(model, name, rate, chosen, dense))
    return found


def _row(model: str, name: str, rate: float, chosen: list[dict], dense: list[dict]) -> dict:
    settings = by_setting(chosen).values()
    shares = [share for share in (tables.fraction(group, dense) for group in settings) if share is not None]
    method = chosen[0]["method"]
    fetched = [row.read_per_token.value for group in settings for row in tables.fetching(group)]
    kept = [line["memory"]["device"] / line["memory"]["full"] for line in chosen]
    in_paper = method in METHODS and rate in (8.0, 16.0, 32.0)
    only: Estimate | None = shares[0] if len(shares) == 1 else None
    return {
        "model": model,
        "method": name,
        "rate": rate,
        "quality %": 100.0 * float(np.mean([share.value for share in shares])) if shares else None,
        **interval(only, 100.0),
        "paper's quality %": paper_fraction(method, rate, paper_model(model)) if in_paper else None,
        "on device %": 100.0 * float(np.mean(kept)),
        "fetch/token %": 100.0 * float(np.mean(fetched)) if fetched else 0.0,
        "questions": len(groups.by(chosen, groups.question)),
    }


@plots.styled
def picture(rows: list[dict], lines: list[dict]):
    """Quality as a fraction of dense against the rate: ours filled, the paper's open and dotted."""
    named = groups.by((row for row in rows if row["quality %"] is not None), lambda row: (row["model"], row["method"]))
    look, is_single = plots.styles(groups.main_setting(lines)), len({model for model, _ in named}) == 1
    figure, axes = plots.start(2 * len(named))
    for (model, method), group in named.items():
        label, (colour, marker) = plots.plain(method if is_single else f"{method}, {model}"), look[method]
        style = {"color": colour, "marker": marker}
        axes.plot([row["rate"] for row in group], [row["quality %"] for row in group], label=label, **style)
        told = [row for row in group if row["paper's quality %"] is not None]
        if told:
            values = [row["paper's quality %"] for row in told]
            style |= {"linestyle": ":", "markerfacecolor": "white"}
            axes.plot([row["rate"] for row in told], values, label=f"{label}, paper", **style)
    axes.axhline(100, color=plots.GREY, linestyle="--", linewidth=1.2)
    plots.compression_axis(axes, [row["rate"] for row in rows])
    axes.set_ylabel("quality (% of dense)")
    plots.legend_below(figure, axes)
    return figure


def run(options) -> None:
    """Run, print, write."""
    lines = answers(options)
    rows = rows_of(lines)
    if options.preset == "laptop":
        print("Ours: a small model, short contexts and other tasks. The paper's: mean of its three models.\n")
    write(options, rows, picture(rows, lines))


if __name__ == "__main__":
    main(run, answer_parser(__doc__, "table1_quality").parse_args())
