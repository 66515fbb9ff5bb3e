"""C7, measured: ladders of ever smaller errors, to find the smallest that is caught.

Each regime has the rungs around its own limit. The first magnitude of a ladder that passes is below
the detection limit; how the limits lie is in the report of the benchmark.
"""

from __future__ import annotations

from typing import Any

import torch
from backward import with_gradient
from places import before_clipping, local, parameters

_MATRIX = "layers.1.feed_forward.w2.weight"
_SEED = 7


def _noise(trainer: Any, size: float) -> None:
    """Add to one matrix's gradient a random direction, ``size`` times as long (fixed over steps).

    Each rank draws for its own shard and scales by that shard's norm, so that the whole is right.
    """

    def disturb() -> None:
        generator = torch.Generator().manual_seed(_SEED)
        for _, parameter in parameters(trainer, _MATRIX):
            gradient = local(parameter.grad)
            noise = torch.randn(gradient.shape, generator=generator).to(gradient.dtype)
            gradient.add_(noise, alpha=size * float(gradient.norm() / noise.norm()))

    before_clipping(disturb)


def _scale(trainer: Any, size: float) -> None:
    """Scale what the loss sends back, and not its value.

    There it is float32 in every regime. A gradient that is in bfloat16 already and is multiplied by
    1 + 1e-3 rounds to itself: no bug at all.
    """
    loss = getattr(trainer.loss_fn, "loss_fn", trainer.loss_fn)
    compute = loss.fn
    loss.fn = lambda *arguments, **options: with_gradient(
        compute(*arguments, **options), lambda gradient: gradient * (1 + size)
    )


def _forward(trainer: Any, size: float) -> None:
    """Scale the logits, as a wrong temperature does."""
    loss = getattr(trainer.loss_fn, "loss_fn", trainer.loss_fn)
    compute = loss.fn
    loss.fn = lambda logits, *arguments, **options: compute(
        logits * (1 + size), *arguments, **options
    )


def _attention(trainer: Any, size: float) -> None:
    """Scale the scores of every attention, as a wrong factor before the softmax does."""
    for model in trainer.model_parts:
        for layer in model.layers.values():
            attention = layer.attention
            attention.scaling = (attention.scaling or attention.head_dim**-0.5) * (1 + size)


def _update(trainer: Any, size: float) -> None:
    """Move one matrix on by ``size`` times its update, after each of them."""
    before: dict[str, Any] = {}

    def remember(*_: Any) -> None:
        before.update((name, local(p).detach().clone()) for name, p in parameters(trainer, _MATRIX))

    @torch.no_grad()
    def move(*_: Any) -> None:
        for name, parameter in parameters(trainer, _MATRIX):
            local(parameter).add_(local(parameter) - before[name], alpha=size)

    trainer.optimizers.register_step_pre_hook(remember)
    trainer.optimizers.register_step_post_hook(move)


def gradient_noise_1e_1(trainer: Any) -> None:
    """The gradient of one matrix has noise of 1e-1 of its norm.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: gradient of one matrix off by 1e-1 in direction
    Cause: gradient direction
    Magnitude: 1e-1
    Regimes: float8 (rungs of other regimes lie around other limits)
    """
    _noise(trainer, 1e-1)


def gradient_noise_5e_2(trainer: Any) -> None:
    """The gradient of one matrix has noise of 5e-2 of its norm.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: gradient of one matrix off by 5e-2 in direction
    Cause: gradient direction
    Magnitude: 5e-2
    Regimes: mixed | bf16 | float8 (rungs of other regimes lie around other limits)
    """
    _noise(trainer, 5e-2)


def gradient_noise_1e_2(trainer: Any) -> None:
    """The gradient of one matrix has noise of 1e-2 of its norm.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: gradient of one matrix off by 1e-2 in direction
    Cause: gradient direction
    Magnitude: 1e-2
    Regimes: mixed | bf16 | float8 (rungs of other regimes lie around other limits)
    """
    _noise(trainer, 1e-2)


def gradient_noise_3e_3(trainer: Any) -> None:
    """The gradient of one matrix has noise of 3e-3 of its norm.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: gradient of one matrix off by 3e-3 in direction
    Cause: gradient direction
    Magnitude: 3e-3
    Regimes: mixed | bf16 (rungs of other regimes lie around other limits)
    """
    _noise(trainer, 3e-3)


def gradient_noise_1e_3(trainer: Any) -> None:
    """The gradient of one matrix has noise of 1e-3 of its norm.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: gradient of one matrix off by 1e-3 in direction
    Cause: gradient direction
    Magnitude: 1e-3
    Regimes: fp32 (rungs of other regimes lie around other limits)
    """
    _noise(trainer, 1e-3)


def gradient_noise_1e_4(trainer: Any) -> None:
    """The gradient of one matrix has noise of 1e-4 of its norm.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: gradient of one matrix off by 1e-4 in direction
    Cause: gradient direction
    Magnitude: 1e-4
    Regimes: fp32 (rungs of other regimes lie around other limits)
    """
    _noise(trainer, 1e-4)


def gradient_noise_1e_5(trainer: Any) -> None:
    """The gradient of one matrix has noise of 1e-5 of its norm.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: gradient of one matrix off by 1e-5 in direction
    Cause: gradient direction
    Magnitude: 1e-5
    Regimes: fp32 (rungs of other regimes lie around other limits)
    """
    _noise(trainer, 1e-5)


def gradient_noise_1e_6(trainer: Any) -> None:
    """The gradient of one matrix has noise of 1e-6 of its norm.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: gradient of one matrix off by 1e-6 in direction
    Cause: gradient direction
    Magnitude: 1e-6
    Regimes: fp32 (rungs of other regimes lie around other limits)
    """
    _noise(trainer, 1e-6)


def gradient_noise_1e_7(trainer: Any) -> None:
    """The gradient of one matrix has noise of 1e-7 of its norm.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: gradient of one matrix off by 1e-7 in direction
    Cause: gradient direction
    Magnitude: 1e-7
    Regimes: fp32 (rungs of other regimes lie around other limits)
    """
    _noise(trainer, 1e-7)


def gradient_scale_1e_2(trainer: Any) -> None:
    """Every gradient is 1 + 1e-2 times what it should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: every gradient off by 1e-2 in length
    Cause: gradient scale
    Magnitude: 1e-2
    Regimes: float8 (rungs of other regimes lie around other limits)
    """
    _scale(trainer, 1e-2)


def gradient_scale_3e_3(trainer: Any) -> None:
    """Every gradient is 1 + 3e-3 times what it should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: every gradient off by 3e-3 in length
    Cause: gradient scale
    Magnitude: 3e-3
    Regimes: mixed | bf16 | float8 (rungs of other regimes lie around other limits)
    """
    _scale(trainer, 3e-3)


def gradient_scale_1e_3(trainer: Any) -> None:
    """Every gradient is 1 + 1e-3 times what it should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: every gradient off by 1e-3 in length
    Cause: gradient scale
    Magnitude: 1e-3
    Regimes: mixed | bf16 | float8 (rungs of other regimes lie around other limits)
    """
    _scale(trainer, 1e-3)


def gradient_scale_3e_4(trainer: Any) -> None:
    """Every gradient is 1 + 3e-4 times what it should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: every gradient off by 3e-4 in length
    Cause: gradient scale
    Magnitude: 3e-4
    Regimes: mixed | bf16 (rungs of other regimes lie around other limits)
    """
    _scale(trainer, 3e-4)


def gradient_scale_1e_4(trainer: Any) -> None:
    """Every gradient is 1 + 1e-4 times what it should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: every gradient off by 1e-4 in length
    Cause: gradient scale
    Magnitude: 1e-4
    Regimes: fp32 (rungs of other regimes lie around other limits)
    """
    _scale(trainer, 1e-4)


def gradient_scale_1e_5(trainer: Any) -> None:
    """Every gradient is 1 + 1e-5 times what it should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: every gradient off by 1e-5 in length
    Cause: gradient scale
    Magnitude: 1e-5
    Regimes: fp32 (rungs of other regimes lie around other limits)
    """
    _scale(trainer, 1e-5)


def gradient_scale_1e_6(trainer: Any) -> None:
    """Every gradient is 1 + 1e-6 times what it should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: every gradient off by 1e-6 in length
    Cause: gradient scale
    Magnitude: 1e-6
    Regimes: fp32 (rungs of other regimes lie around other limits)
    """
    _scale(trainer, 1e-6)


def gradient_scale_1e_7(trainer: Any) -> None:
    """Every gradient is 1 + 1e-7 times what it should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: every gradient off by 1e-7 in length
    Cause: gradient scale
    Magnitude: 1e-7
    Regimes: fp32 (rungs of other regimes lie around other limits)
    """
    _scale(trainer, 1e-7)


def attention_scale_3e_1(trainer: Any) -> None:
    """Attention scores are 1 + 3e-1 times what they should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: loss off by much less than 3e-1, gradients of queries and keys by about 3e-1
    Cause: forward or objective | gradient direction | gradient scale of a group
    Magnitude: 3e-1
    Regimes: float8 (rungs of other regimes lie around other limits)
    """
    _attention(trainer, 3e-1)


def attention_scale_1e_1(trainer: Any) -> None:
    """Attention scores are 1 + 1e-1 times what they should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: loss off by much less than 1e-1, gradients of queries and keys by about 1e-1
    Cause: forward or objective | gradient direction | gradient scale of a group
    Magnitude: 1e-1
    Regimes: mixed | bf16 | float8 (rungs of other regimes lie around other limits)
    """
    _attention(trainer, 1e-1)


def attention_scale_3e_2(trainer: Any) -> None:
    """Attention scores are 1 + 3e-2 times what they should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: loss off by much less than 3e-2, gradients of queries and keys by about 3e-2
    Cause: forward or objective | gradient direction | gradient scale of a group
    Magnitude: 3e-2
    Regimes: mixed | bf16 | float8 (rungs of other regimes lie around other limits)
    """
    _attention(trainer, 3e-2)


def attention_scale_1e_2(trainer: Any) -> None:
    """Attention scores are 1 + 1e-2 times what they should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: loss off by much less than 1e-2, gradients of queries and keys by about 1e-2
    Cause: forward or objective | gradient direction | gradient scale of a group
    Magnitude: 1e-2
    Regimes: mixed | bf16 (rungs of other regimes lie around other limits)
    """
    _attention(trainer, 1e-2)


def attention_scale_1e_3(trainer: Any) -> None:
    """Attention scores are 1 + 1e-3 times what they should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: loss off by much less than 1e-3, gradients of queries and keys by about 1e-3
    Cause: forward or objective | gradient direction | gradient scale of a group
    Magnitude: 1e-3
    Regimes: fp32 (rungs of other regimes lie around other limits)
    """
    _attention(trainer, 1e-3)


def attention_scale_1e_4(trainer: Any) -> None:
    """Attention scores are 1 + 1e-4 times what they should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: loss off by much less than 1e-4, gradients of queries and keys by about 1e-4
    Cause: forward or objective | gradient direction | gradient scale of a group
    Magnitude: 1e-4
    Regimes: fp32 (rungs of other regimes lie around other limits)
    """
    _attention(trainer, 1e-4)


def attention_scale_1e_5(trainer: Any) -> None:
    """Attention scores are 1 + 1e-5 times what they should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: loss off by much less than 1e-5, gradients of queries and keys by about 1e-5
    Cause: forward or objective | gradient direction | gradient scale of a group
    Magnitude: 1e-5
    Regimes: fp32 (rungs of other regimes lie around other limits)
    """
    _attention(trainer, 1e-5)


def attention_scale_1e_6(trainer: Any) -> None:
    """Attention scores are 1 + 1e-6 times what they should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: loss off by much less than 1e-6, gradients of queries and keys by about 1e-6
    Cause: forward or objective | gradient direction | gradient scale of a group
    Magnitude: 1e-6
    Regimes: fp32 (rungs of other regimes lie around other limits)
    """
    _attention(trainer, 1e-6)


def forward_error_1e_1(trainer: Any) -> None:
    """Logits are 1 + 1e-1 times what they should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: loss off by about 1e-1 / 10, gradients by about 1e-1
    Cause: forward or objective | gradient direction | gradient scale
    Magnitude: 1e-1
    Regimes: float8 (rungs of other regimes lie around other limits)
    """
    _forward(trainer, 1e-1)


def forward_error_3e_2(trainer: Any) -> None:
    """Logits are 1 + 3e-2 times what they should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: loss off by about 3e-2 / 10, gradients by about 3e-2
    Cause: forward or objective | gradient direction | gradient scale
    Magnitude: 3e-2
    Regimes: mixed | bf16 | float8 (rungs of other regimes lie around other limits)
    """
    _forward(trainer, 3e-2)


def forward_error_1e_2(trainer: Any) -> None:
    """Logits are 1 + 1e-2 times what they should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: loss off by about 1e-2 / 10, gradients by about 1e-2
    Cause: forward or objective | gradient direction | gradient scale
    Magnitude: 1e-2
    Regimes: mixed | bf16 | float8 (rungs of other regimes lie around other limits)
    """
    _forward(trainer, 1e-2)


def forward_error_1e_3(trainer: Any) -> None:
    """Logits are 1 + 1e-3 times what they should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: loss off by about 1e-3 / 10, gradients by about 1e-3
    Cause: forward or objective | gradient direction | gradient scale
    Magnitude: 1e-3
    Regimes: mixed | bf16 (rungs of other regimes lie around other limits)
    """
    _forward(trainer, 1e-3)


def forward_error_1e_5(trainer: Any) -> None:
    """Logits are 1 + 1e-5 times what they should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: loss off by about 1e-5 / 10, gradients by about 1e-5
    Cause: forward or objective | gradient direction | gradient scale
    Magnitude: 1e-5
    Regimes: fp32 (rungs of other regimes lie around other limits)
    """
    _forward(trainer, 1e-5)


def forward_error_1e_6(trainer: Any) -> None:
    """Logits are 1 + 1e-6 times what they should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: loss off by about 1e-6 / 10, gradients by about 1e-6
    Cause: forward or objective | gradient direction | gradient scale
    Magnitude: 1e-6
    Regimes: fp32 (rungs of other regimes lie around other limits)
    """
    _forward(trainer, 1e-6)


def forward_error_1e_7(trainer: Any) -> None:
    """Logits are 1 + 1e-7 times what they should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: loss off by about 1e-7 / 10, gradients by about 1e-7
    Cause: forward or objective | gradient direction | gradient scale
    Magnitude: 1e-7
    Regimes: fp32 (rungs of other regimes lie around other limits)
    """
    _forward(trainer, 1e-7)


def update_error_3e_1(trainer: Any) -> None:
    """One matrix is moved by 1 + 3e-1 times its update.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: update of one matrix off by 3e-1
    Cause: update
    Magnitude: 3e-1
    Regimes: mixed | bf16 | float8 (rungs of other regimes lie around other limits)
    """
    _update(trainer, 3e-1)


def update_error_1e_1(trainer: Any) -> None:
    """One matrix is moved by 1 + 1e-1 times its update.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: update of one matrix off by 1e-1
    Cause: update
    Magnitude: 1e-1
    Regimes: mixed | bf16 | float8 (rungs of other regimes lie around other limits)
    """
    _update(trainer, 1e-1)


def update_error_1e_2(trainer: Any) -> None:
    """One matrix is moved by 1 + 1e-2 times its update.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: update of one matrix off by 1e-2
    Cause: update
    Magnitude: 1e-2
    Regimes: mixed | bf16 | float8 (rungs of other regimes lie around other limits)
    """
    _update(trainer, 1e-2)


def update_error_1e_3(trainer: Any) -> None:
    """One matrix is moved by 1 + 1e-3 times its update.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: update of one matrix off by 1e-3
    Cause: update
    Magnitude: 1e-3
    Regimes: fp32 (rungs of other regimes lie around other limits)
    """
    _update(trainer, 1e-3)


def update_error_1e_4(trainer: Any) -> None:
    """One matrix is moved by 1 + 1e-4 times its update.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: update of one matrix off by 1e-4
    Cause: update
    Magnitude: 1e-4
    Regimes: fp32 (rungs of other regimes lie around other limits)
    """
    _update(trainer, 1e-4)


def update_error_1e_5(trainer: Any) -> None:
    """One matrix is moved by 1 + 1e-5 times its update.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: update of one matrix off by 1e-5
    Cause: update
    Magnitude: 1e-5
    Regimes: fp32 (rungs of other regimes lie around other limits)
    """
    _update(trainer, 1e-5)
