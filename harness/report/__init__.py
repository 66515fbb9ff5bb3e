"""Verdicts to reports: one view model, several renderers."""

from harness.report.build import Envelopes, build_view
from harness.report.terminal import HEADER, Row, header, rows
from harness.report.view import ReportView
from harness.report.write import write_reports

__all__ = [
    "HEADER",
    "Envelopes",
    "ReportView",
    "Row",
    "build_view",
    "header",
    "rows",
    "write_reports",
]
