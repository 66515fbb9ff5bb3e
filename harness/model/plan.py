"""What to run: jobs, what they depend on, and baselines, which stand in for a control that ran."""

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

BASELINES = "baselines"
"""The folder of a project's baselines, each in a folder ``baselines/NAME``."""
CHECKOUT = "torchtitan checkout"
"""Key among a toolchain's versions: what git calls a torchtitan in a checkout, for people only."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A Python environment on disk. converge reads its versions and never imports from it."""

    name: str
    python: Path
    dialect: str
    """Which code of converge drives it, such as ``titan_0_3``, ``titan_main``, ``megatron_0_16``;
    ``command`` if a user's program trains.
    """
    versions: Mapping[str, str]
    """Distribution name to version: torch, torchtitan, torchao, triton, converge …"""
    paths: tuple[Path, ...] = ()
    """Folders that its processes search before all others (``PYTHONPATH``)."""
    sources: tuple[Path, ...] = ()
    """Folders outside of its packages from which it imports, as those of editable installs."""
    code: Mapping[str, str] = field(default_factory=dict)
    """For a fork of torchtitan, whose version does not identify its code: SHA-256 of each file,
    such as ``torchtitan/trainer.py``, when the toolchain was found. Ranks that import anything else
    leave no evidence.
    """


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is outside the experiment file but can change a job's numbers."""

    hardware: str
    """Hardware class: bit-identical results are expected only within one."""
    rank_code: str
    """Hex digest of the code that runs inside ranks (dialects, CPU shim, recorder, probe, and
    the file formats of ``run_folder``)."""
    data: Mapping[SyntheticData, str] = field(default_factory=dict)
    """Hex digest of every synthetic corpus that the experiment uses."""
    injected: Mapping[str, str] = field(default_factory=dict)
    """Hex digest of the file of every ``inject`` and every function of a ``[technique.NAME]``, by
    ``file:function`` as the set has it.
    """
    sources: Mapping[Path, str] = field(default_factory=dict)
    """Hex digest of every file of ``Command.sources``, with the local files that it imports."""
    seed_checkpoint: str | None = None
    """Hex digest of the checkpoint from which the experiment's sets start, if it names one."""
    software: Mapping[str, Any] = field(default_factory=dict)
    """What jobs get besides their toolchain (container, environment variables …), as JSON values;
    empty if nothing.
    """


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
    """Hex SHA-256 of everything that can change the job's numbers."""
    sample_steps: tuple[int, ...] = ()
    """Steps at which the ranks write per-tensor evidence, in order; 0 is before training."""
    frozen: int = 0
    """Number of batches whose gradients are measured at the initial weights, before training."""
    repeat: Repeat | None = None
    needs: str | None = None
    """Identity of the seed-checkpoint job with the initial weights."""
    starts_from: Path | None = None
    """Or the distributed checkpoint that the file names."""
    baseline: Path | None = None
    """Folder of the baseline that replaces it: then it is not run."""
    matched: str | None = None
    """Name of the matched control: a job in the same precision, whose errors are the yardstick."""
    reference: str | None = None
    """Name of the float32 job from which both errors are measured."""

    @property
    def world_size(self) -> int:
        """Number of ranks; for an elastic set, in its largest segment."""
        if self.role is Role.SEED:
            return 1
        sizes = [segment.parallelism.world_size for segment in self.spec.segments]
        return max(sizes, default=self.spec.parallelism.world_size)

    def in_segment(self, segment: Segment) -> Job:
        """The job with the degrees and batch sizes of a segment."""
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
    """Name of the job that trains a set with another seed."""
    return f"{name}.seed{seed}"


@dataclass(frozen=True, slots=True)
class Plan:
    """All jobs of an experiment: seed checkpoints, anchor, controls, repeats, references, tests."""

    experiment: Experiment
    jobs: tuple[Job, ...]
    waived: tuple[str, ...] = ()
    """Sentences on which set waived which rule. Printed in the report."""
    surroundings: Surroundings = Surroundings(hardware="", rank_code="")
    """The surroundings from which the jobs' identities were computed."""

    def job(self, name: str) -> Job:
        return next(job for job in self.jobs if job.name == name)

    def judged_by(self, test: Job) -> tuple[Job, ...]:
        """The runs without which a test set cannot be judged; a baseline is there already."""
        control = self.job(test.spec.control or "")
        taught = () if self.experiment.calibration else self.repeats_of(control)
        of_precision = (self.job(name) for name in (test.matched, test.reference) if name)
        jobs = (control, *taught, *of_precision)
        return tuple({job.identity: job for job in jobs if job.baseline is None}.values())

    def repeats_of(self, control: Job) -> tuple[Job, ...]:
        """The jobs that repeat a control, in the plan's order."""
        return tuple(
            job for job in self.jobs if job.role is Role.REPEAT and job.spec.name == control.name
        )

    @property
    def counted_in(self) -> str:
        """What its runs train: ``tokens``, or ``samples`` of programs that name no ``seq_len``."""
        return "tokens" if any(job.seq_len > 1 for job in self.jobs) else "samples"

    @property
    def without_baseline(self) -> Plan:
        """The part that is run."""
        return replace(self, jobs=tuple(job for job in self.jobs if job.baseline is None))


@dataclass(frozen=True, slots=True)
class Blessing:
    """Who declared a control correct, when and why."""

    author: str
    reason: str
    date: str
    """ISO 8601, UTC."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A blessed control. Its folder is a run folder with nothing but evidence."""

    name: str
    folder: Path
    identity: str
    """Of the control's job."""
    spec: SetSpec
    """The set that its ranks trained."""
    precision: Precision
    toolchain: Toolchain
    """With the versions of that time; its Python may no longer exist."""
    frozen: int
    """Number of frozen steps of the control."""
    reference: tuple[Path, str] | None
    """Folder and identity of the control in float32; None if the baseline has none."""
    facts: Mapping[str, Any]
    """The inputs of the identity, as JSON values."""
    blessing: Blessing

    @property
    def text(self) -> str:
        """``baseline nightly, blessed by ada on 2026-11-22: first release``."""
        by = self.blessing
        return f"baseline {self.name}, blessed by {by.author} on {by.date[:10]}: {by.reason}"
