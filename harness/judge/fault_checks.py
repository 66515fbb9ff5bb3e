"""The resume tier, too: whether the run was broken and resumed as its set says, and recovered."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from harness.judge.check import Finding, Question, check, counted, invalid, passed, skipped
from harness.judge.degrees import ranks
from harness.judge.passes import NEVER_INTERRUPTED, NO_PASSES
from harness.judge.struck import (
    faults_that_ended,
    is_torn,
    nodes_in,
    pass_of,
    steps_after,
    struck_in,
    torn_checkpoints,
)
from harness.model import (
    Evidence,
    Fault,
    FaultKind,
    Limit,
    Outcome,
    Pass,
    RestartOwner,
    Segment,
    SetSpec,
    Struck,
    Tier,
    Torn,
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
    """Every fault of the script happened, once, and ended the pass that it struck; no other did.

    A run that was not broken says nothing about its recovery, nor does one that broke by itself.
    """
    if spec is None or spec.recovery is None:
        return skipped("no faults are named")
    if test.restarts is RestartOwner.CLUSTER:
        return _by_scheduler(test)
    asked = [_unscripted(test, spec.recovery.faults), _without_effect(test), _without_fault(test)]
    if spec.recovery.nodes[0] != spec.recovery.nodes[1]:
        first, later = test.passes[:1], test.passes[1:]
        asked.insert(1, _other_world(test, spec, first))
        asked.append(_other_world(test, spec, later))
    wrong = next(chain(*asked), None)
    return invalid(*wrong) if wrong else passed(counted(len(test.struck), "fault"))


def _by_scheduler(test: Evidence) -> Finding:
    """No script names what a cluster does to a run; that one struck it is another experiment."""
    if wrong := next(_unscripted(test, ()), None):
        return invalid(*wrong)
    if not test.requeued:
        return skipped(NEVER_INTERRUPTED)
    reached = [int(each.steps.max(initial=each.loaded_step or 0)) for each in test.passes[:-1]]
    steps = ", ".join(str(step) for step in reached)
    return skipped(f"requeued by the scheduler, of which no script tells: after step {steps}")


def _unscripted(test: Evidence, script: tuple[Fault, ...]) -> Iterator[tuple[str, int]]:
    """Faults that did not strike as the script says."""
    struck = {fault.index: fault for fault in test.struck}
    for index, fault in enumerate(script):
        words = f"fault {index + 1} ({fault.kind.value} at step {fault.step})"
        found = struck.get(index)
        if found is None:
            yield f"{words} never struck", fault.step
            return
        if (found.kind, found.step) != (fault.kind.value, fault.step):
            yield f"{words} was {found.kind} at step {found.step}", fault.step
        if fault.kind is FaultKind.CKPT_TORN and not found.torn:
            yield f"{words} left no torn checkpoint", fault.step
        if elsewhere := _elsewhere(fault, found):
            yield f"{words} {elsewhere}", fault.step
    more = test.struck[len(script) :]
    if more:
        words = f"{counted(len(test.struck), 'fault')} struck, {len(script)} are named"
        yield words, more[0].step


def _elsewhere(fault: Fault, struck: Struck) -> str:
    """Where a fault struck, if not on the rank or node that the script names."""
    if fault.kind is FaultKind.AGENT_LOSS:
        if struck.node not in (None, fault.node):
            return f"struck node {struck.node}, node {fault.node} is named"
    elif _names_rank(fault) and struck.rank not in (None, fault.rank):
        return f"struck rank {struck.rank}, rank {fault.rank} is named"
    return ""


def _names_rank(fault: Fault) -> bool:
    if fault.kind is FaultKind.CKPT_TORN:
        return fault.torn is Torn.TRUNCATED
    return fault.kind not in (FaultKind.PREEMPT, FaultKind.JOIN)


def _without_effect(test: Evidence) -> Iterator[tuple[str, int]]:
    """Faults that broke nothing: the pass went on to its end or to another fault."""
    ended = {fault.index for fault in faults_that_ended(test)}
    for fault in test.struck:
        number = pass_of(test, fault)
        each = next((each for each in test.passes if each.number == number), None)
        if each is None:
            words = f"struck pass {number}, which left no evidence"
            if number is None:
                words = "struck nobody knows which pass"
            yield f"{fault.kind} at step {fault.step} {words}", fault.step
            continue
        words = f"{fault.kind} at step {fault.step} did not end pass {number}"
        if fault.index not in ended:
            yield f"{words}, which went on to step {each.steps.max(initial=0)}", fault.step


def _without_fault(test: Evidence) -> Iterator[tuple[str, int]]:
    """Passes that died of themselves."""
    last = 0
    for index, each in enumerate(test.passes, 1):
        if each.number != index:
            yield f"pass {index} left no evidence, and no fault of the script ended it", last + 1
            return
        last = int(each.steps.max(initial=last))
        if not each.ended and not struck_in(test, each):
            yield f"pass {each.number} died of no fault of the script", last + 1


def _other_world(
    test: Evidence, spec: SetSpec, passes: tuple[Pass, ...]
) -> Iterator[tuple[str, int]]:
    """Passes on other nodes than the script has by then: nodes that never came, or never left."""
    recovery = spec.recovery
    if recovery is None:
        return
    most = recovery.nodes[1]
    for each in passes:
        nodes = nodes_in(test, recovery, each)
        wanted = spec.parallelism.world_size * nodes // most
        if each.world_size != wanted:
            verb = "start" if each is test.passes[0] else "go on"
            words = f"{nodes} of {most} nodes should {verb} with {ranks(wanted)}"
            has = f"pass {each.number} has {ranks(each.world_size)}"
            yield f"{words}, {has}", (each.loaded_step or 0) + 1


@check(Tier.RESUME)
def recovers_in_time(test: Evidence, spec: SetSpec | None) -> Finding:
    """After every fault that ended a pass a step ends within the stated time.

    Training never went on, or took longer to than was promised.
    """
    if spec is None or spec.recovery is None or test.restarts is RestartOwner.CLUSTER:
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
        after = steps_after(test, fault)
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
        seconds = after[0][0] - fault.at
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
    savers = [
        each.number
        for each in test.passes
        if each.number < loading.number and any(sample.step == step for sample in each.saved)
    ]
    return bool(savers) and not is_torn(test, savers[-1], step)


CHECKS: tuple[Question, ...] = (
    segments_as_scheduled,
    faults_struck,
    recovers_in_time,
    torn_never_loaded,
)
