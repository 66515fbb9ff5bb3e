"""The calls of a run: which part of it they are, and their rendezvous."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from converge_harness.model import Job, RestartOwner, Role
from converge_harness.run_folder.layout import PASSES

MEETING_PLACE, MEETING_PORT = "$converge_meeting_place", "$converge_meeting_port"
"""Variables of a batch script: host and port at which the nodes of a job meet, and the port."""
FOUND_CHECKPOINT = "\0checkpoint"
"""Stands in a program's arguments and variables for the checkpoint from which it goes on, where
only the batch script can say it. No text of a file has such a character."""
_LAST_CALL_S = 5
"""How long agents wait for further nodes once there are enough. Those of one start arrive together
(``converge_harness.rank.start.agent``), so only after a lost node is this time wasted."""
_KEEP_ALIVE_S, _KEEP_ALIVES = 2, 5
"""A node without a keep-alive for the product of both counts as lost."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a run. The defaults are for runs with only one."""

    number: int = 1
    """From 1, in the order of the starts."""
    segment: int | None = None
    """Index into the segments of an elastic set; None for other sets."""
    max_restarts: int = 0
    """How often torchrun may restart its ranks in place."""
    nodes: int = 1
    """Number of agents at the start."""
    resumes_from: int | None = None
    """Step of the newest complete checkpoint when it starts; None: there is none."""
    looks_for_checkpoint: bool = False
    """Whether the batch script around it looks for that checkpoint: ``FOUND_CHECKPOINT``."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The rendezvous of a call's agents; by default one agent and torchrun's own file.

    On one machine the rendezvous is a file: torch unpickles what it receives, and a port could be
    reached by every user of the machine, and from the network.
    """

    fewest: int = 1
    most: int = 1
    """Least and largest number of nodes; the job's world size is for the largest."""
    endpoint: str = ""
    """On one machine the path of the file, in a private folder; empty: torchrun makes its own. On
    several machines ``HOST:PORT``.
    """
    name: str = ""
    """torchrun's rendezvous id; empty: derived from the job's identity."""
    here: bool = True
    """Whether all nodes are on this machine."""
    port: int | None = None
    """A free port, for ranks whose launcher does not choose one."""

    def arguments(self) -> tuple[str, ...]:
        """Arguments of torchrun for the rendezvous."""
        nodes = str(self.most) if self.fewest == self.most else f"{self.fewest}:{self.most}"
        return (
            f"--nnodes={nodes}",
            "--rdzv-backend=c10d",
            *((f"--rdzv-endpoint={self.endpoint}",) if self.endpoint else ()),
            *((f"--rdzv-conf={self._settings()}",) if self.here else ()),
            # The host's own name may resolve to nothing inside a container.
            *(("--local-addr=127.0.0.1",) if self.here else ()),
        )

    def _settings(self) -> str:
        if self.most == 1:
            return "store_type=file"
        return (
            f"store_type=file,last_call_timeout={_LAST_CALL_S},"
            f"keep_alive_interval={_KEEP_ALIVE_S},keep_alive_max_attempt={_KEEP_ALIVES}"
        )


@dataclass(frozen=True, slots=True)
class NodeCommand:
    """What srun starts for one call of a job: on each of its nodes, or for each of its ranks."""

    starter: tuple[str, ...]
    """Keeps the output, and starts the rest with what only a node knows."""
    launcher: tuple[str, ...] = ()
    """The launcher and its options, in which ``MEETING_PLACE`` and ``MEETING_PORT`` may stand."""
    program: tuple[str, ...] = ()
    """What the launcher starts in every rank."""


def comes_in_passes(job: Job) -> bool:
    """Whether a job has several passes, joined by checkpoints."""
    return job.spec.resumes and job.role is not Role.SEED


def left_passes(job: Job, folder: Path) -> bool:
    """Whether the evidence in a run's folder is in passes, by its job or because it has waited.

    A run writes a checkpoint before it waits for others, if its trainer can continue from one.
    """
    return comes_in_passes(job) or (folder / PASSES).is_dir()


def most_nodes(job: Job) -> int:
    """Largest number of nodes of a job."""
    recovery = job.spec.recovery if comes_in_passes(job) else None
    return recovery.nodes[1] if recovery else 1


def first_call(job: Job) -> Call:
    """The first call of a job's run, for most jobs the only one."""
    if not comes_in_passes(job):
        return Call()
    recovery = job.spec.recovery
    if recovery is None:
        return Call(segment=0)
    restarts = recovery.max_restarts if recovery.restarts is RestartOwner.TORCHRUN else 0
    return Call(max_restarts=restarts, nodes=recovery.first_nodes)


def calls_of_segments(job: Job) -> tuple[Call, ...]:
    """The calls of a job's segments, if nothing goes wrong; of other jobs the first call alone."""
    first = first_call(job)
    if first.segment is None:
        return (first,)
    ends = [segment.until for segment in job.spec.segments[:-1]]
    later = (
        Call(number + 1, segment=number, resumes_from=until)
        for number, until in enumerate(ends, start=1)
    )
    return (first, *later)


def part_of(job: Job, call: Call) -> Job:
    """The job in one of its calls, with the degrees of the call's segment."""
    return job if call.segment is None else job.in_segment(job.spec.segments[call.segment])
