"""C7, measured: ladders of ever smaller errors, to find the smallest that is caught.

Each precision is judged against a control of its own. The first magnitude of a ladder that passes
is below the detection limit; how the limits lie is in the report of the benchmark.
"""

from __future__ import annotations

from typing import Any

import torch
from places import before_clipping, local, parameters, scale_gradients

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
    before_clipping(lambda: scale_gradients(trainer, 1 + size))


def _forward(trainer: Any, size: float) -> None:
    """Scale the logits, as a wrong temperature does."""
    loss = getattr(trainer.loss_fn, "loss_fn", trainer.loss_fn)
    compute = loss.fn
    loss.fn = lambda logits, *arguments, **options: compute(
        logits * (1 + size), *arguments, **options
    )


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


def gradient_noise_1e_4(trainer: Any) -> None:
    """The gradient of one matrix has noise of 1e-4 of its norm.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: gradient of one matrix off by 1e-4 in direction
    Cause: gradient direction
    Magnitude: 1e-4
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
    """
    _noise(trainer, 1e-7)


def gradient_scale_1e_4(trainer: Any) -> None:
    """Every gradient is 1 + 1e-4 times what it should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: every gradient off by 1e-4 in length
    Cause: gradient scale
    Magnitude: 1e-4
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
    """
    _scale(trainer, 1e-7)


def forward_error_1e_5(trainer: Any) -> None:
    """Logits are 1 + 1e-5 times what they should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: loss off by about 1e-5 / 10, gradients by about 1e-5
    Cause: forward or objective | gradient direction | gradient scale
    Magnitude: 1e-5
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
    """
    _forward(trainer, 1e-7)


def update_error_1e_3(trainer: Any) -> None:
    """One matrix is moved by 1 + 1e-3 times its update.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: update of one matrix off by 1e-3
    Cause: update
    Magnitude: 1e-3
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
    """
    _update(trainer, 1e-5)


def bf16_gradient_noise_1e_1(trainer: Any) -> None:
    """The gradient of one matrix has noise of 1e-1 of its norm.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2 in bfloat16
    First step: 1
    Signature: gradient of one matrix off by 1e-1 in direction
    Cause: gradient direction
    Magnitude: 1e-1
    """
    _noise(trainer, 1e-1)


def bf16_gradient_noise_1e_2(trainer: Any) -> None:
    """The gradient of one matrix has noise of 1e-2 of its norm.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2 in bfloat16
    First step: 1
    Signature: gradient of one matrix off by 1e-2 in direction
    Cause: gradient direction
    Magnitude: 1e-2
    """
    _noise(trainer, 1e-2)


def bf16_gradient_noise_1e_3(trainer: Any) -> None:
    """The gradient of one matrix has noise of 1e-3 of its norm.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2 in bfloat16
    First step: 1
    Signature: gradient of one matrix off by 1e-3 in direction
    Cause: gradient direction
    Magnitude: 1e-3
    """
    _noise(trainer, 1e-3)


def bf16_gradient_scale_1e_1(trainer: Any) -> None:
    """Every gradient is 1 + 1e-1 times what it should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2 in bfloat16
    First step: 1
    Signature: every gradient off by 1e-1 in length
    Cause: gradient scale
    Magnitude: 1e-1
    """
    _scale(trainer, 1e-1)


def bf16_gradient_scale_1e_2(trainer: Any) -> None:
    """Every gradient is 1 + 1e-2 times what it should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2 in bfloat16
    First step: 1
    Signature: every gradient off by 1e-2 in length
    Cause: gradient scale
    Magnitude: 1e-2
    """
    _scale(trainer, 1e-2)


def bf16_gradient_scale_1e_3(trainer: Any) -> None:
    """Every gradient is 1 + 1e-3 times what it should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2 in bfloat16
    First step: 1
    Signature: every gradient off by 1e-3 in length
    Cause: gradient scale
    Magnitude: 1e-3
    """
    _scale(trainer, 1e-3)


def bf16_forward_error_1e_2(trainer: Any) -> None:
    """Logits are 1 + 1e-2 times what they should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2 in bfloat16
    First step: 1
    Signature: loss off by about 1e-2 / 10, gradients by about 1e-2
    Cause: forward or objective | gradient direction | gradient scale
    Magnitude: 1e-2
    """
    _forward(trainer, 1e-2)


def bf16_forward_error_1e_3(trainer: Any) -> None:
    """Logits are 1 + 1e-3 times what they should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2 in bfloat16
    First step: 1
    Signature: loss off by about 1e-3 / 10, gradients by about 1e-3
    Cause: forward or objective | gradient direction | gradient scale
    Magnitude: 1e-3
    """
    _forward(trainer, 1e-3)


def bf16_forward_error_1e_4(trainer: Any) -> None:
    """Logits are 1 + 1e-4 times what they should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2 in bfloat16
    First step: 1
    Signature: loss off by about 1e-4 / 10, gradients by about 1e-4
    Cause: forward or objective | gradient direction | gradient scale
    Magnitude: 1e-4
    """
    _forward(trainer, 1e-4)


def float8_gradient_noise_1e_1(trainer: Any) -> None:
    """The gradient of one matrix has noise of 1e-1 of its norm.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2 in Float8
    First step: 1
    Signature: gradient of one matrix off by 1e-1 in direction
    Cause: gradient direction
    Magnitude: 1e-1
    """
    _noise(trainer, 1e-1)


def float8_gradient_noise_1e_2(trainer: Any) -> None:
    """The gradient of one matrix has noise of 1e-2 of its norm.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2 in Float8
    First step: 1
    Signature: gradient of one matrix off by 1e-2 in direction
    Cause: gradient direction
    Magnitude: 1e-2
    """
    _noise(trainer, 1e-2)


def float8_gradient_noise_1e_3(trainer: Any) -> None:
    """The gradient of one matrix has noise of 1e-3 of its norm.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2 in Float8
    First step: 1
    Signature: gradient of one matrix off by 1e-3 in direction
    Cause: gradient direction
    Magnitude: 1e-3
    """
    _noise(trainer, 1e-3)


def float8_gradient_scale_1e_2(trainer: Any) -> None:
    """Every gradient is 1 + 1e-2 times what it should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2 in Float8
    First step: 1
    Signature: every gradient off by 1e-2 in length
    Cause: gradient scale
    Magnitude: 1e-2
    """
    _scale(trainer, 1e-2)


def float8_gradient_scale_1e_3(trainer: Any) -> None:
    """Every gradient is 1 + 1e-3 times what it should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2 in Float8
    First step: 1
    Signature: every gradient off by 1e-3 in length
    Cause: gradient scale
    Magnitude: 1e-3
    """
    _scale(trainer, 1e-3)


def float8_gradient_scale_1e_4(trainer: Any) -> None:
    """Every gradient is 1 + 1e-4 times what it should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2 in Float8
    First step: 1
    Signature: every gradient off by 1e-4 in length
    Cause: gradient scale
    Magnitude: 1e-4
    """
    _scale(trainer, 1e-4)


def float8_forward_error_1e_3(trainer: Any) -> None:
    """Logits are 1 + 1e-3 times what they should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2 in Float8
    First step: 1
    Signature: loss off by about 1e-3 / 10, gradients by about 1e-3
    Cause: forward or objective | gradient direction | gradient scale
    Magnitude: 1e-3
    """
    _forward(trainer, 1e-3)


def float8_forward_error_1e_4(trainer: Any) -> None:
    """Logits are 1 + 1e-4 times what they should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2 in Float8
    First step: 1
    Signature: loss off by about 1e-4 / 10, gradients by about 1e-4
    Cause: forward or objective | gradient direction | gradient scale
    Magnitude: 1e-4
    """
    _forward(trainer, 1e-4)


def float8_forward_error_1e_5(trainer: Any) -> None:
    """Logits are 1 + 1e-5 times what they should be.

    Reference: class of a precision that is lost
    Class: C7
    Technique: FSDP 2 in Float8
    First step: 1
    Signature: loss off by about 1e-5 / 10, gradients by about 1e-5
    Cause: forward or objective | gradient direction | gradient scale
    Magnitude: 1e-5
    """
    _forward(trainer, 1e-5)
