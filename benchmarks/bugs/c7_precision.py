"""C7: arithmetic of less precision than was asked for, near the noise floor.

What is rounded here is rounded to bfloat16: 8 bits of mantissa, a relative error of up to 1/256.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from places import local, parameters
from torch.distributed import _functional_collectives as collectives


def _rounded(tensor: Any) -> Any:
    return tensor.bfloat16().to(tensor.dtype)


def _patch(thing: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a function; ``change`` gets the old one first, then what it is called with."""
    setattr(thing, name, functools.partial(change, getattr(thing, name)))


def _after_update(trainer: Any, action: Callable[[], None]) -> None:
    trainer.optimizers.register_step_post_hook(lambda *_: action())


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def tp_gradients_reduced_in_bf16(trainer: Any) -> None:
    """Collectives over tp carry gradients in bfloat16, though everything else is in float32.

    Reference: pytorch issue 190626
    Class: C7
    Technique: TP 2
    First step: 1
    Signature: gradients off by 1e-3 to 1e-2 in direction, the loss of the first step right
    Cause: gradient direction
    Says: bf16 | bfloat16 | precision
    Regimes: fp32 | float8 (in bfloat16 TP adds up its gradients so)
    """

    def in_bf16(old: Any, tensor: Any, *arguments: Any, **options: Any) -> Any:
        if not _in_backward() or tensor.dtype != torch.float32:
            return old(tensor, *arguments, **options)
        return old(tensor.bfloat16(), *arguments, **options).to(torch.float32)

    for name in ("all_reduce", "reduce_scatter_tensor", "all_gather_tensor"):
        _patch(collectives, name, in_bf16)


def gradients_reduce_scattered_in_bf16(trainer: Any) -> None:
    """FSDP reduces gradients in bfloat16 under a float32 policy.

    Reference: class of pytorch issue 190626
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: every gradient off by about 2e-3 in direction, the loss of the first step right
    Cause: gradient direction
    Says: bf16 | bfloat16 | precision
    """
    from torch.distributed.fsdp import FSDPModule

    for model in trainer.model_parts:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    # torch 2.15 keeps the policy with each parameter, 2.13 with the group.
                    for owner in (group, *group.fsdp_params):
                        policy = getattr(owner, "mp_policy", None)
                        if policy is not None:
                            owner.mp_policy = dataclasses.replace(
                                policy, reduce_dtype=torch.bfloat16
                            )


def epsilon_per_shard_in_clipping(trainer: Any) -> None:
    """Clipping adds its epsilon to the norm of each shard instead of to the norm of all.

    With n equal shards the norm that gradients are divided by is (sqrt(n) - 1) 1e-6 too large:
    less than a millionth of it at any usual norm.

    Reference: pytorch issue 149768
    Class: C7
    Technique: FSDP 2
    First step: 1
    Needs: clipping active
    Signature: clipped gradients smaller by a relative 1e-6; AdamW forgets the factor
    Cause: gradient scale | update
    """
    shards = trainer.parallel_dims.world_size

    def clip(old: Any, clipped: Any, max_norm: float, norm: Any, *arguments: Any) -> Any:
        return old(clipped, max_norm, norm + (shards**0.5 - 1) * 1e-6, *arguments)

    _patch(torch.nn.utils, "clip_grads_with_norm_", clip)


def parameters_kept_in_bf16(trainer: Any) -> None:
    """There is no float32 master copy: parameters are rounded to bfloat16 after every update.

    Reference: class of pytorch issue 190626
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: the first gradients right, every parameter off after the first update
    Cause: update
    Regimes: fp32 | mixed | float8 (it is what parameters in bfloat16 are)
    """

    @torch.no_grad()
    def round_all() -> None:
        for _, parameter in parameters(trainer):
            local(parameter).copy_(_rounded(local(parameter)))

    _after_update(trainer, round_all)


def moments_kept_in_bf16(trainer: Any) -> None:
    """The optimizer keeps its moments in bfloat16 between steps.

    A second moment that moves by less than 1/256 a step stands still.

    Reference: class of pytorch issue 190626
    Class: C7
    Technique: FSDP 2
    First step: 2
    Signature: updates off by about 1e-3 from step 2 on, gradients right until then
    Cause: update | state lost | gradient scale | gradient direction
    Regimes: fp32 | mixed | float8 (with parameters in bfloat16 moments are kept so)
    """

    @torch.no_grad()
    def round_all() -> None:
        for optimizer in trainer.optimizers:
            for state in optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    local(state[key]).copy_(_rounded(local(state[key])))

    _after_update(trainer, round_all)


def attention_weights_in_bf16(trainer: Any) -> None:
    """Queries and keys enter the attention in bfloat16, so its softmax is one of rounded scores.

    Reference: class of torchtitan issue 2575 (a precision cast)
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: loss off by a relative 1e-6 to 1e-4 at step 1, all gradients by about 1e-3
    Cause: forward or objective | gradient direction
    Regimes: fp32 | float8 (in bfloat16 attention computes so)
    """

    def rounded(old: Any, query: Any, key: Any, *arguments: Any, **options: Any) -> Any:
        return old(_rounded(query), _rounded(key), *arguments, **options)

    _patch(torch.nn.functional, "scaled_dot_product_attention", rounded)


def logits_in_bf16(trainer: Any) -> None:
    """The cross entropy is one of logits that were rounded to bfloat16.

    Reference: class of torchtitan issue 2575 (the cast of logits to float32 comes too late)
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: loss off by a relative 1e-5 to 1e-4 at step 1, all gradients by about 1e-3
    Cause: forward or objective | gradient direction
    Regimes: fp32 | float8 (in bfloat16 logits are so)
    """
    loss = getattr(trainer.loss_fn, "loss_fn", trainer.loss_fn)
    compute = loss.fn
    loss.fn = lambda logits, *arguments, **options: compute(_rounded(logits), *arguments, **options)


def rotary_positions_in_bf16(trainer: Any) -> None:
    """The rotary embedding's angles are those of positions and frequencies in bfloat16.

    Reference: class of torchtitan issue 2575; a precision that many rotary embeddings once lost
    Class: C7
    Technique: FSDP 2
    First step: 1
    Signature: loss off by a relative 1e-6 to 1e-4 at step 1, queries and keys off the most
    Cause: forward or objective | gradient direction
    """
    precompute = {}

    def in_bf16(rope: Any) -> Any:
        cache = precompute[rope]()
        angles = _rounded(cache.angle()) if cache.is_complex() else None
        return (
            torch.polar(torch.ones_like(angles), angles) if cache.is_complex() else _rounded(cache)
        )

    for model in trainer.model_parts:
        for module in model.modules():
            if hasattr(module, "_precompute_cache"):
                precompute[module] = module._precompute_cache
                module.cache = in_bf16(module)


def layer_left_out_of_float8(trainer: Any) -> None:
    """One layer's feed-forward runs in float32 where the recipe says Float8.

    Reference: class of torchao issue 4300
    Class: C7
    Technique: FSDP 2 in Float8
    First step: 1
    Signature: loss off by a relative 1e-6 to 1e-3 at step 1 against a Float8 control
    Cause: forward or objective | gradient direction
    """
    for model in trainer.model_parts:
        feed_forward = model.layers["1"].feed_forward
        for linear in (feed_forward.w1, feed_forward.w2, feed_forward.w3):
            linear.forward = functools.partial(_plain_linear, linear)


def _plain_linear(linear: Any, x: Any) -> Any:
    return torch.nn.functional.linear(x, linear.weight, linear.bias)


def layer_put_into_float8(trainer: Any) -> None:
    """The output projection, which the recipe leaves out, has its inputs rounded to Float8.

    Reference: class of torchao issue 4300
    Class: C7
    Technique: FSDP 2 in Float8
    First step: 1
    Signature: loss off by a relative 1e-5 to 1e-3 at step 1 against a Float8 control
    Cause: forward or objective | gradient direction
    """
    for model in trainer.model_parts:
        forward = model.lm_head.forward
        model.lm_head.forward = lambda x, forward=forward: forward(_to_float8_and_back(x))


def _to_float8_and_back(x: Any) -> Any:
    """Tensorwise e4m3, with the gradient of the identity."""
    scale = 448.0 / x.detach().abs().max()
    rounded = (x.detach() * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale
    return x + (rounded - x.detach())
