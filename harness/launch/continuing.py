"""Whether a run continues where an earlier start of it has left a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from converge_harness.launch.next_call import calls_again
from converge_harness.model import LONG, Job
from converge_harness.run_folder.checkpoints import newest_whole
from converge_harness.run_folder.layout import metrics_files
from converge_harness.run_folder.metrics import draws_random_numbers
from converge_harness.run_folder.passes import pass_folders
from converge_harness.store import Store
from converge_harness.trainers import comes_in_passes, left_passes, trainer_of


def saves_where_it_waits(job: Job, waits: Iterable[int]) -> tuple[int, ...]:
    """The steps, of those in ``waits``, at which a run writes a checkpoint before it waits.

    Empty if its trainer cannot continue from one, or if the set has its own checkpoint settings.
    Never below step ``LONG``: training a few steps again is faster than loading a checkpoint.
    """
    trainer, spec = trainer_of(job.spec), job.spec
    if not (spec.trainer.can.continues and trainer.own_rank_code):
        return ()
    if any(trainer.pass_problems(spec, spec.overrides, str, str)):
        return ()
    return tuple(step for step in waits if step >= LONG)


def continues_from(store: Store, job: Job, folder: Path, payload: Mapping[str, Any]) -> int | None:
    """The step of the checkpoint from which a job's run continues; None: it starts over.

    It starts over if it has no checkpoint, if its evidence or one of its sources has changed since,
    or if its experiment says how it is interrupted (elastic and fault sets). A run that has
    checkpoints only because it waited for others also starts over if its steps draw random numbers
    (dropout): the trainer may seed them anew at a start, which would FAIL a check of resumes in a
    set that is not about resumes.

    Args:
        folder: the run folder, which need not exist. payload: of this job.
    """
    if not left_passes(job, folder) or calls_again(job):
        return None
    step = newest_whole(folder, trainer_of(job.spec).checkpoint_form(job))
    if step is not None and not comes_in_passes(job):
        files = (file for each in pass_folders(folder) for file in metrics_files(each))
        if draws_random_numbers(files):
            return None
    # Asked last: it reads all evidence.
    return step if step is not None and store.can_continue(folder, payload) else None
