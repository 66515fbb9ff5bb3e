"""Whether a run continues where an earlier start of it has left a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converge_harness.launch.next_call import calls_again
from converge_harness.model import Job
from converge_harness.run_folder.checkpoints import newest_whole
from converge_harness.store import Store
from converge_harness.trainers import left_passes, trainer_of


def saves_where_it_waits(job: Job) -> bool:
    """Whether a run writes a checkpoint before it waits for others.

    Not if its trainer cannot continue from one, or if it has settings of its own for checkpoints.
    """
    trainer, spec = trainer_of(job.spec), job.spec
    problems = trainer.pass_problems(spec, spec.overrides, str, str)
    return spec.trainer.can.continues and trainer.own_rank_code and not [*problems]


def continues_from(store: Store, job: Job, folder: Path, payload: Mapping[str, Any]) -> int | None:
    """The step of the checkpoint from which a job's run continues; None: it starts over.

    It starts over if it has no checkpoint, if its evidence or one of its sources has changed since,
    or if its experiment says how it is interrupted (elastic and fault sets).

    Args:
        folder: the run folder, which need not exist. payload: of this job.
    """
    if not left_passes(job, folder) or calls_again(job):
        return None
    step = newest_whole(folder, trainer_of(job.spec).checkpoint_form(job))
    # Asked last: it reads all evidence.
    return step if step is not None and store.can_continue(folder, payload) else None
