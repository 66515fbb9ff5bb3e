"""The resume tier, too: whether the run was broken and resumed as its set says, and recovered."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from harness.judge.check import Finding, Question, check, counted, invalid, passed, skipped
from harness.judge.degrees import ranks
from harness.judge.passes import NO_PASSES, pass_of, torn_checkpoints
from harness.model import (
    Evidence,
    FaultKind,
    Limit,
    Outcome,
    Pass,
    Segment,
    SetSpec,
    Struck,
    Tier,
)


@check(Tier.RESUME)
def segments_as_scheduled(test: Evidence, spec: SetSpec | None) -> Finding:
    """Each segment of the schedule is one pass, of its steps and its number of ranks.

    Another schedule is another experiment.
    """
    if spec is None or not spec.segments:
        return skipped("no segments are named")
    if not test.passes:
        return invalid(NO_PASSES)
    wrong = next(_unscheduled(test, spec.segments), None)
    return invalid(*wrong) if wrong else passed(counted(len(spec.segments), "segment"))


def _unscheduled(test: Evidence, segments: tuple[Segment, ...]) -> Iterator[tuple[str, int]]:
    """How the passes are not the schedule, and from which step on."""
    first = 1
    for index, segment in enumerate(segments):
        words = f"segment {index + 1} (steps {first} to {segment.until}, {segment.parallelism})"
        if index >= len(test.passes):
            yield f"{words} never started", first
            return
        each = test.passes[index]
        if each.segment != index:
            yield f"pass {each.number} should be of {words}", first
        if each.world_size != segment.parallelism.world_size:
            yield f"{words} ran on {ranks(each.world_size)}", first
        if not np.array_equal(each.steps, np.arange(first, segment.until + 1)):
            trained = f"{each.steps[0]} to {each.steps[-1]}" if each.steps.size else "none"
            yield f"{words} trained steps {trained}", first
        if not each.ended:
            yield f"{words} did not come to its end", first
        first = segment.until + 1
    more = len(test.passes) - len(segments)
    if more:
        yield f"{counted(len(test.passes), 'pass')} for {counted(len(segments), 'segment')}", first


@check(Tier.RESUME)
def faults_struck(test: Evidence, spec: SetSpec | None) -> Finding:
    """Every fault of the script happened, once, and ended the pass that it struck.

    A run that was not broken says nothing about its recovery.
    """
    if spec is None or spec.recovery is None:
        return skipped("no faults are named")
    struck = {fault.index: fault for fault in test.struck}
    for index, fault in enumerate(spec.recovery.faults):
        words = f"fault {index + 1} ({fault.kind.value} at step {fault.step})"
        found = struck.get(index)
        if found is None:
            return invalid(f"{words} never struck", fault.step)
        if (found.kind, found.step) != (fault.kind.value, fault.step):
            return invalid(f"{words} was {found.kind} at step {found.step}", fault.step)
        if fault.kind is FaultKind.CKPT_TORN and not found.torn:
            return invalid(f"{words} left no torn checkpoint", fault.step)
    if len(test.struck) != len(spec.recovery.faults):
        named = len(spec.recovery.faults)
        return invalid(f"{counted(len(test.struck), 'fault')} struck, {named} are named")
    nodes = spec.recovery.nodes
    asked = [_without_effect(test)]
    if nodes[0] != nodes[1]:
        asked = [_other_start(test, spec), *asked, _other_nodes(test)]
    idle = next(chain(*asked), None)
    return invalid(*idle) if idle else passed(counted(len(test.struck), "fault"))


def _without_effect(test: Evidence) -> Iterator[tuple[str, int]]:
    """Faults that broke nothing: the pass went on to its end or to another fault."""
    ended = {fault.index for fault in faults_that_ended(test)}
    for fault in test.struck:
        number = pass_of(test, fault)
        each = next((each for each in test.passes if each.number == number), None)
        if each is None:
            if number is not None:
                words = f"struck pass {number}, which left no evidence"
                yield f"{fault.kind} at step {fault.step} {words}", fault.step
            continue
        words = f"{fault.kind} at step {fault.step} did not end pass {number}"
        if fault.index not in ended:
            yield f"{words}, which went on to step {each.steps.max(initial=0)}", fault.step


def _other_start(test: Evidence, spec: SetSpec) -> Iterator[tuple[str, int]]:
    """A first pass of other nodes than the script starts with."""
    recovery = spec.recovery
    if recovery is None or not test.passes:
        return
    first = test.passes[0]
    started = spec.parallelism.world_size // recovery.nodes[1] * recovery.first_nodes
    if first.world_size != started:
        words = f"{recovery.first_nodes} of {recovery.nodes[1]} nodes should start"
        yield f"{words} with {ranks(started)}, pass 1 has {ranks(first.world_size)}", 1


def _other_nodes(test: Evidence) -> Iterator[tuple[str, int]]:
    """Nodes that came or went without making the world larger or smaller."""
    passes = {each.number: each for each in test.passes}
    for fault in test.struck:
        number = pass_of(test, fault) or 0
        before, after = passes.get(number), passes.get(number + 1)
        if before is None or after is None:
            continue
        step, go_on = fault.step, f"{ranks(before.world_size)}, then {ranks(after.world_size)}"
        if fault.kind == FaultKind.JOIN and after.world_size <= before.world_size:
            yield f"no node joined at step {step}: {go_on}", step
        if fault.kind == FaultKind.AGENT_LOSS and after.world_size >= before.world_size:
            yield f"no node was lost at step {step}: {go_on}", step


def faults_that_ended(test: Evidence) -> list[Struck]:
    """Faults that ended a pass: the last that struck it, if it did not come to its end."""
    ended = {each.number for each in test.passes if each.ended}
    last: dict[int | None, Struck] = {pass_of(test, fault): fault for fault in test.struck}
    return [fault for number, fault in last.items() if number not in ended]


@check(Tier.RESUME)
def recovers_in_time(test: Evidence, spec: SetSpec | None) -> Finding:
    """After every fault that ended a pass a step ends within the stated time.

    Training never went on, or took longer to than was promised.
    """
    if spec is None or spec.recovery is None:
        return skipped("no time to recover is named")
    if not test.passes:
        return invalid(NO_PASSES)
    broke = faults_that_ended(test)
    if not broke:
        return skipped("no fault ended a pass")
    limit = Limit(spec.recovery.within_s, "time to recover")
    longest, details = 0.0, []
    late: Struck | None = None
    for fault in broke:
        name = f"{fault.kind} at step {fault.step}"
        after = _steps_after(test, fault)
        if after is None:
            return invalid(f"some step does not tell when it ended: {name}", fault.step)
        if not after:
            return Finding(
                Outcome.FAIL,
                f"no step ended after the fault {name}",
                limit=limit,
                unit="s",
                onset=fault.step,
            )
        seconds = after[0] - fault.at
        details.append(f"{name}: {seconds:.1f} s")
        if seconds > limit.value and late is None:
            late = fault
        longest = max(longest, seconds)
    return Finding(
        Outcome.FAIL if late else Outcome.PASS,
        "; ".join(details),
        measured=longest,
        limit=limit,
        unit="s",
        onset=late.step if late else None,
    )


def _steps_after(test: Evidence, fault: Struck) -> list[float] | None:
    """When steps ended after a fault, as trained, without the one that it struck; None: unknown."""
    number = pass_of(test, fault)
    found: list[float] = []
    for each in test.passes:
        if number is not None and each.number < number:
            continue
        times = each.signals.get("at")
        if not each.steps.size:
            continue
        if times is None or not times.present.all():
            return None
        itself = (each.steps <= fault.step) if each.number == number else np.zeros(1, np.bool_)
        found += times.values[(times.values > fault.at) & ~itself].tolist()
    return found


@check(Tier.RESUME)
def torn_never_loaded(test: Evidence) -> Finding:
    """No pass loads a checkpoint that was torn when it was written.

    Half a checkpoint is another state, or a crash at the next resume.
    """
    if not test.passes:
        return invalid(NO_PASSES)
    torn = sorted(torn_checkpoints(test), key=lambda each: (each[1], each[0] or 0))
    if not torn:
        return skipped("no checkpoint was torn")
    for number, step in torn:
        for each in test.passes:
            later = number is None or each.number > number
            if later and each.loaded_step == step and not _saved_whole(test, each, step):
                return Finding(
                    Outcome.FAIL,
                    f"pass {each.number} loads the checkpoint of step {step}, which was torn when "
                    f"pass {number or 'before'} wrote it",
                    onset=step + 1,
                )
    return passed(counted(len(torn), "torn checkpoint"))


def _saved_whole(test: Evidence, loading: Pass, step: int) -> bool:
    """Whether the last pass that saved a step before another loaded it was not torn at it."""
    torn = torn_checkpoints(test)
    savers = [
        each.number
        for each in test.passes
        if each.number < loading.number and any(sample.step == step for sample in each.saved)
    ]
    return bool(savers) and (savers[-1], step) not in torn and (None, step) not in torn


CHECKS: tuple[Question, ...] = (
    segments_as_scheduled,
    faults_struck,
    recovers_in_time,
    torn_never_loaded,
)
