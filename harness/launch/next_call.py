"""What follows a call of a run, and which faults converge has to cause. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from converge_harness.model import ENDED_WITH_0, Fault, FaultKind, Job, Recovery, RestartOwner
from converge_harness.trainers import Call, comes_in_passes
from converge_harness.wording import counted

_HIDES_A_FAULT = (
    "whoever restarts training that fails goes by its exit code, so the program, and what starts "
    "it, must not end with 0 then"
)
HARNESS_FAULTS = frozenset({FaultKind.PREEMPT, FaultKind.AGENT_LOSS, FaultKind.JOIN})
"""Faults that the ranks cannot cause themselves. Ranks without the probe cause none."""


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The result of one call."""

    ended_well: bool
    reached: int | None = None
    """The step that its last pass had to reach and has reached; None: that pass failed."""
    steps: int = 0
    """Number of step lines during the call."""
    struck: frozenset[int] = frozenset()
    """Faults of the script that happened during it."""
    nodes: int = 1
    """Number of nodes that are left for a restart."""
    checkpoint: bool = True
    """Whether there is a complete checkpoint of the step that it had to reach."""
    saved: bool = True
    """Whether there is a complete checkpoint of a later step than that from which it began."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Continue with another call, or end: successfully without a problem, else with it."""

    call: Call | None = None
    reason: str = ""
    """Why there is another call."""
    problem: str = ""
    """A sentence; the failing rank's error is added if there is one."""
    hint: str = ""
    """What the program has to do otherwise; empty: what its trainer says."""


def calls_again(job: Job) -> bool:
    """Whether converge itself may start several calls of a run, one after another.

    These are the segments of an elastic set, and restarts after the faults of a script.
    """
    recovery = job.spec.recovery
    return comes_in_passes(job) and (recovery is None or recovery.restarts.follows_script)


def after(job: Job, call: Call, outcome: CallOutcome) -> Decision:
    """What follows a finished call of a job for which ``calls_again`` holds."""
    if job.spec.recovery is not None:
        return _after_fault(job, job.spec.recovery, call, outcome)
    return _after_segment(job, call, outcome)


def _after_segment(job: Job, call: Call, outcome: CallOutcome) -> Decision:
    index = call.segment or 0
    segments = job.spec.segments
    until = segments[index].until
    first = segments[index - 1].until + 1 if index else 1
    name = f"segment {index + 1} (steps {first} to {until})"
    if not outcome.ended_well:
        return Decision(problem=name)
    if outcome.reached != until:
        return Decision(
            problem=f"{name}: every rank ended with exit code 0, but step {until} was not reached"
        )
    if index + 1 == len(segments):
        return Decision()
    if not outcome.checkpoint:
        return Decision(
            problem=f"{name}: wrote no complete checkpoint of step {until} for the next one"
        )
    following = replace(call, number=call.number + 1, segment=index + 1)
    return Decision(following, f"segment {index + 2} of {len(segments)}")


def _after_fault(job: Job, recovery: Recovery, call: Call, outcome: CallOutcome) -> Decision:
    if outcome.ended_well:
        if outcome.reached == job.steps:
            return Decision()
        struck = [recovery.faults[index] for index in sorted(outcome.struck)]
        since = f" after {struck[-1].kind} at step {struck[-1].step}" if struck else ""
        problem = f"{ENDED_WITH_0}{since}, but step {job.steps} was not reached"
        return Decision(problem=problem, hint=_HIDES_A_FAULT if struck else "")
    restarted = call.number - 1
    if recovery.restarts is RestartOwner.TORCHRUN:
        return Decision(problem=f"torchrun gave up (max_restarts = {recovery.max_restarts})")
    if restarted >= recovery.max_restarts:
        times = counted(restarted, "restart")
        return Decision(problem=f"failed again after {times}, which is max_restarts")
    if not outcome.struck and not (outcome.steps and outcome.saved):
        why = "failed before any step, but not by a fault of the script"
        if outcome.steps:
            why = "failed, but not by a fault of the script, and a restart would come no further "
            why += "without a later complete checkpoint"
        return Decision(problem=why)
    following = replace(call, number=call.number + 1, nodes=outcome.nodes)
    return Decision(
        following,
        f"restarted by converge, {restarted + 1} of at most {recovery.max_restarts} times",
    )


def struck_by_curve(job: Job) -> bool:
    """Whether converge causes all faults of a job, once the curve of its program has their step."""
    return bool(_faults(job)) and not job.spec.trainer.can.probed


def next_by_curve(job: Job, steps: range, done: Collection[int]) -> tuple[int, Fault] | None:
    """The fault that strikes a start whose curve has those steps, with its index; None: none yet.

    ``done`` are those that have struck. One strikes at or after its step: nothing holds a program
    at the end of a step. A checkpoint of this start is torn once there is a later step, before
    which a program saves it.
    """
    left = (each for each in enumerate(_faults(job)) if each[0] not in done)
    index, fault = next(left, (0, None))
    if fault is None or not steps:
        return None
    if fault.kind is FaultKind.CKPT_TORN:
        strikes = fault.step in steps and fault.step < steps[-1]
    else:
        strikes = fault.step <= steps[-1]
    return (index, fault) if strikes else None


def faults_due(job: Job, steps: Collection[int], done: Collection[int]) -> dict[int, Fault]:
    """Faults for converge to cause, by index, once the ranks have reported those steps.

    ``done`` are those already caused.
    """
    return {
        index: fault
        for index, fault in enumerate(_faults(job))
        if fault.kind in HARNESS_FAULTS and fault.step in steps and index not in done
    }


def _faults(job: Job) -> tuple[Fault, ...]:
    recovery = job.spec.recovery if comes_in_passes(job) else None
    return recovery.faults if recovery else ()


def longest_grace_s(job: Job) -> float:
    """The longest time that a job's script gives ranks to stop; 0: it has no ``preempt``."""
    given = (fault.grace_s for fault in _faults(job) if fault.kind is FaultKind.PREEMPT)
    return max(given, default=0.0)


def torn_in(job: Job, struck: Mapping[int, int], number: int) -> frozenset[int]:
    """Steps whose checkpoints faults of a script have torn in a pass.

    ``struck`` is the number of the pass that each of them struck, by index.
    """
    return frozenset(
        fault.step
        for index, fault in enumerate(_faults(job))
        if fault.kind is FaultKind.CKPT_TORN and struck.get(index) == number
    )


def hang_limit_s(
    job: Job, struck: Collection[int], last_step: int | None, progress_timeout_s: float
) -> float | None:
    """How long a rank may hang by the script before converge restarts the run.

    Half of the time to recover, which leaves the other half for the restart. None: none hangs, or
    converge does not restart it. ``struck`` are the faults that have happened in the call; a hang
    at a finished step is over.
    """
    recovery = job.spec.recovery if comes_in_passes(job) else None
    if recovery is None or recovery.restarts is RestartOwner.TORCHRUN:
        return None
    for index, fault in enumerate(recovery.faults):
        ended = last_step is not None and last_step >= fault.step
        if fault.kind is FaultKind.HANG and index in struck and not ended:
            return min(progress_timeout_s, recovery.within_s / 2)
    return None
