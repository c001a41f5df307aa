"""Results in, page out."""

import os
import tempfile
from pathlib import Path

from verkv.report.read import ReportError, read_results


def write_report(results: str | Path, out: str | Path | None = None, model: str | None = None) -> Path:
    """Read results and write the page; an earlier page stays until the new one is complete.

    Parameters
    ----------
    results : path-like
        JSONL of ``verkv eval``.
    out : path-like, optional
        Default: beside the results, with the suffix ``.html``.
    model : str, optional
        Which one, where the results hold several.

    Returns
    -------
    Path
        Of the page.

    Raises
    ------
    ReportError
        If the results cannot be read or shown, or the page cannot be written.
    ImportError
        Without matplotlib.
    """
    results = Path(results)
    out = Path(out) if out is not None else results.with_suffix(".html")
    lines = read_results(results, model)
    if out.exists() and results.samefile(out):
        raise ReportError(f"--out {out} is the results file itself")

    from verkv.report.page import page

    try:
        text = page(lines, results.name)
    except (KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ReportError(f"{results} has a line that verkv eval would not write ({what})") from error
    replace_file(out, text)
    return out


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Parameters
    ----------
    path : Path
    text : str

    Raises
    ------
    ReportError
        If it cannot be written.
    """
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise ReportError(f"{path} cannot be written: {error.strerror}") from error
