"""Torchtitan under torchrun, every dialect: ``job.json``, argv, environment, evidence.

Pure functions of a job; ``tests/trainers`` compares what they build with golden files.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.model import GLOBAL_BATCH, Fault, Job, Recovery, Role, Segment
from harness.trainers.calls import Call, Rendezvous, comes_in_passes, first_call, part_of
from harness.trainers.passes import has_metadata, last_step

RANK_MODULE = "harness.rank"
"""What torchrun starts as every rank."""
HEAD_NODE = "HEAD_NODE:29500"
"""Where printed commands of several nodes meet."""

_FOREIGN = re.compile(
    r"(RANK|LOCAL_RANK|GROUP_RANK|ROLE_.*|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE"
    r"|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|PYTHON_EXEC|CUDA_VISIBLE_DEVICES)"
)
"""Variables of a torchrun or a scheduler around the harness, which its jobs must not inherit."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a job gets from the machine.

    ``devices`` are GPU ids, empty on the CPU, None where a scheduler hands them out; ``loopback``
    names the loopback interface, None to let gloo choose.
    """

    device: str = "cpu"
    devices: tuple[int, ...] | None = ()
    loopback: str | None = "lo"


def job_payload(
    job: Job, folder: Path, *, data: Path | None, seed_checkpoint: Path | None, device: str
) -> dict[str, Any]:
    """The content of ``job.json`` (``docs/architecture.md``), without its schema version.

    ``data`` is the folder of the job's corpus, named after its digest.
    """
    spec = job.spec
    config = spec.train_config
    in_passes = comes_in_passes(job)
    overrides = dict(spec.overrides)
    if in_passes:
        # Each segment accumulates up to it: it must not follow from a segment's own degrees.
        overrides[GLOBAL_BATCH] = job.global_batch_size
    recovery = spec.recovery if in_passes else None
    return {
        "name": job.name,
        "role": job.role.value,
        "identity": job.identity,
        "dialect": job.toolchain.dialect,
        "run_folder": str(folder.absolute()),
        "seed": job.seed,
        "steps": job.steps,
        "parallelism": asdict(spec.parallelism),
        "techniques": [technique.value for technique in spec.techniques],
        "pipeline_schedule": spec.pipeline_schedule,
        "cp_rotation": spec.cp_rotation,
        "spmd_backend": spec.spmd_backend,
        "train_config": {
            "path": config.path,
            "module": config.module,
            "config": config.config,
            "model": dict(config.model),
            "settings": dict(config.settings),
            "loader": config.loader.value,
        },
        "overrides": overrides,
        "data": {"folder": str(data.absolute()), "digest": data.name} if data else None,
        "seed_checkpoint": str(seed_checkpoint.absolute()) if seed_checkpoint else None,
        "sample_steps": list(job.sample_steps),
        "frozen": job.frozen,
        "segments": [_plain(segment) for segment in spec.segments] if in_passes else [],
        "checkpoint_every": recovery.checkpoint_every if recovery else None,
        "faults": [_plain(fault) for fault in recovery.faults] if recovery else [],
        "elastic_nodes": recovery is not None and recovery.nodes[0] < recovery.nodes[1],
        "recovery": _plain(recovery) if recovery else None,
        "repeat": job.repeat.kind.value if job.repeat else None,
        "repeat_seed": job.repeat.seed if job.repeat else 1,
        "inject": spec.inject,
        "without_fixes": list(spec.without_fixes),
        "device": device,
    }


def _plain(value: Segment | Fault | Recovery) -> dict[str, Any]:
    """A dataclass of ours in the words of JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(value)))
    return plain


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


def environment(
    base: Mapping[str, str],
    resources: Resources,
    folder: Path | None = None,
    job: Job | None = None,
) -> dict[str, str]:
    """The environment of a job's processes: ``base`` with all that shapes numbers pinned.

    ``folder`` is the run folder; it and the job are None for a process that serves several jobs.
    An empty ``base`` gives what is pinned, and nothing else.
    """
    pinned = {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # With it a later run dies with "Could not resolve the process group": the cache keeps
        # names of process groups. The FX graph cache would also hide what a run's own graph
        # passes did (fused async-TP nodes are counted there).
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        # Compile in the rank: worker processes would outnumber the cores, and cannot be forked.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    if folder is not None:
        # Of its own: Inductor writes compiled kernels in place, so a killed job would leave
        # half a library behind for the next one to load.
        pinned["TORCHINDUCTOR_CACHE_DIR"] = str(folder.absolute() / "inductor")
    ours = job is None or (job.spec.command is None and job.spec.train_config.data is not None)
    if ours:
        # Our corpus needs nothing from the network; torchtitan's own datasets (c4) come from it,
        # and whatever a program of the user's reads.
        pinned |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    if resources.loopback is not None:
        pinned["GLOO_SOCKET_IFNAME"] = resources.loopback
    if job is not None and comes_in_passes(job) and job.spec.recovery is not None:
        # torch 2.13: restarts in place and joining nodes race on the agents' own store, which the
        # ranks otherwise share.
        pinned["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if resources.devices is not None:
        pinned["CUDA_VISIBLE_DEVICES"] = ",".join(str(device) for device in resources.devices)
    kept = {name: value for name, value in base.items() if not _FOREIGN.fullmatch(name)}
    return {**kept, **pinned}


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


def seed_checkpoint_of(folder: Path) -> Path:
    """The checkpoint that a seed-checkpoint job leaves in its run folder."""
    return folder / "checkpoint" / "step-0"


def metrics_files(folder: Path) -> tuple[Path, Path]:
    """Where steps appear while a job runs, and where they are when training is complete."""
    return folder / "metrics.jsonl.part", folder / "metrics.jsonl"


def is_complete(job: Job, folder: Path) -> bool:
    """Whether a job that ended well left what it was run for."""
    if job.role is Role.SEED:
        return has_metadata(seed_checkpoint_of(folder))
    if comes_in_passes(job):
        return last_step(folder) == job.steps
    return metrics_files(folder)[1].is_file()
