"""``verkv report``."""

import argparse
import sys
from pathlib import Path


def add_parser(commands) -> None:
    """Add ``report`` to the sub-parsers of ``verkv``."""
    parser = commands.add_parser("report", help="show the results of `verkv eval` as one HTML page")
    parser.add_argument("results", type=Path, metavar="RESULTS", help="JSONL file of `verkv eval`")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="default: beside RESULTS, as .html")
    parser.add_argument("--model", help="which one, where RESULTS holds answers of several")


def run(options: argparse.Namespace) -> int:
    """Write the page; returns the exit status."""
    from verkv.report.read import ReportError
    from verkv.report.write import write_report

    try:
        print(f"Written: {write_report(options.results, options.out, options.model)}")
    except ReportError as error:
        print(f"verkv report: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"verkv report: {error}; the report needs pip install 'verkv[demo]'", file=sys.stderr)
        return 1
    return 0
