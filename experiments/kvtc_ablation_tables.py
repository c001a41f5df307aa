"""Tables of the ablations of kvtc, our figures beside the paper's."""

import math

from kvtc_common import Lines, dnll_cell, interval, markdown, mean_of
from paper_items import paper_table

LLAMA = "Llama 3.1 8B"
PAPER_TASKS = ("gsm8k", "mmlu", "qasper", "litm", "vt")
OURS = ["K error", "V error", "KL", "same next", "dNLL"]
PAPER_NAMES = [f"paper: {name}" for name in PAPER_TASKS]
DEFAULT = {"sinks": 4, "window": 128, "plan": "dp", "layers": "all", "outliers": False}


def ours(lines: Lines, **point) -> list:
    """Cells of a point, means over texts; KL with its 95 % interval from three texts on."""
    found = lines.find(kind="point", **(DEFAULT | point))
    if not found:
        return [None] * len(OURS)
    errors = [mean_of(found, "k_error"), mean_of(found, "v_error")]
    kl = interval([line["kl"] for line in found])
    return [*errors, kl, f"{mean_of(found, 'same_top1'):.1%}", dnll_cell(found)]


def counted(lines: Lines, **point) -> float | None:
    """Ratio of a point as the paper counts."""
    found = lines.find(kind="point", **(DEFAULT | point))
    return mean_of(found, "paper_ratio") if found else None


def scores(row: dict | None) -> list:
    """The paper's cells of a row."""
    return [(row or {}).get(name) for name in PAPER_TASKS]


def at(ratio: float) -> dict:
    """The same ratio for both sides."""
    return {"k_ratio": ratio, "v_ratio": ratio}


def select(name: str, **keys) -> dict | None:
    """The row of a table of the paper."""
    return next((row for row in paper_table(name) if all(row[key] == value for key, value in keys.items())), None)


# --- figures ----------------------------------------------------------------------------------------------------------


def figure2(lines: Lines) -> str:
    """What PCA, quantisation and DEFLATE contribute."""
    rows = []
    for row in paper_table("kvtc_figure2"):
        found = lines.find(kind="point", **at(row["ratio"]), **DEFAULT)
        if not found:
            continue
        kept = [mean_of(found, f"{side}_kept") for side in "kv"]
        pca = -math.log2(sum(kept) / 2)
        nominal, deflate = mean_of(found, "nominal_ratio"), mean_of(found, "deflate_gain")
        parts = [pca, math.log2(nominal) - pca, math.log2(deflate)]
        shares = [f"{share:.1%}" for share in (*kept, 2 ** -row["pca"])]
        rows.append([f"{row['ratio']:g}x", *shares[:2], *parts, mean_of(found, "paper_ratio"), shares[2]])
        rows[-1] += [row["pca"], row["quantisation"], row["deflate"]]
    header = ["nominal", "K kept", "V kept", "log2 PCA", "log2 quant.", "log2 DEFLATE", "ratio"]
    return markdown([*header, "paper: kept", "paper: PCA", "paper: quant.", "paper: DEFLATE"], rows)


def figure6(lines: Lines) -> str:
    """Errors by calibration tokens and by position, and the bit plan."""
    paper = paper_table("kvtc_figure6")

    def beside(start: int) -> list:
        row = next((row for row in paper if row["part"] == "position" and row["x"] == start), {})
        return [row.get("k_error"), row.get("v_error")]

    names = ["K error", "V error", "paper: K error", "paper: V error"]
    own = sorted(lines.find(kind="fit"), key=lambda line: line["n_rows"])
    fits = [[f"ours, {line['n_rows']:,}", line["k_error"], line["v_error"]] for line in own]
    theirs = [row for row in paper if row["part"] == "calibration"]
    fits += [[f"paper, {row['x']:,.0f}", row["k_error"], row["v_error"]] for row in theirs]
    positions = [
        [f"{line['start']}–{line['stop'] - 1}", line["k_error"], line["v_error"], *beside(line["start"])]
        for line in lines.find(kind="position")
    ]
    plans = [
        [line["side"].upper(), f"{line['start']}–{line['start'] + line['size'] - 1}", line["bits"], line["cost"]]
        for line in lines.find(kind="plan")
    ]
    plan_header = ["side", "coordinates", "bits", "bits with shift and scale"]
    tables = [markdown(["calibration rows", "K error", "V error"], fits), markdown(["position", *names], positions)]
    return "\n".join([*tables, markdown(plan_header, plans)])


# --- tables -----------------------------------------------------------------------------------------------------------


def table5(latency: Lines) -> str:
    """Times, ours in seconds and shares, the paper's in milliseconds."""
    rows = []
    for line in latency.lines:
        seconds = line["cpu_seconds"]
        recompute = seconds["prefill"] + seconds["first token, prefilled"]
        restored = seconds["load"] + seconds["first token, loaded"]
        name = f"ours, {line['n_tokens']} tokens, {line['ratio']:g}x {line['mode']}"
        shares = [_share(line[f"{way}_stages"], *stages) for way, stages in STAGES]
        rows.append([name, seconds["compress"], seconds["restore"], recompute, restored, recompute / restored, *shares])
    for row in paper_table("kvtc_table5"):
        ms = [row[name] / 1000 for name in ("compress_total", "restore_total", "recompute", "restored")]
        shares = []
        for way in ("compress", "restore"):
            parts = [row[f"{way}_{stage}"] for stage in ("project", "quantise", "deflate")]
            shares.append(" / ".join(f"{part / sum(parts):.0%}" for part in parts))
        rows.append([f"paper, {row['setting']}", *ms, ms[2] / ms[3], *shares])
    header = ["", "compress, s", "restore, s", "first token, prefilled, s", "first token, restored, s", "gain"]
    return markdown([*header, "compress: project / quantise / DEFLATE", "restore: the same"], rows)


STAGES = (
    ("compress", (("project",), ("quantise", "pack"), ("deflate",))),
    ("restore", (("reconstruct", "rotate", "place"), ("unpack", "dequantise"), ("inflate",))),
)


def _share(stages: dict, *groups) -> str:
    total = sum(stages.values())
    return " / ".join(f"{sum(stages[name] for name in group) / total:.0%}" for group in groups)


def table6(lines: Lines) -> str:
    """Sinks."""
    rows = []
    for ratio, sinks, outliers in (
        (16, 0, False),
        (16, 0, True),
        (16, 4, False),
        (64, 0, False),
        (64, 0, True),
        (64, 4, False),
    ):
        point = at(ratio) | {"sinks": sinks, "outliers": outliers}
        row = None if outliers else select("kvtc_table6", model=LLAMA, sinks=sinks, ratio=ratio)
        name = f"{sinks}{', outliers kept' if outliers else ''}"
        rows.append([f"{ratio}x", name, counted(lines, **point), *ours(lines, **point), *scores(row)])
    return markdown(["nominal", "sinks kept", "ratio", *OURS, *PAPER_NAMES], rows)


def table7(lines: Lines) -> str:
    """Keys against values."""
    rows = []
    for row in paper_table("kvtc_table7"):
        if row["model"] == LLAMA:
            point = {"k_ratio": row["k_ratio"], "v_ratio": row["v_ratio"]}
            names = [f"{row['k_ratio']:g}x", f"{row['v_ratio']:g}x"]
            rows.append([*names, counted(lines, **point), *ours(lines, **point), *scores(row)])
    return markdown(["K", "V", "ratio", *OURS, *PAPER_NAMES], rows)


def table12(lines: Lines) -> str:
    """Window."""
    rows = []
    for window in (1, 16, 64, 128):
        point = at(64) | {"window": window}
        rows.append([window, *ours(lines, **point), *scores(select("kvtc_table12", model=LLAMA, window=window))])
    return markdown(["window", *OURS, *PAPER_NAMES], rows)


def table13(lines: Lines) -> str:
    """Lossless codecs."""
    found = lines.find(kind="lossless")
    kinds = list(dict.fromkeys(line["text"] for line in found))
    rows = []
    for layout in ("store", "fetch"):
        for codec in dict.fromkeys(line["codec"] for line in found):
            same = lines.find(kind="lossless", codec=codec, layout=layout)
            row = select("kvtc_table13", codec=codec) if layout == "store" else None
            means = [[line for line in same if line["text"] == kind] for kind in kinds]
            cells = [cell for part in means for cell in (mean_of(part, "paper_ratio"), mean_of(part, "gain"))]
            theirs = [row and row[name] for name in ("gsm8k", "qasper", "litm", "vt")]
            rows.append([layout, codec, *cells, *theirs])
    header = ["layout", "codec", *(f"{kind}: {what}" for kind in kinds for what in ("ratio", "gain"))]
    return markdown([*header, *(f"paper: {name}" for name in ("gsm8k", "qasper", "litm", "vt"))], rows)


def table14(lines: Lines) -> str:
    """Bit plans against the first axes alone."""
    rows = []
    for window in (16, 128):
        for ratio in (8, 16, 32, 64):
            for plan in ("dp", "pca"):
                point = at(ratio) | {"window": window, "plan": plan}
                row = select("kvtc_table14", window=window, ratio=ratio, plan=plan)
                cells = [window, f"{ratio}x", "kvtc" if plan == "dp" else "PCA alone", counted(lines, **point)]
                rows.append([*cells, *ours(lines, **point), *scores(row)])
    return markdown(["window", "nominal", "plan", "ratio", *OURS, *PAPER_NAMES], rows)


def table15(lines: Lines) -> str:
    """Layers that share a basis."""
    found = lines.find(kind="point", window=16)
    groups = [*sorted({line["layers"] for line in found if line["layers"] != "all"}), "all"]
    nearest = {1: 1, 2: 2, 5: 4, 10: 8, "all": 32}  # layers of the paper's 32
    rows = []
    for layers in groups:
        for ratio in (8, 16, 32, 64):
            row = select("kvtc_table15", layers=nearest.get(layers), ratio=ratio)
            pca, dp = (ours(lines, **at(ratio), window=16, layers=layers, plan=plan) for plan in ("pca", "dp"))
            rows.append([layers, f"{ratio}x", *pca[:4], *dp[:4], row and f"{row['layers']:g}", *scores(row)])
    header = [f"{plan}: {name}" for plan in ("PCA", "kvtc") for name in OURS[:4]]
    return markdown(["layers", "nominal", *header, "paper: layers", *PAPER_NAMES], rows)


TABLES = {f.__name__: f for f in (figure2, figure6, table6, table7, table12, table13, table14, table15)}


def render(names: list[str], lines: Lines, latency: Lines) -> str:
    """The tables of some experiments, one after the other."""
    parts = [f"### {name}\n\n{table5(latency) if name == 'table5' else TABLES[name](lines)}" for name in names]
    return "\n".join(parts)
