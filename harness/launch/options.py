"""How a plan is to be run on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from converge_harness.model import Job, SyntheticData
from converge_harness.trainers import RANK_MODULE


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the experiment file does not say."""

    data: Mapping[SyntheticData, Path] = field(default_factory=dict)
    """The folder of every corpus that the plan's jobs read."""
    gpus: tuple[int, ...] = ()
    """Ids of this machine's GPUs to use, one rank each; empty: ranks run on the CPU."""
    cluster_device: str | None = None
    """What ranks run on where a scheduler places them, ``cuda`` or ``cpu``; None: they run here."""
    fresh: bool = False
    """Run everything again, even what has finished with the same identity."""
    warm: bool = True
    """Fork ranks from a server with its imports done. Never on GPUs: a CUDA context does not
    survive a fork."""
    check: bool = True
    """Have the toolchain build every config before anything is launched."""
    grace_s: float = 5.0
    """Between asking processes to end and killing them."""
    poll_s: float = 0.05
    """How often running jobs are looked at."""
    rank_module: str = RANK_MODULE
    """What torchrun runs as every rank."""

    @property
    def device(self) -> str:
        return self.cluster_device or ("cuda" if self.gpus else "cpu")

    def data_of(self, job: Job) -> Path | None:
        """The folder of a job's corpus; None when it reads torchtitan's own dataset."""
        data = job.spec.train_config.data
        return None if data is None else self.data[data]
