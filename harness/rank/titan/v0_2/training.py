"""What a rank does, from its job to the last step."""

from __future__ import annotations

import importlib
import os
import time
import types
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from converge_harness.rank.cpu import multiply_bf16_by_float32_kernels
from converge_harness.rank.own_techniques import OwnTechniques
from converge_harness.rank.recorder.imported import leave_imported
from converge_harness.rank.recorder.step_recorder import StepRecorder
from converge_harness.rank.titan.common.checkpoints import move_loaded_weights
from converge_harness.rank.titan.v0_2.config import Built, build_config, flat_config
from converge_harness.rank.titan.v0_2.shim import Prepared, prepare
from converge_harness.run_folder.job import RankJob
from converge_harness.run_folder.layout import GPU_OF_RANK

_HEAVY = (
    "torchtitan.train",
    "torchtitan.models.llama3",
    "torch._dynamo",
    "torch.distributed.checkpoint",
)
"""What ranks import while they build, train and load: paid once by a warm start."""


def preload(device: str) -> None:
    """Import what every rank needs; on a CPU, after the patches that must come before."""
    if device == "cpu":
        from converge_harness.rank.titan.common.cpu import prepare_torch

        prepare_torch()
    for name in _HEAVY:
        importlib.import_module(name)


def run(job: RankJob) -> None:
    """Train, or write the seed checkpoint.

    Raises SettingError with the keys that torchtitan's config does not take, and TechniqueError
    when a function of an own technique cannot be called.
    """
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    from converge_harness.rank.titan.v0_2 import train_spec

    init_logger()
    if GPU_OF_RANK in os.environ:  # the only one that this rank sees; 0.3 takes it by itself
        os.environ["LOCAL_RANK"] = "0"
    own = OwnTechniques(job)
    built = build_config(job)
    config, keys = own.apply_to_config(built.config, flat_config, built.new_keys)
    built = replace(built, config=config, declared=(*built.declared, *keys))
    if job.device == "cpu":
        multiply_bf16_by_float32_kernels(flat_config(built.config))
    spec = train_spec.register(job, built.config, own.watch_model)
    prepared = prepare(built.config, job.device, job.without_fixes, spec.parallelize_fn)
    _end_without_sleeping()
    trainer = Trainer(built.config)
    try:
        if job.makes_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
            leave_imported(job.run_folder, rank=0)
        else:
            _train(trainer, job, built, prepared, own)
    finally:
        trainer.close()
    dist.destroy_process_group()


def _train(
    trainer: Any, job: RankJob, built: Built, prepared: Prepared, own: OwnTechniques
) -> None:
    from converge_harness.rank.titan.common.training import train
    from converge_harness.rank.titan.v0_2 import audit, hooks

    injected: list[str] = []

    def after_first_step(recorder: StepRecorder) -> None:
        audit.write_in_force(trainer, built, prepared, recorder, injected, own)

    recorder = hooks.attach(trainer, job, after_first_step)
    if job.repeat == "ulp":
        move_loaded_weights(trainer, job.repeat_seed)
    train(trainer, job, recorder, own, injected)


def _end_without_sleeping() -> None:
    """``Trainer.train`` ends with two seconds of sleep on rank 0, for other ranks to finish.

    A barrier makes sure of that here, and the sleep would only make every job longer.
    """
    from torchtitan import train

    train.time = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)
