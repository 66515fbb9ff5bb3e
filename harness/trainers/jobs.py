"""What the launcher asks of a job, whichever trainer it has: torchtitan or any program."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.model import Job
from harness.trainers import command, titan
from harness.trainers.calls import Call, Rendezvous
from harness.trainers.titan import RANK_MODULE, Resources

AGENT_MODULE = "harness.rank.agent"
"""torchrun's agent, tied to the life of the harness."""
LOOPBACK_TORCHRUN = Path(__file__).parent.parent / "rank" / "loopback.py"
"""torchrun whose ports only this machine can reach; needs nothing of this package."""


def job_payload(
    job: Job, folder: Path, *, data: Path | None, seed_checkpoint: Path | None, device: str
) -> dict[str, Any]:
    """The content of ``job.json`` (``docs/architecture.md``), without its schema version.

    ``data`` is the folder of the job's corpus, named after its digest.
    """
    told = titan.job_payload(job, folder, data=data, seed_checkpoint=seed_checkpoint, device=device)
    if job.spec.command is None:
        return told
    return {**told, "command": command.payload(job, folder, data)}


def argv(
    job: Job,
    folder: Path,
    rank_module: str = RANK_MODULE,
    call: Call | None = None,
    meeting: Rendezvous | None = None,
    *,
    devices: tuple[int, ...] | None = (),
    data: Path | None = None,
) -> tuple[str, ...]:
    """A call of a job, as a user would type it; None: the first.

    ``devices`` are the ids of its GPUs, ``data`` is the folder of its corpus; only another program
    than torchtitan is told them here.
    """
    if job.spec.command is None:
        return titan.argv(job, folder, rank_module, call, meeting)
    return command.command_argv(job, folder, meeting=meeting, devices=devices, data=data)


def agent_argv(
    job: Job,
    folder: Path,
    *,
    logs: Path,
    python: Path | None = None,
    rank_module: str = RANK_MODULE,
    call: Call | None = None,
    meeting: Rendezvous | None = None,
    devices: tuple[int, ...] | None = (),
    data: Path | None = None,
) -> tuple[str, ...]:
    """What the harness itself starts for one agent of a call.

    Under torchrun that is an agent of ours, where the environment has this package: it leaves how
    each rank failed. Elsewhere it is torchrun by a file of ours, which keeps to loopback too.
    ``python`` stands in for the toolchain's (warm start, torchtitan only).
    """
    spec = job.spec
    if spec.command is None:
        return (
            *(str(python or job.toolchain.python), "-m", AGENT_MODULE),
            *titan.torchrun_arguments(job, folder, rank_module, call, meeting, logs),
        )
    ours = spec.command.probed
    return command.command_argv(
        job,
        folder,
        torchrun=("-m", AGENT_MODULE) if ours else (str(LOOPBACK_TORCHRUN),),
        meeting=meeting,
        logs=logs,
        devices=devices,
        data=data,
    )


def work_folder(job: Job, folder: Path) -> Path:
    """Where a job's processes are started: its run folder, or where the user's program wants."""
    return folder if job.spec.command is None else job.spec.command.folder


def environment(
    base: Mapping[str, str],
    resources: Resources,
    folder: Path | None = None,
    job: Job | None = None,
    *,
    meeting: Rendezvous | None = None,
    data: Path | None = None,
) -> dict[str, str]:
    """The environment of a job's processes: ``base`` with all that shapes numbers pinned.

    ``folder`` is the run folder; it and the job are None for a process that serves several jobs.
    An empty ``base`` gives what is pinned, and nothing else. ``meeting`` and ``data`` as for
    ``argv``.
    """
    made = titan.environment(base, resources, folder, job)
    if job is None or folder is None or job.spec.command is None:
        return made
    here = resources.loopback is not None
    return command.with_variables(
        made, job, folder, device=resources.device, here=here, meeting=meeting, data=data
    )


def printable_command(
    job: Job, folder: Path, ranks_per_node: int | None = None, data: Path | None = None
) -> str:
    """The call as one line for a shell; of torchtitan to be given on every node.

    Of a run in several segments, their calls one after another.
    Raises ValueError when the ranks do not fill nodes of that size.

    It needs the run folder's ``job.json``, so it repeats a run that was started once. The
    environment that goes with it stands in ``record.json``.
    """
    if job.spec.command is None:
        return titan.printable_command(job, folder, ranks_per_node)
    return command.printable(job, folder, data)


def is_complete(job: Job, folder: Path) -> bool:
    """Whether a job that ended well left what it was run for."""
    if job.spec.command is None or job.spec.command.probed:
        return titan.is_complete(job, folder)
    curves = command.curves_of(job, folder)
    return curves is not None and curves.exists()  # a folder of TensorBoard's, say
