"""Model families of torchtitan 0.3 at a size for two CPU cores: config functions for models.toml.

``[converge.model]`` reshapes torchtitan's Llama 3 and Qwen 3. Other families are built here by
torchtitan's own builders, so that their parts, their initial weights and the code that distributes
them are torchtitan's; only sizes differ. It is also an example of config functions with parameters
(docs/own-model.md). What a commit of summer 2026 may not have yet is imported where it is used, so
that the other models train there, too (docs/bisect.md).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.models import deepseek_v3, gpt_oss
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.deepseek_v3.model import DeepSeekV3Model
from torchtitan.models.gpt_oss.config_registry import gpt_oss_debugmodel_flex
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.trainer import Trainer


def tiny_deepseek_v3(
    dim: int = 64,
    n_layers: int = 3,
    num_experts: int = 4,
    vocab_size: int = 512,
    mtp_layers: int = 0,
) -> Trainer.Config:
    """Multi-head latent attention; the first layer is dense, the others have experts."""
    config = deepseek_v3_debugmodel()
    layers = deepseek_v3._build_dsv3_layers(**_latent(dim, n_layers, num_experts))
    config.model_spec.model = DeepSeekV3Model.Config(
        **_around(deepseek_v3, dim, vocab_size),
        layers=layers,
        mtp_layers=deepseek_v3._build_mtp_layers(layers[-1], dim=dim, num_mtp_layers=mtp_layers),
    )
    if mtp_layers:
        from torchtitan.models.deepseek_v3.mtp import MTPLoss

        config.loss = MTPLoss.Config(global_vocab_size=vocab_size)
    return config


def tiny_moonlight(
    dim: int = 64, n_layers: int = 3, num_experts: int = 4, vocab_size: int = 512
) -> Trainer.Config:
    """Kimi's text model, with torchtitan's AdamW: Moonlight without its size."""
    from torchtitan.models import kimi_k2_7
    from torchtitan.models.kimi_k2_7.model import KimiK25Model

    config = deepseek_v3_debugmodel()
    spec = kimi_k2_7.model_registry("debugmodel")
    spec.model = KimiK25Model.Config(
        **_around(kimi_k2_7, dim, vocab_size),
        layers=kimi_k2_7._build_kimi_layers(**_latent(dim, n_layers, num_experts)),
        vision_encoder=None,
    )
    config.model_spec = spec
    return config


class CastingExperts(GptOssGroupedExperts):
    """GPT-OSS's experts, whose result has the type of what they were given.

    torchtitan's own answer in bfloat16, unlike those of all other models (``models/gpt_oss/moe.py``
    against ``models/common/moe.py``, ``type_as``), and by torchtitan 0.3.0 a model that computes in
    float32 then ends with "scatter(): Expected self.dtype to be equal to src.dtype".
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        """The keys of GPT-OSS's experts."""

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:  # noqa: N803 - sharding is declared by these names
        return super().forward(x_RD, num_tokens_per_expert_E).type_as(x_RD)


def tiny_gpt_oss(
    dim: int = 64, n_layers: int = 2, num_experts: int = 4, vocab_size: int = 512
) -> Trainer.Config:
    """Attention sinks, a sliding window in every other layer, experts with biases."""
    config = gpt_oss_debugmodel_flex()
    rope = CosSinRoPE.Config(dim=16, max_seq_len=4096, theta=150000.0)
    layers = gpt_oss._build_gptoss_layers(
        dim=dim,
        n_layers=n_layers,
        hidden_dim=dim,
        num_experts=num_experts,
        top_k=2,
        load_balance_coeff=1e-3,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=rope,
    )
    for layer_id, layer in enumerate(layers):
        experts = layer.moe.routed_experts.inner_experts
        layer.moe.routed_experts.inner_experts = CastingExperts.Config(
            dim=experts.dim,
            hidden_dim=experts.hidden_dim,
            num_experts=experts.num_experts,
            param_init=experts.param_init,
        )
        # Of every width the builder gives it 64 heads of 64.
        layer.attention = gpt_oss._make_gptoss_attn_config(
            dim=dim,
            layer_id=layer_id,
            attn_backend="flex",
            n_heads=4,
            n_kv_heads=2,
            head_dim=16,
            sliding_window_size=layer.attention.sliding_window_size,
            rope=rope,
        )
    config.model_spec.model = gpt_oss.GptOssModel.Config(
        **_around(gpt_oss, dim, vocab_size), layers=layers
    )
    return config


def tiny_muse_glimmer(dim: int = 64, n_layers: int = 2, vocab_size: int = 512) -> Trainer.Config:
    """Gain-centered norms, windows of 128 tokens in every other layer, a soft cap on the logits."""
    from torchtitan.models import muse_glimmer
    from torchtitan.models.muse_glimmer.config_registry import muse_glimmer_debugmodel

    config = muse_glimmer_debugmodel()
    config.model_spec.model = muse_glimmer._muse_glimmer_config(
        dim=dim,
        n_layers=n_layers,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        vocab_size=vocab_size,
        max_seq_len=4096,
        window_pattern=[128, 0],
        output_multiplier=1.0,
        attn_backend="flex",
    )
    return config


def _latent(dim: int, n_layers: int, num_experts: int) -> dict[str, Any]:
    """Layers of DeepSeek V3 and of Kimi, which torchtitan builds by the same function."""
    return {
        "n_layers": n_layers,
        "n_dense_layers": 1,
        "dim": dim,
        "n_heads": 4,
        "q_lora_rank": 0,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "mscale": 0.70,
        "dense_hidden_dim": 2 * dim,
        "moe_hidden_dim": dim,
        "num_experts": num_experts,
        "num_shared_experts": 1,
        "router_top_k": 2,
        "router_score_func": "softmax",
        "attn_backend": "flex",
        "moe_comm_backend": "standard",
        "non_blocking_capacity_factor": None,
        "rope": ComplexRoPE.Config(dim=16, max_seq_len=4096, theta=10000.0),
    }


def _around(family: Any, dim: int, vocab_size: int) -> dict[str, Any]:
    """What is around the layers of a decoder, with the initial weights of its family."""
    return {
        "dim": dim,
        "vocab_size": vocab_size,
        "tok_embeddings": Embedding.Config(
            num_embeddings=vocab_size, embedding_dim=dim, param_init=family._EMBEDDING_INIT
        ),
        "norm": RMSNorm.Config(normalized_shape=dim, param_init=family._NORM_INIT),
        "lm_head": Linear.Config(
            in_features=dim, out_features=vocab_size, param_init=family._output_linear_init(dim)
        ),
    }
