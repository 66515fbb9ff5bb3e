"""The initial weights of a probed run: those of an ``ulp`` repeat are moved."""

from __future__ import annotations

import os

import torch

from converge_harness.probe.errors import ProbeError
from converge_harness.probe.wrapping import Wrapped
from converge_harness.rank.repeats import move_by_one_ulp, move_tensors
from converge_harness.run_folder.checkpoints import newest_whole
from converge_harness.run_folder.job import JobError, RankJob, read_job
from converge_harness.run_folder.layout import SEGMENT_VARIABLE

_moved: set[str] = set()
"""Jobs whose initial weights this process moved before the model was wrapped."""


def job_of(path: str) -> RankJob:
    """The job in a file; of an elastic set, in the segment that this call trains.

    Raises ProbeError if it cannot be read, or is not probed.
    """
    segment = os.environ.get(SEGMENT_VARIABLE)
    try:
        job = read_job(path, None if segment is None else int(segment))
    except JobError as error:
        raise ProbeError(f"$CONVERGE_JOB: {error}") from error
    if not job.is_probed:
        raise ProbeError(
            f"$CONVERGE_JOB: {path}: its program only writes curves (trainer.probe = false): unset "
            "the variable, or set trainer.probe = true"
        )
    return job


def _is_moved(job: RankJob) -> bool:
    """Whether this start moves weights: not if it goes on from a checkpoint, which has moved ones.

    The program may have loaded it by now.
    """
    goes_on = job.resumes and newest_whole(job.run_folder, job.checkpoints) is not None
    return job.repeat == "ulp" and not goes_on


def move_initial_weights(model: torch.nn.Module, path: str) -> None:
    """Move the weights of a model that is not wrapped yet, if the job is an ``ulp`` repeat.

    Raises ProbeError for weights without values, and when they were moved before.
    """
    job = job_of(path)
    if not _is_moved(job):
        return
    if path in _moved:
        raise ProbeError("initial_weights has already moved the weights of this run: call it once")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ProbeError(
            "initial_weights: the model is on the meta device and has no values to move yet; "
            "call it after the model has its weights"
        )
    move_by_one_ulp([model], job.repeat_seed)
    _moved.add(path)


def move_wrapped_weights(wrapped: Wrapped, job: RankJob, path: str) -> None:
    """Move the weights of an ``ulp`` repeat, unless ``initial_weights`` has moved them.

    Raises ProbeError if the model's wrapping does not allow it.
    """
    if not _is_moved(job) or path in _moved:
        return
    if not wrapped.movable:
        raise ProbeError(
            f"{job.name} starts from weights moved by one unit in the last place, which "
            f"cannot be done to a model wrapped as {wrapped.wrapping}: call "
            "converge_harness.probe.initial_weights(model) before anything wraps the model"
        )
    move_tensors(wrapped.copies, job.repeat_seed)
