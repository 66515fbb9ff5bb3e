"""``python -m converge_harness.rank.start.newest JOB.json``: what a requeued program goes on from.

A batch script calls it before it starts the program again. It prints a line with ``MARK`` and the
path of the job's newest complete checkpoint, or nothing after the mark if there is none: srun and
containers may print lines of their own. It sets the others aside, as converge does where it starts
the program itself. Of several nodes the first one does that; no rank has started yet.
"""

from __future__ import annotations

import os
import sys

from converge_harness.run_folder.checkpoints import (
    TornCheckpointError,
    newest_whole,
    set_torn_aside,
)
from converge_harness.run_folder.job import JobError, read_job
from converge_harness.run_folder.layout import NEWEST_CHECKPOINT as MARK


def main(path: str) -> None:
    """Raises SystemExit with a sentence if the job cannot be read, or a checkpoint not moved."""
    try:
        job = read_job(path)
        if not int(os.environ.get("SLURM_NODEID") or 0):
            set_torn_aside(job.run_folder, job.checkpoints)
    except (JobError, TornCheckpointError) as error:
        sys.exit(str(error))
    step = newest_whole(job.run_folder, job.checkpoints)
    print(f"{MARK}{'' if step is None else job.checkpoints.path(job.run_folder, step)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
