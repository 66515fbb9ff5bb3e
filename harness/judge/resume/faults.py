"""Faults that struck a run: which pass each ended, what it tore, and when training went on."""

from __future__ import annotations

import numpy as np

from converge_harness.model import Evidence, FaultKind, Pass, Recovery, Struck

IN_A_STEP = frozenset({FaultKind.KILL, FaultKind.HANG, FaultKind.NAN_BATCH})
"""Faults that strike before their step has ended, unless converge strikes a program by its curve;
all others strike once its evidence is there."""


def pass_of(evidence: Evidence, fault: Struck) -> int | None:
    """The pass that a fault struck: as recorded, else the last that had started by then."""
    if fault.number is not None:
        return fault.number
    started = [
        each.number
        for each in evidence.passes
        if each.started is not None and each.started <= fault.at
    ]
    return max(started, default=None)


def struck_pass(evidence: Evidence, fault: Struck) -> Pass | None:
    """The pass that a fault struck; None if it is unknown, or has left no evidence."""
    number = pass_of(evidence, fault)
    return next((each for each in evidence.passes if each.number == number), None)


def struck_in(evidence: Evidence, each: Pass) -> list[Struck]:
    """The faults that struck a pass, in the order of the script."""
    return [fault for fault in evidence.struck if pass_of(evidence, fault) == each.number]


def faults_that_ended(evidence: Evidence) -> list[Struck]:
    """Faults that ended a pass: the last that struck it, if the pass did not finish.

    A full disk ended none that trained on without that checkpoint.
    """
    found = []
    for each in evidence.passes:
        struck = [
            fault for fault in struck_in(evidence, each) if not trained_on_without(fault, each)
        ]
        if struck and not each.ended:
            found.append(struck[-1])
    return found


def trained_on_without(fault: Struck, each: Pass) -> bool:
    """Whether a program made steps after a full disk, and never said that it had saved its own."""
    saved = fault.step in {sample.step for sample in each.saved}
    later = int(each.steps.max(initial=0)) > fault.step
    return fault.kind == FaultKind.DISK_FULL and later and not saved


def torn_checkpoints(evidence: Evidence) -> frozenset[tuple[int | None, int]]:
    """Number of the pass and step of every checkpoint that a fault tore."""
    return frozenset(
        (pass_of(evidence, fault), fault.step) for fault in evidence.struck if fault.torn
    )


def is_torn(evidence: Evidence, number: int, step: int) -> bool:
    """Whether a fault tore the checkpoint that a pass wrote of a step, or may have."""
    torn = torn_checkpoints(evidence)
    return (number, step) in torn or (None, step) in torn


def steps_after(evidence: Evidence, fault: Struck) -> list[tuple[float, int]] | None:
    """End and pass of every step that was trained by later passes than a fault struck, as trained.

    Steps may still end in the pass that it struck, as of a program that got SIGTERM and goes on to
    its next checkpoint: that is no recovery yet. Of a pass that is known by its curve only the
    first step counts. None: for some step it is not recorded when it ended.
    """
    number = pass_of(evidence, fault)
    found: list[tuple[float, int]] = []
    for each in evidence.passes:
        if not each.steps.size or (number is not None and each.number <= number):
            continue
        if each.by_curve:
            if each.first_row_at is None:
                return None
            if each.first_row_at > fault.at:
                found.append((each.first_row_at, each.number))
            continue
        times = each.signals.get("at")
        if times is None or not times.present.all():
            return None
        later = times.values[times.values > fault.at]
        found += [(at, each.number) for at in later.tolist()]
    return found


def nodes_in(evidence: Evidence, recovery: Recovery, each: Pass) -> int:
    """How many nodes a pass should have: those at the start, plus joined, minus left before it."""
    nodes = recovery.first_nodes
    for fault in faults_that_ended(evidence):
        if (pass_of(evidence, fault) or 0) < each.number:
            nodes += (fault.kind == FaultKind.JOIN) - (fault.kind == FaultKind.AGENT_LOSS)
    return min(max(nodes, recovery.nodes[0]), recovery.nodes[1])


def last_whole_step(evidence: Evidence, each: Pass) -> int:
    """The last step of a pass that had surely ended, its checkpoint included; 0 if none had.

    A pass may have died right after its last step, before that step's checkpoint was whole; but
    when a fault strikes in a step, everything that belongs to the one before is complete.
    """
    reached = int(each.steps.max(initial=0))
    if each.ended:
        return reached
    struck = [fault.step - 1 for fault in struck_in(evidence, each) if fault.kind in IN_A_STEP]
    return max(int(np.max(struck, initial=0)), reached - 1, 0)
