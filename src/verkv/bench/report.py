"""Comparisons as a table to read and as JSON to keep."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from verkv import __version__
from verkv.bench.settings import BenchSettings
from verkv.bench.timing import Comparison


def as_table(comparison: Comparison) -> str:
    """Median, ratio and spread of every case, and the facts below.

    Parameters
    ----------
    comparison : Comparison

    Returns
    -------
    str
    """
    header = ["", "median", "ratio", "10 % - 90 %"]
    rows = []
    for case in comparison.seconds:
        ratio = comparison.ratio(case)
        spread = "" if case == comparison.baseline else f"{ratio.low:.2f} - {ratio.high:.2f}"
        rows.append([case, _duration(comparison.median(case)), f"{ratio.median:.2f}", spread])
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    line = lambda row: "  ".join(  # noqa: E731
        cell.ljust(width) if i == 0 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ).rstrip()
    n_rounds = len(comparison.seconds[comparison.baseline])
    title = f"{comparison.title} ({comparison.clock} time, {n_rounds} interleaved rounds)"
    return "\n".join([title, *(f"  {line(row)}" for row in [header, *rows]), *_facts(comparison.facts, "  ")])


def as_record(name: str, comparison: Comparison) -> dict:
    """The same, and every single time, for JSON.

    Parameters
    ----------
    name : str
        Of the benchmark.
    comparison : Comparison

    Returns
    -------
    dict
    """
    cases = {}
    for case, seconds in comparison.seconds.items():
        ratio = comparison.ratio(case)
        cases[case] = {
            "median_seconds": comparison.median(case),
            "ratio": ratio.median,
            "ratio_p10": ratio.low,
            "ratio_p90": ratio.high,
            "seconds": seconds,
        }
    return {
        "benchmark": name,
        "title": comparison.title,
        "baseline": comparison.baseline,
        "clock": comparison.clock,
        "cases": cases,
        "facts": comparison.facts,
    }


def environment(settings: BenchSettings) -> dict:
    """Versions, machine and options.

    Parameters
    ----------
    settings : BenchSettings

    Returns
    -------
    dict
    """
    device = settings.torch_device
    options = {name: value for name, value in vars(settings).items() if name != "torch_device"}
    return {
        "versions": {"verkv": __version__, "python": platform.python_version(), **_versions()},
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "settings": {**options, "only": list(settings.only), "device": str(device)},
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "kvpress"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _duration(seconds: float) -> str:
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.1f} us"


def _facts(facts: dict, indent: str) -> list[str]:
    lines = []
    for name, value in facts.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}", *_facts(value, indent + "  ")]
        elif isinstance(value, list):
            lines += [f"{indent}({item})" for item in value]
        else:
            lines.append(f"{indent}{name}: {_number(name, value)}")
    return lines


def _number(name: str, value) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if "bytes" in name else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
