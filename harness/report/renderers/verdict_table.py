"""The verdict table as cells, for the terminal and the Markdown report. Printing is the CLI's."""

from __future__ import annotations

from typing import NamedTuple

from converge_harness.judge import LossOnlyGate
from converge_harness.model import Judgement
from converge_harness.report.text import ABSENT, duration, percent
from converge_harness.report.view.report_view import ReportView, TestView

HEADER = (
    "verdict",
    "test set",
    "degrees",
    "techniques",
    "onset",
    "loss-only gate",
    "wall",
    "cause",
)


def columns(view: ReportView) -> dict[str, str]:
    """The columns of :data:`HEADER` that a table of this report has, with their titles in it.

    One that is empty in every row is left out, as are the degrees of curves from anywhere. A set
    that resumes shows its events beside its degrees.
    """
    cells = zip(HEADER, *rows(view), strict=True)
    filled = [title for title, *column in cells if {*column} - {"", ABSENT}] or HEADER[:2]
    events = "degrees, events"
    return {title: events if view.resumes and title == "degrees" else title for title in filled}


class VerdictRow(NamedTuple):
    """Cells of one test set, in the order of :data:`HEADER`; plain text, no markup."""

    judgement: Judgement
    name: str
    degrees: str
    techniques: str
    onset: str
    loss_only: str
    wall: str
    cause: str


def rows(view: ReportView) -> tuple[VerdictRow, ...]:
    """One row per test set, those that need attention first."""
    return tuple(row(test) for test in view.by_severity)


def row(test: TestView) -> VerdictRow:
    onset = test.verdict.onset_step
    return VerdictRow(
        judgement=test.verdict.judgement,
        name=f"{test.run.name} (control)" if test.challenged else test.run.name,
        degrees=test.run.degrees or ABSENT,
        techniques=", ".join(test.run.techniques) or ABSENT,
        onset=ABSENT if onset is None else f"step {onset}",
        loss_only=loss_only(test.loss_only),
        wall=_wall(test),
        cause=test.verdict.cause,
    )


def _wall(test: TestView) -> str:
    """``12 s (reused)``; of an interrupted run since its last start."""
    run = test.run
    notes = [f"last of {run.requeues + 1} starts"] if run.requeues else []
    notes += ["reused"] if run.reused else []
    return duration(run.wall_s) + (f" ({', '.join(notes)})" if notes else "")


def loss_only(gate: LossOnlyGate | None) -> str:
    """What a gate on the loss alone would have said: ``would pass (0.05%)``."""
    if gate is None:
        return ABSENT
    word = "pass" if gate.passes else "fail"
    return f"would {word} ({percent(gate.measured)})"
