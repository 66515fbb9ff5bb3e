"""What a rank does, from its job to the last step."""

from __future__ import annotations

import functools
from typing import Any

import torch

from harness.rank.inject import call_injected
from harness.rank.job import Job
from harness.rank.settings import SettingError
from harness.rank.ulp import move_by_one_ulp
from harness.rank.writer import write_json


def preload(device: str) -> None:
    """Import torch and torchtitan; on a CPU, with the one patch that must come before."""
    if device == "cpu":
        from harness.rank.titan_0_2 import cpu_device

        cpu_device.announce_cpu()
    import torchtitan.models.llama3
    import torchtitan.train  # noqa: F401 - what every rank needs


def run(job: Job) -> None:
    """Train, or write the seed checkpoint.

    Raises SettingError for the first key that torchtitan's config does not take.
    """
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    from harness.rank.titan_0_2 import config, shim, train_spec

    init_logger()
    if job.device == "cpu":
        torch.set_num_threads(1)  # also where torchrun starts a single rank: same sums everywhere
    built = config.build(job)
    for problem in built.problems:
        raise SettingError(problem)
    spec = train_spec.register(job, built.config)
    counts = shim.prepare(built.config, job.device, job.without_fixes, spec.parallelize_fn)
    trainer = Trainer(built.config)
    try:
        if job.makes_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            _train(trainer, job, built, counts)
    finally:
        trainer.close()
    torch.distributed.destroy_process_group()


def _train(trainer: Any, job: Job, built: Any, counts: Any) -> None:
    from harness.rank.titan_0_2 import hooks, in_force

    def write_audit(is_writer: bool) -> None:  # noqa: FBT001 - the probe's callback
        if is_writer:
            found = in_force.audit(trainer, job, built, counts)
            write_json(job.run_folder / "in_force.json", found)

    probe = hooks.attach(trainer, job, write_audit)
    if job.repeat == "ulp":
        _move_loaded_weights(trainer)
    if job.inject is not None:
        call_injected(job.inject, trainer)
    trainer.train()
    probe.close()


def _move_loaded_weights(trainer: Any) -> None:
    """Move the weights once the seed checkpoint is loaded, which ``train`` begins with."""
    load = trainer.checkpointer.load

    @functools.wraps(load)
    def load_and_move(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        move_by_one_ulp(trainer.model_parts)
        return loaded

    trainer.checkpointer.load = load_and_move
