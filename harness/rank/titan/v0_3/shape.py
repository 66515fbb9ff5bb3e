"""The model of a job: the base config's, reshaped, with the CPU's attention and Float8 layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.models.common.attention import FlexAttention

from converge_harness.rank.settings import KeyProblem, SettingError
from converge_harness.rank.titan.v0_3.attention import DenseFlexAttention

_RECIPES = {"float8": "tensorwise", "float8_rowwise": "rowwise"}
_DECODER_KEYS = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size")
_QWEN3_KEYS = (*_DECODER_KEYS, "head_dim")
_QWEN3_MOE_KEYS = (*_QWEN3_KEYS, "moe_hidden_dim", "num_experts", "top_k")


def reshape_model(spec: Any, shape: Mapping[str, int], module: str) -> Any:
    """The model spec with ``[converge.model]``'s shape in place of its own.

    ``module`` is the one that the config function is from. A spec that another module than
    torchtitan's own made may have other parts, which a model that is built again would lose.

    Raises SettingError for a key that the model does not have, and for a model that this dialect
    cannot build.
    """
    if not shape:
        return spec
    keys: tuple[str, ...]
    if module == "torchtitan.models.llama3.config_registry":
        keys, build = _DECODER_KEYS, _llama3
    elif module == "torchtitan.models.qwen3.config_registry":
        moe = spec.model.layers[0].moe is not None
        keys, build = (_QWEN3_MOE_KEYS if moe else _QWEN3_KEYS), _qwen3
    else:
        raise SettingError(
            KeyProblem(
                "converge.model",
                f"only torchtitan's llama3 and qwen3 can be reshaped, not {spec.name} of {module}: "
                "write a config function with parameters (docs/own-model.md), and set them in "
                "[converge.arguments]",
            )
        )
    for key in shape:
        if key not in keys:
            raise SettingError(
                KeyProblem(f"converge.model.{key}", f"is no part of {spec.name}'s shape", keys)
            )
    return dataclasses.replace(spec, model=build(spec.model, shape))


def _llama3(base: Any, shape: Mapping[str, int]) -> Any:
    """A Llama 3 of the given shape, with the same parts and initial weights as torchtitan's own."""
    from torchtitan.models import llama3
    from torchtitan.models.common import compute_ffn_hidden_dim

    attention = base.layers[0].attention
    dim = shape.get("dim", base.dim)
    n_heads = shape.get("n_heads", attention.n_heads)
    layers = llama3._build_llama3_layers(
        n_layers=shape.get("n_layers", len(base.layers)),
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=shape.get("n_kv_heads", attention.n_kv_heads),
        hidden_dim=compute_ffn_hidden_dim(dim, multiple_of=64),
        rope=dataclasses.replace(attention.rope, dim=dim // n_heads),
        attn_backend="flex",
    )
    return _decoder(base, shape, layers, lm_head_init=llama3._output_linear_init(dim))


def _qwen3(base: Any, shape: Mapping[str, int]) -> Any:
    """A Qwen 3, dense or with a mixture of experts, with torchtitan's own parts and init.

    Its attention's width is ``n_heads * head_dim``, whatever ``dim`` is; the feed-forward of a
    dense one keeps its width.
    """
    from torchtitan.models import qwen3

    first = base.layers[0]
    attention = first.attention
    head_dim = shape.get("head_dim", attention.head_dim)
    common = {
        "n_layers": shape.get("n_layers", len(base.layers)),
        "dim": shape.get("dim", base.dim),
        "n_heads": shape.get("n_heads", attention.n_heads),
        "n_kv_heads": shape.get("n_kv_heads", attention.n_kv_heads),
        "head_dim": head_dim,
        "rope": dataclasses.replace(attention.rope, dim=head_dim),
        "attn_backend": "flex",
    }
    if first.moe is None:
        hidden_dim = first.feed_forward.w1.out_features
        layers = qwen3._build_qwen3_layers(hidden_dim=hidden_dim, **common)
    else:
        experts = first.moe.routed_experts.inner_experts
        layers = qwen3._build_qwen3_moe_layers(
            moe_hidden_dim=shape.get("moe_hidden_dim", experts.hidden_dim),
            num_experts=shape.get("num_experts", experts.num_experts),
            top_k=shape.get("top_k", first.moe.router.top_k),
            moe_comm_backend="standard",
            **common,
        )
    # Qwen 3 draws its output projection with one standard deviation for every width.
    return _decoder(base, shape, layers, lm_head_init=base.lm_head.param_init)


def _decoder(base: Any, shape: Mapping[str, int], layers: Any, *, lm_head_init: Any) -> Any:
    """A decoder of the given layers, with all around them in the shape's width and vocabulary."""
    dim = shape.get("dim", base.dim)
    vocab_size = shape.get("vocab_size", base.vocab_size)
    return dataclasses.replace(
        base,
        dim=dim,
        vocab_size=vocab_size,
        tok_embeddings=dataclasses.replace(
            base.tok_embeddings, num_embeddings=vocab_size, embedding_dim=dim
        ),
        norm=dataclasses.replace(base.norm, normalized_shape=dim),
        lm_head=dataclasses.replace(
            base.lm_head, in_features=dim, out_features=vocab_size, param_init=lm_head_init
        ),
        layers=layers,
    )


def use_dense_attention(model: Any) -> None:
    """Put the CPU's attention in the place of every FlexAttention of a model config."""
    for _, config, parent, name in list(model.traverse(FlexAttention.Config)):
        setattr(parent, name, DenseFlexAttention.Config(block_size=config.block_size))


def use_float8(spec: Any, technique: str, *, device: str, compiled: bool) -> Any:
    """The model spec with Float8 linear layers, all but the output projection.

    On the CPU the arithmetic is emulated, and torchtitan 0.3.0 then drops the recipe: every
    emulated layer is tensorwise, whatever was named. The audit reads the layers, so it shows.

    Raises SettingError where torchtitan refuses (emulation with compile).
    """
    converter = Float8LinearConverter.Config(
        recipe_name=_RECIPES[technique],
        # The converter takes every linear layer it is not told to leave out; in its own configs
        # and everywhere else in the field the output projection stays in high precision.
        filter_fqns=["lm_head"],
        emulate=device == "cpu",
        model_compile_enabled=compiled,
    )
    try:
        return dataclasses.replace(spec, model=converter.build().convert(spec.model))
    except ValueError as error:
        raise SettingError(KeyProblem("techniques", f"{technique}: {error}")) from error
