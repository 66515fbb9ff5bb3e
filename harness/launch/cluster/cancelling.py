"""Takes jobs out of a scheduler's hands, and has their run folders say why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from harness.errors import StoreError
from harness.launch.cluster.backend import Backend
from harness.launch.cluster.submission import Submission, write_submission


def cancel_all(backend: Backend, jobs: Mapping[Path, Submission]) -> StoreError | None:
    """Write the submissions of jobs by run folder, which say why, then have the jobs ended.

    They are ended, too, where that cannot be written, which is no reason to let them run: the
    first such error comes back.

    Raises ClusterError when the scheduler cannot be reached.
    """
    untold = None
    for folder, submission in jobs.items():
        try:
            write_submission(folder, submission)
        except StoreError as error:
            untold = untold or error
    backend.cancel([each.job_id for each in jobs.values() if each.job_id])
    return untold
