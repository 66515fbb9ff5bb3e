"""Starts the agents of a job's calls, and causes the faults that ranks cannot cause.

After the step of such a fault the ranks wait until it is over (``faults/<index>.over.json``), so it
happens where the script says, however fast the machine is. Those of a program without the probe do
not wait: it is struck once its curve has the step, so at that step or a later one.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from converge_harness.errors import StoreError
from converge_harness.launch import processes
from converge_harness.launch.continuing import continues_from, saves_where_it_waits
from converge_harness.launch.local.curve_steps import CurveSteps
from converge_harness.launch.local.run import Agent, Run, RunningCall, struck_faults
from converge_harness.launch.next_call import longest_grace_s, struck_by_curve, torn_in
from converge_harness.launch.options import RunOptions
from converge_harness.launch.progress import Growth, MetricsTail
from converge_harness.launch.warm import WarmServers
from converge_harness.model import Fault, FaultKind, Job
from converge_harness.run_folder.checkpoints import (
    TornCheckpointError,
    is_whole,
    newest_whole,
    set_torn_aside,
    write_manifest,
)
from converge_harness.run_folder.faults import (
    StruckDocument,
    over_document,
    over_file,
    struck_document,
    struck_file,
)
from converge_harness.run_folder.layout import (
    FAILURES,
    FAILURES_VARIABLE,
    LOGS,
    TOGETHER_VARIABLE,
    call_logs,
    calls_so_far,
    together_value,
)
from converge_harness.run_folder.starts import StartDocument, read_start, start_file
from converge_harness.run_folder.waits import wait_file, waits_document
from converge_harness.store import RunLock, Store, write_json
from converge_harness.trainers import (
    Call,
    Rendezvous,
    Resources,
    agent_argv,
    argv,
    comes_in_passes,
    curves_of,
    environment,
    first_call,
    job_payload,
    most_nodes,
    needs_port,
    part_of,
    trainer_of,
)
from converge_harness.trainers.environment import SMALL_NCCL

PROCESS_GUARD = Path(__file__).parent.parent / "process_guard.py"
"""Runs a user's launcher."""
ARRIVED = "arrived"
"""File in an agent's log folder: its imports are done."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine on which all jobs of a matrix run."""

    store: Store
    options: RunOptions
    servers: WarmServers
    environment: Mapping[str, str]
    """converge's own environment, which jobs inherit."""
    loopback: str | None
    """Name of the loopback interface."""
    private: Path
    """A folder that only this user can enter, for the duration of the matrix."""


def start_run(
    place: Machine,
    job: Job,
    *,
    seed_checkpoint: Path | None,
    slots: tuple[int, ...],
    attempt: int,
    lock: RunLock,
    waits: tuple[int, ...] = (),
) -> Run:
    """Start a job in an empty run folder, or where an earlier start of it has left a checkpoint.

    Its ranks wait after each of the steps ``waits``, until ``let_train_on`` is called.

    Raises StoreError if the folder cannot be written or the toolchain's Python cannot be started.
    """
    folder = place.store.run_folder(job.name, job.identity).absolute()
    data = place.options.data_of(job)
    payload = job_payload(
        job, folder, data=data, seed_checkpoint=seed_checkpoint, device=place.options.device
    )
    store, fresh = place.store, place.options.fresh
    step = None if fresh else continues_from(store, job, folder, payload)
    saves = saves_where_it_waits(job, waits)
    in_passes = bool(saves) or comes_in_passes(job) or step is not None
    first = first_call(job)
    tail = MetricsTail(folder, in_passes)
    waits_again = None
    if step is None:
        store.start_run(folder, payload)
        _prepare(job, folder)
    else:
        store.continue_run(folder)
        _set_torn_aside(job, folder)
        number = max(calls_so_far(folder / LOGS), 1) + 1
        first = replace(first, number=number, resumes_from=step)
        earlier = {line.step: line for line in tail.new_steps()}
        tail.loaded = False  # what follows is of this start
        waits_again = earlier.get(step) if step in waits else None
        waits = tuple(each for each in waits if each > step or (waits_again and each == step))
    if waits:
        write_json(wait_file(folder), waits_document(waits, saves=saves))
    _begin_start(job, folder, first)
    call = _start_call(place, job, folder, first, slots)
    return Run(
        job=job,
        folder=folder,
        slots=slots,
        attempt=attempt,
        lock=lock,
        call=call,
        warm=place.servers.python(job.toolchain.name) is not None,
        environment=environment(
            {name: place.environment[name] for name in SMALL_NCCL if name in place.environment},
            _resources(place, slots),
            folder,
            job,
            meeting=call.meeting,
            data=data,
            call=first,
        ),
        payload=payload,
        tail=tail,
        growth=_growth(job, folder, first),
        curve=_curve(place, job, folder, first, payload),
        waits=waits,
        saves=saves,
        in_passes=in_passes,
        continues_from=step,
        last=waits_again,
    )


def let_train_on(run: Run, slots: tuple[int, ...]) -> None:
    """Let a run that waits train on, in these slots. Raises StoreError if that cannot be said."""
    run.waits = run.waits[1:]
    write_json(wait_file(run.folder), waits_document(run.waits, saves=run.saves))
    run.train_on(slots)


def _prepare(job: Job, folder: Path) -> None:
    """Make the folders that a job's program needs in the run folder."""
    try:
        for name in trainer_of(job.spec).own_folders(job):
            (folder / name).mkdir()
    except OSError as error:
        path = error.filename or folder
        raise StoreError(f"{path}: cannot be made: {error.strerror or error}") from error


def _growth(job: Job, folder: Path, call: Call) -> Growth | None:
    """Growing output that shows progress of a call without step reports; None for other jobs."""
    curves = curves_of(job, folder, call)
    return None if curves is None else Growth(curves, folder / LOGS)


def _curve(
    place: Machine, job: Job, folder: Path, call: Call, payload: Mapping[str, Any]
) -> CurveSteps | None:
    """The curve of a call whose program converge strikes by it; None for other jobs."""
    path, read = curves_of(job, folder, call), place.options.steps_so_far
    if path is None or not struck_by_curve(job):
        return None
    if read is None:
        raise ValueError(f"nothing reads the curve of {job.name}: RunOptions.steps_so_far")
    named = trainer_of(job.spec).curve_of(folder, payload)
    return CurveSteps(path, named.columns if named else {}, read)


def _begin_start(job: Job, folder: Path, call: Call) -> None:
    """Write down how a program without the probe is started, if it is started several times.

    Raises StoreError if that cannot be written.
    """
    curves = curves_of(job, folder, call)
    output = trainer_of(job.spec).folder_of_call(job, folder, call)
    if curves is None or output is None:
        return
    path = start_file(folder, call.number)
    try:
        output.mkdir()
        path.parent.mkdir(parents=True)
    except OSError as error:
        raise StoreError(f"{error.filename or folder}: cannot be made: {error.strerror}") from error
    document: StartDocument = {
        "segment": call.segment,
        "ranks": part_of(job, call).world_size,
        "curve": str(curves.relative_to(folder)),
        "at": time.time(),
        "returncode": None,
    }
    write_json(path, document)


def end_start(run: Run, *, by_itself: bool) -> None:
    """Write down how a start of a program without the probe ended; nothing for other runs.

    A program that ended with 0 says that what it wrote is whole, so the checkpoints that are new
    get their manifests; also one that stopped early because it was asked to (``preempt``), which
    counts as one that converge ended. Of any other, those of steps after which its curve has
    another one do: it had saved the one before it trained the other. Where a file is named that is
    written last, that file says so of the newest step, too. ``by_itself``: converge did not have to
    end it.

    Raises StoreError if that cannot be written.
    """
    number = run.call.call.number
    path = start_file(run.folder, number)
    if not path.is_file():
        return
    code = run.call.returncode if by_itself else None
    form = trainer_of(run.job.spec).checkpoint_form(run.job)
    saved: range = range(0)
    torn = torn_in(run.job, run.struck, number)
    document: StartDocument = {"returncode": code}
    if run.curve is not None:
        run.last_look()
        says_so = code == 0 or form.last_file is not None
        saved = run.curve.steps[: None if says_so else -1]
        document["first_row_at"] = run.curve.first_row_at
        if run.stopped_when_asked:
            document["returncode"] = None
    try:
        write_json(path, {**read_start(path), **document})
        for step, checkpoint in form.found(run.folder):
            if step in torn:
                continue
            if step in saved or (code == 0 and not is_whole(run.folder, step, form)):
                write_manifest(checkpoint, step, path.parent, form)
    except (OSError, ValueError) as error:
        raise StoreError(f"{path.parent}: cannot record how the start ended: {error}") from error


def start_next_call(place: Machine, run: Run, call: Call) -> None:
    """Start the next call of a run whose last call is over, in the same folder and slots.

    Raises StoreError as ``start_run`` does.
    """
    _set_torn_aside(run.job, run.folder)
    form = trainer_of(run.job.spec).checkpoint_form(run.job)
    call = replace(call, resumes_from=newest_whole(run.folder, form))
    _begin_start(run.job, run.folder, call)
    following = _start_call(place, run.job, run.folder, call, run.slots)
    following.faults_before = struck_faults(run.folder)
    run.earlier.append(run.call)
    run.call, run.growth = following, _growth(run.job, run.folder, call)
    run.curve = _curve(place, run.job, run.folder, call, run.payload)


def _set_torn_aside(job: Job, folder: Path) -> None:
    """Move incomplete checkpoints away, which a program may look for itself. Raises StoreError."""
    try:
        set_torn_aside(folder, trainer_of(job.spec).checkpoint_form(job))
    except TornCheckpointError as error:
        raise StoreError(str(error)) from error


def start_node(place: Machine, run: Run) -> None:
    """Start a further node for the running call, on the slots of one that was lost.

    Raises StoreError as ``start_run`` does.
    """
    running = run.call
    own = free_share(shares_of_nodes(run.job, run.slots), running.agents)
    node = len(running.agents)
    running.agents.append(
        _start_agent(place, run.job, run.folder, running.call, own, running.meeting, node)
    )


def _start_call(
    place: Machine, job: Job, folder: Path, call: Call, slots: tuple[int, ...]
) -> RunningCall:
    meeting = _meeting(place, job)
    shares = shares_of_nodes(job, slots)
    agents: list[Agent] = []
    try:
        agents.extend(
            _start_agent(place, job, folder, call, shares[node], meeting, node, together=True)
            for node in range(call.nodes)
        )
    except BaseException:
        processes.end_all([(agent.process, agent.folder) for agent in agents], grace_s=None)
        raise
    return RunningCall(
        call=call,
        argv=argv(
            job,
            folder,
            place.options.rank_module,
            call,
            _as_typed(meeting),
            devices=_devices(place, slots),
            data=place.options.data_of(job),
        ),
        meeting=meeting,
        agents=agents,
    )


def _start_agent(
    place: Machine,
    job: Job,
    folder: Path,
    call: Call,
    slots: tuple[int, ...],
    meeting: Rendezvous,
    node: int,
    *,
    together: bool = False,
) -> Agent:
    """``slots``: the node's own; ``together``: it waits for the other first nodes of its call."""
    logs = _logs(job, folder, call, node)
    work = folder if node == 0 else logs
    data = place.options.data_of(job)
    variables = environment(
        place.environment,
        _resources(place, slots),
        folder,
        job,
        meeting=meeting,
        data=data,
        call=call,
    )
    variables[FAILURES_VARIABLE] = str(logs / FAILURES)
    if grace := longest_grace_s(job):
        # converge ends ranks that have not stopped in time (``RunningCall.give``), not torchrun,
        # whose own default may be shorter.
        variables[_SHUTDOWN_TIMEOUT] = str(math.ceil(grace) + _SHUTDOWN_TIMEOUT_MARGIN_S)
    if together and call.nodes > 1:
        others = (other for other in range(call.nodes) if other != node)
        own, *theirs = (_logs(job, folder, call, one) / ARRIVED for one in (node, *others))
        variables[TOGETHER_VARIABLE] = together_value(own, theirs)
    stand_in = place.servers.python(job.toolchain.name)
    if stand_in is not None:
        variables["PYTHON_EXEC"] = str(stand_in)  # with which torchrun starts its ranks
    command = agent_argv(
        job,
        folder,
        logs=logs,
        python=stand_in,
        rank_module=place.options.rank_module,
        call=call,
        meeting=meeting,
        devices=_devices(place, slots),
        data=data,
    )
    trainer = trainer_of(job.spec)
    if not trainer.own_rank_code:
        command = (sys.executable, "-I", str(PROCESS_GUARD), *command)
        # An aborted rank then prints its stack.
        variables.setdefault("PYTHONFAULTHANDLER", "1")
    try:
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / trainer.launcher_log(job)
        process = processes.start(command, variables, trainer.work_folder(job, work), log)
    except OSError as error:
        raise StoreError(f"{folder}: cannot start {command[0]}: {error}") from error
    return Agent(process, work, logs, slots)


def _logs(job: Job, folder: Path, call: Call, node: int) -> Path:
    """Each agent has its own, so that a failure is not attributed to a later call."""
    if not comes_in_passes(job) and call.number == 1:
        return folder / LOGS
    return call_logs(folder / LOGS, call.number, node)


def shares_of_nodes(job: Job, slots: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """A job's slots, divided between the agents that stand for its nodes."""
    each = len(slots) // most_nodes(job)
    return tuple(slots[start : start + each] for start in range(0, len(slots), each))


def free_share(shares: tuple[tuple[int, ...], ...], agents: Iterable[Agent]) -> tuple[int, ...]:
    """The share of a node that has not come, or was lost."""
    free = Counter(shares)  # where nodes share a GPU, several have the same share
    free.subtract(agent.slots for agent in agents if not agent.lost)
    return next((share for share in shares if free[share] > 0), shares[-1])


def _resources(place: Machine, slots: tuple[int, ...]) -> Resources:
    options = place.options
    return Resources(
        options.device, _devices(place, slots), place.loopback, shared=options.shares_gpus
    )


def _devices(place: Machine, slots: tuple[int, ...]) -> tuple[int, ...]:
    """Ids of the job's GPUs; none on the CPU."""
    return slots if place.options.gpus else ()


def _meeting(place: Machine, job: Job) -> Rendezvous:
    """A rendezvous for one call, which no other user of the machine can reach."""
    recovery = job.spec.recovery
    fewest, most = recovery.nodes if recovery and most_nodes(job) > 1 else (1, 1)
    name = secrets.token_hex(16)
    port = _free_port() if needs_port(job) else None
    return Rendezvous(fewest, most, str(place.private / name), name, port=port)


_SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Seconds that torchrun (of torch 2.13 and 2.15) leaves between SIGTERM and SIGKILL."""
_SHUTDOWN_TIMEOUT_MARGIN_S = 60


def _as_typed(meeting: Rendezvous) -> Rendezvous:
    """The rendezvous for a command that a user types: the file of a single agent is temporary."""
    return meeting if meeting.most > 1 else Rendezvous(port=meeting.port)


def _free_port() -> int:
    """A port that is free now, for ranks whose launcher does not choose one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


_BY_CURVE = {
    FaultKind.KILL: signal.SIGKILL,
    FaultKind.HANG: signal.SIGSTOP,
    FaultKind.PREEMPT: signal.SIGTERM,
    FaultKind.CKPT_TORN: signal.SIGKILL,
}
"""The signal of each fault that strikes a program without the probe."""
_OF_ALL = frozenset({FaultKind.PREEMPT, FaultKind.CKPT_TORN})
"""Those whose signal every rank gets."""


def strike_by_curve(run: Run, index: int, fault: Fault) -> None:
    """Send the signal of a fault to a program without the probe, whose curve has its step.

    ``preempt`` goes to every rank and not to torchrun, which would end with an error also if all of
    them stop with 0. If a rank's process is not there (any more), or the checkpoint that is to be
    cut is not, nothing happens. Raises StoreError if the fault's file cannot be written.
    """
    everybody = fault.kind in _OF_ALL
    ranks = range(part_of(run.job, run.call.call).world_size) if everybody else (fault.rank,)
    (agent,) = run.call.agents  # without the probe there is one node
    if run.curve is None or not (found := run.call.ranks(agent, ranks)):
        return
    torn = fault.kind is FaultKind.CKPT_TORN
    if torn and not _cut_while_stopped(run, fault.step, found.values()):
        return
    run.struck[index] = run.tail.number
    more: StruckDocument = {"curve_step": run.curve.steps[-1], "torn": torn}
    if not everybody:
        more["rank"] = fault.rank
    elif fault.kind is FaultKind.PREEMPT:
        run.call.give(fault.grace_s)
    _write_struck(run, index, fault, more)
    for process in found.values():
        processes.signal_tree(process, _BY_CURVE[fault.kind])


def _cut_while_stopped(run: Run, step: int, ranks: Collection[psutil.Process]) -> bool:
    """Cut a step's checkpoint, and leave the ranks stopped so that none saves a later one.

    False if that checkpoint is not there, or a later one is, from which the program would go on.
    """
    form = trainer_of(run.job.spec).checkpoint_form(run.job)
    checkpoint = form.path(run.folder, step)

    def is_newest() -> bool:
        later = any(at > step for at, _ in form.found(run.folder))
        return form.is_finished(checkpoint) and not later

    if not is_newest():
        return False
    for rank in ranks:
        processes.signal_tree(rank, signal.SIGSTOP)
    if is_newest() and _cut(checkpoint):
        return True
    for rank in ranks:
        processes.signal_tree(rank, signal.SIGCONT)
    return False


def _cut(checkpoint: Path) -> bool:
    """Cut a checkpoint, of a folder its largest file, to half; False if it has been removed."""
    try:
        files = [each for each in (checkpoint, *checkpoint.rglob("*")) if each.is_file()]
        size, largest = max((each.stat().st_size, each) for each in files)
        os.truncate(largest, size // 2)
    except (OSError, ValueError):  # ValueError: of an empty folder
        return False
    return True


def strike(place: Machine, run: Run, index: int, fault: Fault) -> None:
    """Cause a fault of the run's script that its ranks cannot cause.

    ``agent_loss`` of a missing node and ``join`` of one too many do not happen. Raises StoreError
    if the fault's file cannot be written or a node cannot be started.
    """
    run.struck[index] = run.tail.number
    if not _can_strike(run, fault):
        _mark_over(run, index)
        return
    where: StruckDocument = {"node": fault.node} if fault.kind is FaultKind.AGENT_LOSS else {}
    _write_struck(run, index, fault, where)
    if fault.kind is FaultKind.PREEMPT:
        _ask_to_stop(run, fault.grace_s)
    elif lost := _lost_by(run, fault):
        processes.end_all([(lost.process, lost.folder)], grace_s=None)
        lost.lost = True
        _mark_over(run, index)
    else:
        start_node(place, run)


def _ask_to_stop(run: Run, grace_s: float) -> None:
    """Send the SIGTERM of ``preempt``.

    To torchrun's agents, which pass it on. Other launchers end at once, so there every rank gets
    it, as from a scheduler; a program whose ranks converge does not find gets it itself.
    """
    run.call.give(grace_s)
    if run.job.spec.trainer.can.under_torchrun:
        for agent in run.call.left:
            processes.ask_to_end(agent.process)
        return
    (agent,) = run.call.agents  # nodes that come and go are torchrun's
    ranks = range(part_of(run.job, run.call.call).world_size)
    found = processes.ranks_of(agent.logs, agent.process.pid, ranks)
    for rank in found.values():
        with suppress(psutil.NoSuchProcess):
            rank.terminate()
    if not found:
        processes.ask_to_end(agent.process)


def _write_struck(run: Run, index: int, fault: Fault, more: StruckDocument) -> None:
    """Write down that a fault strikes now; ``more`` is what only faults of its kind have."""
    document = struck_document(
        index,
        kind=fault.kind.value,
        step=fault.step,
        pass_number=run.tail.number,
        torn=False,
    )
    write_json(struck_file(run.folder, index), {**document, **more})


def end_faults(run: Run, *, call_is_over: bool) -> None:
    """Mark faults as over once they had their effect: another pass has begun, or the call ended.

    Raises StoreError if that cannot be written.
    """
    if run.curve is not None:  # no rank waits
        return
    for index, number in run.struck.items():
        if call_is_over or run.tail.number > number:
            _mark_over(run, index)


def _can_strike(run: Run, fault: Fault) -> bool:
    if fault.kind is FaultKind.AGENT_LOSS:
        return _lost_by(run, fault) is not None
    return fault.kind is not FaultKind.JOIN or len(run.call.left) < most_nodes(run.job)


def _lost_by(run: Run, fault: Fault) -> Agent | None:
    return run.call.node(fault.node) if fault.kind is FaultKind.AGENT_LOSS else None


def _mark_over(run: Run, index: int) -> None:
    path = over_file(run.folder, index)
    if not path.exists():
        write_json(path, over_document(index))
