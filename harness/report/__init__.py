"""Verdicts to reports: one view model, several renderers.

::

    view/               the view, and what makes it of verdicts and evidence
    renderers/          HTML, Markdown, JSON, JUnit, PNG and SVG, the terminal's table
    check_subjects.py   what checks are about, to list those without evidence
    sanitize.py         texts that are safe to print
    text.py             numbers, durations and names for people
    templates/ vendor/  the page's template, styles and scripts
"""

from pathlib import Path

from converge_harness.report.renderers import npz_tables
from converge_harness.report.renderers.html_page import to_html
from converge_harness.report.renderers.issue_draft import Reproduction, issue_draft
from converge_harness.report.renderers.json_document import to_json
from converge_harness.report.renderers.junit import to_junit
from converge_harness.report.renderers.markdown import to_markdown, to_summary
from converge_harness.report.renderers.plots import draw
from converge_harness.report.renderers.verdict_table import HEADER, columns, rows
from converge_harness.report.view.against import Against, ChangedSet
from converge_harness.report.view.build import build_view
from converge_harness.report.view.report_view import ReportView, TestView
from converge_harness.store import atomic_write

__all__ = [
    "HEADER",
    "Against",
    "ChangedSet",
    "ReportView",
    "Reproduction",
    "TestView",
    "build_view",
    "columns",
    "issue_draft",
    "rows",
    "to_summary",
    "write_reports",
]


def write_reports(view: ReportView, folder: Path) -> list[Path]:
    """Write every report into ``folder``, each file at once; return their paths, HTML first.

    Raises :class:`converge_harness.errors.StoreError` when the folder cannot be written.
    """
    contents = {
        "report.html": to_html(view).encode(),
        "report.md": to_markdown(view).encode(),
        "report.json": to_json(view).encode(),
        "junit.xml": to_junit(view),
        npz_tables.FILE: npz_tables.to_npz(view),
        **{f"plots/{name}": picture for name, picture in draw(view).items()},
    }
    paths = []
    for name, content in contents.items():
        path = folder / name
        atomic_write(path, content)
        paths.append(path)
    return paths
