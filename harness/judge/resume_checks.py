"""The resume tier: whether a run in several passes is the run that it would have been in one.

Asked of runs that were made in passes, or should have been. The curve that the passes make is
judged as any other; these checks say what each resume kept.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.judge.check import Finding, Question, check, counted, invalid, passed, skipped
from harness.judge.degrees import degrees_of
from harness.judge.known_state import says_nothing
from harness.judge.passes import (
    NEVER_INTERRUPTED,
    NO_PASSES,
    Load,
    counts_one_rank,
    gaps,
    loads,
    never_interrupted,
)
from harness.judge.restored import PARAMETERS, RESTORED, Part, parts
from harness.model import Deviation, Evidence, Limit, Outcome, RestartOwner, SetSpec, Tier

MOST_DEVIATIONS = 20


@check(Tier.RESUME)
def passes_continuous(test: Evidence, spec: SetSpec | None) -> Finding:
    """Every pass goes on from the newest checkpoint, and the final state has every step once.

    Every checkpoint that the set promises was written. Steps, tokens, samples and the optimizer's
    updates are counted right after every load as they were when the checkpoint was saved. A count
    of tokens that the trainer keeps per rank, and restores so, is told and no failure: nothing but
    logs reads it.
    """
    if not test.passes:
        return invalid(NO_PASSES)
    found = sorted(gaps(test, spec), key=lambda gap: (not gap.told, gap.step))
    if not found:
        resumes = list(loads(test))
        words = f"{counted(len(test.passes), 'pass')}, {len(resumes)} from a checkpoint of the run"
        words += ", requeued by the scheduler" if test.requeued else ""
        notes = [note for load in resumes if (note := counts_one_rank(load))]
        return passed("; ".join([words, *notes]))
    told = [gap for gap in found if gap.told] or found
    detail = "; ".join(gap.what for gap in told[:3])
    more = f" (and {len(told) - 3} more)" if len(told) > 3 else ""  # noqa: PLR2004 (as many as shown)
    outcome = Outcome.FAIL if told[0].told else Outcome.INVALID
    return Finding(outcome, detail + more, onset=told[0].step)


@check(Tier.RESUME)
def state_restored(test: Evidence, control: Evidence, spec: SetSpec | None) -> Finding:
    """Parameters, optimizer state and lr right after every load are those that were saved.

    Compared by sketches of whole tensors, so across a change of degrees too: all tensors that the
    runs' samples know. A run that never loaded a checkpoint of its own tests no resume.
    """
    if not test.passes:
        return invalid(NO_PASSES)
    limit = Limit(RESTORED, "rounding of sums in float64")
    compared: list[Lost] = []
    untold: list[Load] = []
    resumes = list(loads(test))
    for load in resumes:
        lost = not_restored(load)
        if lost is not None and lost.any:
            return _not_restored(load, lost, limit)
        if lost is not None:
            compared.append(lost)
        elif load.into.steps.size:  # one that made no step may have died before it was looked at
            untold.append(load)
    if untold:
        return invalid(f"nothing tells what came back in {untold[0].words}", untold[0].step + 1)
    for load in resumes:
        if empty := says_nothing(load, test, control):
            return invalid(f"in {load.words}, nothing tells {empty}", load.step + 1)
    if not compared:
        detail = "no pass loaded a checkpoint of the run"
        asked = spec is not None and spec.resumes and test.restarts is not RestartOwner.CLUSTER
        return invalid(f"{detail}, so no resume was tested") if asked else skipped(detail)
    return Finding(
        Outcome.PASS,
        f"{counted(len(compared), 'load')} of {', '.join(part.name for part in compared[0].parts)}",
        measured=max(lost.worst for lost in compared),
        limit=limit,
        unit="relative",
    )


class Lost(NamedTuple):
    """What a load did not give back."""

    parts: tuple[Part, ...]
    """All that were compared."""
    lr: tuple[float, float] | None
    """Rate as saved and as loaded, where they differ."""

    @property
    def off(self) -> list[Part]:
        return [part for part in self.parts if part.off.size]

    @property
    def any(self) -> bool:
        return bool(self.off) or self.lr is not None

    @property
    def worst(self) -> float:
        return max(float(part.difference.max(initial=0.0)) for part in self.parts)


def not_restored(load: Load) -> Lost | None:
    """What a load did not give back; None when the evidence of it is missing."""
    saved, loaded = load.saved, load.into.loaded
    if saved is None or loaded is None:
        return None
    rates = None if saved.lr == loaded.lr else (saved.lr, loaded.lr)
    return Lost(tuple(parts(saved, loaded)), rates)


def _not_restored(load: Load, lost: Lost, limit: Limit) -> Finding:
    step = load.step + 1
    deviations = [
        Deviation(
            part.tensors[index] + (f" ({part.name})" if part.name != PARAMETERS else ""),
            load.step,
            float(part.difference[index]),
            RESTORED,
        )
        for part in lost.off
        for index in part.off.tolist()
    ]
    deviations.sort(key=lambda each: -each.measured)
    return Finding(
        Outcome.FAIL,
        f"in {load.words}, {lost_words(lost)}",
        measured=lost.worst if lost.off else None,
        limit=limit if lost.off else None,
        unit="relative" if lost.off else "",
        onset=step,
        deviations=tuple(deviations[:MOST_DEVIATIONS]),
    )


def lost_words(lost: Lost) -> str:
    """``exp_avg of 12 of 12 parameters is off by up to 1 (output.weight)``, every part."""
    words = []
    for part in lost.off:
        what = part.name if part.name != PARAMETERS else "the value"
        most = float(part.difference[part.off[0]])
        off = f"off by up to {most:.2g}" if np.isfinite(most) else "missing, zero or NaN"
        words.append(
            f"{what} of {part.off.size} of {len(part.tensors)} parameters is {off} "
            f"({part.tensors[part.off[0]]})"
        )
    if lost.lr is not None:
        words.append(f"lr is {lost.lr[1]!r}, {lost.lr[0]!r} was saved")
    return "; ".join(words)


class Other(NamedTuple):
    """The first step of a pass whose samples are not the control's."""

    number: int
    step: int
    digest: str | None
    first: bool
    """Whether it is the first step of its pass."""
    change: str
    """Degrees before and after the resume, where they differ."""


@check(Tier.RESUME)
def data_resumed(test: Evidence, control: Evidence, spec: SetSpec | None) -> Finding:
    """Every pass goes on with the samples that the control trains on, replayed steps too.

    The loader lost its place at a resume: it starts over, skips samples or gives them twice.
    """
    if not test.passes or never_interrupted(test):
        return skipped(NEVER_INTERRUPTED) if test.passes else invalid(NO_PASSES)
    expected = digests_of(control)
    if not expected or not any(any(each.batch_digests) for each in test.passes):
        detail = "no batch digests: nothing tells which samples a resume went on with"
        return skipped(detail) if spec is None else invalid(detail)
    other = other_samples(test, control)
    if other is None:
        return passed(
            f"{counted(sum(each.steps.size for each in test.passes), 'step')} of all passes"
        )
    if other.digest is None or other.step not in expected:
        return invalid(f"no batch digest at step {other.step} of pass {other.number}", other.step)
    if other.number == test.passes[0].number:
        detail = f"the samples differ at step {other.step}, before any resume"
        return invalid(detail, other.step)
    return Finding(Outcome.FAIL, data_words(other, control), onset=other.step)


def digests_of(evidence: Evidence) -> dict[int, str]:
    """Batch digests by step, where the run left one."""
    pairs = zip(evidence.steps.tolist(), evidence.batch_digests, strict=False)
    return {step: digest for step, digest in pairs if digest is not None}


def other_samples(test: Evidence, control: Evidence) -> Other | None:
    """The first step, pass by pass, that was trained on other samples than the control's."""
    expected = digests_of(control)
    for index, each in enumerate(test.passes):
        for step, digest in zip(each.steps.tolist(), each.batch_digests, strict=True):
            if digest is None or digest != expected.get(step):
                before = degrees_of(test.passes[index - 1]) if index else ""
                after = degrees_of(each)
                change = f" ({before} -> {after})" if index and before != after else ""
                return Other(each.number, step, digest, step == int(each.steps[0]), change)
    return None


def data_words(other: Other, control: Evidence) -> str:
    """What a resume did to the samples, in a sentence."""
    seen = [step for step, digest in digests_of(control).items() if digest == other.digest]
    when = "right after" if other.first else "after"
    words = (
        f"step {other.step}, {when} the resume of pass {other.number}{other.change}, is trained on "
        "other samples than the control's"
    )
    if seen and seen[0] == int(control.steps[0]):
        return f"{words}: those of step {seen[0]}, so the data started over from the beginning"
    return f"{words}: those of step {seen[0]}" if seen else words


CHECKS: tuple[Question, ...] = (passes_continuous, state_restored, data_resumed)
