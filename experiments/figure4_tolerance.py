"""Figure 4: what epsilon and delta do to host traffic (a) and to quality (b).

    python experiments/figure4_tolerance.py
    python experiments/figure4_tolerance.py --preset paper

The paper's curves carry no figures; its text gives three facts, which are printed beside ours.
"""

from paper_items import LAPTOP_TASKS, PAPER_RULER, answer_parser, answers, as_text, interval, main, paper_table, write

from verkv.report import groups, plots, tables
from verkv.report.bootstrap import difference, estimate

EPSILONS = (0.01, 0.05, 0.1, 0.3)
DELTAS = (0.02, 0.05, 0.1)


def rows_of(lines: list[dict]) -> list[dict]:
    """One row for each tolerance: traffic per token, and the score minus dense's on the same questions."""
    dense, found = groups.dense_lines(lines), []
    for row in tables.tolerances(lines):
        chosen = [x for x in lines if (x["epsilon"], x["delta"]) == (row.epsilon, row.delta)]
        pairs = groups.paired_strata(chosen, dense, groups.score)
        points = estimate(list(pairs.values()), difference)
        ends = interval(points)
        found.append(
            {
                "delta": row.delta,
                "epsilon": row.epsilon,
                "KV read/token %": 100.0 * row.read_per_token.value,
                "score - dense": points.value,
                "low": ends["low"],
                "high": ends["high"],
                "questions": points.n_examples,
            }
        )
    return found


def facts(rows: list[dict]) -> list[dict]:
    """What the paper's text says beside ours; nothing unless all tolerances were run and something was read."""
    read = {(row["delta"], row["epsilon"]): row["KV read/token %"] for row in rows}
    score = {(row["delta"], row["epsilon"]): row["score - dense"] for row in rows}
    deltas, epsilons = sorted({d for d, _ in read}), sorted({e for _, e in read})
    if len(read) < len(deltas) * len(epsilons) or min(len(deltas), len(epsilons)) < 2 or not all(read.values()):
        return []
    by_epsilon = read[deltas[-1], epsilons[0]] / read[deltas[-1], epsilons[-1]]
    by_delta = [read[deltas[0], e] / read[deltas[-1], e] for e in epsilons]
    small = [score[deltas[-1], e] for e in epsilons if e <= 0.05]
    ours = [(by_epsilon, by_epsilon), (min(by_delta), max(by_delta)), (min(small), max(small))]
    stated = paper_table("figure4_tolerance")
    return [
        {
            "quantity": fact["quantity"],
            "ours": f"{low:.3g} to {high:.3g}",
            "paper": f"{fact['low']:g} to {fact['high']:g}",
        }
        for fact, (low, high) in zip(stated, ours, strict=True)
    ]


@plots.styled
def picture(rows: list[dict]):
    """Two panels over the tolerance, a line for each delta."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 * plots.WIDTH, 3.8), layout="constrained")
    panels = figure.subplots(1, 2)
    for i, (delta, group) in enumerate(groups.by(rows, lambda row: row["delta"]).items()):
        style = {"color": ("#0072B2", "#D55E00", "#009E73")[i % 3], "marker": "os^"[i % 3], "label": f"δ = {delta:g}"}
        x = [row["epsilon"] for row in group]
        panels[0].plot(x, [row["KV read/token %"] for row in group], **style)
        panels[1].plot(x, [row["score - dense"] for row in group], **style)
    for axes, label in zip(panels, ("KV read per token (% of cache)", "score minus dense's (points)"), strict=True):
        axes.set(xscale="log", xlabel="tolerance ε (relative error of the softmax denominator)", ylabel=label)
        axes.set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
        axes.set_xticks([], minor=True)
    panels[0].set_yscale("log")
    panels[1].axhline(0, color=plots.GREY, linestyle="--", linewidth=1.2)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def run(options) -> None:
    """Run, print, write."""
    axes = {"compression": [16.0], "epsilon": list(EPSILONS), "delta": list(DELTAS)}
    if options.preset == "laptop":
        axes |= {"tasks": list(LAPTOP_TASKS), "n_examples": 2}
    else:
        axes |= {"tasks": list(PAPER_RULER), "n_tokens": [32768], "models": ["Qwen/Qwen3-4B-Instruct-2507"]}
    rows = rows_of(answers(options, methods=("verkv",), **axes))
    stated = facts(rows)
    if stated:
        print(as_text(stated), end="\n\n")
    write(options, rows, picture(rows))


if __name__ == "__main__":
    main(run, answer_parser(__doc__, "figure4_tolerance").parse_args())
