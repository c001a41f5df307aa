"""``verkv report``: results of ``verkv eval`` as one HTML page to look at. Needs matplotlib for the pictures."""

from verkv.report.read import ReportError, read_results

__all__ = ["ReportError", "read_results"]
