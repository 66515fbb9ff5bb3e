"""The script of a fault set, and whether its faults can happen and be survived."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from converge_harness.errors import Problem
from converge_harness.experiment.tables import (
    ElasticTable,
    FaultSetTable,
    FaultTable,
)
from converge_harness.model import (
    TRAINING_STEPS,
    Fault,
    FaultKind,
    Recovery,
    RestartOwner,
    SetSpec,
    Torn,
)
from converge_harness.toml import Where

OF_A_RANK = frozenset(
    {
        FaultKind.KILL,
        FaultKind.HANG,
        FaultKind.NAN_BATCH,
        FaultKind.CKPT_TORN,
        FaultKind.DISK_FULL,
    }
)
OF_A_CHECKPOINT = frozenset({FaultKind.CKPT_TORN, FaultKind.DISK_FULL})
OF_A_NODE = frozenset({FaultKind.AGENT_LOSS, FaultKind.JOIN})
OF_THE_HARNESS = frozenset({FaultKind.PREEMPT, *OF_A_NODE})
"""Faults that converge itself causes, on the machine where it runs.

They come between steps: after the last step there is nothing left to interrupt.
"""
KEYS = {
    "rank": OF_A_RANK,
    "node": frozenset({FaultKind.AGENT_LOSS}),
    "torn": frozenset({FaultKind.CKPT_TORN}),
    "grace_s": frozenset({FaultKind.PREEMPT}),
    "saves": frozenset({FaultKind.PREEMPT}),
}
"""By key of a fault, the kinds of faults that it belongs to."""
_BY_TORCHRUN = 'trainer.launcher = "torchrun"'
_HERE = 'run it here, with launcher = "local"'
_NOT_THERE = "converge does not run next to the ranks of a cluster"
HANG_FLOOR_S = 10.0
"""A hanging rank is detected by its silence, which takes half of the time to recover."""


class _Wrong(NamedTuple):
    """What is wrong with a fault: the key, why, and what would be right."""

    key: str
    message: str
    hint: str = ""


class _At(NamedTuple):
    """A fault of the script, and the number of nodes when it happens."""

    fault: FaultTable
    kind: FaultKind
    nodes: int


def recovery_of(
    table: FaultSetTable, spec: SetSpec, where: Where, problems: list[Problem]
) -> Recovery:
    """The script in the order of its steps; problems are added to ``problems``.

    Args:
        table: the set as written.
        spec: the set without its recovery, for its degrees and number of steps. Converge can make
        all faults in its runs.
        where: maps a key of the table to its place.
        problems: list to which problems are added.
    """
    in_order = sorted(enumerate(table.faults), key=lambda placed: placed[1].step)
    recovery = Recovery(
        faults=tuple(_fault(fault) for _, fault in in_order),
        checkpoint_every=table.checkpoint_every,
        restarts=RestartOwner(table.restarts),
        max_restarts=table.max_restarts,
        within_s=table.recover_within_s,
        nodes=(table.nodes[0], table.nodes[1]),
    )
    problems += _node_problems(recovery, spec, where)
    problems += _time_problems(recovery, where)
    problems += _script_problems(in_order, recovery, spec, where)
    nodes = recovery.first_nodes
    for index, fault in in_order:
        at = _At(fault, FaultKind(fault.kind), nodes)
        found = list(_fault_problems(at, recovery, spec))
        problems += [
            Problem(where(f"faults[{index}].{key}"), message, hint) for key, message, hint in found
        ]
        if not any(wrong.key == "kind" for wrong in found):  # else it changes no nodes
            nodes += {FaultKind.JOIN: 1, FaultKind.AGENT_LOSS: -1}.get(at.kind, 0)
    return recovery


def unmakeable_fault(table: FaultSetTable, spec: SetSpec, where: Where) -> Problem | None:
    """The first fault of a set that converge cannot make in its runs, and why; None if all can be.

    The same of several nodes, and of restarts by torchrun where something else starts the ranks, or
    where only converge can say which curve is of which start. ``spec`` is the set without its
    recovery.
    """
    can = spec.trainer.can
    for index, fault in enumerate(table.faults):
        if FaultKind(fault.kind) not in can.faults:
            makes = ", ".join(kind.value for kind in FaultKind if kind in can.faults)
            others = "" if can.probed else "; the probe makes the others (docs/probe.md)"
            if FaultKind(fault.kind) in OF_A_NODE and not can.under_torchrun:
                others = f"; nodes that come and go are torchrun's agents: {_BY_TORCHRUN}"
            return Problem(
                where(f"faults[{index}].kind"),
                f"converge cannot make {fault.kind} in runs of {_who(spec)}",
                f"{'one of' if len(can.faults) > 1 else 'only'} {makes}{others}",
            )
        if fault.kind == FaultKind.CKPT_TORN and fault.torn != Torn.TRUNCATED and not can.probed:
            return Problem(
                where(f"faults[{index}].torn"),
                f"converge does not see when {_who(spec)} writes its checkpoint, so it cannot end "
                "a rank that does",
                f"torn = {Torn.TRUNCATED.value!r}, or the probe (docs/probe.md)",
            )
    if table.nodes[1] > 1 and not can.faults >= OF_A_NODE:
        return Problem(where("nodes"), f"{_who(spec)} runs on one node", "leave it out")
    if table.restarts == RestartOwner.TORCHRUN and not can.under_torchrun:
        return Problem(
            where("restarts"),
            "torchrun starts again only what it has started, and another launcher starts the "
            f"ranks of {_who(spec)}",
            f"restarts = {RestartOwner.HARNESS.value!r}, or {_BY_TORCHRUN}",
        )
    if table.restarts == RestartOwner.TORCHRUN and not can.probed:
        return Problem(
            where("restarts"),
            "torchrun starts the program again without converge, and without the probe every start "
            "needs a curve of its own",
            f"restarts = {RestartOwner.HARNESS.value!r}, or the probe (docs/probe.md)",
        )
    return None


def unrunnable_on_cluster(
    table: ElasticTable | FaultSetTable, spec: SetSpec, where: Where
) -> Problem | None:
    """Why a set cannot be resumed on a cluster; None if it can.

    It can if its ranks make all of its faults, and torchrun restarts them. ``spec`` is the set
    without its segments or recovery.
    """
    can = spec.trainer.can
    if not can.probed:
        return Problem(
            where("kind"),
            f"{_NOT_THERE}, so without the probe nothing kills the program, or records how it was "
            "started again",
            f"trainer.probe = true (docs/probe.md), or {_HERE}",
        )
    if not isinstance(table, FaultSetTable):
        return None
    for index, fault in enumerate(table.faults):
        if FaultKind(fault.kind) in OF_THE_HARNESS:
            return Problem(
                where(f"faults[{index}].kind"),
                f"{fault.kind} is caused by converge on the machine of the ranks, where on a "
                "cluster it does not run",
                _HERE,
            )
    if table.nodes[1] > 1:
        return Problem(
            where("nodes"),
            "a scheduler decides on the nodes: they do not change during a job",
            _HERE,
        )
    if table.restarts == RestartOwner.HARNESS:
        by = "" if can.under_torchrun else f"{_BY_TORCHRUN} and "
        return Problem(
            where("restarts"),
            f"{_NOT_THERE}, so it cannot restart them",
            f'{by}restarts = "torchrun", or {_HERE}',
        )
    return None


def _fault(table: FaultTable) -> Fault:
    default = Fault(FaultKind(table.kind), table.step)
    return Fault(
        kind=default.kind,
        step=default.step,
        rank=default.rank if table.rank is None else table.rank,
        node=default.node if table.node is None else table.node,
        torn=default.torn if table.torn is None else Torn(table.torn),
        grace_s=default.grace_s if table.grace_s is None else table.grace_s,
        saves=bool(table.saves),
    )


def _node_problems(recovery: Recovery, spec: SetSpec, where: Where) -> Iterator[Problem]:
    """Check that nodes have equally many ranks, and that a degree can shrink with the nodes."""
    fewest, most = recovery.nodes
    degrees = spec.parallelism
    replicas = spec.trainer.can.replicas_leave and degrees.dp_shard == 1
    name = "dp_replicate" if replicas else "dp_shard"
    degree = degrees.dp_replicate if replicas else degrees.dp_shard
    if fewest < most and degree % most:
        yield Problem(
            where("nodes"),
            f"{name} {degree} is not a multiple of {most} nodes: a node that leaves takes its part "
            f"of {name} with it",
        )
    elif degrees.world_size % most:
        yield Problem(where("nodes"), f"{degrees.world_size} ranks do not fill {most} nodes")


def _time_problems(recovery: Recovery, where: Where) -> Iterator[Problem]:
    """Check that there are enough restarts, and time to detect a hang."""
    needed = sum(fault.kind is not FaultKind.JOIN for fault in recovery.faults)
    if needed > recovery.max_restarts:
        faults = (
            "1 fault needs a restart" if needed == 1 else f"{needed} faults need a restart each"
        )
        yield Problem(where("max_restarts"), f"is {recovery.max_restarts}, and {faults}")
    hangs = any(fault.kind is FaultKind.HANG for fault in recovery.faults)
    if hangs and recovery.within_s < HANG_FLOOR_S:
        yield Problem(
            where("recover_within_s"),
            f"{recovery.within_s:g} s are too few to detect a hanging rank and to restart",
            f"at least {HANG_FLOOR_S:g} s in a script with hang",
        )


def _script_problems(
    in_order: Sequence[tuple[int, FaultTable]], recovery: Recovery, spec: SetSpec, where: Where
) -> Iterator[Problem]:
    """Check that faults do not race, and that at least one leads to loading a checkpoint."""
    for (earlier, first), (later, second) in pairwise(in_order):
        if first.step == second.step:
            yield Problem(
                where(f"faults[{later}].step"),
                f"{second.kind} happens at step {second.step}, and so does faults[{earlier}], "
                f"{first.kind}: only one of them could end the pass, and which one would be chance",
                "at most one fault per step",
            )
    every, held = recovery.checkpoint_every, spec.trainer.can.probed
    if not any(_comes_after(every, fault, held=held) for fault in recovery.faults):
        yield Problem(
            where("faults"),
            "none happens after a complete checkpoint, so there is nothing to recover from: with "
            f"checkpoint_every = {every} the first one is at step {every}",
            f"a fault after step {every}",
        )


def _comes_after(checkpoint: int, fault: Fault, *, held: bool) -> bool:
    """Whether that step's checkpoint is complete when the fault happens, perhaps in a replay.

    ``held``: ranks write it, and then wait for faults that happen after the step.
    """
    at_its_step = held and fault.kind in OF_THE_HARNESS
    return fault.step > checkpoint or (at_its_step and fault.step == checkpoint)


def _fault_problems(at: _At, recovery: Recovery, spec: SetSpec) -> Iterator[_Wrong]:
    """Key, message and hint for everything that prevents one fault from being a test."""
    for key, kinds in KEYS.items():
        if getattr(at.fault, key) is not None and at.kind not in kinds:
            valid = ", ".join(kind.value for kind in FaultKind if kind in kinds)
            yield _Wrong(key, f"is not a key of {at.kind.value}", f"of {valid}")
    yield from _step_problems(at, recovery, spec)
    yield from _target_problems(at, recovery, spec)
    yield from _grace_problems(at, recovery)
    yield from _restart_problems(at, recovery, spec)


def _who(spec: SetSpec) -> str:
    """Whose runs cannot have a fault."""
    can = spec.trainer.can
    there = {"the probe": can.probed, "torchrun": can.under_torchrun}
    without = " and ".join(name for name, is_there in there.items() if not is_there)
    return f"a {spec.trainer.kind} trainer{f' without {without}' if without else ''}"


def _step_problems(at: _At, recovery: Recovery, spec: SetSpec) -> Iterator[_Wrong]:
    step, steps, every = at.fault.step, spec.setting(TRAINING_STEPS), recovery.checkpoint_every
    if not isinstance(steps, int):  # refused with the sizes of the set (harness/plan)
        return
    if step > steps:
        yield _Wrong("step", f"{step} comes after the last step: training.steps is {steps}")
    elif step == steps and (
        at.kind in OF_THE_HARNESS | OF_A_CHECKPOINT or not spec.trainer.can.probed
    ):
        yield _Wrong(
            "step",
            f"{at.kind.value} happens when step {step} has ended, and that is the last: "
            "nothing is left to recover",
            f"from 1 to {steps - 1}",
        )
    if at.kind in OF_A_CHECKPOINT and step % every:
        yield _Wrong(
            "step",
            f"no checkpoint is written at step {step}",
            f"checkpoint_every = {every}: at steps {every}, {2 * every}, …",
        )


def _target_problems(at: _At, recovery: Recovery, spec: SetSpec) -> Iterator[_Wrong]:
    """Check that the rank or node exists, and that the job stays within its number of nodes."""
    fewest, most = recovery.nodes
    ranks = spec.parallelism.world_size // most * at.nodes
    rank = at.fault.rank
    if at.kind is FaultKind.CKPT_TORN and rank is not None and at.fault.torn != Torn.TRUNCATED:
        yield _Wrong("rank", "whichever rank writes the checkpoint dies", "leave rank out")
    elif rank is not None and rank >= ranks:
        there = f" on the {at.nodes} of {most} nodes that are there" if at.nodes < most else ""
        yield _Wrong(
            "rank", f"there is no rank {rank}: {ranks} ranks{there}", f"from 0 to {ranks - 1}"
        )
    if at.kind not in OF_A_NODE:
        return
    if fewest == most:
        yield _Wrong(
            "kind", f"{at.kind.value} needs nodes that may change", "such as nodes = [1, 2]"
        )
    elif at.kind is FaultKind.JOIN and at.nodes == most:
        yield _Wrong("kind", f"no node can join: all {most} are there by step {at.fault.step}")
    elif at.kind is FaultKind.AGENT_LOSS and at.nodes == fewest:
        yield _Wrong("kind", f"no node can be lost: the fewest, {fewest}, are left by then")
    elif at.kind is FaultKind.AGENT_LOSS and (node := _fault(at.fault).node) >= at.nodes:
        yield _Wrong("node", f"there is no node {node} of {at.nodes}", "counted from 0")


def _grace_problems(at: _At, recovery: Recovery) -> Iterator[_Wrong]:
    """Check that ranks that use all of their time to stop leave some to recover.

    Not of the default, as most stop at once.
    """
    grace_s = at.fault.grace_s
    if grace_s is None or at.kind is not FaultKind.PREEMPT:
        return
    if grace_s >= recovery.within_s:
        yield _Wrong(
            "grace_s",
            f"a rank may take {grace_s:g} s to stop, and recover_within_s, which begins with "
            f"SIGTERM, is {recovery.within_s:g}",
            "a longer recover_within_s",
        )


def _restart_problems(at: _At, recovery: Recovery, spec: SetSpec) -> Iterator[_Wrong]:
    """Faults that torchrun's restarts in place cannot survive."""
    if recovery.restarts is not RestartOwner.TORCHRUN:
        return
    harness = 'restarts = "harness"'
    if at.kind is FaultKind.PREEMPT:
        yield _Wrong("kind", "torchrun ends on SIGTERM: only converge can start it again", harness)
    if at.kind is FaultKind.AGENT_LOSS and at.fault.node == 0:
        yield _Wrong(
            "node", "node 0 has the rendezvous store: without it torchrun cannot restart", harness
        )
    if at.kind is FaultKind.CKPT_TORN and at.fault.torn == Torn.TRUNCATED:
        yield _Wrong(
            "torn",
            "a truncated checkpoint looks complete: torchrun's restarts would load it and die, "
            "again and again; only converge sets it aside",
            harness,
        )
    if at.kind is FaultKind.HANG:
        yield from _hang_problems(spec, recovery.within_s, harness)


def _hang_problems(spec: SetSpec, within_s: float, harness: str) -> Iterator[_Wrong]:
    deaf = "torchrun does not detect a hanging rank"
    key = spec.trainer.keys.collective_timeout
    if not key:
        yield _Wrong("kind", deaf, harness)
        return
    timeout = spec.setting(key)
    if not (isinstance(timeout, int) and timeout < within_s):
        yield _Wrong(
            "kind",
            f"{deaf}: only the collectives' timeout does, and {key} is {timeout or 'not set'}, "
            f"recover_within_s {within_s:g}",
            f"set it below recover_within_s, or {harness}",
        )
