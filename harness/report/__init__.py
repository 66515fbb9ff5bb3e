"""Verdicts to reports: one view model, several renderers.

::

    build.py            build_view: verdicts and evidence to the view
    view.py             the view: one frozen value with all that a report shows
    audit.py curves.py faults.py gradients.py passes.py programs.py tensors.py tolerances.py
    counterfactual.py   parts of the view, each with its values and what makes them
    check_subjects.py   what checks are about, for what nobody asked or saw
    sanitize.py         texts that are safe to print
    text.py             numbers, durations and names as a person reads them
    renderers/          HTML, Markdown, JSON, JUnit, PNG and SVG, the terminal's table
    templates/ vendor/  the page's template, styles and scripts
"""

from harness.report.build import build_view
from harness.report.renderers.files import write_reports
from harness.report.renderers.markdown import to_summary
from harness.report.renderers.verdict_table import HEADER, Row, header, rows
from harness.report.view import ReportView

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
