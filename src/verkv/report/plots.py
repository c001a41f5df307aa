"""The pictures of the report, drawn with matplotlib. Colours of Okabe and Ito; every method has its own marker, too."""

import functools
from collections.abc import Callable, Iterable

import numpy as np

from verkv.report import groups, tables
from verkv.report.groups import Lines

WIDTH = 5.4  # inches: the letters stay readable on a phone
# Method: colour and marker. Colours differ for colour-blind readers; two methods of one colour differ in the marker.
STYLES = {
    "dense": ("#000000", "o"),
    "dense_offloaded": ("#000000", "X"),
    "verkv_everything": ("#666666", "P"),
    "kvzip": ("#E69F00", "v"),
    "fastkvzip": ("#CC79A7", "<"),
    "poissoncomp": ("#56B4E9", "D"),
    "verkv": ("#D55E00", "s"),
    "verkv_fastkvzip": ("#D55E00", "p"),
    "verkv_default": ("#0072B2", "h"),
    "verkv_exact": ("#009E73", "^"),
}
OTHERS = [
    (colour, marker) for marker in ("*", "1", "d", ">") for colour in ("#666666", "#CC79A7", "#56B4E9", "#E69F00")
]
GREY = "#595959"


SETTINGS = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
}


def styled(draw: Callable) -> Callable:
    """Run a function that draws under the report's settings of matplotlib; they are put back afterwards."""

    @functools.wraps(draw)
    def drawn(*arguments, **options):
        import matplotlib

        with matplotlib.rc_context(SETTINGS):
            return draw(*arguments, **options)

    return drawn


def start(n_series: int = 0, height: float = 3.3):
    """A figure and its axes; for functions that are ``styled``.

    Parameters
    ----------
    n_series : int
        How many entries the legend will have, for which the figure gets higher.
    height : float
        In inches, without legend.

    Returns
    -------
    tuple
        Of matplotlib's Figure and Axes.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height + 0.22 * ((n_series + 1) // 2)), layout="constrained")
    return figure, figure.add_subplot()


def styles(lines: Lines) -> dict[str, tuple[str, str]]:
    """Colour and marker of every variant; settings of one method take turns through markers of their own."""
    found: dict[str, tuple[str, str]] = {}
    spare = iter(OTHERS * 8)
    for name, group in groups.variants(lines).items():
        style = STYLES.get(group[0]["method"])
        found[name] = style if style and style not in found.values() else next(spare)
    return found


def plain(text: str, longest: int = 60) -> str:
    """A label from the results: no formulas, no line breaks, not too long."""
    short = " ".join(text.split())
    short = short if len(short) <= longest else short[: longest - 1] + "…"
    return short.replace("$", r"\$")


def legend_below(figure, axes, ncols: int = 2, **options) -> None:
    """All labelled series, under the plot."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=ncols, frameon=False, fontsize=10, **options)


def compression_axis(axes, values: Iterable[float]) -> None:
    """A logarithmic axis with a tick at every compression there is."""
    values = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:g}×" for value in values])
    axes.set_xticks([], minor=True)
    axes.set_xlim(min(values) / 1.35, max(values) * 1.35)
    axes.set_xlabel("compression (full cache / kept on the device)")


def series(axes, points, style: tuple[str, str], label: str, shift: float = 0.0, **options) -> None:
    """Points (x, Estimate) joined by a line, with intervals; ``shift`` moves them aside on a logarithmic axis."""
    x = np.array([x for x, _ in points]) * 2.0**shift
    middle = np.array([e.value for _, e in points])
    below = [0.0 if e.low is None else max(0.0, e.value - e.low) for _, e in points]
    above = [0.0 if e.high is None else max(0.0, e.high - e.value) for _, e in points]
    colour, marker = style
    options = {"markersize": 6, "linewidth": 1.6, "capsize": 2.5, "elinewidth": 1} | options
    axes.errorbar(x, middle, [below, above], color=colour, marker=marker, label=plain(label), **options)


def shifts(n: int) -> list[float]:
    """Where n series stand beside a tick, so that their intervals do not hide each other."""
    return [0.0] if n < 2 else list(np.linspace(-0.12, 0.12, n))


@styled
def quality_plot(lines: Lines):
    """Score against compression on the tasks run at every compression; dense is the dashed line. None without data."""
    chosen = on_common_tasks(groups.main_setting(lines))
    rows = tables.quality(chosen)
    values = tables.compressions(chosen)
    if not values:
        return None
    look = styles(chosen)
    sampled = _by_name([row for row in rows if row.compression in values], lambda row: row.score)
    figure, axes = start(len(sampled))
    references = exact_names(chosen)
    names = [name for name in sampled if name not in references]
    places = dict(zip(names, shifts(len(names)), strict=True))
    for name, points in sampled.items():
        options = {"linestyle": "--"} if name in references else {}
        series(axes, points, look[name], name, places.get(name, 0.0), **options)
    compression_axis(axes, values)
    axes.set(ylabel="mean task score (0 to 100)", ylim=(-3, 103))
    legend_below(figure, axes)
    return figure


def exact_names(lines: Lines) -> set[str]:
    """Variants that keep everything."""
    named = groups.variants(lines)
    return {name for name, group in named.items() if all(groups.rate(line) == 1 for line in group)}


def on_common_tasks(lines: Lines) -> Lines:
    """Answers of the tasks that were run at every compression, so that points of a curve can be compared."""
    values = tables.compressions(lines)
    tasks = [{line["task"] for line in lines if groups.rate(line) == value} for value in values]
    common = set.intersection(*tasks) if tasks else set()
    return [line for line in lines if line["task"] in common] if common else lines


def _by_name(rows, figure: Callable) -> dict[str, list[tuple[float, object]]]:
    found: dict[str, list] = {}
    for row in rows:
        found.setdefault(row.name, []).append((row.compression, figure(row)))
    return {name: sorted(points, key=lambda point: point[0]) for name, points in found.items()}


@styled
def divergence_plots(lines: Lines) -> list:
    """KL divergence, and share of equal next tokens, against compression."""
    chosen = on_common_tasks(groups.main_setting(lines))
    rows = [row for row in tables.divergence(chosen) if row.compression in tables.compressions(lines)]
    if not rows:
        return []
    look, figures = styles(chosen), []
    kinds = (("kl", "mean KL (nats per token)", True), ("same_next", "same next token (share)", False))
    for key, label, is_logarithmic in kinds:
        figure, axes = start(len({row.name for row in rows}))
        named = _by_name(rows, lambda row, key=key: getattr(row, key))
        for (name, points), place in zip(named.items(), shifts(len(named)), strict=True):
            series(axes, points, look[name], name, place)
        compression_axis(axes, [row.compression for row in rows])
        axes.set_ylabel(label)
        if is_logarithmic and any(row.kl.value > 0 for row in rows):
            axes.set_yscale("log")
            axes.set_ylim(bottom=0.5 * min(row.kl.value for row in rows if row.kl.value > 0))
        legend_below(figure, axes)
        figures.append(figure)
    return figures


def head_maps(lines: Lines) -> dict[str, np.ndarray]:
    """Mean fetch rate by layer and query head, (n_layers, Hq), of every verified variant at its usual compression."""
    mapped = [line for line in groups.main_setting(lines) if (line.get("by_head") or {}).get("fetch_rate")]
    found = {}
    for name, group in groups.variants(mapped).items():
        by_compression = groups.by(group, groups.rate)
        compression, chosen = max(by_compression.items(), key=lambda item: len(item[1]))
        maps = [np.array(line["by_head"]["fetch_rate"], dtype=float) for line in chosen]
        shapes = {m.shape for m in maps}
        if len(shapes) == 1 and maps[0].ndim == 2 and any(m.any() for m in maps):
            found[f"{name}, {compression:g}×"] = np.mean(maps, axis=0)
    return found


@styled
def head_map_plot(rates: np.ndarray, title: str):
    """One heat map; every cell is a query head of a layer."""
    figure, axes = start(height=min(7.0, max(3.4, 1.2 + 0.11 * rates.shape[0])))
    axes.grid(False)
    image = axes.imshow(rates, aspect="auto", cmap="cividis", vmin=0.0, vmax=1.0, interpolation="nearest")
    axes.set(xlabel="query head (number)", ylabel="layer (number, 0 is the first)")
    axes.set_title(plain(title), fontsize=11)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes, label="decisions that fetch (share)", shrink=0.9)
    return figure


@styled
def tolerance_plots(lines: Lines) -> dict[str, object]:
    """Adherence ("adherence") and traffic ("traffic") against the tolerance; only what there is data for."""
    rows, figures = tables.tolerances(lines), {}
    if rows:
        named = _tolerance_series(rows)
        figure = _tolerance_plot(named, lambda row: row.read_per_token, "KV read per token (share of cache)")
        reads = [row.read_per_token.value for row in rows]
        if min(reads) > 0 and max(reads) > 5 * min(reads):
            figure.axes[0].set_yscale("log")
        figures["traffic"] = figure
    if any(row.violations for row in rows):
        named = _tolerance_series([row for row in rows if row.violations])
        figure = _tolerance_plot(named, lambda row: row.violations, "decisions beyond ε (share)")
        axes = figure.axes[0]
        for delta in sorted({row.delta for row in rows if row.violations}):
            axes.axhline(delta, color=GREY, linestyle="--", linewidth=1.2)
            place = {"xy": (1, delta), "xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
            axes.annotate(f"δ = {delta:g}", **place, xytext=(-3, 3), ha="right", color=GREY)
        axes.set_ylim(bottom=0)
        figures["adherence"] = figure
    return figures


def _tolerance_series(rows) -> dict[str, list]:
    """Rows by label, with compression and delta in it where they vary."""
    several = len({row.compression for row in rows}) > 1, len({row.delta for row in rows}) > 1
    name = lambda row: ", ".join(  # noqa: E731
        [row.label, *[f"{row.compression:g}×"] * several[0], *[f"δ {row.delta:g}"] * several[1]]
    )
    return groups.by(rows, name)


def _tolerance_plot(named: dict, figure_of: Callable, label: str):
    figure, axes = start(len(named))
    colours = [colour for colour, _ in STYLES.values()][3:]
    markers = "sD^vopXh"
    for i, (name, rows) in enumerate(named.items()):
        style = colours[i % len(colours)], markers[i % len(markers)]
        series(axes, [(row.epsilon, figure_of(row)) for row in rows], style, name)
    values = sorted({row.epsilon for rows in named.values() for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.set_xticks([], minor=True)
    axes.set_xlim(min(values) / 1.3, max(values) * 1.3)
    axes.set(xlabel="tolerance ε (relative error of the softmax denominator)", ylabel=label)
    legend_below(figure, axes)
    return figure


@styled
def bound_plot(lines: Lines, most: int = 1500):
    """True error against the bound, both relative, of sampled decisions; None where nothing was audited."""
    audited = [line for line in lines if (line.get("audit") or {}).get("pairs")]
    if not audited:
        return None
    floor, chosen = 1e-5, groups.main_setting(audited)
    look, named = styles(chosen), groups.variants(chosen)
    figure, axes = start(1 + len(named))
    for name, group in named.items():
        pairs = np.array([pair for line in group for pair in line["audit"]["pairs"]], dtype=float).reshape(-1, 2)
        pairs = pairs[np.isfinite(pairs).all(1)]
        if len(pairs) > most:
            pairs = pairs[np.random.default_rng(0).choice(len(pairs), most, replace=False)]
        colour, marker = look[name]
        bound, error = np.maximum(pairs, floor).T
        look_of_points = {"s": 7, "alpha": 0.4, "color": colour, "marker": marker, "linewidths": 0.5}
        axes.scatter(bound, error, label=plain(name), rasterized=True, **look_of_points)
    ends = [floor, max(1.0, *axes.get_xlim())]
    axes.plot(ends, ends, color=GREY, linestyle="--", linewidth=1.2, label="error = bound")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="bound before fetching (relative)",
        ylabel="true error after fetching (relative)",
    )
    legend_below(figure, axes, markerscale=2.5)
    return figure
