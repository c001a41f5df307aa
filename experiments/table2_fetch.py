"""Table 2: how often KVFetch fetches, how much, and what it reads, by tolerance, with a 2-bit and a perfect sketch.

python experiments/table2_fetch.py
python experiments/table2_fetch.py --preset paper
"""

from paper_items import LAPTOP_TASKS, PAPER_RULER, answer_parser, answers, main, paper_model, paper_table, write

from verkv.report import groups, plots, tables

EPSILONS = (0.01, 0.05, 0.1, 0.2, 0.3)
SKETCHES = {"rope_pair": "2-bit", "exact": "perfect"}
COLUMNS = [f"{what}_{phase}" for what in ("decisions", "kv_heads", "tokens") for phase in ("question", "decode")]


def rows_of(lines: list[dict]) -> list[dict]:
    """One row for each model, sketch and tolerance: ours, and below it the paper's where it has one."""
    found = []
    groups_of = groups.by(
        [line for line in lines if line["epsilon"] is not None],
        lambda line: (line["model"], line["sketch"], line["epsilon"]),
    )
    for (model, sketch, epsilon), group in sorted(groups_of.items()):
        for row in tables.fetching(group):
            ours = {"source": "ours", "model": model, "sketch": SKETCHES.get(sketch, sketch), "epsilon": epsilon}
            ours |= {f"{key} %": 100.0 * getattr(row, key) for key in COLUMNS}
            ours |= {"kv_read %": 100.0 * row.read_per_forward.value}
            found += [ours, *_paper_rows(model, ours["sketch"], epsilon)]
    return found


def _paper_rows(model: str, sketch: str, epsilon: float) -> list[dict]:
    """The paper's row of its detailed model, or what it says of another; Qwen3-4B's for a model it does not have."""
    named = paper_model(model) or "Qwen3-4B"
    head = {"source": "paper", "model": named, "sketch": sketch, "epsilon": epsilon}
    detailed = [r for r in paper_table("table2_fetch") if (r["sketch"], r["epsilon"]) == (sketch, epsilon)]
    if named == "Qwen3-4B" and detailed:
        return [head | {f"{key} %": detailed[0][key] for key in (*COLUMNS, "kv_read")}]
    read = [r["kv_read"] for r in paper_table("table2_models") if (r["model"], r["epsilon"]) == (named, epsilon)]
    if sketch != "2-bit" or not read:
        return []
    return [head | dict.fromkeys(f"{key} %" for key in COLUMNS) | {"kv_read %": read[0]}]


@plots.styled
def picture(rows: list[dict]):
    """KV read per forward pass against the tolerance: ours filled, the paper's open and dotted."""
    named = groups.by(rows, lambda row: (row["source"], row["model"], row["sketch"]))
    figure, axes = plots.start(2 * len(named))  # one column
    for i, ((source, model, sketch), group) in enumerate(named.items()):
        style = {"color": {"2-bit": "#D55E00", "perfect": "#009E73"}.get(sketch, "#0072B2"), "marker": "s^ovDph"[i % 7]}
        if source == "paper":
            style |= {"linestyle": ":", "markerfacecolor": "white"}
        label = plots.plain(f"{source}: {model}, {sketch}")
        axes.plot([r["epsilon"] for r in group], [r["kv_read %"] for r in group], label=label, **style)
    axes.set(xscale="log", yscale="log", xlabel="tolerance ε (relative error of the softmax denominator)")
    axes.set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
    axes.set_xticks([], minor=True)
    axes.set_ylabel("KV read per pass (% of cache)")
    plots.legend_below(figure, axes, ncols=1)
    return figure


def run(options) -> None:
    """Run, print, write."""
    axes = {"compression": [16.0], "epsilon": list(EPSILONS), "delta": [0.1]}
    if options.preset == "laptop":
        axes |= {"tasks": list(LAPTOP_TASKS), "n_examples": 2}
    else:
        axes |= {"tasks": list(PAPER_RULER), "n_tokens": [32768]}
    rows = rows_of(answers(options, methods=("verkv", "verkv_exact"), **axes))
    write(options, rows, picture(rows))


if __name__ == "__main__":
    main(run, answer_parser(__doc__, "table2_fetch").parse_args())
