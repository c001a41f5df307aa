"""Figure 6: quality against decode speed, sweeping the tolerance.

    python experiments/figure6_latency.py
    python experiments/figure6_latency.py --preset paper

Speed is measured here, in interleaved rounds, as a ratio to dense attention with the cache resident; milliseconds are
given on a GPU only. Quality comes from answers of `verkv eval`, which are run if missing. VerKV here is the reference
in plain torch, not the paper's kernels in vLLM. The paper scores with Fast KVzip: `--scores fastkvzip`, with gates from
the hub.

The laptop preset shows how the cost of a step falls as the tolerance grows, and what that costs in quality. It cannot
show the speed-up over an offloaded dense cache, for on a CPU nothing has to be moved; the ratio of the bytes, which is
what a bus would see, stands for it.
"""

from decode_times import OFFLOADED, RESIDENT, cases, is_gpu, read_share, timed
from paper_items import LAPTOP_TASKS, PAPER_RULER, answers, main, paper_table, write
from scored_prompt import load_prompt, prompt_parser

from verkv.report import groups, plots
from verkv.report.bootstrap import difference, estimate

EPSILONS = (0.01, 0.05, 0.1, 0.3, 0.5)
DELTA = 0.1
METHODS = {"kvzip": "verkv", "fastkvzip": "verkv_fastkvzip"}  # by scores


def scores_by_epsilon(lines: list[dict]) -> dict[float | None, float]:
    """Mean score minus dense's, on the same questions; None is dense itself."""
    dense, found = groups.dense_lines(lines), {None: 0.0}
    for epsilon, group in groups.by((x for x in lines if x["epsilon"] is not None), lambda x: x["epsilon"]).items():
        pairs = groups.paired_strata(group, dense, groups.score)
        found[epsilon] = estimate(list(pairs.values()), difference).value
    return found


def rows_of(prompt, made, comparison, scores: dict) -> list[dict]:
    """One row for each case: time as a ratio with its spread, bytes, score, and the paper's figures."""
    found = []
    for case in made:
        ratio, read = comparison.ratio(case.name), read_share(case)
        told = _told(case)
        found.append(
            {
                "method": case.name,
                "time / dense resident": ratio.median,
                "p10": ratio.low,
                "p90": ratio.high,
                "ms": 1e3 * comparison.median(case.name) if is_gpu(prompt) else None,
                "throughput / dense offload": _speed_up(comparison, case.name),
                "paper's": told.get("throughput_over_offloaded_dense"),
                "paper's ms": told.get("ms_per_token"),
                "KV read/token %": 100.0 * read,
                "full cache / bytes read": 1.0 / read if read else None,
                "score - dense": scores.get(case.epsilon),
                "paper's score - dense": told["score"] - 88.0 if told.get("score") else None,
            }
        )
    return found


def _speed_up(comparison, name: str) -> float | None:
    if OFFLOADED not in comparison.seconds:
        return None
    return comparison.median(OFFLOADED) / comparison.median(name)


def _told(case) -> dict:
    name = "VerKV" if case.press is not None else case.name
    rows = [row for row in paper_table("figure6_latency") if (row["method"], row["epsilon"]) == (name, case.epsilon)]
    return rows[0] if rows else {}


@plots.styled
def picture(rows: list[dict]):
    """Score minus dense's against throughput over that of dense attention with the cache resident."""
    shown = [row for row in rows if row["score - dense"] is not None]
    figure, axes = plots.start(len(shown))
    dense = {RESIDENT: ("#000000", "o"), OFFLOADED: ("#666666", "X")}
    looks = iter(zip(("#D55E00", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9"), "s^vD<>", strict=True))
    for row in shown:
        colour, marker = dense.get(row["method"]) or next(looks)
        style = {"color": colour, "marker": marker, "linestyle": "", "markersize": 8, "label": row["method"]}
        axes.plot([1.0 / row["time / dense resident"]], [row["score - dense"]], **style)
    axes.axhline(0, color=plots.GREY, linestyle="--", linewidth=1.2)
    scores = [row["score - dense"] for row in shown]
    axes.set(xlabel="decode throughput over dense, cache resident (ratio)", ylabel="score minus dense's (points)")
    axes.set(xlim=(0, None), ylim=(min(-5.0, 1.2 * min(scores)), max(5.0, 1.2 * max(scores))))
    plots.legend_below(figure, axes)
    return figure


def run(options) -> None:
    """Run, print, write."""
    scores, options.models = {}, [options.model] if options.model else None
    if not options.no_quality:
        axes = {"compression": [16.0], "epsilon": list(EPSILONS), "delta": [DELTA]}
        if options.preset == "laptop":
            axes |= {"tasks": list(LAPTOP_TASKS), "n_examples": 2}
        else:
            axes |= {"tasks": list(PAPER_RULER), "n_tokens": [32768], "models": ["Qwen/Qwen3-4B-Instruct-2507"]}
        scores = scores_by_epsilon(answers(options, methods=(METHODS[options.scores],), **axes))
    prompt = load_prompt(options)
    made = cases(prompt, options, EPSILONS, DELTA)
    comparison = timed(prompt, options, made, 1, options.rounds)
    rows = rows_of(prompt, made, comparison, scores)
    what = f"{prompt.name}, {prompt.scored.n_tokens:,} context tokens, 16x"
    print(f"{what}, {options.rounds} rounds, {comparison.clock} time\n")
    write(options, rows, picture(rows) if scores else None)


def options_parser():
    """Options of this script."""
    made = prompt_parser(__doc__, "figure6_latency")
    made.add_argument("--rounds", type=int, default=9, help="of the timing (default: 9)")
    made.add_argument("--results", help="JSONL of `verkv eval` (default: the preset's)")
    made.add_argument("--no-run", action="store_true", help="take the scores from RESULTS; run no task")
    made.add_argument("--no-quality", action="store_true", help="time only")
    made.set_defaults(n_examples=None, data_dir=None)
    return made


if __name__ == "__main__":
    main(run, options_parser().parse_args())
