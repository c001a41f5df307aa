"""The report's sections. Each takes the answers of one length and gives markup; what lacks data says what to run."""

from collections.abc import Iterable, Sequence

from verkv.report import groups, plots, tables
from verkv.report.bootstrap import LEVEL, Estimate
from verkv.report.groups import Lines
from verkv.report.html import Html, element, join, picture, table
from verkv.report.picture import data_address

INTERVAL = f"{100 * LEVEL:g} % interval"
NO_ANSWER = "–"


def number(estimate: Estimate | None, form: str = "{:.1f}", scale: float = 1.0) -> Html:
    """A figure with its interval below."""
    if estimate is None:
        return Html(NO_ANSWER)
    middle = form.format(scale * estimate.value)
    if estimate.low is None or estimate.high is None:
        return join([middle])
    ends = f"[{form.format(scale * estimate.low)}, {form.format(scale * estimate.high)}]"
    return join([middle, element("small", ends)])


def intervals(estimates: Iterable[Estimate | None]) -> str:
    """What a caption says of the intervals."""
    if any(estimate is not None and estimate.low is not None for estimate in estimates):
        return f"Below: {INTERVAL}, bootstrap over the examples of each task."
    return "No intervals: they need two examples of every task."


def bars(estimates: Iterable[Estimate | None]) -> str:
    """What a caption says of the bars in a plot."""
    has_bars = any(estimate is not None and estimate.low is not None for estimate in estimates)
    return f" Bars: {INTERVAL}s." if has_bars else ""


def missing(what: str, flags: str) -> Html:
    """A section without data: what is not there, and the flags of the command that makes it."""
    command = f"verkv eval --preset laptop {flags} --output RESULTS"
    return element("p", what, " Run: ", element("code", command), class_="missing")


def glance(lines: Lines) -> Html:
    """One row for each method at the compression with the most questions: the figures to take away."""
    values = tables.compressions(lines)
    if not groups.dense_lines(lines):
        return missing("Dense was not run, so there is no reference.", "--methods dense")
    if not values:
        return element("p", "No compressed method was run yet.")
    chosen = groups.main_setting(lines)
    rows = tables.quality(chosen)
    asked = {c: max(row.score.n_examples for row in rows if row.compression == c) for c in values}
    compression = max(values, key=lambda c: (asked[c], c == 16.0))
    diverged = {row.name: row for row in tables.divergence(chosen) if row.compression == compression}
    fetched = {row.name: row for row in tables.fetching(chosen) if row.compression == compression}
    body = []
    for row in (row for row in rows if row.compression == compression):
        same, read = diverged.get(row.name), fetched.get(row.name)
        cells = [number(row.score), number(row.fraction, "{:.0f} %", 100.0)]
        cells.append(number(same.same_next, "{:.1f} %", 100.0) if same else NO_ANSWER)
        cells.append(number(read.read_per_token, "{:.1f} %", 100.0) if read else NO_ANSWER)
        body.append([row.name, *cells])
    header = ["method", "mean score (0 to 100)", "share of dense's score", "same next token as dense"]
    header.append("KV read from the host per token (% of cache)")
    caption = f"At {compression:g}×, {asked[compression]} questions. {intervals(row.score for row in rows)}"
    return table(caption, header, body)


def quality(lines: Lines) -> Html:
    """Scores and shares of dense by method and compression, and the curve."""
    rows = tables.quality(lines)
    columns = sorted({row.compression for row in rows})
    found = {(row.name, row.compression): row for row in rows}
    names = list(dict.fromkeys(row.name for row in rows))
    most = {c: max((r.score for r in rows if r.compression == c), key=lambda e: e.n_examples) for c in columns}
    header = ["method", *(_column(c, most[c]) for c in columns)]
    scores = [[name, *(_score(found.get((name, c)), most[c]) for c in columns)] for name in names]
    caption = f"Mean task score (0 to 100). {intervals(row.score for row in rows)}"
    shares = [_fractions(found, names, columns, solved) for solved in (False, True)]
    return join([_flow(table(caption, header, scores), _quality_picture(lines)), _flow(*shares)])


def _flow(*parts: Html) -> Html:
    """Side by side where there is room."""
    return element("div", *parts, class_="flow")


def _column(compression: float, most: Estimate) -> Html:
    return join([rate_name(compression), element("small", f"{most.n_examples} questions, {most.n_tasks} tasks")])


def rate_name(compression: float) -> str:
    """A compression as the tables say it."""
    return {1.0: "all kept", groups.UNRATED: "own rate"}.get(compression, f"{compression:g}×")


def _score(row: tables.Quality | None, most: Estimate) -> Html:
    if row is None:
        return Html(NO_ANSWER)
    here = row.score
    if (here.n_examples, here.n_tasks) == (most.n_examples, most.n_tasks):
        return number(here)
    return join([number(here), element("small", f"{here.n_examples} questions only")])


def _fractions(found: dict, names: list[str], columns: list[float], solved: bool) -> Html:
    which = "on tasks that dense solves (its mean score is 50 or more)" if solved else "on all tasks"
    key = "fraction_on_solved" if solved else "fraction"
    rows = [[name] for name in names]
    for row in rows:
        cells = [getattr(found.get((row[0], c)), key, None) for c in columns]
        row += [number(cell, "{:.1f} %", 100.0) for cell in cells]
    note = "" if solved else " Both are measured on the same questions; the interval is that of the pair."
    header = ["method", *map(rate_name, columns)]
    return table(f"Share of dense's mean score, {which}.{note}", header, rows)


def _quality_picture(lines: Lines) -> Html:
    figure = plots.quality_plot(lines)
    if figure is None:
        return missing("There is no compressed method yet, so no curve.", "--methods kvzip verkv")
    common = plots.on_common_tasks(groups.main_setting(lines))
    n_tasks, n_all = len({x["task"] for x in common}), len({x["task"] for x in lines})
    caption = f"Quality against compression on the {n_tasks} of {n_all} tasks that were run at every compression."
    caption += bars(row.score for row in tables.quality(common)) + " Points are set apart sideways."
    alternative = "Line plot of the mean task score against compression, one line per method. " + _spoken(
        tables.quality(common), lambda row: row.score.value, "{:.0f}"
    )
    return picture(data_address(figure), alternative, caption)


def _spoken(rows: Sequence, value, form: str) -> str:
    """The figures of a plot in words, for those who do not see it."""
    named = groups.by(rows, lambda row: row.name)
    spoken = [
        f"{name}: " + ", ".join(f"{form.format(value(row))} at {row.compression:g}×" for row in rows)
        for name, rows in named.items()
    ]
    return "; ".join(spoken) + "."


def task_by_task(lines: Lines) -> Html:
    """One table for each compression: methods by task, those that keep everything first."""
    rows = tables.per_task(lines)
    return join([_tasks_at(rows, compression) for compression in tables.compressions(lines) or [1.0]])


def _tasks_at(rows: list[tables.TaskScore], compression: float) -> Html:
    asked = list(dict.fromkeys(row.task for row in rows if row.compression == compression))
    found: dict[str, dict[str, tables.TaskScore]] = {}
    for row in rows:
        if row.compression in (1.0, compression) and row.task in asked:
            found.setdefault(row.name, {})[row.task] = row
    body = [[name, *(_mean(scores.get(task)) for task in asked)] for name, scores in found.items()]
    where = "" if compression == 1 else f" at {compression:g}×"
    return table(f"Mean score (0 to 100) by task{where}.", ["method", *asked], body)


def _mean(row: tables.TaskScore | None) -> str:
    return NO_ANSWER if row is None else f"{row.score:.1f}"


def order(lines: Lines) -> Html:
    """Whether each method is at least as good as the simpler one it builds on."""
    rows = tables.order(lines)
    if not rows:
        command = "--methods dense kvzip poissoncomp verkv verkv_exact"
        return missing("Too few of the methods were run to compare them.", command)
    body = [
        [f"{r.better} ≥ {r.worse}", f"{r.compression:g}×", number(r.points, "{:+.1f}"), r.verdict, _exceptions(r)]
        for r in rows
    ]
    caption = "Does every step of the method help on average? Difference of the mean scores in points, on the same "
    caption += f"questions, with its {INTERVAL}, and the tasks on which it does not."
    return table(caption, ["", "compression", "difference", "holds?", "tasks where it does not"], body, text={0, 3, 4})


def _exceptions(row: tables.Comparison) -> str:
    return ", ".join(f"{task} ({value:+.1f})" for task, value in row.exceptions.items()) or NO_ANSWER


def divergence(lines: Lines) -> Html:
    """Divergence from dense by method and compression."""
    rows = tables.divergence(lines)
    if not rows:
        return missing("No answer carries a divergence from dense.", "--methods dense verkv")
    columns = sorted({row.compression for row in rows})
    found = {(row.name, row.compression): row for row in rows}
    names = list(dict.fromkeys(row.name for row in rows))
    header = ["method", *map(rate_name, columns)]
    figures = dict(zip(("kl", "same_next"), plots.divergence_plots(lines), strict=False))
    parts = []
    for key, title, form in (
        ("kl", "Mean KL(dense ‖ method) in nats per token", "{:.3g}"),
        ("same_next", "Share of tokens at which the method's first choice is dense's", "{:.3f}"),
    ):
        body = [[name, *(number(getattr(found.get((name, c)), key, None), form) for c in columns)] for name in names]
        told = intervals(getattr(row, key) for row in rows)
        made = [table(f"{title}, teacher-forced on dense's own answer. {told}", header, body)]
        if key in figures:
            spoken = _spoken(rows, lambda row, key=key: getattr(row, key).value, "{:.3g}")
            alternative = f"Line plot: {title} against compression, one line per method. {spoken}"
            caption = f"{title}, against compression, on the tasks run at every compression."
            caption += bars(getattr(row, key) for row in rows)
            made.append(picture(data_address(figures[key]), alternative, caption))
        parts.append(_flow(*made))
    return join(parts)


FETCH_COLUMNS = ("decisions that fetch (%)", "KV heads' steps that fetch (%)", "tokens per fetch (% of context)")


def fetching(lines: Lines) -> Html:
    """What is kept and read."""
    rows = tables.fetching(lines)
    if not rows:
        return missing("No method with a certificate was run, so nothing was fetched.", "--methods verkv")
    percent = lambda share: NO_ANSWER if share is None else f"{100 * share:.1f}"  # noqa: E731
    header = ["method", "compression", "kept on the device (% of cache)"]
    header += [f"{what}, {phase}" for what in FETCH_COLUMNS for phase in ("question", "decode")]
    header += ["KV read per forward pass (% of cache)", "KV read per generated token (% of cache)"]
    body = []
    for row in rows:
        shares = (row.resident, row.decisions_question, row.decisions_decode, row.kv_heads_question)
        shares += (row.kv_heads_decode, row.tokens_question, row.tokens_decode)
        reads = [number(read, "{:.1f}", 100.0) for read in (row.read_per_forward, row.read_per_token)]
        body.append([row.name, rate_name(row.compression), *map(percent, shares), *reads])
    caption = (
        "What is fetched. A decision is one query head of one layer at one query token; tokens per fetch are those "
    )
    caption += "that a fetching decision makes exact, resident ones included."
    return table(caption, header, body)


def heads(lines: Lines) -> Html:
    """Where in the model it fetches."""
    maps = plots.head_maps(lines)
    if not maps:
        return missing("No answer carries fetch rates by head.", "--methods verkv")
    pictures = []
    for name, rates in maps.items():
        layers = rates.mean(1)
        most, least = int(layers.argmax()), int(layers.argmin())
        alternative = f"""Heat map of the share of decisions that fetch, {rates.shape[0]} layers by {rates.shape[1]}
            query heads, for {name}. The layer that fetches most is {most} ({layers[most]:.0%} of its decisions),
            the one that fetches least {least} ({layers[least]:.0%})."""
        caption = f"""{name}: share of decisions that fetch, by layer and query head, mean over answers. Yellow: all;
            dark blue: none."""
        pictures.append(picture(data_address(plots.head_map_plot(rates, name)), alternative, caption))
    return element("div", *pictures, class_="pictures")


SWEEP = "--methods verkv --epsilon 0.01 0.05 0.1 0.3"


def guarantee(lines: Lines) -> Html:
    """Adherence, traffic and bounds against the tolerance."""
    rows, figures = tables.tolerances(lines), plots.tolerance_plots(lines)
    notes = []
    if not rows:
        notes.append(missing("Nothing was run with a tolerance.", SWEEP))
    elif len({row.epsilon for row in rows}) < 2:
        notes.append(missing("There is one tolerance only, so no curve.", SWEEP))
    if "adherence" not in figures:
        notes.append(missing("Nothing was audited, so true errors are not known.", "--methods verkv --audit"))
    pictures = [_tolerance_picture(key, figures[key], rows) for key in ("adherence", "traffic") if key in figures]
    bounds = plots.bound_plot(lines)
    if bounds is not None:
        caption = """The bound before fetching against the true error after it, of a sample of decisions; both relative
            to the denominator. Above the dashed line the error is larger than that bound. What is smaller than 1e-5 is
            drawn there."""
        pictures.append(picture(data_address(bounds), f"Scatter plot. {caption}", caption))
    return join([*notes, element("div", *pictures, class_="pictures")])


def _tolerance_picture(key: str, figure, rows: list[tables.Tolerance]) -> Html:
    if key == "adherence":
        rows = [row for row in rows if row.violations]
        estimates = [row.violations for row in rows]
        caption = """Adherence: share of audited decisions whose denominator is off by more than ε. The dashed line is
            δ, what the certificate allows with exact weights."""
    else:
        estimates = [row.read_per_token for row in rows]
        caption = "Traffic: bytes read from the host per generated token over the bytes of the full cache."
    spoken = "; ".join(
        f"{row.label} at {row.compression:g}×, ε {row.epsilon:g}: {100 * estimate.value:.2g} %"
        for row, estimate in zip(rows, estimates, strict=True)
    )
    alternative = f"Line plot against the tolerance ε. {caption} {spoken}."
    return picture(data_address(figure), alternative, caption + bars(estimates))


def answers(lines: Lines, most: int = 20) -> Html:
    """Questions at which a method and dense differ, to read."""
    dense = {groups.question(line): line for line in groups.dense_lines(lines)}
    if not dense:
        return missing("Dense was not run, so there is nothing to compare answers with.", "--methods dense")
    others = [line for name, group in groups.variants(lines).items() for line in group if not groups.is_dense(line)]
    differing = [x for x in others if (d := dense.get(groups.question(x))) and abs(x["score"] - d["score"]) >= 0.5]
    if not differing:
        return element("p", "Nowhere does a method's score differ from dense's by half or more.")
    header = ["question", "expected", "dense", "method", "its answer"]
    rows = []
    for line in differing[:: max(1, len(differing) // most)][:most]:
        reference = dense[groups.question(line)]
        expected = ", ".join(map(str, line["answers"]))
        cells = [_shown(text) for text in (expected, _scored(reference), _scored(line))]
        method = f"{line['label']}, {rate_name(groups.rate(line))}"
        rows.append([f"{line['task']} no. {line['example']}", *cells[:2], method, cells[2]])
    caption = (
        f"{len(rows)} of {len(differing)} answers whose score differs from dense's by half or more, evenly chosen."
    )
    return table(caption, header, rows, text=set(range(5)))


def _scored(line: dict) -> str:
    return f"{line['prediction'].strip()} ({100 * line['score']:.0f})"


def _shown(text: str, longest: int = 240) -> Html:
    return element("div", text if len(text) <= longest else text[:longest] + " …", class_="answer")
