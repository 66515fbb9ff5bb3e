"""Verdicts to reports: one view model, several renderers.

::

    view/               the view, and what makes it of verdicts and evidence
    renderers/          HTML, Markdown, JSON, JUnit, PNG and SVG, the terminal's table
    check_subjects.py   what checks are about, to list those without evidence
    sanitize.py         texts that are safe to print
    text.py             numbers, durations and names for people
    templates/ vendor/  the page's template, styles and scripts
"""

from converge_harness.report.renderers.files import write_reports
from converge_harness.report.renderers.issue_draft import Reproduction, issue_draft
from converge_harness.report.renderers.markdown import to_summary
from converge_harness.report.renderers.verdict_table import HEADER, VerdictRow, header, rows
from converge_harness.report.view.against import Against, ChangedSet, Sameness
from converge_harness.report.view.build import build_view
from converge_harness.report.view.report_view import ReportView, TestView

__all__ = [
    "HEADER",
    "Against",
    "ChangedSet",
    "ReportView",
    "Reproduction",
    "Sameness",
    "TestView",
    "VerdictRow",
    "build_view",
    "header",
    "issue_draft",
    "rows",
    "to_summary",
    "write_reports",
]
