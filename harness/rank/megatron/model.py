"""Process groups, model parts, DDP, optimizer and schedule: Megatron-Core's own, for a job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from converge_harness.rank.megatron.config import MegatronConfig
from converge_harness.run_folder.job import RankJob
from converge_harness.run_folder.layout import GPU_OF_RANK

Wrapped: TypeAlias = _BaseDataParallel
"""A model chunk as the training loop calls it: in ``DistributedDataParallel`` or Megatron-FSDP."""


def device_and_backend(job: RankJob) -> tuple[torch.device, str]:
    """Where this rank computes, and what connects it with the others."""
    if job.device == "cpu":
        return torch.device("cpu"), "gloo"
    # A rank that shares a GPU sees that one alone.
    place = 0 if GPU_OF_RANK in os.environ else int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device(job.device, place), "nccl"


def start_ranks(job: RankJob, config: MegatronConfig) -> torch.device:
    """Connect the ranks, and seed them. Returns this rank's device. Collective over the world."""
    device, backend = device_and_backend(job)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if job.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    dist.init_process_group(backend)
    transformer = config.tables.transformer
    parallel_state.initialize_model_parallel(
        transformer.tensor_model_parallel_size,
        transformer.pipeline_model_parallel_size,
        transformer.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=transformer.expert_model_parallel_size,
        expert_tensor_parallel_size=transformer.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=config.tables.ddp.num_distributed_optimizer_instances,
    )
    torch.manual_seed(job.seed)
    model_parallel_cuda_manual_seed(job.seed)
    torch.use_deterministic_algorithms(job.deterministic)
    return device


def build_model(config: MegatronConfig, device: torch.device) -> list[GPTModel]:
    """The model chunks of this rank's pipeline stage; one, unless the schedule interleaves."""
    transformer = config.tables.transformer
    # The config's function ends every forward-backward pass: it reduces gradients.
    transformer.finalize_model_grads_func = finalize_model_grads
    chunks = transformer.virtual_pipeline_model_parallel_size
    return [_chunk(config, stage).to(device) for stage in (range(chunks) if chunks else (None,))]


def _chunk(config: MegatronConfig, stage: int | None) -> GPTModel:
    transformer, gpt = config.tables.transformer, config.tables.gpt
    model = GPTModel(
        transformer,
        _layers(config, stage),
        vocab_size=gpt.vocab_size,
        max_sequence_length=config.tables.training.seq_len,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        parallel_output=gpt.parallel_output,
        share_embeddings_and_output_weights=gpt.share_embeddings_and_output_weights,
        position_embedding_type=gpt.position_embedding_type,
        rotary_base=gpt.rotary_base,
        rotary_percent=gpt.rotary_percent,
        rope_scaling=gpt.rope_scaling,
        rope_scaling_factor=gpt.rope_scaling_factor,
        vp_stage=stage,
    )
    return model.to(config.dtype)


def _layers(config: MegatronConfig, stage: int | None) -> Any:
    """Which modules layers have; with experts ``moe_layer_freq`` says which layers have some."""
    transformer = config.tables.transformer
    if transformer.num_moe_experts is None:
        return get_gpt_layer_local_spec(
            qk_layernorm=transformer.qk_layernorm, normalization=transformer.normalization
        )
    return get_gpt_decoder_block_spec(
        transformer,
        use_transformer_engine=False,
        normalization=transformer.normalization,
        vp_stage=stage,
    )


def wrap_model(config: MegatronConfig, chunks: Sequence[GPTModel]) -> list[Wrapped]:
    """The chunks in Megatron-Core's DDP or FSDP, which have buffers of parameters and gradients."""
    tables = config.tables
    wrapper = FullyShardedDataParallel if tables.ddp.use_megatron_fsdp else DistributedDataParallel
    parts = [
        wrapper(
            tables.transformer,
            # It fills in a bucket size.
            replace(tables.ddp),
            chunk,
            disable_bucketing=number > 0,
        )
        for number, chunk in enumerate(chunks)
    ]
    _overlap(config, parts)
    return parts


def _overlap(config: MegatronConfig, parts: Sequence[Wrapped]) -> None:
    """Have the schedule call what overlaps communication, as Megatron-LM's ``train`` does."""
    transformer, ddp = config.tables.transformer, config.tables.ddp
    if not ddp.overlap_grad_reduce:
        return

    def of_all(name: str) -> Any:
        found = [getattr(part, name) for part in parts]
        return found if len(found) > 1 else found[0]

    transformer.no_sync_func = of_all("no_sync")
    transformer.grad_sync_func = of_all("start_grad_sync")
    if ddp.overlap_param_gather and ddp.align_param_gather:
        transformer.param_sync_func = of_all("start_param_sync")


def build_optimizer(config: MegatronConfig, parts: Sequence[Wrapped]) -> Any:
    """A ``ChainedOptimizer`` of the parts' parameters. Collective over the world."""
    return get_megatron_optimizer(config.tables.optimizer, list(parts))


def build_schedule(config: MegatronConfig, optimizer: Any) -> OptimizerParamScheduler:
    """The learning rate's schedule, counted in optimizer steps; weight decay stays as it is."""
    given, optimizer_config = config.tables.lr_scheduler, config.tables.optimizer
    # It refuses a warm-up that does not end, as in the one step of a reference.
    steps = max(config.tables.training.steps, given.lr_warmup_steps + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=given.init_lr,
        max_lr=optimizer_config.lr,
        min_lr=optimizer_config.min_lr or 0.0,
        lr_warmup_steps=given.lr_warmup_steps,
        lr_decay_steps=given.lr_decay_steps or steps,
        lr_decay_style=given.lr_decay_style,
        start_wd=optimizer_config.weight_decay,
        end_wd=optimizer_config.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
    )
