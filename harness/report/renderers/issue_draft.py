"""The draft of an issue for an upstream project: what, expected, set-up, where, versions, how."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from converge_harness.model import Check, Judgement, Kind
from converge_harness.report.renderers.markdown import (
    escape,
    fenced,
    limit_text,
    set_up,
    table,
)
from converge_harness.report.text import ABSENT, digits
from converge_harness.report.view.report_view import ReportView, RunView, TestView

_SHOULD = {
    Kind.ELASTIC: (
        "The resized run should go on with the state and the samples that it had, so that its "
        "curve is that of the run that was not resized, up to rounding."
    ),
    Kind.FAULT: (
        "The interrupted run should go on from its newest complete checkpoint with the state and "
        "the samples that it had there, so that its curve is that of the run that was not "
        "interrupted, up to rounding."
    ),
}
"""What is right for sets in several passes."""
_SHOULD_COMPUTE = (
    "On the same samples and initial weights, the failing set-up should compute the loss, "
    "gradients and updates of the correct one, up to rounding."
)
_SHOULD_RUN = "What the failing set-up names should be what runs, or be refused before training."
"""What is right where a setting is ignored in silence."""
CHECKS = 6
"""Failed checks that are listed, in the order of their tiers."""
TENSORS = 8


@dataclass(frozen=True, slots=True)
class Reproduction:
    """What the draft says besides the verdict."""

    commands: Sequence[str]
    """That reproduce it, line by line, in the folder of the draft."""
    needs: Sequence[str] = ()
    """Sentences on what the failure needs, from a search for the smallest set-up."""
    sizes: str = ""
    """Steps, sequence length, model and data, in a phrase."""
    resumes: str = ""
    """When the failing run is resized or interrupted, and where it saves, in a phrase."""
    differing: Sequence[str] = ()
    """Settings that the failing set-up has otherwise than the correct one, as ``key = value``."""
    bisected: str = ""
    """The revision that a search has found, in a sentence."""


def issue_draft(view: ReportView, name: str, reproduction: Reproduction) -> str:
    """The draft in Markdown, about one failed test set of a report.

    Raises StopIteration if the report has no test set of that name.
    """
    test = next(each for each in view.tests if each.run.name == name)
    control = next(each for each in view.judged_against if each.name == test.verdict.control)
    return "\n".join(_lines(view, test, control, reproduction)) + "\n"


def _lines(
    view: ReportView, test: TestView, control: RunView, reproduction: Reproduction
) -> Iterator[str]:
    verdict = test.verdict
    yield f"# {escape(_title(verdict.cause, test.run))}"
    yield ""
    yield f"**What happens.** {escape(_sentence(verdict.cause))}"
    if verdict.first_wrong:
        yield f"What is wrong first: {escape(verdict.first_wrong)}."
    if verdict.look_at:
        yield f"Where to look: {escape(verdict.look_at)}."
    yield ""
    should = _SHOULD.get(test.kind, _SHOULD_COMPUTE)
    if verdict.judgement is Judgement.INVALID:
        should = _SHOULD_RUN
    yield f"**What should happen.** {should}"
    yield ""
    yield from table(
        ["", "Set-up"],
        [
            ["correct", escape(set_up(control))],
            ["failing", escape(set_up(test.run))],
        ],
    )
    yield ""
    for phrase in filter(None, (reproduction.sizes, reproduction.resumes)):
        yield escape(_sentence(phrase))
        yield ""
    if reproduction.differing:
        yield "Settings of the failing set-up that the correct one has otherwise:"
        yield ""
        yield from (f"- {escape(each)}" for each in reproduction.differing)
        yield ""
    if reproduction.needs:
        yield "**What it needs** (smaller set-ups were run and judged in the same way):"
        yield ""
        yield from (f"- {escape(each)}" for each in reproduction.needs)
        yield ""
    if reproduction.bisected:
        yield f"**Which revision.** {escape(reproduction.bisected)} (by `converge bisect`)"
        yield ""
    if verdict.onset_step is not None:
        yield f"**First wrong step**: {verdict.onset_step}"
        yield ""
    failed = verdict.decided_by
    yield from table(
        ["Check that fails", "Measured", "Allowed", "Detail"],
        (_cells(check) for check in failed[:CHECKS]),
    )
    yield ""
    yield from _tensors(failed)
    yield "**To reproduce**, in this folder:"
    yield ""
    yield fenced("\n".join(reproduction.commands), "sh")
    yield ""
    yield "**Versions**"
    yield ""
    yield from (f"- {escape(key)} {escape(version)}" for key, version in view.versions.items())


def _title(cause: str, run: RunView) -> str:
    """The first clause of the cause, and the set-up in which it holds."""
    plain = re.sub(r" \([^()]*\)", "", cause)  # a comma in brackets ends no clause
    first = re.split("[:,;]", plain, maxsplit=1)[0]
    return f"{_sentence(first).removesuffix('.')} ({set_up(run)})"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "…", "?")) else ".")


def _cells(check: Check) -> list[str]:
    return [
        escape(check.title),
        escape(f"{digits(check.measured)} {check.unit}".strip()),
        escape(limit_text(check)),
        escape(check.detail) or ABSENT,
    ]


def _tensors(failed: Sequence[Check]) -> Iterator[str]:
    check = next((check for check in failed if check.deviations), None)
    if check is None:
        return
    yield f"**Tensors** outside of the limit of “{escape(check.title)}”, largest excess first:"
    yield ""
    for each in check.deviations[:TENSORS]:
        measured, allowed = digits(each.measured), digits(each.limit)
        yield f"- `{escape(each.tensor)}` at step {each.step}: {measured}, allowed {allowed}"
    if len(check.deviations) > TENSORS:
        yield f"- and {len(check.deviations) - TENSORS} more"
    yield ""
