"""Verdicts as a user sees them: the table at the end, and the sentences below it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from converge_harness.cli.console import WIDE, say
from converge_harness.errors import HistoryError, StoreError
from converge_harness.history import History
from converge_harness.matrix.conclude import remember
from converge_harness.model import Judgement, Plan, RunRecord, Sameness, Verdict
from converge_harness.report import (
    HEADER,
    Against,
    ReportView,
    columns,
    rows,
    to_summary,
    write_reports,
)
from converge_harness.report.check_subjects import subjects
from converge_harness.report.renderers.markdown import SUMMARY_BYTES
from converge_harness.report.text import ABSENT, cause_page

SUMMARY = "GITHUB_STEP_SUMMARY"
"""The variable with the file that GitHub Actions shows as Markdown on a job's page."""

STYLES = {
    Judgement.PASS: "bold green",
    Judgement.FAIL: "bold red",
    Judgement.INVALID: "bold magenta",
    Judgement.ERROR: "bold yellow",
    Judgement.INCONCLUSIVE: "bold cyan",
}


CHANGES = {
    Sameness.BITWISE: "bold green",
    Sameness.ROUNDING: "bold cyan",
    Sameness.UNKNOWN: "bold magenta",
    Sameness.DIFFERENT: "bold red",
}


def show_verdicts(console: Console, view: ReportView, folder: Path | None) -> None:
    """Write the reports, then print the verdict table with which the reports begin."""
    paths = write_reports(view, folder) if folder else []
    _append_summary(view)
    titles = columns(view)
    shown = [title for title in _fitting(console.width) if title in titles]
    table = Table(title=escape(view.title), title_justify="left", show_edge=False)
    for title in shown:
        table.add_column(titles[title], overflow="fold", no_wrap=title == "verdict")
    for row in rows(view):
        cells = dict(zip(HEADER, (row.judgement.value, *map(escape, row[1:])), strict=True))
        cells["verdict"] = _styled(row.judgement)
        table.add_row(*(cells[title] for title in shown))
    console.print()
    console.print(table)
    _show_against(console, view.against)
    for test, row in zip(view.by_severity, rows(view), strict=True):
        if row.cause:
            console.print(f"\n{_styled(row.judgement)} [bold]{escape(row.name)}[/]:", end=" ")
            say(console, row.cause)
        for line in _advice(test.verdict):
            say(console, line)
    console.print(f"\n{escape(view.headline)}", style="bold")
    for line in _besides(view):
        say(console, line, "dim")
    if paths:
        say(console, f"report: {paths[0]}")


def _advice(verdict: Verdict) -> Iterator[str]:
    """What follows a cause: where it shows first, where to look, what it means, what to run."""
    if verdict.first_wrong:
        yield f"first wrong: {verdict.first_wrong}"
    if verdict.look_at:
        yield f"look at: {verdict.look_at}"
    if verdict.cause_class:
        yield f"what this means: {cause_page(verdict.cause_class)}"
    if verdict.next_command:
        yield f"next: {verdict.next_command}"


def _besides(view: ReportView) -> Iterator[str]:
    """Lines under the headline: what is no evidence, notes, and whose code ran in the sets."""
    if view.without_evidence:
        yield f"No evidence of: {', '.join(subjects(view.without_evidence))}."
    yield from view.notes
    runs = [*view.controls, *(test.run for test in view.by_severity)]
    sentences = dict.fromkeys(each for run in runs for each in run.own_sentences)
    yield from (f"Technique {each}" for each in sentences)
    for run in runs:
        if run.inject:
            yield f"{run.name} has inject: {run.inject}"


def _show_against(console: Console, against: Against | None) -> None:
    """Print what the change did to every set, then to all together."""
    if against is None:
        return
    table = Table(
        title=escape(f"against {against.revision}"), title_justify="left", show_edge=False
    )
    for title in ("set", "change", "verdict"):
        table.add_column(title, overflow="fold", no_wrap=title == "change")
    for each in against.sets:
        colour = CHANGES[each.sameness]
        table.add_row(escape(each.name), f"[{colour}]{each.sameness}[/]", each.verdicts or ABSENT)
    console.print()
    console.print(table)
    for each in against.sets:
        if each.sameness is not Sameness.BITWISE:
            say(console, f"{each.name}: {each.sameness.value}: {each.sentence}")
    console.print(f"\n{escape(against.headline)}", style="bold")
    say(console, against.tested)


def add_night(
    console: Console,
    history: History,
    plan: Plan,
    records: Sequence[RunRecord],
    verdicts: Sequence[Verdict],
    *,
    folder: Path,
    wall_s: float | None,
) -> None:
    """Add a finished matrix to the history; a failure is only a warning."""
    try:
        added = remember(history, plan, records, verdicts, folder=folder, wall_s=wall_s)
    except HistoryError as error:
        warning = f"warning: this night is missing from the history: {error}"
        say(console, warning, "yellow")
        return
    if added:
        say(console, f"history: {history.path}")


def _append_summary(view: ReportView) -> None:
    """Append the report to the job's page if this is a GitHub Actions job."""
    summary = os.environ.get(SUMMARY)
    if not summary:
        return
    path = Path(summary)
    try:
        taken = path.stat().st_size if path.exists() else 0
        with path.open("a", encoding="utf-8") as file:
            file.write(to_summary(view, max(0, SUMMARY_BYTES - taken)))
    except OSError as error:
        raise StoreError(f"{SUMMARY}={summary}: {error.strerror}") from None


def _styled(judgement: Judgement) -> str:
    return f"[{STYLES[judgement]}]{judgement.value}[/]"


def _fitting(width: int) -> tuple[str, ...]:
    """The columns of the verdict table that fit; the reports have all of them.

    Causes are sentences, so they follow below the table.
    """
    wide = width >= WIDE
    return tuple(
        title
        for title in HEADER
        if title != "cause" and (wide or title not in ("techniques", "wall"))
    )
