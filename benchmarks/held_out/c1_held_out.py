"""Held out, C1: gradients of the right direction and the wrong length."""

from __future__ import annotations

from typing import Any

from places import before_clipping, local, parameters


def accumulation_left_undivided(trainer: Any) -> None:
    """A backward of one's own skips the division by the accumulation steps, which the engine made.

    DeepSpeed divides in ``engine.backward``; who calls it with ``scale_wrt_gas=False``, or calls
    ``loss.backward`` directly, gets the sum. The reported loss is divided elsewhere and right.

    Reference: nanoGPT issue 206; class of transformers 34191
    Class: C1
    Technique: FSDP 2, 4 accumulation steps
    First step: 1
    Signature: every gradient four times the control's; loss right at step 1
    Cause: gradient scale
    Says: microbatch | accumulation
    """
    _scale_backward(trainer, float(trainer.gradient_accumulation_steps))


def output_divided_by_fsdp(trainer: Any) -> None:
    """The output's FSDP group keeps FSDP's own division by the shards, all others have none.

    Whatever is wrapped after ``disable_fsdp_gradient_division`` ran keeps the default factor.

    Reference: class of torchtitan issue 2318
    Class: C1
    Technique: FSDP 2
    First step: 1
    Signature: gradients of norm and lm_head half of the control's, all others equal
    Cause: gradient scale of a group
    Says: lm_head | output | norm
    """
    mesh = trainer.parallel_dims.get_mesh("fsdp")
    trainer.model_parts[0].lm_head.set_gradient_divide_factor(float(mesh.size()))


def loss_scale_not_undone(trainer: Any) -> None:
    """The loss is scaled by 1024 for the backward pass and gradients are clipped as they are.

    Clipping without ``unscale_`` before it: the norm is that of scaled gradients.

    Reference: class of pytorch issue 136009 (GradScaler under DDP)
    Class: C1
    Technique: DDP 2
    First step: 1
    Signature: every gradient and the grad norm 1024 times the control's; loss right at step 1
    Cause: gradient scale
    """
    _scale_backward(trainer, 1024.0)


def norms_reduced_twice(trainer: Any) -> None:
    """Gradients of the layers' norms, already summed over TP, are summed over it again.

    Megatron sums them after the backward pass; a module that sums its own is counted twice.

    Reference: class of gpt-neox pull 1259, Megatron-LM issue 1446
    Class: C1
    Technique: FSDP 2 x TP 2, sequence parallel
    First step: 1
    Signature: gradients of attention_norm and ffn_norm twice the control's, all others equal
    Cause: gradient scale of a group
    Says: norm
    """
    import torch.distributed as dist

    group = trainer.parallel_dims.get_mesh("tp").get_group()

    def reduce() -> None:
        for _, parameter in parameters(trainer, "_norm."):
            dist.all_reduce(local(parameter.grad), group=group)

    before_clipping(reduce)


def pipeline_divides_sums(trainer: Any) -> None:
    """The pipeline divides gradients by its microbatches, though the loss is a sum over tokens.

    ``scale_grads`` is True by default and right for a loss that is a mean.

    Reference: torchtitan pull 1732, issue 2972
    Class: C1
    Technique: FSDP 2 x PP 2, 1F1B, 4 microbatches
    First step: 1
    Signature: every gradient a quarter of the control's; loss right at step 1
    Cause: gradient scale
    Says: microbatch
    """
    trainer.pp_schedule.scale_grads = True


def _scale_backward(trainer: Any, factor: float) -> None:
    """Scale what flows back from the loss and leave its value as it is."""
    loss = trainer.loss_fn.loss_fn
    compute = loss.fn

    def scaled(*arguments: Any, **options: Any) -> Any:
        value = compute(*arguments, **options)
        return value + (factor - 1.0) * (value - value.detach())

    loss.fn = scaled
