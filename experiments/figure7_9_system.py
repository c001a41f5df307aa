"""Figures 7 to 9: decode steps by batch size, where their time goes, and what crosses the bus.

    python experiments/figure7_9_system.py
    python experiments/figure7_9_system.py --preset paper

Times are ratios to dense attention with the cache resident, in interleaved rounds, with their spread; milliseconds,
tokens per second and the load of the link are given on a GPU only. Phases are timed one by one, so that on a GPU
nothing overlaps and their sum is more than a step. VerKV here is the reference in plain torch, not the paper's kernels.

The laptop preset shows how the cost of VerKV's step grows with the batch, which phase dominates it at which tolerance,
and the bytes it reads as a share of what a fully offloaded cache would move. It shows nothing about PCIe.
"""

import time
from pathlib import Path

from decode_times import OFFLOADED, PHASES, cases, is_gpu, link_bandwidth, phases, read_share, timed
from paper_items import as_text, main, paper_table, write
from scored_prompt import load_prompt, prompt_parser, verkv_press

from verkv.report import groups, plots

BATCHES = {"laptop": (1, 2), "paper": (1, 2, 4, 8)}
BATCH_EPSILONS = (0.05, 0.5)
EPSILONS = {"laptop": (0.01, 0.05, 0.1, 0.5), "paper": (0.01, 0.03, 0.05, 0.1, 0.25, 0.5)}
DELTA = 0.05
COLOURS = dict(zip(PHASES, ("#D55E00", "#0072B2", "#009E73", "#E69F00", "#999999"), strict=True))
HATCHES = dict(zip(PHASES, ("", "//", "..", "xx", "\\\\"), strict=True))


def batch_rows(prompt, options) -> list[dict]:
    """Figure 7: a step by batch size and method."""
    found = []
    for batch in options.batches or BATCHES[options.preset]:
        made = cases(prompt, options, BATCH_EPSILONS, DELTA, batch)
        comparison = timed(prompt, options, made, batch, options.rounds)
        for case in made:
            ratio, seconds = comparison.ratio(case.name), comparison.median(case.name)
            found.append(
                {
                    "batch": batch,
                    "method": case.name,
                    "time / dense resident": ratio.median,
                    "p10": ratio.low,
                    "p90": ratio.high,
                    "tokens/s": batch / seconds if is_gpu(prompt) else None,
                    "paper's tokens/s": _told("figure7_batch", case, "tokens_per_s", batch=float(batch)),
                    "seconds": seconds,
                }
            )
    first = {row["method"]: row["seconds"] / row["batch"] for row in found if row["batch"] == found[0]["batch"]}
    for row in found:
        row["throughput / smallest batch"] = first[row["method"]] * row["batch"] / row.pop("seconds")
        row["paper's"] = _paper_gain(row)
    return found


def _paper_gain(row: dict) -> float | None:
    """The paper's throughput over its own at batch 1."""
    told = [r for r in paper_table("figure7_batch") if _case_name(r) == row["method"]]
    rates = {r["batch"]: r["tokens_per_s"] for r in told}
    return rates[row["batch"]] / rates[1.0] if row["batch"] in rates else None


def _case_name(told: dict) -> str:
    return told["method"] if told["epsilon"] is None else f"{told['method']} (ε = {told['epsilon']:g})"


def _told(table: str, case, column: str, **where) -> float | None:
    for row in paper_table(table):
        if _case_name(row) == case.name and all(row[key] == value for key, value in where.items()):
            return row[column]
    return None


def phase_rows(prompt, made, n_steps: int) -> list[dict]:
    """Figure 8: shares of a step's time by phase."""
    found = []
    for case in made:
        seconds = phases(prompt, case, n_steps)
        total = sum(seconds.values())
        row = {"method": case.name} | {f"{phase} %": 100.0 * seconds[phase] / total for phase in PHASES}
        row["ms"] = 1e3 * total if is_gpu(prompt) else None
        told, fetch = _told("figure8_phases", case, "total_ms"), _told("figure8_phases", case, "fetch_ms")
        row |= {"paper's ms": told, "paper's fetch ms": fetch}
        row["paper's fetch %"] = 100.0 * fetch / told if told and fetch is not None else None
        found.append(row)
    return found


def link_rows(prompt, made, comparison) -> list[dict]:
    """Figure 9: bytes that a step moves from the host, and on a GPU the load of the link."""
    bandwidth, found = link_bandwidth(prompt.model.device), []
    full = made[-1].press.stats.full_bytes
    for case in made:
        share = read_share(case)
        rate = share * full / comparison.median(case.name) if bandwidth else None
        found.append(
            {
                "method": case.name,
                "bytes read/step": share * full,
                "of the full cache %": 100.0 * share,
                "GB/s": rate / 1e9 if rate is not None else None,
                "link load %": 100.0 * rate / bandwidth if rate is not None else None,
                "paper's link load %": _told("figure9_link", case, "utilisation_percent"),
                "paper's GB/s": _told("figure9_link", case, "gb_per_s"),
            }
        )
    return found


def first_token(prompt, options) -> list[dict]:
    """Time to the first token, in units of a dense prefill; one run, so without spread."""
    prefill, scoring = prompt.scored.prefill_seconds, prompt.scored.score_seconds[prompt.source]
    start = time.perf_counter()
    prompt.scored.sealed(prompt.model, verkv_press(options, 0.05, DELTA), prompt.source)
    seal = time.perf_counter() - start
    parts = {"prefill": prefill, "scores": scoring, "seal": seal, "together": prefill + scoring + seal}
    seconds = is_gpu(prompt)
    return [{"part": k, "of a prefill": v / prefill, "seconds": v if seconds else None} for k, v in parts.items()]


@plots.styled
def batch_picture(rows: list[dict]):
    """Throughput relative to the smallest batch, by batch."""
    named = groups.by(rows, lambda row: row["method"])
    figure, axes = plots.start(len(named))
    colours = ("#000000", "#666666", "#D55E00", "#0072B2")
    for i, (name, group) in enumerate(named.items()):
        values = [row["throughput / smallest batch"] for row in group]
        axes.plot([row["batch"] for row in group], values, color=colours[i % 4], marker="oXs^"[i % 4], label=name)
    batches = sorted({row["batch"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="batch size (sequences)", ylabel="tokens/s over batch 1 (ratio)", ylim=(0, None))
    plots.legend_below(figure, axes)
    return figure


@plots.styled
def phase_picture(rows: list[dict]):
    """Stacked bars: shares of a step's time, by method."""
    figure, axes = plots.start(len(PHASES), height=1.2 + 0.4 * len(rows))
    left = [0.0] * len(rows)
    for phase in PHASES:
        widths = [row[f"{phase} %"] for row in rows]
        style = {"color": COLOURS[phase], "hatch": HATCHES[phase], "edgecolor": "white", "label": phase}
        axes.barh(range(len(rows)), widths, left=left, **style)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(rows)), [row["method"] for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel="share of a decode step's time (%)", xlim=(0, 100))
    plots.legend_below(figure, axes, ncols=3)
    return figure


@plots.styled
def link_picture(rows: list[dict]):
    """Bars: what a step moves from the host."""
    figure, axes = plots.start(height=1.2 + 0.4 * len(rows))
    is_load = rows[0]["link load %"] is not None
    key = "link load %" if is_load else "of the full cache %"
    bars = axes.barh(range(len(rows)), [row[key] for row in rows], color="#0072B2")
    axes.bar_label(bars, [f"{row[key]:.1f}" for row in rows], padding=3, fontsize=10)
    axes.set_yticks(range(len(rows)), [row["method"] for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("load of the link (%)" if is_load else "read from the host per step (% of the full cache)")
    return figure


def run(options) -> None:
    """Run, print, write three tables."""
    prompt = load_prompt(options)
    print(f"{prompt.name}, {prompt.scored.n_tokens:,} context tokens, 16x, delta {DELTA:g}, {options.rounds} rounds\n")
    print(as_text(first_token(prompt, options)), end="\n\n")
    rows = batch_rows(prompt, options)
    _write(options, "7", rows, batch_picture(rows))
    made = cases(prompt, options, EPSILONS[options.preset], DELTA)
    comparison = timed(prompt, options, made, 1, options.rounds)
    rows = link_rows(prompt, made, comparison)
    _write(options, "9", rows, link_picture(rows))
    rows = phase_rows(prompt, [case for case in made if case.name != OFFLOADED], options.rounds)
    _write(options, "8", rows, phase_picture(rows))


def _write(options, number: str, rows: list[dict], figure) -> None:
    print(f"Figure {number}")
    part = type(options)(**vars(options))
    part.output = Path(options.output).with_name(f"{options.output.stem}_{number}.csv")
    write(part, rows, figure)
    print()


def options_parser():
    """Options of this script."""
    made = prompt_parser(__doc__, "figure7_9_system")
    made.add_argument("--rounds", type=int, default=7, help="of the timing (default: 7)")
    made.add_argument("--batches", type=int, nargs="+", help="batch sizes of figure 7")
    return made


if __name__ == "__main__":
    main(run, options_parser().parse_args())
