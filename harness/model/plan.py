"""What is to be run: jobs, and what they depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from converge_harness.model.experiment import (
    Experiment,
    Precision,
    Repeat,
    Role,
    SetSpec,
    SyntheticData,
)
from converge_harness.model.kinds import Segment


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A Python environment with given versions, found on disk. Nothing in it was imported."""

    name: str
    python: Path
    dialect: str
    """Which rank adapter speaks to its torchtitan: ``titan_0_3`` or ``titan_0_2``; ``command``
    where a program of the user's trains."""
    versions: Mapping[str, str]
    """Distribution name to version: torch, torchtitan, torchao, triton, converge …"""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What lies outside the experiment file and can still change a job's numbers."""

    hardware: str
    """Hardware class: bit-identical results are expected within one, and only there."""
    rank_code: str
    """Hex digest of the code that runs inside ranks (probe, CPU shim, adapters, the library)."""
    data: Mapping[SyntheticData, str] = field(default_factory=dict)
    """Hex digest of every synthetic corpus that the experiment uses."""
    injected: Mapping[str, str] = field(default_factory=dict)
    """Hex digest of the file of every ``inject``, by ``inject`` as the set has it."""
    sources: Mapping[Path, str] = field(default_factory=dict)
    """Hex digest of every file of ``Command.sources``, with what it imports beside it."""
    seed_checkpoint: str | None = None
    """Hex digest of the checkpoint that the experiment's sets start from, where it names one."""
    software: Mapping[str, Any] = field(default_factory=dict)
    """What a cluster gives its jobs besides the toolchain (container, environment variables …), as
    JSON values; empty on this machine."""


@dataclass(frozen=True, slots=True)
class Job:
    """One call of a launcher. Two jobs with the same identity would leave the same evidence."""

    name: str
    role: Role
    spec: SetSpec
    toolchain: Toolchain
    seed: int
    steps: int
    local_batch_size: int
    global_batch_size: int
    seq_len: int
    precision: Precision
    identity: str
    """Hex SHA-256 of all that can change the job's numbers."""
    sample_steps: tuple[int, ...] = ()
    """Steps at which the ranks leave per-tensor evidence, in order; 0 is before training."""
    frozen: int = 0
    """Batches whose gradients it leaves at the initial weights, before training."""
    repeat: Repeat | None = None
    needs: str | None = None
    """Identity of the seed-checkpoint job whose weights this one starts from."""
    starts_from: Path | None = None
    """The distributed checkpoint that it starts from instead, where the file names one."""
    golden: Path | None = None
    """Folder of the golden that it is: then it is not run."""
    matched: str | None = None
    """Name of the job of its own precision whose errors are the measure of its own."""
    reference: str | None = None
    """Name of the job in float32 from which these errors are measured."""

    @property
    def world_size(self) -> int:
        """Ranks that run side by side; of an elastic set, in its largest segment."""
        if self.role is Role.SEED:
            return 1
        sizes = [segment.parallelism.world_size for segment in self.spec.segments]
        return max(sizes, default=self.spec.parallelism.world_size)

    def in_segment(self, segment: Segment) -> Job:
        """The job as it is in one of its segments."""
        spec = replace(
            self.spec,
            parallelism=segment.parallelism,
            pipeline_schedule=segment.pipeline_schedule,
            segments=(),
        )
        return replace(self, spec=spec, local_batch_size=segment.local_batch_size)

    @property
    def gradient_accumulation_steps(self) -> int:
        return self.global_batch_size // (self.local_batch_size * self.spec.parallelism.dp)

    @property
    def tokens_per_step(self) -> int:
        """The token budget of one optimizer step."""
        return self.global_batch_size * self.seq_len


def other_seed_name(name: str, seed: int) -> str:
    """Name of the job that trains a set by another seed."""
    return f"{name}.seed{seed}"


@dataclass(frozen=True, slots=True)
class Plan:
    """All jobs of an experiment: seed checkpoints, anchor, controls, repeats, references, tests."""

    experiment: Experiment
    jobs: tuple[Job, ...]
    waived: tuple[str, ...] = ()
    """Sentences: which rule was waived by which set. Printed in the report."""
    surroundings: Surroundings = Surroundings(hardware="", rank_code="")
    """As they were when the plan was made: the identities of its jobs are made of them."""

    def job(self, name: str) -> Job:
        return next(job for job in self.jobs if job.name == name)

    @property
    def without_golden(self) -> Plan:
        """The part that is run."""
        return replace(self, jobs=tuple(job for job in self.jobs if job.golden is None))
