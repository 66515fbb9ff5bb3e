"""The view model to files."""

from __future__ import annotations

from pathlib import Path

from harness.report import tables
from harness.report.plots import draw
from harness.report.report_html import to_html
from harness.report.report_json import to_json
from harness.report.report_junit import to_junit
from harness.report.report_markdown import to_markdown
from harness.report.view import ReportView
from harness.store import atomic_write


def write_reports(view: ReportView, folder: Path) -> list[Path]:
    """Write every report into ``folder``, each file at once; return their paths, HTML first.

    Raises :class:`harness.errors.StoreError` when the folder cannot be written.
    """
    contents = {
        "report.html": to_html(view).encode(),
        "report.md": to_markdown(view).encode(),
        "report.json": to_json(view).encode(),
        "junit.xml": to_junit(view),
        tables.FILE: tables.to_npz(view),
        **{f"plots/{name}": picture for name, picture in draw(view).items()},
    }
    paths = []
    for name, content in contents.items():
        path = folder / name
        atomic_write(path, content)
        paths.append(path)
    return paths
