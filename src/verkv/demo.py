"""``verkv demo``: one question over a long context, answered by several methods, and what each keeps and reads."""

import copy
import json
import platform
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from verkv import __version__
from verkv.checks import check_count

NEEDLE = "One of the special magic numbers for {key} is: {number}."
INTRODUCTION = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize them. I will quiz you "
    "about the numbers afterwards.\n"
)
QUESTION = "\nWhat is the special magic number for {key} mentioned in the provided text?"
ANSWER_PREFIX = " The special magic number for {key} mentioned in the provided text is"
KEYS = ("tomato", "harbor", "violin")


@dataclass(frozen=True)
class DemoSettings:
    """Options of ``verkv demo``; see its ``--help``."""

    model: str | None = None
    tokens: int = 2400
    compression_ratio: float = 0.9375
    epsilon: float = 0.05
    delta: float = 0.1
    alpha: float | None = None
    n_sink: int = 32
    n_local: int = 32
    shortlist: int = 32
    max_new_tokens: int = 10
    seed: int = 0
    device: str | None = None
    output_dir: Path = Path("outputs")


@dataclass(frozen=True)
class Task:
    """A context with needles in it, and a question about one of them."""

    context: str
    question: str
    answer_prefix: str
    answer: str


@dataclass(frozen=True)
class Prefix:
    """The prefilled context that all methods start from, and what it took."""

    cache: object
    scores: dict[int, torch.Tensor]
    queries: dict[int, torch.Tensor]
    template_length: int
    prefill_seconds: float
    scoring_seconds: float


@dataclass
class Result:
    """What one method did."""

    name: str
    answer: str
    is_right: bool
    seconds: float
    resident: float
    kv_read_per_token: float | None = None
    fetch_rate: float | None = None
    violation_rate: float | None = None
    stats: dict = field(default_factory=dict)


def run_demo(settings: DemoSettings) -> list[Result]:
    """Run all methods, print the table, write ``demo.png`` and append a line to ``demo.jsonl``.

    Parameters
    ----------
    settings : DemoSettings

    Returns
    -------
    list of Result

    Raises
    ------
    ValueError
        If an option is out of range, or the model cannot hold the context.
    """
    presses = _presses(settings)  # refuses bad options before anything is loaded
    check_count("--max-new-tokens", settings.max_new_tokens, least=1)
    _prepare_output(settings.output_dir)
    model, tokenizer = _load(settings)
    task = build_task(tokenizer, settings.tokens, settings.seed)
    context_ids, question_ids = encode_task(tokenizer, task, model.device)
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    n_total = context_ids.shape[1] + question_ids.shape[1] + settings.max_new_tokens
    if longest is not None and n_total > longest:
        raise ValueError(f"--tokens {settings.tokens} is too long: the model takes {longest} tokens")

    _print_task(settings, model, context_ids, task)
    results = []
    n_steps = 2 + len(presses) * (settings.max_new_tokens + 1)
    with tqdm(total=n_steps, unit="step", dynamic_ncols=True) as bar:
        prefix = _prefill(model, tokenizer, context_ids, bar)
        for name, press in presses.items():
            bar.set_description(name)
            results.append(_ask(name, press, model, tokenizer, prefix, question_ids, task, settings, bar))
    print(
        f"Prefill    {prefix.prefill_seconds:.0f} s, KVzip scores {prefix.scoring_seconds:.0f} s, shared by all methods"
    )
    print(format_table(results, settings))
    _write(settings, model, context_ids.shape[1], task, prefix, results, presses["VerKV"])
    return results


def build_task(tokenizer, n_tokens: int, seed: int) -> Task:
    """English prose of about ``n_tokens`` tokens, a needle per key at random places, a question about the first.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
    n_tokens : int
        Of the context, needles included.
    seed : int

    Returns
    -------
    Task

    Raises
    ------
    ValueError
        If the context is too short for its needles, or longer than the prose at hand.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=generator))  # noqa: E731
    numbers = [str(draw(10**6, 10**7)) for _ in KEYS]
    needles = [NEEDLE.format(key=key, number=number) for key, number in zip(KEYS, numbers, strict=True)]
    n_fixed = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in (INTRODUCTION, *needles))
    prose_ids = tokenizer.encode("\n".join(prose_paragraphs()), add_special_tokens=False)
    n_prose = n_tokens - n_fixed
    if not 8 * len(KEYS) <= n_prose <= len(prose_ids):
        raise ValueError(f"--tokens must be between {n_fixed + 8 * len(KEYS)} and {n_fixed + len(prose_ids)}")

    lines = tokenizer.decode(prose_ids[:n_prose]).split("\n")
    for needle in needles:
        lines.insert(draw(0, len(lines) + 1), needle)
    key = KEYS[0]
    return Task(
        context=INTRODUCTION + "\n".join(lines),
        question=QUESTION.format(key=key),
        answer_prefix=ANSWER_PREFIX.format(key=key),
        answer=numbers[0],
    )


def prose_paragraphs() -> list[str]:
    """Plain English paragraphs of the language reference that every Python carries, without code, grammar and lists."""
    from pydoc_data.topics import topics

    paragraphs = []
    for block in re.split(r"\n\s*\n", "\n\n".join(topics.values())):
        lines = block.split("\n")
        is_prose = not any(line.startswith(("    ", "* ")) or "::=" in line for line in lines)
        text = " ".join(line.strip() for line in lines)
        if is_prose and len(text) > 120 and text.endswith((".", ":")):
            paragraphs.append(text)
    return paragraphs


def format_table(results: list[Result], settings: DemoSettings) -> str:
    """The table that the demo prints."""
    header = ["method", "answer", "", "resident", "KV read/token", "fetching", "violations", "time"]
    share = lambda value: "-" if value is None else f"{100 * value:.1f} %"  # noqa: E731
    rows = [
        [
            r.name,
            _shorten(r.answer),
            "right" if r.is_right else "wrong",
            f"{100 * r.resident:.2f} %",
            share(r.kv_read_per_token),
            share(r.fetch_rate),
            share(r.violation_rate),
            f"{r.seconds:.0f} s",
        ]
        for r in results
    ]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    left_aligned = 3
    pad = lambda row: "  ".join(  # noqa: E731
        cell.ljust(width) if i < left_aligned else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    rule = "-" * len(pad(header))
    notes = f"""\
resident    bytes on the device / bytes of the full cache; the budget is {1 - settings.compression_ratio:.2%}, and the
            sample's size varies with the draw
KV read     bytes read from the host / bytes of the full cache, per decoded token
fetching    share of attention decisions (one head of one layer for one decoded token) that fetch
violations  share of them whose softmax denominator is really off by more than epsilon = {settings.epsilon:g};
            VerKV aims at delta = {settings.delta:.0%} or less: proven for exact weights, measured for sketches
time        sealing, answer, and the audit that measures the violations"""
    return "\n".join(["", pad(header), rule, *map(pad, rows), rule, notes])


# --- running --------------------------------------------------------------------------------------------------------


def _prepare_output(folder: Path) -> None:
    """Make the folder now: a demo that cannot write its results should not run for minutes first."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output-dir {str(folder)!r} cannot be made: {error}") from error


def _presses(settings: DemoSettings) -> dict:
    from verkv import KVzipPress, PoissonCompPress, VerKVPress

    sampled = {
        "compression_ratio": settings.compression_ratio,
        "n_sink": settings.n_sink,
        "n_local": settings.n_local,
        "seed": settings.seed,
        "audit": True,
    }
    verified = sampled | {
        "epsilon": settings.epsilon,
        "delta": settings.delta,
        "record_bounds": True,
    }
    return {
        "dense": None,
        "KVzip top-k": KVzipPress(compression_ratio=settings.compression_ratio, audit=True),
        "PoissonComp": PoissonCompPress(KVzipPress(), alpha=settings.alpha or 0.0, **sampled),
        "VerKV as published": VerKVPress(KVzipPress(), paper=True, shortlist=settings.shortlist, **verified),
        "VerKV": VerKVPress(KVzipPress(), alpha=settings.alpha, **verified),
        "VerKV, exact sketch": VerKVPress(KVzipPress(), sketch="exact", alpha=settings.alpha, **verified),
    }


def _load(settings: DemoSettings):
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if settings.model is None:
        from verkv.demo_model import demo_model_path

        name = str(demo_model_path())
    else:
        name = settings.model
    try:
        device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {settings.device!r} cannot be used: {error}") from error
    transformers.utils.logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device).eval()
    except OSError as error:
        raise ValueError(f"--model {name!r} cannot be loaded: {error}") from error
    finally:
        transformers.utils.logging.enable_progress_bar()
    return model, tokenizer


def encode_task(tokenizer, task: Task, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of context and question, as in KVPress' pipeline: both lie inside the user's message."""
    if tokenizer.chat_template is None:
        context, suffix = (tokenizer.bos_token or "") + task.context, "\n"
    else:
        separator = "#" * 40
        context, suffix = tokenizer.apply_chat_template(
            [{"role": "user", "content": task.context + separator}],
            add_generation_prompt=True,
            tokenize=False,
            enable_thinking=False,
        ).split(separator)

    def encode(text: str) -> torch.Tensor:
        return tokenizer.encode(text, return_tensors="pt", add_special_tokens=False).to(device)

    return encode(context), encode(task.question + suffix + task.answer_prefix)


@torch.inference_mode()
def _prefill(model, tokenizer, context_ids: torch.Tensor, bar: tqdm) -> Prefix:
    """Fill a cache with the context and score its tokens, once for all methods."""
    from verkv import KVzipPress, make_cache, record_queries

    start = time.perf_counter()
    cache = make_cache(model.config)
    bar.set_description("prefill")
    with record_queries(model) as queries:
        (getattr(model, "model", None) or model.base_model)(input_ids=context_ids, past_key_values=cache)
    bar.update()
    prefilled = time.perf_counter()
    bar.set_description("KVzip scores")
    source = KVzipPress(tokenizer=tokenizer).source()
    source.prepare(model)
    scores = source.after_prefill(model, cache, context_ids, None)
    bar.update()
    scored = time.perf_counter()
    return Prefix(cache, scores, queries, source.prefix_length, prefilled - start, scored - prefilled)


@torch.inference_mode()
def _ask(name, press, model, tokenizer, prefix, question_ids, task, settings, bar) -> Result:
    """Seal a copy of the prefix with the press, ask, decode greedily."""
    start = time.perf_counter()
    cache = copy.deepcopy(prefix.cache)
    if press is not None:
        press.seal(model, cache, prefix.scores, prefix_length=prefix.template_length, queries=prefix.queries)
    logits = model(input_ids=question_ids, past_key_values=cache, logits_to_keep=1).logits
    bar.update()
    tokens: list[int] = []
    stop = model.generation_config.eos_token_id
    stop = set(stop if isinstance(stop, list) else [stop])
    for _ in range(settings.max_new_tokens):
        tokens.append(int(logits[0, -1].argmax()))
        bar.update()
        if tokens[-1] in stop or len(tokens) == settings.max_new_tokens:
            bar.update(settings.max_new_tokens - len(tokens))
            break
        logits = model(input_ids=question_ids.new_tensor([tokens[-1:]]), past_key_values=cache).logits
    seconds = time.perf_counter() - start
    answer = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    result = Result(name, answer, task.answer in answer, seconds, resident=1.0)
    if press is not None:
        stats = press.stats
        result.resident = press.memory_report().resident_share
        result.kv_read_per_token = stats.kv_read_per_token
        result.fetch_rate = stats.fetch_rate("decode")
        if stats.sealed_layers and stats.decisions("decode"):
            result.violation_rate = stats.violation_rate(settings.epsilon, "decode")
        result.stats = stats.summary()
    return result


# --- showing --------------------------------------------------------------------------------------------------------


def _print_task(settings: DemoSettings, model, context_ids, task: Task) -> None:
    name = "SmolLM2-135M-Instruct" if settings.model is None else settings.model
    print(f"Model      {name} on {model.device}, {str(model.dtype).removeprefix('torch.')}")
    print(f"Context    {context_ids.shape[1]:,} tokens of English prose, {len(KEYS)} numbers hidden in it")
    print(f"Question   {task.question.strip()}")
    print(f"Expected   {task.answer}")
    print(
        f"Setting    {1 / (1 - settings.compression_ratio):.3g}x compression, epsilon {settings.epsilon:g}, delta "
        f"{settings.delta:g}, {settings.n_sink} sinks, {settings.n_local} local tokens",
        flush=True,
    )


def _shorten(answer: str, width: int = 24) -> str:
    line = " ".join(answer.split())
    return line if len(line) <= width else line[: width - 3] + "..."


def _write(
    settings: DemoSettings, model, n_tokens: int, task: Task, prefix: Prefix, results: list[Result], press
) -> None:
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "settings": {**asdict(settings), "output_dir": str(settings.output_dir)},
        "n_tokens": n_tokens,
        "expected": task.answer,
        "device": str(model.device),
        "dtype": str(model.dtype),
        "versions": _versions(),
        "prefill_seconds": prefix.prefill_seconds,
        "scoring_seconds": prefix.scoring_seconds,
        "results": [asdict(result) for result in results],
    }
    with (settings.output_dir / "demo.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"\nWritten: {settings.output_dir / 'demo.jsonl'}", end="")
    if press.stats.sealed_layers:
        _draw(press.stats, settings, settings.output_dir / "demo.png")
        print(f", {settings.output_dir / 'demo.png'}", end="")
    print()


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    names = ("torch", "transformers", "kvpress")
    return {"verkv": __version__, "python": platform.python_version(), **{name: version(name) for name in names}}


def _draw(stats, settings: DemoSettings, path: Path) -> None:
    """Bound and fetch rate of every layer and query head."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import LogNorm

    maps = stats.by_head()
    bound, rate = maps["error_bound"].clamp_min(1e-4), 100 * maps["fetch_rate"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 7), layout="constrained", sharey=True)
    norm = LogNorm(vmin=float(bound.min()), vmax=max(float(bound.max()), 2 * float(bound.min())))
    shown = left.imshow(bound, aspect="auto", norm=norm, cmap="viridis")
    bar = figure.colorbar(shown, ax=left, label="mean bound on the relative error, before fetching")
    bar.ax.axhline(settings.epsilon, color="red", linewidth=2)
    bar.ax.text(1.1, settings.epsilon, "ε", color="red", va="center", transform=bar.ax.get_yaxis_transform())
    shown = right.imshow(rate, aspect="auto", vmin=0, vmax=100, cmap="magma")
    figure.colorbar(shown, ax=right, label="decisions that fetch (%)")
    left.set_ylabel("layer")
    for axes, title in ((left, "Certificate"), (right, "Fetching")):
        axes.set_title(title)
        axes.set_xlabel("query head")
        axes.set_yticks(range(0, len(stats.sealed_layers), 5), [str(i) for i in stats.sealed_layers[::5]])
    figure.suptitle(
        f"{stats.method}, {stats.sketch} sketch, {1 / (1 - settings.compression_ratio):.3g}x: "
        f"{stats.fetch_rate():.0%} of all decisions fetch, {stats.kv_read_per_token:.1%} of the cache read per token"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)
