"""The model of a job: the base config's, reshaped, with the CPU's attention and Float8 layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.models.common.attention import FlexAttention

from harness.rank.settings import KeyProblem, SettingError
from harness.rank.titan_0_3.attention import DenseFlexAttention

SHAPE_KEYS = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size")
_RECIPES = {"float8": "tensorwise", "float8_rowwise": "rowwise"}


def reshape_model(spec: Any, shape: Mapping[str, int]) -> Any:
    """The model spec with ``[converge.model]``'s shape in place of its own.

    Raises SettingError for an unknown key, and for a model that this adapter cannot build.
    """
    if not shape:
        return spec
    for key in shape:
        if key not in SHAPE_KEYS:
            raise SettingError(
                KeyProblem(f"converge.model.{key}", "is no part of a model's shape", SHAPE_KEYS)
            )
    if spec.name != "llama3":
        raise SettingError(
            KeyProblem("converge.model", f"only llama3 can be reshaped, not {spec.name}")
        )
    return dataclasses.replace(spec, model=_llama3(spec.model, shape))


def _llama3(base: Any, shape: Mapping[str, int]) -> Any:
    """A Llama 3 of the given shape, with the same parts and initial weights as torchtitan's own."""
    from torchtitan.models import llama3
    from torchtitan.models.common import compute_ffn_hidden_dim

    attention = base.layers[0].attention
    dim = shape.get("dim", base.dim)
    n_heads = shape.get("n_heads", attention.n_heads)
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
            base.lm_head,
            in_features=dim,
            out_features=vocab_size,
            param_init=llama3._output_linear_init(dim),
        ),
        layers=llama3._build_llama3_layers(
            n_layers=shape.get("n_layers", len(base.layers)),
            dim=dim,
            n_heads=n_heads,
            n_kv_heads=shape.get("n_kv_heads", attention.n_kv_heads),
            hidden_dim=compute_ffn_hidden_dim(dim, multiple_of=64),
            rope=dataclasses.replace(attention.rope, dim=dim // n_heads),
            attn_backend="flex",
        ),
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
