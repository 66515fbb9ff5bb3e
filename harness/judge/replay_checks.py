"""The resume tier, too: whether steps that a restart replays come out as they did before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from harness.judge.check import Finding, Question, check, counted, invalid, skipped
from harness.judge.curves import relative_difference
from harness.judge.degrees import degrees_of
from harness.judge.floors import FLOORS, JUDGED_SIGNALS
from harness.judge.passes import NO_PASSES
from harness.judge.struck import IN_A_STEP, pass_of
from harness.model import Evidence, FaultKind, Limit, Outcome, Pass, Tier


class Replay(NamedTuple):
    """A step that was trained once more."""

    step: int
    first: tuple[Pass, int]
    """The first pass that trained it, and the index of the step there."""
    again: tuple[Pass, int]


@check(Tier.RESUME)
def replays_agree(test: Evidence) -> Finding:
    """A replayed step comes out as it did the first time: samples, tokens, lr, loss, grad norm.

    Restarts that change what follows make a run that nobody can repeat.
    """
    if not test.passes:
        return invalid(NO_PASSES)
    untold = next(_untold(test), None)
    if untold:
        return invalid(*untold)
    found = list(replays(test))
    if not found:
        return skipped("no step was replayed")
    worst, measured, limit = -1.0, 0.0, Limit(0.0, "exact")
    floors = FLOORS[test.precision]
    origin = f"floor of {test.precision.value} arithmetic"
    for replay in found:
        words = _differs_exactly(replay)
        if words:
            return Finding(
                Outcome.FAIL, f"step {replay.step} {words}{_of(replay)}", onset=replay.step
            )
        for signal in () if _poisoned(test, replay.step, replay.first[0]) else JUDGED_SIGNALS:
            before, again = _value(replay.first, signal), _value(replay.again, signal)
            if before is None and again is None:
                continue
            allowed = float(floors[signal].at(np.array([replay.step]))[0])
            difference = _apart(before, again)
            if not difference <= allowed:
                return Finding(
                    Outcome.FAIL,
                    f"{signal} of step {replay.step} is {_spelled(again)}, {_spelled(before)} "
                    f"the first time{_of(replay)}",
                    measured=difference,
                    limit=Limit(allowed, origin),
                    unit="relative",
                    onset=replay.step,
                )
            if difference / allowed > worst:
                worst, measured = difference / allowed, difference
                limit = Limit(allowed, origin)
    steps = [replay.step for replay in found]
    return Finding(
        Outcome.PASS,
        f"{counted(len(found), 'step')} replayed" + ("" if measured else ", with equal values"),
        measured=measured,
        limit=limit,
        unit="relative",
        steps=(min(steps), max(steps)),
    )


def _untold(test: Evidence) -> Iterator[tuple[str, int]]:
    """Steps that a pass had trained when a fault struck, and whose values it did not leave."""
    passes = {each.number: each for each in test.passes}
    for fault in test.struck:
        each = passes.get(pass_of(test, fault) or 0)
        if each is None or each.loaded_step is None:
            continue
        last = fault.step - (fault.kind in IN_A_STEP)
        missing = np.setdiff1d(np.arange(each.loaded_step + 1, last + 1), each.steps)
        if missing.size:
            words = f"pass {each.number}, which {fault.kind} struck at step {fault.step}"
            yield f"{words}, left nothing of step {missing[0]}", int(missing[0])


def replays(test: Evidence) -> Iterator[Replay]:
    """Every step that a pass trained and an earlier one had, with the first that had it.

    Values that a fault made NaN are compared once, and the next take their place.
    """
    first: dict[int, tuple[Pass, int]] = {}
    for each in test.passes:
        for index, step in enumerate(each.steps.tolist()):
            if step in first:
                yield Replay(step, first[step], (each, index))
            if step not in first or _poisoned(test, step, first[step][0]):
                first[step] = (each, index)


def _differs_exactly(replay: Replay) -> str:
    """What of the inputs is not the same, in words; empty when all is."""
    digests = [each.batch_digests[index] for each, index in (replay.first, replay.again)]
    if digests[0] != digests[1]:
        return "is trained on other samples"
    for signal in ("tokens", "lr"):
        before, again = _value(replay.first, signal), _value(replay.again, signal)
        if before != again:
            return f"has {signal} {again!r}, {before!r} the first time"
    return ""


def _poisoned(test: Evidence, step: int, each: Pass) -> bool:
    """Whether a fault made a pass's values of a step NaN: a replay is to have others."""
    return any(
        fault.kind == FaultKind.NAN_BATCH
        and fault.step == step
        and pass_of(test, fault) == each.number
        for fault in test.struck
    )


def _of(replay: Replay) -> str:
    (first, _), (again, _) = replay.first, replay.again
    before, after = degrees_of(first), degrees_of(again)
    change = f", {before} -> {after}" if before != after else ""
    return f" (pass {again.number} after pass {first.number}{change})"


def _value(where: tuple[Pass, int], signal: str) -> float | None:
    each, index = where
    column = each.signals.get(signal)
    return None if column is None else column[index]


def _apart(before: float | None, again: float | None) -> float:
    if before is None or again is None:
        return np.inf
    return float(relative_difference(np.array(before), np.array(again)))


def _spelled(value: float | None) -> str:
    return "not told" if value is None else f"{value:.8g}"


CHECKS: tuple[Question, ...] = (replays_agree,)
