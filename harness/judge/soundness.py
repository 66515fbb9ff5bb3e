"""Whether one run's evidence can be judged at all: pure questions about one run.

Each function returns a :class:`Flaw`, or None when nothing is wrong.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

from harness.judge.curves import has
from harness.judge.floors import JUDGED_SIGNALS
from harness.model import Evidence, RunStatus


class Flaw(NamedTuple):
    """Why evidence is broken, in one clause, and from which step on (None: as a whole)."""

    what: str
    step: int | None = None


def unfinished(evidence: Evidence) -> Flaw | None:
    """The run crashed, hung, was interrupted or skipped, or ended before its last step."""
    last = evidence.steps[-1] if evidence.steps else None
    if evidence.status is not RunStatus.FINISHED:
        error = f": {evidence.error.message}" if evidence.error else ""
        after = f" after step {last}" if last is not None else " before its first step"
        return Flaw(f"{evidence.status.value}{after}{error}", last)
    if last is None:
        return Flaw("left no step at all")
    expected = evidence.expected_steps
    if expected is not None and len(evidence.steps) != expected:
        return Flaw(f"left {len(evidence.steps)} of {expected} steps", last)
    if not evidence.complete:
        return Flaw(f"ended early, after step {last}", last)
    return None


def disordered(evidence: Evidence) -> Flaw | None:
    """A step that occurs twice, or that follows a later one."""
    for before, step in pairwise(evidence.steps):
        if step == before:
            return Flaw(f"has step {step} twice", step)
        if step < before:
            return Flaw(f"has step {step} after step {before}", step)
    return None


def missing_values(evidence: Evidence, required: tuple[str, ...]) -> Flaw | None:
    """A required signal that is not there, or a judged one with holes or a wrong length."""
    count = len(evidence.steps)
    for signal in required:
        if not has(evidence, signal):
            return Flaw(f"has no {signal}")
    for signal in JUDGED_SIGNALS:
        values = evidence.signals.get(signal, ())
        if not has(evidence, signal):
            continue
        if len(values) != count:
            return Flaw(f"has {len(values)} values of {signal} for {count} steps")
        if None in values:
            step = evidence.steps[values.index(None)]
            return Flaw(f"has no {signal} at step {step}", step)
    return None


def non_finite(evidence: Evidence) -> Flaw | None:
    """The first NaN or infinity in a judged signal."""
    found = [
        Flaw(f"{signal} is {value} at step {step}", step)
        for signal in JUDGED_SIGNALS
        for step, value in zip(evidence.steps, evidence.signals.get(signal, ()), strict=False)
        if value is not None and not math.isfinite(value)
    ]
    return min(found, key=lambda flaw: flaw.step or 0, default=None)


def other_steps(evidence: Evidence, control: Evidence) -> Flaw | None:
    ours, theirs = set(evidence.steps), set(control.steps)
    if ours == theirs:
        return None
    step = min(ours ^ theirs)
    which = "lacks" if step in theirs else "alone has"
    return Flaw(f"{which} step {step} ({len(ours)} steps, the control {len(theirs)})", step)


def other_data(evidence: Evidence, control: Evidence) -> Flaw | None:
    """The first common step whose batch digest differs, or is missing on one side."""
    if not evidence.batch_digests and not control.batch_digests:
        return None
    ours = dict(zip(evidence.steps, evidence.batch_digests, strict=False))
    theirs = dict(zip(control.steps, control.batch_digests, strict=False))
    for step in sorted({*evidence.steps} & {*control.steps}):
        mine, other = ours.get(step), theirs.get(step)
        if mine is None or other is None:
            return Flaw(f"or its control has no batch digest at step {step}", step)
        if mine != other:
            return Flaw(f"trained on other samples than the control at step {step}", step)
    return None


def ranks_disagree(evidence: Evidence) -> Flaw | None:
    if not evidence.batch_agrees:
        return None
    agrees = dict(zip(evidence.steps, evidence.batch_agrees, strict=False))
    for step in evidence.steps:
        if agrees.get(step) is None:
            return Flaw(f"does not tell at step {step} whether its ranks share samples", step)
        if not agrees[step]:
            return Flaw(f"has ranks that should share samples and do not, at step {step}", step)
    return None
