"""Options for running a plan on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from converge_harness.model import Job, RunRecord, SyntheticData
from converge_harness.trainers import RANK_MODULE


class Training(NamedTuple):
    """A run that has not finished."""

    folder: Path
    step: int
    """Its last."""
    stopped: bool = False
    """Whether it was stopped after that step; otherwise it trains on."""


class LookError(Exception):
    """A test set that trains could not be judged; the reason, in a clause."""


Look: TypeAlias = "Callable[[Job, Mapping[str, RunRecord], Mapping[str, Training]], str | None]"
"""Asked of a test set that is training, with the records of runs that have ended and with those
that train, itself among them, both by identity: why it need not train on, in a clause; empty if it
must; None while a run that it is judged by has not come as far. Raises LookError."""


StepsSoFar: TypeAlias = "Callable[[Path, Mapping[str, str]], range]"
"""Asked of the curve of a program that still runs, with the names of its columns: its steps, from
the first to the newest; empty while it has none. Raises EvidenceError for one that cannot be read.
"""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options that are not in the experiment file."""

    data: Mapping[SyntheticData, Path] = field(default_factory=dict)
    """The folders of the corpora that the plan's jobs read."""
    gpus: tuple[int, ...] = ()
    """Ids of this machine's GPUs to use, one per rank; empty: ranks run on the CPU.

    An id that is there several times is a GPU that so many ranks share.
    """
    cluster_device: str | None = None
    """Device of ranks under a scheduler, ``cuda`` or ``cpu``; None: they run on this machine."""
    fresh: bool = False
    """Run everything again, even finished jobs with the same identity."""
    warm: bool = True
    """Fork ranks from a server that has done the imports. Never on GPUs: a CUDA context does not
    survive a fork.
    """
    check: bool = True
    """Let the toolchain check every config before anything is launched."""
    grace_s: float = 5.0
    """Seconds between asking processes to end and killing them."""
    poll_s: float = 0.05
    """How often running jobs are checked, in seconds."""
    look: Look | None = None
    """Judges a running test set, which is stopped if its verdict is known; None: all train on."""
    read_by: Mapping[str, tuple[Job, ...]] = field(default_factory=dict)
    """By identity of a control or repeat that may end early, the test sets that read it: it ends
    once all of them have been stopped.
    """
    read_stopped: Callable[[Job, RunRecord], None] | None = None
    """Called with every run that was stopped, by this process or earlier, while its lock is held:
    once that is free, another process may let the run train on. So it reads what will be judged.
    """
    steps_so_far: StepsSoFar | None = None
    """Reads the growing curve of a program that faults strike by it; None: they strike none."""
    rank_module: str = RANK_MODULE
    """The module that torchrun runs in every rank."""

    @property
    def shares_gpus(self) -> bool:
        """Whether several ranks use one GPU."""
        return len(set(self.gpus)) < len(self.gpus)

    @property
    def device(self) -> str:
        return self.cluster_device or ("cuda" if self.gpus else "cpu")

    def data_of(self, job: Job) -> Path | None:
        """The folder of a job's corpus; None if it reads another dataset."""
        data = job.spec.train_config.data
        return None if data is None else self.data[data]
