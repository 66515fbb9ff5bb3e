"""``report.md``: renders on GitHub, also as a job summary (``$GITHUB_STEP_SUMMARY``)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from harness.model import Check, Judgement, Outcome
from harness.report.palette import SYMBOLS
from harness.report.terminal import HEADER, rows
from harness.report.text import ABSENT, duration, excess, number, step_range, tail
from harness.report.view import ReportView, RunView, TestView

LOG_LINES = 30
"""Lines of a failed rank's log in the report: GitHub cuts a job summary at 1 MiB."""


def to_markdown(view: ReportView) -> str:
    """Render: the answer, the verdict table, one sentence per set that is not PASS, details."""
    return "\n".join(_lines(view)) + "\n"


_MARKUP = re.compile(
    r"""(?<![^\W_])_|_(?![^\W_])   # an underscore inside a word is no emphasis
    | :(?=\S)                     # of an address or an emoji, not of a sentence
    | [^\w\s.,;:()=+/%'"…✓-]""",
    re.VERBOSE,
)


def escape(text: str) -> str:
    """Text inside a line that no Markdown dialect takes for markup.

    Character references are decoded after block and inline parsing (CommonMark 0.31, 2.5), so they
    never open a tag, a link, a table cell, a mention or an issue reference.
    """
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", text)


def fenced(text: str, language: str = "") -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _lines(view: ReportView) -> Iterator[str]:
    yield f"# {SYMBOLS[view.worst]} {escape(view.title)}"
    yield ""
    yield f"**{escape(view.headline)}**"
    yield ""
    table = rows(view)
    yield from _table(
        [title.capitalize() for title in HEADER],
        ([_word(row.judgement), *map(escape, row[1:])] for row in table),
    )
    yield ""
    for row in table:
        if row.judgement is not Judgement.PASS:
            onset = f" (from {row.onset})" if row.onset != ABSENT else ""
            cause = row.cause or "no cause is known"
            yield f"- {_word(row.judgement)} **{escape(row.name)}**{onset}: {escape(cause)}"
    yield ""
    yield from _facts(view)
    for test in view.by_severity:
        yield from _test(test)


def _facts(view: ReportView) -> Iterator[str]:
    for control in view.controls:
        words = [word for word in (control.degrees, *control.techniques, control.toolchain) if word]
        yield f"- control **{escape(control.name)}**: {escape(', '.join(words) or control.source)}"
    for sentence in view.waived:
        yield f"- waived rule: {escape(sentence)}"
    for sentence in view.notes:
        yield f"- {escape(sentence)}"
    if view.entropy_floor is not None:
        yield f"- entropy floor of the data: {number(view.entropy_floor)} nats per token"
    if view.steps is not None:
        yield f"- {view.steps} steps, seed {view.seed}"
    if view.wall_s is not None:
        yield f"- wall time: {duration(view.wall_s)}"
    if view.versions:
        versions = ", ".join(f"{name} {version}" for name, version in view.versions.items())
        yield f"- versions: {escape(versions)}"
    yield ""


def _test(test: TestView) -> Iterator[str]:
    verdict = test.verdict
    yield "<details>"
    yield f"<summary>{_word(verdict.judgement)} {escape(test.run.name)}</summary>"
    yield ""
    if test.run.note:
        yield f"Note: {escape(test.run.note)}\n"
    if verdict.cause:
        yield f"**Cause:** {escape(verdict.cause)}\n"
    if verdict.next_command:
        yield f"Next:\n\n{fenced(verdict.next_command, 'sh')}\n"
    yield from _checks(verdict.checks)
    if test.in_force:
        yield from _table(
            ["Technique", "Named", "In force"],
            (map(escape, (row.what, row.named, row.in_force)) for row in test.in_force),
        )
        yield ""
    if test.config:
        yield from _table(
            ["Configuration key", "Control", "Test", "Declared"],
            (
                [
                    *map(escape, (row.key, row.control, row.test)),
                    "yes" if row.declared else "**no**",
                ]
                for row in test.config
            ),
        )
        yield ""
    yield from _run(test.run)
    yield "</details>"
    yield ""


def _checks(checks: Sequence[Check]) -> Iterator[str]:
    if not checks:
        return
    yield from _table(
        ["Outcome", "Check", "Measured", "Limit", "Steps", "What was seen"],
        (
            [
                check.outcome.value if check.outcome is not Outcome.FAIL else "**FAIL**",
                escape(check.title),
                escape(f"{number(check.measured)} {check.unit}".strip()),
                escape(_limit(check)),
                step_range(check.steps),
                escape(check.detail) or ABSENT,
            ]
            for check in checks
        ),
    )
    yield ""


def _limit(check: Check) -> str:
    if check.limit is None:
        return ABSENT
    times = excess(check.measured, check.limit.value) if check.outcome is Outcome.FAIL else ""
    return f"{number(check.limit.value)} ({check.limit.origin})" + (f"; {times}" if times else "")


def _run(run: RunView) -> Iterator[str]:
    if run.command:
        yield f"Run again:\n\n{fenced(run.command, 'sh')}\n"
    if run.error:
        yield f"Rank {run.error.rank}: {escape(run.error.message)}\n"
        if run.error.traceback:
            yield f"{fenced(tail(run.error.traceback, LOG_LINES))}\n"


def _word(judgement: Judgement) -> str:
    return f"{SYMBOLS[judgement]} {judgement.value}"


def _table(titles: Iterable[str], body: Iterable[Iterable[str]]) -> Iterator[str]:
    header = list(titles)
    yield f"| {' | '.join(header)} |"
    yield f"|{' --- |' * len(header)}"
    for cells in body:
        yield f"| {' | '.join(cells)} |"
