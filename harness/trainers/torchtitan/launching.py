"""Torchtitan under torchrun, every dialect: argv. Pure functions of a job.

``tests/trainers`` compares what they build with golden files.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from harness.model import Job
from harness.trainers.base import RANK_MODULE
from harness.trainers.calls import Call, Rendezvous, comes_in_passes, first_call, part_of

HEAD_NODE = "HEAD_NODE:29500"
"""Where printed commands of several nodes meet."""


def torchrun_arguments(
    job: Job,
    folder: Path,
    rank_module: str = RANK_MODULE,
    call: Call | None = None,
    meeting: Rendezvous | None = None,
    logs: Path | None = None,
) -> tuple[str, ...]:
    """Arguments of torchrun for one call of a job's run (None: its first) and one of its agents.

    ``logs`` is the folder for what ranks print; None: the run folder's ``logs``.
    """
    folder = folder.absolute()
    call = call or first_call(job)
    meeting = meeting or Rendezvous()
    return (
        *_agent_arguments(job, call, meeting),
        f"--rdzv-id={meeting.name or job.identity[:12]}",
        f"--max-restarts={call.max_restarts}",
        f"--log-dir={logs or folder / 'logs'}",
        "--redirects=3",
        *_rank_arguments(folder, rank_module, call),
    )


def node_arguments(
    job: Job, folder: Path, call: Call, meeting: Rendezvous, rank_module: str = RANK_MODULE
) -> tuple[str, ...]:
    """The same for ``harness.rank.node``, which adds what nodes and lives of a job differ in.

    Those are the rendezvous id, the folder of logs, and whether the node has the rendezvous store
    (of one node: the file that it is in).
    """
    return (
        *_agent_arguments(job, call, meeting),
        f"--max-restarts={call.max_restarts}",
        "--redirects=3",
        *_rank_arguments(folder.absolute(), rank_module, call),
    )


def _agent_arguments(job: Job, call: Call, meeting: Rendezvous) -> tuple[str, ...]:
    nodes, *where = meeting.arguments()
    ranks = part_of(job, call).world_size // meeting.most
    return (nodes, f"--nproc-per-node={ranks}", *where)


def _rank_arguments(folder: Path, rank_module: str, call: Call) -> tuple[str, ...]:
    return (
        "-m",
        rank_module,
        str(folder / "job.json"),
        *(() if call.segment is None else ("--segment", str(call.segment))),
    )


def argv(
    job: Job,
    folder: Path,
    rank_module: str = RANK_MODULE,
    call: Call | None = None,
    meeting: Rendezvous | None = None,
) -> tuple[str, ...]:
    """A torchrun call of a job, as a user would type it; None: the first."""
    return (*_torchrun(job), *torchrun_arguments(job, folder, rank_module, call, meeting))


def _torchrun(job: Job) -> tuple[str, ...]:
    return (str(job.toolchain.python), "-m", "torch.distributed.run")


def printable_command(job: Job, folder: Path, ranks_per_node: int | None = None) -> str:
    """The torchrun call as one line for a shell, to be given on every node.

    Of a run in several segments, their calls one after another.
    Raises ValueError when the ranks do not fill nodes of that size.

    It needs the run folder's ``job.json``, so it repeats a run that was started once. The
    environment that goes with it stands in ``record.json``.
    """
    first = first_call(job)
    parts = len(job.spec.segments) if first.segment is not None else 1
    calls = (first, *(Call(number + 1, segment=number) for number in range(1, parts)))
    return " && ".join(
        shlex.join(
            (
                *_torchrun(job),
                *torchrun_arguments(
                    job, folder, call=call, meeting=_meeting(job, call, ranks_per_node)
                ),
            )
        )
        for call in calls
    )


def _meeting(job: Job, call: Call, ranks_per_node: int | None) -> Rendezvous:
    """Where nodes of that many ranks meet; ``HEAD_NODE:29500`` is for the user to fill in."""
    ranks = part_of(job, call).world_size
    recovery = job.spec.recovery if comes_in_passes(job) else None
    fewest, most = recovery.nodes if recovery else (1, 1)
    if ranks_per_node is not None and ranks > ranks_per_node * most:
        nodes, rest = divmod(ranks, ranks_per_node)
        if rest:
            raise ValueError(f"{ranks} ranks do not fill nodes of {ranks_per_node}")
        fewest = most = nodes
    if most == 1:
        return Rendezvous()
    return Rendezvous(fewest, most, endpoint=HEAD_NODE, here=False)
