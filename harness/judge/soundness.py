"""Whether one run's evidence can be judged at all: pure questions about one run.

Each function returns what is wrong, mostly a :class:`Flaw`, or None when nothing is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from converge_harness.judge.compare.curves import common_steps, has, series
from converge_harness.model import JUDGED_SIGNALS, Evidence, Integers, RunStatus

DONE_TO_IT = frozenset(
    {
        RunStatus.SKIPPED,
        RunStatus.REFUSED,
        RunStatus.CANCELLED,
        RunStatus.INTERRUPTED,
        RunStatus.STOPPED,
    }
)
"""Endings that a message puts in the passive: the run *was* skipped, but it crashed."""


class Flaw(NamedTuple):
    """Why evidence is broken, in one clause, and from which step on (None: as a whole)."""

    what: str
    step: int | None = None


def unfinished(evidence: Evidence) -> Flaw | None:
    """The run crashed, hung, was interrupted or skipped, or ended before its last step."""
    last = int(evidence.steps[-1]) if evidence.steps.size else None
    if evidence.status is not RunStatus.FINISHED:
        error = f": {evidence.error.message}" if evidence.error else ""
        after = f" after step {last}" if last is not None else " before its first step"
        was = "was " if evidence.status in DONE_TO_IT else ""
        return Flaw(f"{was}{evidence.status.value}{after}{error}", last)
    if last is None:
        return Flaw("left no step at all" + "".join(f": {each}" for each in evidence.problems[:1]))
    expected = evidence.expected_steps
    rarely = evidence.logged_every > 1  # the reader has looked at all of its steps
    if expected is not None and evidence.steps.size != expected and not rarely:
        which = _missing_row(evidence, expected) or _rarely(evidence)
        return Flaw(f"left {evidence.steps.size} of {expected} steps{which}", last)
    if not evidence.complete:
        return Flaw(f"ended early, after step {last}", last)
    return None


def _missing_row(evidence: Evidence, expected: int) -> str:
    """The first step that is in none of the curves of a program's starts; empty for other runs."""
    missing = np.setdiff1d(np.arange(1, expected + 1), evidence.steps)
    if not evidence.by_curves or not missing.size:
        return ""
    return f": no curve of its starts has a row of step {missing[0]}"


def _rarely(evidence: Evidence) -> str:
    """Advice for a run that has only some steps; empty where steps are consecutive."""
    strides = np.unique(np.diff(evidence.steps))
    if strides.size != 1 or strides[0] <= 1:
        return ""
    last = evidence.steps[-1]
    return f", one in {strides[0]}, up to step {last}: log every step, or every n-th to the last"


def resumed(evidence: Evidence) -> Flaw | None:
    """The run was made in several passes on purpose, so it is not an uninterrupted one."""
    if not evidence.passes or evidence.may_continue:
        return None
    return Flaw("was itself resumed, so it does not show what an uninterrupted run does")


def disordered(evidence: Evidence) -> Flaw | None:
    """A step that occurs twice, or that follows a later one."""
    wrong = np.flatnonzero(np.diff(evidence.steps) <= 0)
    if not wrong.size:
        return None
    before, step = (int(evidence.steps[index]) for index in (wrong[0], wrong[0] + 1))
    if step == before:
        return Flaw(f"has step {step} twice", step)
    return Flaw(f"has step {step} after step {before}", step)


def missing_values(evidence: Evidence, required: tuple[str, ...]) -> Flaw | None:
    """A required signal that is missing, or a judged one with gaps or a wrong length."""
    count = evidence.steps.size
    for signal in required:
        if not has(evidence, signal):
            return Flaw(f"has no {signal}")
    for signal in JUDGED_SIGNALS:
        if not has(evidence, signal):
            continue
        column = evidence.signals[signal]
        if len(column) != count:
            return Flaw(f"has {len(column)} values of {signal} for {count} steps")
        holes = np.flatnonzero(~column.present)
        if holes.size:
            step = int(evidence.steps[holes[0]])
            return Flaw(f"has no {signal} at step {step}", step)
    return None


def replayed_otherwise(evidence: Evidence) -> Flaw | None:
    """A step that the source has twice, with other values.

    A restart may have replayed it and come out otherwise, or the source holds two runs: their
    values do not show which.
    """
    conflicts = evidence.replay_conflicts
    if not conflicts:
        return None
    others = f" (and {len(conflicts) - 1} more)" if len(conflicts) > 1 else ""
    return Flaw(
        f"has steps twice, with other values, {conflicts[0]}{others}: either two runs are in one "
        "file (give each its own), or a replay after a restart did not come out the same (look for "
        "state that its checkpoint lacks)"
    )


def non_finite(evidence: Evidence) -> Flaw | None:
    """A judged signal that is NaN or infinite at some step."""
    first = first_non_finite(evidence)
    return first and Flaw(f"is not finite: {first.what}", first.step)


def first_non_finite(evidence: Evidence) -> Flaw | None:
    """The first NaN or infinity in a judged signal, in a clause of its own."""
    found = []
    for signal in JUDGED_SIGNALS:
        column = evidence.signals.get(signal)
        if column is None:
            continue
        length = min(len(column), evidence.steps.size)
        wrong = np.flatnonzero(column.present[:length] & ~np.isfinite(column.values[:length]))
        if wrong.size:
            step = int(evidence.steps[wrong[0]])
            found.append(Flaw(f"{signal} is {column.values[wrong[0]]} at step {step}", step))
    return min(found, key=lambda flaw: flaw.step or 0, default=None)


class LateStart(NamedTuple):
    """A loss that is NaN before a step, and finite from then on."""

    step: int

    @property
    def option(self) -> str:
        """With which it can be compared."""
        return f"--from {self.step}"

    @property
    def text(self) -> str:
        """A clause, with advice."""
        return (
            f"has no loss before step {self.step}, as in the log of a resumed run with NaN for "
            f"steps that it did not make: {self.option} compares from there"
        )


def began_later(evidence: Evidence) -> LateStart | None:
    """Whether, and when, a loss that is NaN at first becomes finite for good."""
    loss = series(evidence, "loss")
    finite = np.isfinite(loss.values)
    first = int(np.argmax(finite)) if finite.size else 0
    if first == 0 or not finite[first:].all() or not np.isnan(loss.values[:first]).all():
        return None
    return LateStart(int(loss.steps[first]))


def numbered_otherwise(evidence: Evidence, control: Evidence) -> Flaw | None:
    """One counts its steps from 0 and the other, with as many steps, from 1.

    Then values at a common step are of different updates.
    """
    ours, theirs = evidence.steps, control.steps
    if ours.size != theirs.size or {*ours[:1].tolist(), *theirs[:1].tolist()} != {0, 1}:
        return None
    if not np.array_equal(ours - ours[0], theirs - theirs[0]):
        return None
    advice = "log both from the same step"
    if may_count_from_1(evidence, control):
        advice += ", or give --count-from-1, which adds 1 to the steps of curves that begin at 0"
    return Flaw(
        f"counts its steps from {ours[0]} ({ours[0]} to {ours[-1]}), and the control from "
        f"{theirs[0]} ({theirs[0]} to {theirs[-1]}): at a common step these are different "
        f"updates; {advice}",
        0,
    )


def may_count_from_1(evidence: Evidence, control: Evidence) -> bool:
    """Whether all that count from 0 are curves whose steps the user may renumber."""
    from_0 = (each for each in (evidence, control) if each.steps[0] == 0)
    return all(each.identity is None for each in from_0)


def other_steps(evidence: Evidence, control: Evidence) -> Flaw | None:
    """The steps are not exactly the control's."""
    if np.array_equal(evidence.steps, control.steps):
        return None
    if numbered := numbered_otherwise(evidence, control):
        return numbered
    step = int(np.setxor1d(evidence.steps, control.steps).min(initial=2**62))
    which = "lacks" if step in control.steps else "alone has"
    sizes = f"{evidence.steps.size} steps, the control {control.steps.size}"
    return Flaw(f"{which} step {step} ({sizes})", step)


def other_means(evidence: Evidence, control: Evidence) -> Flaw | None:
    """The losses at a common step are means over other steps than the control's.

    A source that does not say whether it has means is taken to have them since its last row. Steps
    out of order are another check's.
    """
    if evidence.mean_over == control.mean_over == 1 or disordered(evidence) or disordered(control):
        return None
    common = common_steps(evidence.steps, control.steps)
    ours, theirs = _means(evidence)[common.first], _means(control)[common.second]
    other = np.flatnonzero((ours != theirs) & (ours > 0) & (theirs > 0))
    if not other.size:
        return None
    step, mine, his = (int(each[other[0]]) for each in (common.steps, ours, theirs))
    return Flaw(
        f"logs at step {step} the mean loss of {_so_many(mine)}, its control that of "
        f"{_so_many(his)}; log both at the same interval",
        step,
    )


def _means(evidence: Evidence) -> Integers:
    """Over how many steps the loss of each row is the mean; 0: that is not known.

    It is not of a first row that comes later than an interval after the start: training before it
    may be in another log.
    """
    steps = evidence.steps
    if evidence.mean_over > 1:
        return np.minimum(evidence.mean_over, steps)
    since_last = np.diff(steps, prepend=0)
    if steps.size and (steps.size == 1 or steps[0] > steps[1] - steps[0]):
        since_last[0] = 0
    return since_last


def _so_many(steps: int) -> str:
    return "that step alone" if steps == 1 else f"the last {steps} steps"


def other_data(evidence: Evidence, control: Evidence) -> Flaw | None:
    """The first common step whose batch digest differs, or is missing on one side."""
    if not evidence.batch_digests and not control.batch_digests:
        return None
    ours = dict(zip(evidence.steps.tolist(), evidence.batch_digests, strict=False))
    theirs = dict(zip(control.steps.tolist(), control.batch_digests, strict=False))
    for step in common_steps(evidence.steps, control.steps).steps.tolist():
        mine, other = ours.get(step), theirs.get(step)
        if mine is None or other is None:
            return Flaw(f"or its control has no batch digest at step {step}", step)
        if mine != other:
            return Flaw(f"trained on other samples than the control at step {step}", step)
    return None


def ranks_disagree(evidence: Evidence) -> Flaw | None:
    if not evidence.batch_agrees:
        return None
    agrees = dict(zip(evidence.steps.tolist(), evidence.batch_agrees, strict=False))
    for step in evidence.steps.tolist():
        if agrees.get(step) is None:
            return Flaw(f"does not record at step {step} whether its ranks share samples", step)
        if not agrees[step]:
            return Flaw(f"has ranks that should share samples and do not, at step {step}", step)
    return None


def replicas_differ(evidence: Evidence) -> Flaw | None:
    """The first sampled step at which ranks that hold the same shard hold different bits."""
    for sample in evidence.replicas:
        if not sample.count:
            continue
        first = sample.disagreements[0] if sample.disagreements else None
        what = f"{first.kind} {first.tensor}" if first else "tensors"
        along = f" along {' and '.join(first.mesh_dims)}" if first and first.mesh_dims else ""
        more = f" and {sample.count - 1} more" if first and sample.count > 1 else ""
        return Flaw(
            f"has replicas that differ at step {sample.step}: {what}{along}{more}", sample.step
        )
    return None


def unsampled(evidence: Evidence) -> Flaw | None:
    """A step at which the run was asked to leave per-tensor evidence, and did not."""
    wanted = [step for step in evidence.sample_steps or () if step <= evidence.steps.max(initial=0)]
    for what, samples in (("parameters", evidence.samples), ("replicas", evidence.replicas)):
        left = {sample.step for sample in samples}
        missing = [step for step in wanted if step not in left]
        if missing:
            return Flaw(f"left no sample of its {what} at step {missing[0]}", missing[0])
    return None
