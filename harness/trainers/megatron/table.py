"""Megatron-Core's part of an experiment file: ``[trainer]``, train configs, and what is refused.

A train config has a table for each dataclass of Megatron-Core, with that class's own keys, and one
table of converge (docs/megatron.md)::

    [converge.data]     # the project's synthetic corpus; required
    [training]          # local_batch_size (of a microbatch), global_batch_size, seq_len, steps
    [transformer]       # TransformerConfig
    [gpt]               # arguments of GPTModel: vocab_size, position_embedding_type, …
    [ddp]               # DistributedDataParallelConfig
    [optimizer]         # OptimizerConfig
    [lr_scheduler]      # OptimizerParamScheduler

The toolchain checks the keys against the installed classes. Here is what no toolchain takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from converge_harness.errors import ConfigError, Problem
from converge_harness.model import SetSpec, Technique, TrainConfig
from converge_harness.toml import Environment, FilePath, Where, flatten
from converge_harness.trainers.table import TrainerTable, plain_train_config

DEFAULT_TOOLCHAIN = "megatron-core-0.19.2"
OWNED = {
    "transformer.tensor_model_parallel_size": "parallelism.tp",
    "transformer.pipeline_model_parallel_size": "parallelism.pp",
    "transformer.context_parallel_size": "parallelism.cp",
    "transformer.expert_model_parallel_size": "parallelism.ep",
    "transformer.bf16": 'techniques = ["bf16"]',
    "optimizer.bf16": 'techniques = ["bf16"]',
    "ddp.use_distributed_optimizer": "parallelism.dp_shard",
    "ddp.num_distributed_optimizer_instances": "parallelism.dp_replicate beside dp_shard",
    "optimizer.use_distributed_optimizer": "parallelism.dp_shard",
}
"""Train config keys for which the experiment file has its own key."""
MODEL_KEYS = (
    "gpt.vocab_size",
    "gpt.position_embedding_type",
    "gpt.share_embeddings_and_output_weights",
    "training.seq_len",  # of learned_absolute positions
    *(
        f"transformer.{name}"
        for name in (
            *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"),
            *("num_query_groups", "kv_channels", "gated_linear_unit", "add_bias_linear"),
            *("add_qkv_bias", "qk_layernorm", "normalization", "init_method"),
            *("embedding_init_method", "output_layer_init_method", "apply_query_key_layer_scaling"),
            *("softmax_type", "num_moe_experts", "moe_ffn_hidden_size", "moe_layer_freq"),
            *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
        )
    ),
)
"""Keys, or their beginnings, on which shapes and values of initial weights depend."""

_ENGINE = "needs Transformer Engine, which the toolchain does not have"
_OTHER_MODEL = "is another model than the GPT that converge builds of Megatron-Core's layers"
_DRAWS = "draws random numbers, which differ in every layout"
_UNTESTED = "is not supported by converge's rank code for Megatron-Core"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("transformer.fp8", "transformer.fp8_param", "transformer.fp4"),
            *("transformer.use_te_rng_tracker", "transformer.use_te_activation_func"),
            *("transformer.use_kitchen", "transformer.tp_comm_overlap"),
            *("transformer.cuda_graph_impl", "transformer.fine_grained_activation_offloading"),
            *("transformer.moe_permute_fusion", "transformer.moe_router_fusion"),
            *("transformer.moe_latent_size", "transformer.moe_router_padding_for_fp8"),
            "transformer.moe_router_padding_for_quantization",
            *("transformer.fp8_output_proj", "transformer.use_transformer_engine_op_fuser"),
            *("transformer.fused_residual_rmsnorm", "transformer.use_grouped_gemm_for_dense_mlp"),
            *("transformer.use_grouped_gemm_for_shared_expert", "ddp.fp4_param_gather"),
            "transformer.batch_invariant_backend",
            *("optimizer.use_precision_aware_optimizer", "ddp.fp8_param_gather"),
            "transformer.transformer_impl",
        ),
        _ENGINE,
    ),
    **dict.fromkeys(
        (
            *("transformer.multi_latent_attention", "transformer.mtp_num_layers"),
            *("transformer.attention_output_gate", "transformer.experimental_attention_variant"),
            *("transformer.is_hybrid_model", "transformer.heterogeneous_block_specs"),
            *("transformer.qk_l2_norm", "transformer.enable_mhc_connections"),
        ),
        _OTHER_MODEL,
    ),
    **dict.fromkeys(
        (
            *("transformer.fp16", "optimizer.fp16", "ddp.use_custom_fsdp"),
            "ddp.megatron_fsdp_use_decoupled_grad",
            *("ddp.megatron_fsdp_version", "ddp.megatron_fsdp_main_params_dtype"),
            *("ddp.preserve_fp32_weights", "ddp.outer_dp_sharding_strategy"),
            *("ddp.megatron_fsdp_cuda_graph_mode", "ddp.fsdp_double_buffer"),
            *("ddp.megatron_fsdp_max_pool_double_buffer", "ddp.fsdp_manual_registration"),
            "ddp.delay_wgrad_compute",
            *("transformer.pipeline_model_parallel_layout", "transformer.hybrid_context_parallel"),
            "transformer.num_layers_in_first_pipeline_stage",
            "transformer.num_layers_in_last_pipeline_stage",
            "transformer.account_for_embedding_in_pipeline_split",
            "transformer.account_for_loss_in_pipeline_split",
            *("transformer.moe_expert_capacity_factor", "transformer.moe_token_dropping"),
            *("transformer.moe_router_enable_expert_bias", "transformer.moe_enable_routing_replay"),
            *("transformer.moe_router_topk_limited_devices", "transformer.moe_z_loss_coeff"),
            *("transformer.moe_expert_rank_capacity_factor", "transformer.moe_paged_stash"),
            *("transformer.moe_mlp_glu_interleave_size", "transformer.moe_use_grouped_tensor"),
            *("transformer.moe_single_grouped_weight", "transformer.moe_single_grouped_bias"),
            *("transformer.moe_router_quantile_balancing_ema", "transformer.use_mup"),
            *("transformer.gtp_weight_remat_size", "transformer.expert_gtp_weight_remat_size"),
            "transformer.tensor_parallel_num_weight_shards",
            "transformer.expert_tensor_parallel_num_weight_shards",
            *("transformer.gtp_remat_opt_in_modules", "transformer.mlp_chunks_for_training"),
            *("transformer.moe_dispatch_fwd_dtype", "transformer.moe_combine_bwd_dtype"),
            "ddp.param_name_patterns_for_fp32_local_accumulation",
            *("optimizer.grad_norm_skip_threshold", "optimizer.optimizer_cuda_graph"),
            "optimizer.overlap_param_gather_with_optimizer_step",
            "optimizer.use_layer_wise_distributed_optimizer",
        ),
        _UNTESTED,
    ),
    **dict.fromkeys(
        (
            *("transformer.moe_input_jitter_eps", "transformer.moe_router_force_load_balancing"),
            "transformer.moe_router_force_biased",
        ),
        _DRAWS,
    ),
}
"""Train config keys that no job may set, and why; some of them only in newer releases."""
_OFF_AT: Mapping[str, object] = {
    "transformer.moe_router_force_biased": None,  # 0.0 draws random routes
    "transformer.mlp_chunks_for_training": 1,
    "transformer.transformer_impl": "local",
    "ddp.megatron_fsdp_version": 1,
    "ddp.megatron_fsdp_main_params_dtype": "float32",
    "ddp.preserve_fp32_weights": True,
    "ddp.outer_dp_sharding_strategy": "no_shard",
    "transformer.gtp_weight_remat_size": 1,
    "transformer.expert_gtp_weight_remat_size": 1,
}
"""Keys of ``REFUSED``, and the value that switches each off; for all others see ``_is_off``."""


class MegatronTable(TrainerTable):
    """``kind = "megatron"``."""

    toolchain: Environment = DEFAULT_TOOLCHAIN
    weights: FilePath | None = None
    """The file with the names of another trainer's checkpoint (``mapping.py``)."""


def megatron_train_config(tables: Mapping[str, Any], path: str, place: str) -> TrainConfig:
    """Megatron-Core's own tables, and ours; raises ConfigError for what no job may have.

    Args:
        tables: as TOML gave them.
        path: name of the train config in messages.
        place: what comes before a dotted key in messages.
    """
    config = plain_train_config(tables, path, place)
    settings = dict(flatten(dict(config.settings)))
    problems = [
        Problem(
            f"{place} {key}",
            "is decided by the experiment file",
            f"leave it out, and say it there: {OWNED[key]}",
        )
        for key in settings
        if key in OWNED
    ]
    problems += refused_settings(settings, lambda key: f"{place} {key}")
    if config.data is None:
        problems.append(
            Problem(
                f"{place} converge.data",
                "is missing: converge trains Megatron-Core on its own corpus",
                "add a table [converge.data], which may be empty",
            )
        )
    if problems:
        raise ConfigError(problems)
    return config


def refused_settings(settings: Mapping[str, Any], where: Where) -> Iterator[Problem]:
    """Keys that no job may set to anything but off."""
    for key, value in settings.items():
        if key in REFUSED and not _is_off(key, value):
            yield Problem(where(key), REFUSED[key], "leave it out")


def _is_off(key: str, value: object) -> bool:
    if key in _OFF_AT:
        return value == _OFF_AT[key]
    return not value or value == "none"


def has_auxiliary_loss(spec: SetSpec) -> bool:
    """Whether experts are balanced by a loss of the microbatch (``aux_loss``, the default)."""
    kind = spec.setting("transformer.moe_router_load_balancing_type")
    balanced = spec.setting("transformer.moe_aux_loss_coeff")
    return bool(
        spec.setting("transformer.num_moe_experts") and balanced and kind in (None, "aux_loss")
    )


def set_problems(spec: SetSpec, where: Where) -> Iterator[Problem]:
    """What of a set our rank code for Megatron-Core cannot do."""
    degrees = spec.parallelism
    if degrees.cp > 1:
        yield Problem(
            where("parallelism.cp"), f"context parallelism {_ENGINE}", "use tp or pp instead"
        )
    for technique in spec.technique_names:
        if technique != Technique.BF16:
            yield Problem(
                where("techniques"), f"Megatron-Core has no technique {technique!r}", "use bf16"
            )
    for key in ("cp_rotation", "spmd_backend"):
        if getattr(spec, key):
            yield Problem(where(key), "is for torchtitan only", "leave it out")
