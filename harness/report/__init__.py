"""Verdicts to reports: one view model, several renderers."""

from harness.report.build import build_view
from harness.report.report_markdown import to_summary
from harness.report.terminal import HEADER, Row, header, rows
from harness.report.view import ReportView
from harness.report.write import write_reports

__all__ = [
    "HEADER",
    "ReportView",
    "Row",
    "build_view",
    "header",
    "rows",
    "to_summary",
    "write_reports",
]
