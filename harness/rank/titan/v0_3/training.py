"""One rank of a job, from its config to the last step."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
from torchtitan.observability import structured_logger
from torchtitan.tools.logging import init_logger, logger

from converge_harness.rank.cpu import multiply_bf16_by_float32_kernels
from converge_harness.rank.own_techniques import OwnTechniques
from converge_harness.rank.recorder.imported import leave_imported
from converge_harness.rank.titan.common.audit import Happened
from converge_harness.rank.titan.common.checkpoints import move_loaded_weights
from converge_harness.rank.titan.common.counters import FusionCount, RotationCount
from converge_harness.rank.titan.common.training import train
from converge_harness.rank.titan.v0_3 import attention, audit, hooks
from converge_harness.rank.titan.v0_3.config import BuiltConfig, build_config, flat_config
from converge_harness.rank.titan.v0_3.series import CUDA_GRAPHS
from converge_harness.rank.titan.v0_3.streaming_package import import_streaming, is_installed
from converge_harness.run_folder.job import RankJob

_HEAVY = (
    "torchtitan.trainer",
    "torchtitan.models.llama3.config_registry",
    "torch._dynamo",
    "torch.distributed.checkpoint",
)
"""What ranks import only while they build, train and load: paid once by a warm start."""


def preload() -> None:
    """Import what a rank will need later, so that a forked rank finds it imported."""
    for name in _HEAVY:
        importlib.import_module(name)
    if is_installed():
        import_streaming()


def run(job: RankJob) -> None:
    """Train, or write the seed checkpoint.

    Raises SettingError when the config cannot be built, InjectError when ``inject`` cannot be
    found, TechniqueError when a function of an own technique cannot be called, and whatever the
    trainer raises.
    """
    init_logger()
    own = OwnTechniques(job)
    config = _with_own(build_config(job), own)
    structured_logger.init_structured_logger(
        source="training",
        output_dir=config.trainer.dump_folder,
        enable=config.trainer.debug.enable_structured_logging,
    )
    if job.device == "cpu":
        multiply_bf16_by_float32_kernels(config.flat)
    fusion = _prepare_compile(config.trainer.compile, job.device)
    trainer = config.trainer.build()
    try:
        if job.makes_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
            leave_imported(job.run_folder, rank=0)  # initial weights are of the model's code, too
            logger.info("Created seed checkpoint")
        else:
            _train(trainer, job, config, fusion, own)
    finally:
        trainer.close()
    dist.destroy_process_group()


def _with_own(built: BuiltConfig, own: OwnTechniques) -> BuiltConfig:
    """The config as the experiment file's own techniques make it."""
    config, keys = own.apply_to_config(built.trainer, flat_config, built.new_keys)
    if keys:
        declared = tuple(dict.fromkeys((*built.declared, *keys)))
        built = replace(built, trainer=config, flat=flat_config(config), declared=declared)
    config.model_spec = own.watch_model(config.model_spec)
    return replace(built, trainer=config)


def _prepare_compile(compile_config: Any, device: str) -> FusionCount | None:
    """Make compiling repeatable; count fused operators where async TP is switched on."""
    if not compile_config.enable:
        return None
    # Cached graphs hold the names of process groups of the run that filled the cache: a later run
    # dies with "Could not resolve the process group".
    torch._functorch.config.enable_autograd_cache = False
    # A pool of compile workers per rank costs more than it gives where ranks share few cores.
    torch._inductor.config.compile_threads = 1
    if not compile_config.enable_async_tensor_parallel:
        return None
    # A graph from the cache would not pass the pass whose work is counted.
    torch._inductor.config.fx_graph_cache = False
    return FusionCount(device)


def _train(
    trainer: Any,
    job: RankJob,
    config: BuiltConfig,
    fusion: FusionCount | None,
    own: OwnTechniques,
) -> None:
    rotation = RotationCount(job.device) if job.parallelism.cp > 1 else None
    if job.device == "cpu":
        attention.write_out_masks(trainer)
    if job.repeat == "ulp":
        move_loaded_weights(trainer, job.repeat_seed)
    if job.repeat == "rounding" or any(fault.kind == "nan_batch" for fault in job.faults):
        # What hooks of modules do would be captured once, and the same in every replay.
        _run_without_cuda_graph(trainer)

    injected: list[str] = []
    happened = Happened(injected, rotation=rotation, fusion=fusion, own=own)
    recorder = hooks.attach(
        trainer, job, lambda recorder: audit.write_in_force(trainer, config, recorder, happened)
    )
    train(trainer, job, recorder, own, injected)


def _run_without_cuda_graph(trainer: Any) -> None:
    """Run every microbatch as it is called, whatever the config says; that of a repeat may not."""
    if CUDA_GRAPHS:
        trainer.fwd_bwd_fn = trainer._forward_backward_body
