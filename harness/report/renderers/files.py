"""Writes every form of a report into a folder."""

from __future__ import annotations

from pathlib import Path

from converge_harness.report.renderers import npz_tables
from converge_harness.report.renderers.html_page import to_html
from converge_harness.report.renderers.json_document import to_json
from converge_harness.report.renderers.junit import to_junit
from converge_harness.report.renderers.markdown import to_markdown
from converge_harness.report.renderers.plots import draw
from converge_harness.report.view.report_view import ReportView
from converge_harness.store import atomic_write


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
