"""Where jobs run: on this machine, or by a scheduler on many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Launcher(StrEnum):
    """Who starts the ranks of a job."""

    LOCAL = "local"
    """The harness itself, by torchrun on this machine."""
    SLURM = "slurm"
    """Slurm, by one batch script per job."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """``[cluster]``: what a scheduler is asked for, and what its nodes need before ranks start.

    Options of sbatch that are None are not asked for. Every text is what sbatch and bash take as it
    stands, or quoted: ``harness.experiment.cluster`` refuses what they would read otherwise.
    """

    ranks_per_node: int
    """Ranks (GPUs) on a full node. A job of no more ranks gets one node."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    """Time limit of a job as sbatch takes it: ``04:00:00``, ``1-12``, ``90`` (minutes)."""
    gpus_per_node: bool = True
    """Whether to ask for a GPU per rank by ``--gpus-per-node``; off where ``gres`` says it, or
    where ranks run on CPUs."""
    gres: str | None = None
    """``gpu:h100:8``; replaces ``--gpus-per-node``."""
    cpus_per_rank: int | None = None
    memory_per_node: str | None = None
    """``64G``; sbatch's ``--mem``."""
    constraint: str | None = None
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, each as on a ``#SBATCH`` line: ``--exclusive``."""
    srun: tuple[str, ...] = ()
    """Further arguments of srun, as ``--container-image=…`` of pyxis."""
    container: tuple[str, ...] = ()
    """What the ranks' command is given to: ``apptainer exec --nv image.sif``, as an argv."""
    modules: tuple[str, ...] = ()
    """Environment modules to load."""
    prologue: tuple[str, ...] = ()
    """Lines of bash that run on the first node before the ranks start, as they are written."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of all ranks: ``NCCL_SOCKET_IFNAME``, ``GLOO_SOCKET_IFNAME`` …"""
    device: str = "cuda"
    """``cuda`` or ``cpu``."""
    hardware: str | None = None
    """Name of the nodes' hardware, as ``H100``: part of every job's identity. None: partition,
    gres and constraint stand for it."""
    max_jobs: int | None = None
    """How many jobs of the experiment may run at once; None: the scheduler decides."""
    requeue: bool = True
    """Whether a job comes back to the queue after a node failure or preemption."""
    checkpoint_every: int | None = None
    """Steps from one checkpoint to the next of every job, which goes on from the newest when it
    has been requeued; None: it starts over."""
    poll_s: float = 10.0
    """How often the scheduler is asked, in seconds; by one query for all jobs."""
