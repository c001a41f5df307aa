"""The benchmarks by name, run one after the other."""

import functools
import json
from pathlib import Path

import torch

from verkv.bench.report import as_record, as_table, environment
from verkv.bench.settings import BenchSettings, BenchSkipped

NAMES = ("decide", "attention", "decode", "replay", "kernels")
_WITH_MODEL = ("attention", "decode", "replay")


def run_bench(settings: BenchSettings, json_path: Path | None = None) -> dict:
    """Run benchmarks and print their tables; what cannot run here is skipped with its reason.

    Parameters
    ----------
    settings : BenchSettings
    json_path : Path, optional
        File to write the result to.

    Returns
    -------
    dict
        Environment, "comparisons" and "skipped".

    Raises
    ------
    ValueError
        If a benchmark is unknown, an option does not fit the model, or the file cannot be written.
    """
    unknown = [name for name in settings.only if name not in NAMES]
    if unknown:
        raise ValueError(f"--only {unknown[0]!r} is not one of {', '.join(NAMES)}")
    if json_path is not None:
        _check_writable(json_path)
    torch.manual_seed(settings.seed)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        result = _run_all(settings)
    finally:
        torch.set_num_threads(threads_before)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\nWritten: {json_path}")
    return result


def _run_all(settings: BenchSettings) -> dict:
    result = {**environment(settings), "comparisons": [], "skipped": {}}
    prefix = functools.cache(lambda: _prefix(settings))
    for name in settings.only or NAMES:
        try:
            comparisons = _function(name)(settings, prefix()) if name in _WITH_MODEL else _function(name)(settings)
        except BenchSkipped as reason:
            print(f"{name}: skipped: {reason}\n", flush=True)
            result["skipped"][name] = str(reason)
            continue
        for comparison in comparisons:
            print(as_table(comparison), end="\n\n", flush=True)
            result["comparisons"].append(as_record(name, comparison))
    return result


def _function(name: str):
    """A benchmark's function; the module is imported only now, for not all of what they need may be installed."""
    import importlib

    return importlib.import_module(f"verkv.bench.{name}").run


def _prefix(settings: BenchSettings):
    from verkv.bench.prefix import load_model, prefill

    model, tokenizer = load_model(settings)
    print(f"Prefilling and scoring {settings.n_tokens:,} tokens ...\n", flush=True)
    return prefill(model, tokenizer, settings)


def _check_writable(path: Path) -> None:
    """Now: not after minutes of measuring."""
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise ValueError(f"--json {str(path)!r} cannot be written: {error}") from error
