"""What every release's trainer does from its recorder to its last step."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from converge_harness.rank.faults import install_faults
from converge_harness.rank.inject import call_injected
from converge_harness.rank.own_techniques import OwnTechniques
from converge_harness.rank.recorder.step_recorder import StepRecorder
from converge_harness.rank.repeats import round_in_repeat
from converge_harness.rank.waiting import wait_between_steps
from converge_harness.run_folder.job import RankJob


def train(
    trainer: Any, job: RankJob, recorder: StepRecorder, own: OwnTechniques, injected: list[str]
) -> None:
    """Change the built trainer as the job says, and train. Collective over the world.

    ``injected``: gets ``file.py:function`` of what was injected. Raises InjectError,
    TechniqueError, and whatever the trainer raises.
    """
    round_in_repeat(job.repeat, trainer.model_parts, job.repeat_seed, recorder.view.dp_rank)
    own.apply_to_trainer(trainer)
    if job.inject:
        injected.append(call_injected(job.inject, trainer))
    if recorder.this_pass:
        install_faults(trainer, job, recorder.this_pass.number)
    wait_between_steps(trainer, job.run_folder)
    trainer.train()
    recorder.close()
    # The rank that serves the process group's store must not leave before the others are done.
    dist.barrier()
