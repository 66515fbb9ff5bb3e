"""Torchtitan under torchrun, every dialect: ``job.json``, argv, environment, evidence.

Pure functions of a job; ``tests/trainers`` compares what they build with golden files.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.model import Job, Role

RANK_MODULE = "harness.rank"
"""What torchrun starts as every rank."""

_FOREIGN = re.compile(
    r"(RANK|LOCAL_RANK|GROUP_RANK|ROLE_.*|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE"
    r"|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|PYTHON_EXEC|CUDA_VISIBLE_DEVICES)"
)
"""Variables of a torchrun or a scheduler around the harness, which its jobs must not inherit."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a job gets from the machine.

    ``devices`` are GPU ids, empty on the CPU; ``loopback`` names the loopback interface, None to
    let gloo choose.
    """

    device: str = "cpu"
    devices: tuple[int, ...] = ()
    loopback: str | None = "lo"


def job_payload(
    job: Job, folder: Path, *, data: Path | None, seed_checkpoint: Path | None, device: str
) -> dict[str, Any]:
    """The content of ``job.json`` (``docs/architecture.md``), without its schema version.

    ``data`` is the folder of the job's corpus, named after its digest.
    """
    spec = job.spec
    config = spec.train_config
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
        "train_config": {
            "path": config.path,
            "module": config.module,
            "config": config.config,
            "model": dict(config.model),
            "settings": dict(config.settings),
        },
        "overrides": dict(spec.overrides),
        "data": {"folder": str(data.absolute()), "digest": data.name} if data else None,
        "seed_checkpoint": str(seed_checkpoint.absolute()) if seed_checkpoint else None,
        "sample_steps": list(job.sample_steps),
        "repeat": job.repeat.kind.value if job.repeat else None,
        "repeat_seed": job.repeat.seed if job.repeat else 1,
        "inject": spec.inject,
        "without_fixes": list(spec.without_fixes),
        "device": device,
    }


def torchrun_arguments(
    job: Job, folder: Path, rank_module: str = RANK_MODULE, nodes: int = 1
) -> tuple[str, ...]:
    """Arguments of torchrun: no restarts; on one node, a rendezvous port of its own.

    Over several nodes the rendezvous is ``HEAD_NODE:29500``, for the user to fill in.
    """
    folder = folder.absolute()
    here = nodes == 1
    return (
        f"--nnodes={nodes}",
        f"--nproc-per-node={job.world_size // nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={'localhost:0' if here else 'HEAD_NODE:29500'}",
        f"--rdzv-id={job.identity[:12]}",
        # The host's own name may resolve to nothing inside a container.
        *(("--local-addr=127.0.0.1",) if here else ()),
        "--max-restarts=0",
        f"--log-dir={folder / 'logs'}",
        "--redirects=3",
        "-m",
        rank_module,
        str(folder / "job.json"),
    )


def argv(job: Job, folder: Path, rank_module: str = RANK_MODULE) -> tuple[str, ...]:
    """The torchrun call of a job, as a user would type it."""
    return (*_torchrun(job), *torchrun_arguments(job, folder, rank_module))


def _torchrun(job: Job) -> tuple[str, ...]:
    return (str(job.toolchain.python), "-m", "torch.distributed.run")


def environment(
    base: Mapping[str, str], resources: Resources, folder: Path | None = None
) -> dict[str, str]:
    """The environment of a job's processes: ``base`` with all that shapes numbers pinned.

    ``folder`` is the run folder; None for a process that serves several jobs. An empty ``base``
    gives what is pinned, and nothing else.
    """
    pinned = {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
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
    if resources.loopback is not None:
        pinned["GLOO_SOCKET_IFNAME"] = resources.loopback
    pinned["CUDA_VISIBLE_DEVICES"] = ",".join(str(device) for device in resources.devices)
    kept = {name: value for name, value in base.items() if not _FOREIGN.fullmatch(name)}
    return {**kept, **pinned}


def printable_command(job: Job, folder: Path, ranks_per_node: int | None = None) -> str:
    """The torchrun call as one line for a shell, to be given on every node.

    Raises ValueError when the ranks do not fill nodes of that size.

    It needs the run folder's ``job.json``, so it repeats a run that was started once. The
    environment that goes with it stands in ``record.json``.
    """
    nodes = 1
    if ranks_per_node is not None and job.world_size > ranks_per_node:
        nodes, rest = divmod(job.world_size, ranks_per_node)
        if rest:
            raise ValueError(f"{job.world_size} ranks do not fill nodes of {ranks_per_node}")
    return shlex.join((*_torchrun(job), *torchrun_arguments(job, folder, nodes=nodes)))


def seed_checkpoint_of(folder: Path) -> Path:
    """The checkpoint that a seed-checkpoint job leaves in its run folder."""
    return folder / "checkpoint" / "step-0"


def metrics_files(folder: Path) -> tuple[Path, Path]:
    """Where steps appear while a job runs, and where they are when training is complete."""
    return folder / "metrics.jsonl.part", folder / "metrics.jsonl"


def is_complete(job: Job, folder: Path) -> bool:
    """Whether a job that ended well left what it was run for."""
    if job.role is Role.SEED:
        # Written last by torch.distributed.checkpoint.
        return (seed_checkpoint_of(folder) / ".metadata").is_file()
    return metrics_files(folder)[1].is_file()
