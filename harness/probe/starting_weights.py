"""The weights that a probed run starts from: those of an ``ulp`` repeat are moved first."""

from __future__ import annotations

import torch

from converge_harness.probe.errors import ProbeError
from converge_harness.probe.wrapping import Wrapped
from converge_harness.rank.repeats import move_by_one_ulp, move_tensors
from converge_harness.run_folder.job import JobError, RankJob, read_job

_moved: set[str] = set()
"""Jobs whose initial weights this process has moved before the model was wrapped."""


def job_of(path: str) -> RankJob:
    """The job in a file. Raises ProbeError when it cannot be read as one that is probed."""
    try:
        job = read_job(path)
    except JobError as error:
        raise ProbeError(f"$CONVERGE_JOB: {error}") from error
    if not job.is_probed:
        raise ProbeError(
            f"$CONVERGE_JOB: {path}: its program leaves curves only (trainer.probe = false): unset "
            "the variable, or set trainer.probe = true"
        )
    return job


def move_initial_weights(model: torch.nn.Module, path: str) -> None:
    """Move the weights of a model that nothing wraps yet, where the job is an ``ulp`` repeat.

    Raises ProbeError for weights without values, and when they were moved before.
    """
    job = job_of(path)
    if job.repeat != "ulp":
        return
    if path in _moved:
        raise ProbeError("initial_weights has moved the weights of this run already: call it once")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ProbeError(
            "initial_weights: the model lies on the meta device and has no values to move yet; "
            "call it once the weights are there"
        )
    move_by_one_ulp([model], job.repeat_seed)
    _moved.add(path)


def move_wrapped_weights(wrapped: Wrapped, job: RankJob, path: str) -> None:
    """Move the weights of an ``ulp`` repeat which the program has not had moved before.

    Raises ProbeError where what wraps the model by now does not let them be moved.
    """
    if job.repeat != "ulp" or path in _moved:
        return
    if not wrapped.movable:
        raise ProbeError(
            f"{job.name} starts from weights moved by one unit in the last place, which "
            f"cannot be done to a model wrapped as {wrapped.wrapping}: call "
            "converge_harness.probe.initial_weights(model) before anything wraps the model"
        )
    move_tensors(wrapped.copies, job.repeat_seed)
