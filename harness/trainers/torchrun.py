"""Trainers whose ranks are converge's own rank code, and how torchrun is called for them.

``tests/trainers`` compares what is built here with golden files.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from signal import SIGUSR1

from converge_harness.model import Job, RankError
from converge_harness.run_folder.layout import JOB, LOGS
from converge_harness.toolchains.user_python import before
from converge_harness.trainers.base import RANK_MODULE, CallOptions, Trainer
from converge_harness.trainers.calls import (
    Call,
    NodeCommand,
    Rendezvous,
    calls_of_segments,
    comes_in_passes,
    first_call,
    part_of,
)
from converge_harness.trainers.failure import rank_error

AGENT_MODULE = "converge_harness.rank.start.agent"
"""torchrun's agent, which ends with converge."""
NODE_MODULE = "converge_harness.rank.start.node"
"""The same on a node of a scheduler's job."""


class TorchrunTrainer(Trainer):
    """A trainer that converge's rank code drives, under torchrun."""

    own_rank_code = True
    stack_signal = SIGUSR1

    def argv(self, job: Job, folder: Path, options: CallOptions) -> tuple[str, ...]:
        return torchrun_argv(job, folder, options.rank_module, options.call, options.meeting)

    def agent_argv(self, job: Job, folder: Path, options: CallOptions) -> tuple[str, ...]:
        return (
            *(str(options.python or job.toolchain.python), "-m", AGENT_MODULE),
            *torchrun_arguments(
                job, folder, options.rank_module, options.call, options.meeting, options.logs
            ),
        )

    def node_command(self, job: Job, folder: Path, options: CallOptions) -> NodeCommand:
        call = options.call or first_call(job)
        folder = folder.absolute()
        return NodeCommand(
            starter=node_starter(job, folder, call),
            launcher=node_options(job, call, options.meeting or Rendezvous()),
            program=_rank_arguments(folder, options.rank_module, call),
        )

    def printable(
        self, job: Job, folder: Path, ranks_per_node: int | None, data: Path | None
    ) -> str:
        return printable_command(job, folder, ranks_per_node)

    def error(
        self,
        logs: Sequence[Path],
        failed: Sequence[Path],
        returncode: int | None,
        script: Path | None = None,
    ) -> RankError:
        return rank_error(*failed, script=script)


HEAD_NODE = "HEAD_NODE:29500"
"""Rendezvous endpoint in printed commands for several nodes."""


def torchrun_arguments(
    job: Job,
    folder: Path,
    rank_module: str = RANK_MODULE,
    call: Call | None = None,
    meeting: Rendezvous | None = None,
    logs: Path | None = None,
) -> tuple[str, ...]:
    """Arguments of torchrun for one call of a job's run (None: its first) and one of its agents.

    ``logs`` is the folder for the ranks' output; None: the run folder's ``logs``.
    """
    folder = folder.absolute()
    call = call or first_call(job)
    meeting = meeting or Rendezvous()
    return (
        *_agent_arguments(job, call, meeting),
        f"--rdzv-id={meeting.name or job.identity[:12]}",
        f"--max-restarts={call.max_restarts}",
        f"--log-dir={logs or folder / LOGS}",
        "--redirects=3",
        *_rank_arguments(folder, rank_module, call),
    )


def node_starter(job: Job, folder: Path, call: Call) -> tuple[str, ...]:
    """Starts torchrun on a node, with options that differ between nodes and starts of a job.

    These are the rendezvous id, the log folder, and whether the node has the rendezvous store (for
    one node: the file of the rendezvous).
    """
    return (
        *(str(job.toolchain.python), "-m", NODE_MODULE),
        *("--logs", str(folder / LOGS), "--call", str(call.number), "--"),
    )


def node_options(job: Job, call: Call, meeting: Rendezvous) -> tuple[str, ...]:
    """The options of torchrun that are the same on every node."""
    return (
        *_agent_arguments(job, call, meeting),
        f"--max-restarts={call.max_restarts}",
        "--redirects=3",
    )


def _agent_arguments(job: Job, call: Call, meeting: Rendezvous) -> tuple[str, ...]:
    nodes, *where = meeting.arguments()
    ranks = part_of(job, call).world_size // meeting.most
    return (nodes, f"--nproc-per-node={ranks}", *where)


def _rank_arguments(folder: Path, rank_module: str, call: Call) -> tuple[str, ...]:
    return (
        "-m",
        rank_module,
        str(folder / JOB),
        *(() if call.segment is None else ("--segment", str(call.segment))),
    )


def torchrun_argv(
    job: Job,
    folder: Path,
    rank_module: str = RANK_MODULE,
    call: Call | None = None,
    meeting: Rendezvous | None = None,
) -> tuple[str, ...]:
    """A call of a job, as a user would type it; None: the first."""
    return (*_torchrun(job), *torchrun_arguments(job, folder, rank_module, call, meeting))


def _torchrun(job: Job) -> tuple[str, ...]:
    return (str(job.toolchain.python), "-m", "torch.distributed.run")


def printable_command(job: Job, folder: Path, ranks_per_node: int | None = None) -> str:
    """The call as one shell line, to be run on every node.

    For a run in several segments, their calls one after another.
    Raises ValueError when the ranks do not fill nodes of that size.

    It needs the run folder's ``job.json``, so it repeats a run that was started before. Its
    environment is in ``record.json``.
    """
    paths = _first_on_path(job)
    return " && ".join(
        paths
        + shlex.join(
            (
                *_torchrun(job),
                *torchrun_arguments(
                    job, folder, call=call, meeting=_meeting(job, call, ranks_per_node)
                ),
            )
        )
        for call in calls_of_segments(job)
    )


def _first_on_path(job: Job) -> str:
    """What comes before a command in a shell, for the folders that its Python searches first."""
    if not job.toolchain.paths:
        return ""
    return f"PYTHONPATH={shlex.quote(before(job.toolchain.paths, None))} "


def _meeting(job: Job, call: Call, ranks_per_node: int | None) -> Rendezvous:
    """The rendezvous of nodes with that many ranks; the user fills in ``HEAD_NODE:29500``."""
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
