"""``report.md``: renders on GitHub, also as a job summary (``$GITHUB_STEP_SUMMARY``)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from converge_harness.model import Check, Judgement, Outcome
from converge_harness.report.renderers.palette import SYMBOLS
from converge_harness.report.renderers.verdict_table import HEADER, columns, rows
from converge_harness.report.text import (
    ABSENT,
    cause_page,
    digits,
    duration,
    excess,
    of_limit,
    step_range,
    tail,
)
from converge_harness.report.view.against import Against
from converge_harness.report.view.report_view import SIGNAL_TITLES, ReportView, RunView, TestView
from converge_harness.report.view.resumed_run import (
    FAULT_TITLES,
    PASS_TITLES,
    PassesView,
    fault_cells,
    pass_cells,
)
from converge_harness.report.view.tensor_tables import SHOWN, ReplicaView, TensorTable

LOG_LINES = 30
"""Lines of a failed rank's log in the report: GitHub cuts a job summary at 1 MiB."""


SUMMARY_BYTES = 1024 * 1024
"""The largest summary of a step that GitHub accepts; it shows nothing of a larger one."""


def to_markdown(view: ReportView) -> str:
    """Render: the answer, the verdict table, one sentence per set that is not PASS, details."""
    return "\n".join(_lines(view)) + "\n"


def to_summary(view: ReportView, most_bytes: int = SUMMARY_BYTES) -> str:
    """The report for a job's summary, with as many details as fit, at most ``most_bytes`` long.

    Failures come first: sets are left out from the end, then lines of the table. UTF-8.
    """
    whole = to_markdown(view)
    if len(whole.encode()) <= most_bytes:
        return whole
    note = "\nThe rest is in report.md: a summary has no room for it.\n"
    top, *details = whole.split("\n<details>\n")
    kept = _fitting([f"{line}\n" for line in top.split("\n")], most_bytes - len(note.encode()))
    room = most_bytes - len(f"{kept}{note}".encode())
    return kept + _fitting([f"<details>\n{each}\n" for each in details], room) + note


def _fitting(parts: Sequence[str], room: int) -> str:
    """The first parts that fit together into so many bytes."""
    ends = accumulate(len(part.encode()) for part in parts)
    return "".join(part for part, end in zip(parts, ends, strict=True) if end <= room)


_MARKUP = re.compile(
    r"""(?<![^\W_])_|_(?![^\W_])   # an underscore inside a word is no emphasis
    | :(?=\S)                     # of an address or an emoji, not of a sentence
    | (?<!-)>                     # an arrow is no tag
    | [^\w\s.,;:()=+/%'"…✓>-]""",
    re.VERBOSE,
)


def escape(text: str) -> str:
    """Text inside a line that no Markdown dialect reads as markup.

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
    if view.against:
        yield from _against(view.against)
    listed, titles = rows(view), columns(view)
    cells = (
        zip(HEADER, (_word(row.judgement), *map(escape, row[1:])), strict=True) for row in listed
    )
    yield from table(
        [title.capitalize() for title in titles.values()],
        ([cell for title, cell in row if title in titles] for row in cells),
    )
    yield ""
    for test, row in zip(view.by_severity, listed, strict=True):
        if row.judgement is not Judgement.PASS:
            onset = f" (from {row.onset})" if row.onset != ABSENT else ""
            cause = row.cause or "no cause is known"
            yield f"- {_word(row.judgement)} **{escape(row.name)}**{onset}: {escape(cause)}"
            if test.verdict.first_wrong:
                yield f"  - first wrong: {escape(test.verdict.first_wrong)}"
            if test.verdict.look_at:
                yield f"  - look at: {escape(test.verdict.look_at)}"
    yield ""
    yield from _facts(view)
    for test in view.by_severity:
        yield from _test(test)
    yield from _tolerances(view)


def _against(against: Against) -> Iterator[str]:
    yield f"**{escape(against.headline)}** {escape(against.tested)}"
    yield ""
    yield from table(
        ["Set", "Change", "Verdict", "What differs"],
        (
            [escape(each.name), each.sameness.value, each.verdicts or ABSENT, escape(each.sentence)]
            for each in against.sets
        ),
    )
    yield ""


def _facts(view: ReportView) -> Iterator[str]:
    for control in view.controls:
        requeued = f" {control.requeue_sentence}" if control.requeues else ""
        yield f"- control **{escape(control.name)}**: {escape(set_up(control))}{requeued}"
    for each in view.besides:
        reused = " (reused)" if each.run.reused else ""
        took = f", {duration(each.run.wall_s)}{reused}" if each.run.wall_s is not None else ""
        failed = f": {escape(each.run.error.message)}" if each.run.error else ""
        yield f"- {escape(each.what)} **{escape(each.run.name)}**: {each.run.degrees}{took}{failed}"
    if view.anchor:
        yield f"- anchor **{escape(view.anchor.name)}**: {escape(set_up(view.anchor))}"
    for sentence in view.waived:
        yield f"- waived rule: {escape(sentence)}"
    for sentence in view.notes:
        yield f"- {escape(sentence)}"
    if view.entropy_floor is not None:
        yield f"- entropy floor of the data: {digits(view.entropy_floor)} nats per token"
    if view.steps is not None:
        yield f"- {view.steps} steps, seed {view.seed}"
    if view.wall_s is not None:
        yield f"- wall time: {duration(view.wall_s)}"
    if view.versions:
        versions = ", ".join(f"{name} {version}" for name, version in view.versions.items())
        yield f"- versions: {escape(versions)}"
    yield ""


def set_up(run: RunView) -> str:
    parts = [part for part in (run.degrees, *run.techniques, run.toolchain) if part]
    return ", ".join(parts) or run.source


def _test(test: TestView) -> Iterator[str]:
    verdict = test.verdict
    yield "<details>"
    yield f"<summary>{_word(verdict.judgement)} {escape(test.run.name)}</summary>"
    yield ""
    yield from (f"Technique {escape(sentence)}\n" for sentence in test.run.own_sentences)
    if test.run.note:
        yield f"Note: {escape(test.run.note)}\n"
    said = (
        ("Cause", verdict.cause),
        ("First wrong", verdict.first_wrong),
        ("Look at", verdict.look_at),
    )
    yield from (f"**{title}:** {escape(what)}\n" for title, what in said if what)
    if verdict.cause_class:
        yield f"**What this means:** `{cause_page(verdict.cause_class)}`\n"
    if verdict.next_command:
        yield f"Next:\n\n{fenced(verdict.next_command, 'sh')}\n"
    yield from _would_change(test.would_change)
    if test.resumed:
        yield from _passes(test.resumed)
    yield from _checks(test.asked)
    if test.tensors:
        yield from _tensors(test.tensors)
    if test.replicas:
        yield from _replicas(test.replicas)
    if test.in_force:
        yield from table(
            ["Technique", "Named", "In force"],
            (map(escape, (row.what, row.named, row.in_force)) for row in test.in_force),
        )
        yield ""
    if test.config:
        yield from table(
            ["Configuration key", "Control", test.configured, "Declared"],
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


def _would_change(sentences: Sequence[str]) -> Iterator[str]:
    if sentences:
        yield "What would change this verdict:\n"
        yield from (f"- {escape(sentence)}" for sentence in sentences)
        yield ""


def _passes(resumed: PassesView) -> Iterator[str]:
    yield f"{escape(resumed.summary)}\n"
    yield from table(
        PASS_TITLES,
        (map(escape, pass_cells(each)) for each in resumed.passes),
    )
    yield ""
    if resumed.faults:
        yield from table(FAULT_TITLES, (map(escape, fault_cells(f)) for f in resumed.faults))
        yield ""


def _checks(checks: Sequence[Check]) -> Iterator[str]:
    if not checks:
        return
    yield from table(
        ["Outcome", "Check", "Measured", "Limit", "Steps", "Detail"],
        (
            [
                check.outcome.value if check.outcome is not Outcome.FAIL else "**FAIL**",
                escape(check.title),
                escape(f"{digits(check.measured)} {check.unit}".strip()),
                escape(limit_text(check)),
                step_range(check.steps),
                escape(check.detail) or ABSENT,
            ]
            for check in checks
        ),
    )
    yield ""
    for check in checks:
        if check.deviations:
            yield f"{escape(check.title)} Largest excess first:\n"
            yield from table(
                ["Tensor", "Measured", "Limit", "Times", "Step"],
                (
                    [
                        escape(each.tensor),
                        digits(each.measured),
                        digits(each.limit),
                        excess(each.measured, each.limit) or ABSENT,
                        str(each.step),
                    ]
                    for each in check.deviations[:SHOWN]
                ),
            )
            yield ""


def _tensors(tensors: TensorTable) -> Iterator[str]:
    yield f"{tensors.summary}\n"
    yield from table(
        ["Parameter", "Gradient", "Update"],
        (
            [
                escape(row.name),
                of_limit(row.gradient, row.gradient_limit),
                of_limit(row.update, row.update_limit),
            ]
            for row in tensors.rows
        ),
    )
    yield ""
    if tensors.groups:
        yield from table(
            ["Gradient norm by kind of parameter", "Parameters", "Norm", "Control", "Ratio"],
            (
                [
                    escape(group.name),
                    str(group.parameters),
                    *map(digits, (group.norm, group.control, group.ratio)),
                ]
                for group in tensors.groups
            ),
        )
        yield ""


def _replicas(replicas: ReplicaView) -> Iterator[str]:
    yield f"{escape(replicas.summary)}\n"
    if replicas.rows:
        yield from table(
            ["Tensor", "Kind", "Mesh dimensions", "Ranks that agree", "From step"],
            (
                [*map(escape, (row.tensor, row.kind, row.mesh_dims, row.groups)), str(row.step)]
                for row in replicas.rows
            ),
        )
        yield ""


def _tolerances(view: ReportView) -> Iterator[str]:
    if not view.calibrations:
        return
    yield "## Where the tolerances come from"
    yield ""
    for calibration in view.calibrations:
        yield f"Control **{escape(calibration.control)}**: {escape(calibration.summary)}\n"
        for problem in calibration.problems:
            yield f"- {escape(problem)}"
        if calibration.problems:
            yield ""
        if calibration.repeats:
            yield from table(
                ["Repeat", "Kind", "Largest loss difference", "Largest grad norm difference"],
                (
                    [
                        escape(repeat.name),
                        escape(repeat.kind) or ABSENT,
                        *(repeat.distance(value) for value in (repeat.loss, repeat.grad_norm)),
                    ]
                    for repeat in calibration.repeats
                ),
            )
            yield ""
        if calibration.signals:
            yield from table(
                ["Signal", "Spread at first step", "At last step", "Growth", "Doubles in"],
                (
                    [
                        escape(SIGNAL_TITLES.get(each.signal, each.signal)),
                        *(
                            f"{digits(scale)} (step {step})"
                            for scale, step in zip(each.scale, each.steps, strict=True)
                        ),
                        f"step^{digits(each.growth)}",
                        each.doubling,
                    ]
                    for each in calibration.signals
                ),
            )
            yield ""


def limit_text(check: Check) -> str:
    if check.limit is None:
        return ABSENT
    times = excess(check.measured, check.limit.value) if check.outcome is Outcome.FAIL else ""
    return f"{digits(check.limit.value)} ({check.limit.origin})" + (f"; {times}" if times else "")


def _run(run: RunView) -> Iterator[str]:
    if run.command:
        yield f"Run again:\n\n{fenced(run.command, 'sh')}\n"
    if run.error:
        whose = "" if run.error.rank is None else f"Rank {run.error.rank}: "
        yield f"{whose}{escape(run.error.message)}\n"
        if run.error.traceback:
            yield f"{fenced(tail(run.error.traceback, LOG_LINES))}\n"


def _word(judgement: Judgement) -> str:
    return f"{SYMBOLS[judgement]} {judgement.value}"


def table(titles: Iterable[str], body: Iterable[Iterable[str]]) -> Iterator[str]:
    header = list(titles)
    yield f"| {' | '.join(header)} |"
    yield f"|{' --- |' * len(header)}"
    for cells in body:
        yield f"| {' | '.join(cells)} |"
