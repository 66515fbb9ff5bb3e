"""Whether a run continues where an earlier start of it has left a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converge_harness.launch.next_call import calls_again
from converge_harness.model import Job
from converge_harness.run_folder.checkpoints import newest_whole
from converge_harness.store import Store
from converge_harness.trainers import comes_in_passes


def continues_from(store: Store, job: Job, folder: Path, payload: Mapping[str, Any]) -> int | None:
    """The step of the checkpoint from which a job's run continues; None: it starts over.

    It starts over if it has no checkpoint, if its evidence or one of its sources has changed since,
    or if its experiment says how it is interrupted (elastic and fault sets).

    Args:
        folder: the run folder, which need not exist. payload: of this job.
    """
    if not comes_in_passes(job) or calls_again(job):
        return None
    step = newest_whole(folder)
    # Asked last: it reads all evidence.
    return step if step is not None and store.can_continue(folder, payload) else None
