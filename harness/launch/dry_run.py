"""Builds and steps jobs on this machine without their GPUs: one process per job and stage.

Each is a rank of its own of the job's whole world (``harness/rank/dry_run/run.py``). Ranks of one
pipeline stage are alike, so the first of each stand for all; a repeat trains what its control
trains, and another seed what the first trains.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from converge_harness.errors import Problem, ToolchainError
from converge_harness.launch import processes
from converge_harness.launch.interruption import Interruption
from converge_harness.launch.options import RunOptions
from converge_harness.launch.private_folder import private_folder
from converge_harness.model import Job, Role
from converge_harness.run_folder.dry_run import DryRunDocument, read_answer
from converge_harness.run_folder.layout import JOB
from converge_harness.store import write_json
from converge_harness.trainers import (
    Resources,
    comes_in_passes,
    environment,
    job_payload,
    searching,
)
from converge_harness.trainers.failure import log_tail

_NEEDS_BYTES = 3 * 2**30
"""Memory of a process, a generous estimate: 8B parameters in a world of 64 take 0.7 GB."""
_POLL_S = 0.05
BUILT_AS_ANOTHER = (Role.SEED, Role.REPEAT, Role.OTHER_SEED)
"""Roles of jobs that are built like a job of another role."""


@dataclass(frozen=True, slots=True)
class Part:
    """One process of a dry run: a rank of a job, or of a segment of an elastic job."""

    job: Job
    """In the segment, if there are segments."""
    stage: int
    segment: int | None = None

    @property
    def rank(self) -> int:
        """The first rank of the stage; the pipeline is torchtitan's outermost mesh dimension."""
        degrees = self.job.spec.parallelism
        return self.stage * (degrees.world_size // degrees.pp)

    @property
    def title(self) -> str:
        """``fsdp8_pp2, pipeline rank 1 of 2``."""
        degrees = self.job.spec.parallelism
        segment = "" if self.segment is None else f", segment {self.segment}"
        stage = f", pipeline rank {self.stage} of {degrees.pp}" if degrees.pp > 1 else ""
        return f"{self.job.name}{segment}{stage}"


@dataclass(frozen=True, slots=True)
class DryRunResult:
    """Result of a process: the JSON object of its rank (``run_folder/dry_run.py``)."""

    part: Part
    found: DryRunDocument

    @property
    def unsupported(self) -> str | None:
        """Why the toolchain has no dry run; None if it has."""
        return self.found.get("unsupported")

    @property
    def peak_bytes(self) -> int:
        return int(self.found.get("peak_bytes") or 0)


def parts_of(jobs: Sequence[Job]) -> tuple[Part, ...]:
    """The processes of a dry run, in the order of the jobs."""
    return tuple(part for job in jobs for part in _parts(job))


def _parts(job: Job) -> Iterator[Part]:
    if job.role in BUILT_AS_ANOTHER:
        return
    segments = job.spec.segments if comes_in_passes(job) else ()
    each: list[tuple[Job, int | None]] = [
        (job.in_segment(segment), index) for index, segment in enumerate(segments)
    ] or [(job, None)]
    for part, index in each:
        for stage in range(part.spec.parallelism.pp):
            yield Part(part, stage, index)


def dry_run(
    jobs: Sequence[Job],
    device: str,
    options: RunOptions,
    base_environment: Mapping[str, str],
    stop: Interruption,
    *,
    timeout_s: float = 1200.0,
    on_answer: Callable[[DryRunResult], None] = lambda _: None,
) -> tuple[DryRunResult, ...]:
    """Dry-run jobs for a device (``cuda`` or ``cpu``), as many at a time as the machine can hold.

    Raises:
        ToolchainError: a process ended without an answer.
        Interrupted: a signal came.
    """
    wanted = environment(base_environment, Resources(device="cpu"))
    waiting = list(enumerate(parts_of(jobs)))
    answers: dict[int, DryRunResult] = {}
    running: dict[int, _Process] = {}
    whole = {job.name: job for job in jobs}
    with private_folder() as private:
        try:
            while waiting or running:
                while waiting and len(running) < _at_once():
                    index, part = waiting.pop(0)
                    folder = private / str(index)
                    running[index] = _start(
                        part, whole[part.job.name], device, folder, options, wanted, timeout_s
                    )
                for index, process in list(running.items()):
                    answer = process.answer()
                    if answer is not None:
                        del running[index]
                        answers[index] = answer
                        on_answer(answer)
                stop.check()
                time.sleep(_POLL_S)
        finally:
            left = [(process.handle, process.folder) for process in running.values()]
            processes.end_all(left, grace_s=0.0)
    return tuple(answers[index] for index in sorted(answers))


def problems_of(answers: Sequence[DryRunResult]) -> list[Problem]:
    """All problems of all jobs, each once, with the set's name and the key."""
    found: dict[Problem, None] = {}
    for answer in answers:
        job = answer.part.job
        segment = "" if answer.part.segment is None else f" (segment {answer.part.segment})"
        for entry in answer.found["problems"]:
            key = f": {entry['key']}" if entry["key"] else ""
            valid = ", ".join(map(str, entry.get("valid") or ()))
            hint = f"valid: {valid}" if valid else ""
            found[Problem(f"{job.name}{segment}{key}", entry["message"], hint)] = None
        for sentence in answer.found.get("sharding_problems", ()):
            found[Problem(f"{job.name}{segment}: parallelism", sentence)] = None
    for problem in _stages_without_parameters(answers):
        found[problem] = None
    return list(found)


def _stages_without_parameters(answers: Sequence[DryRunResult]) -> Iterator[Problem]:
    """Check that each job's stages together hold every parameter of the model exactly once."""
    by_job: dict[tuple[str, int | None], list[Mapping[str, Any]]] = {}
    for answer in answers:
        held = answer.found.get("parameters")
        if held is not None:
            by_job.setdefault((answer.part.job.name, answer.part.segment), []).append(held)
    degrees = {(each.part.job.name, each.part.segment): each.part.job for each in answers}
    for key, each in by_job.items():
        pp = degrees[key].spec.parallelism.pp
        total, of_model = sum(int(held["count"]) for held in each), int(each[0]["of_model"])
        if len(each) == pp and total != of_model:
            message = f"the stages hold {total:,} parameters, the model has {of_model:,}"
            yield Problem(f"{key[0]}: parallelism.pp", message)


@dataclass(frozen=True, slots=True)
class _Process:
    part: Part
    handle: subprocess.Popen[bytes]
    folder: Path
    deadline: float

    def answer(self) -> DryRunResult | None:
        """None while it runs. Raises ToolchainError if it ended without an answer."""
        if self.handle.poll() is None:
            if time.monotonic() < self.deadline:
                return None
            processes.end_all([(self.handle, self.folder)], grace_s=0.0)
            message = "the dry run did not end in time and was killed"
            return DryRunResult(self.part, {"problems": [{"key": "", "message": message}]})
        try:
            return DryRunResult(self.part, read_answer((self.folder / "answer").read_bytes()))
        except (OSError, ValueError):
            toolchain = self.part.job.toolchain.name
            raise ToolchainError(
                f"toolchain {toolchain} cannot dry-run {self.part.title} "
                f"(exit code {self.handle.returncode}):\n{log_tail(self.folder / 'log')}"
            ) from None


def _start(
    part: Part,
    whole: Job,
    device: str,
    folder: Path,
    options: RunOptions,
    wanted: Mapping[str, str],
    timeout_s: float,
) -> _Process:
    folder.mkdir()
    # Without the corpus: the ranks replace it, as every other data set, by dummy data.
    payload = job_payload(whole, folder, data=None, seed_checkpoint=None, device=device)
    write_json(folder / JOB, payload)
    argv = [str(whole.toolchain.python), "-m", options.rank_module, "--dry-run"]
    argv += [str(folder / JOB), "--rank", str(part.rank)]
    if part.segment is not None:
        argv += ["--segment", str(part.segment)]
    variables = searching(whole.toolchain, wanted)
    handle = processes.start(argv, variables, folder, folder / "log", folder / "answer")
    return _Process(part, handle, folder, time.monotonic() + timeout_s)


def _at_once() -> int:
    """Number of processes for the machine's cores and free memory; at least one."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, int(psutil.virtual_memory().available // _NEEDS_BYTES)))
