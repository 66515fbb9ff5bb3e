"""C2: the forward pass is right, and gradients point elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from backward import (
    change_input_gradient,
    modules,
    own_part,
    reduce_scatter_by,
    take_partial_as_whole,
    with_gradient,
)
from places import before_clipping, local, parameters
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional


def norm_gradients_partial_over_tp(trainer: Any) -> None:
    """Each TP rank takes its part of the norms' gradients for the whole.

    Under sequence parallel a norm sees a part of the sequence on each rank, so its gradient is
    a partial sum. Without placements for it, it passes for replicated and is never summed.

    Reference: torchtitan issue 1805
    Class: C2
    Technique: TP 2 with sequence parallel
    Module: none
    First step: 1
    Signature: gradients of all norms wrong at step 1, and different on the ranks of tp
    Cause: replicas differ
    Says: tp
    """
    take_partial_as_whole("norm")


def norm_gradients_of_one_tp_rank(trainer: Any) -> None:
    """The norms' partial gradients are copied from the first TP rank, not summed.

    Reference: class of torchtitan issue 1805
    Class: C2
    Technique: TP 2 with sequence parallel
    Module: none
    First step: 1
    Signature: gradients of all norms wrong in direction at step 1, and the same on all ranks
    Cause: gradient direction
    Says: norm
    """
    from torch.distributed import broadcast
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    inner = FSDPParam._get_grad_inner_tensor

    def of_first_rank(parameter: Any, gradient: Any) -> Any:
        if "norm" not in parameter._param_fqn or not isinstance(gradient, DTensor):
            return inner(parameter, gradient)
        part = gradient.to_local().contiguous()
        broadcast(part, group=gradient.device_mesh.get_group(), group_src=0)
        return part

    FSDPParam._get_grad_inner_tensor = of_first_rank


def _as_replicated(gradient: Tensor) -> Tensor:
    """A partial gradient labelled as if every TP rank had the whole."""
    return DTensor.from_local(gradient.to_local(), gradient.device_mesh, [Replicate()])


def column_parallel_input_gradient_partial(trainer: Any) -> None:
    """The input gradients of queries, keys and values are not summed over TP.

    Reference: class of torchtitan issue 1805
    Class: C2
    Technique: TP 2
    Module: layers.*.attention.qkv_linear or layers.*.attention.qkv_linear.wqkv
    First step: 1
    Signature: wrong from the attention norm of the last layer on down; its projections right
    Cause: gradient direction
    """
    for module in modules(trainer, "qkv_linear"):
        change_input_gradient(module, _as_replicated)


def output_input_gradient_partial(trainer: Any) -> None:
    """The chunked loss labels the partial gradient of the hidden states as replicated.

    Reference: torchtitan issue 3412
    Class: C2
    Technique: TP 2 with chunked loss
    Module: loss or the model
    First step: 1
    Signature: the output projection right, all below it wrong in direction
    Cause: gradient direction
    """
    from torchtitan.components.loss import GradAccumulator

    result = GradAccumulator.result
    GradAccumulator.result = lambda self: _as_replicated(result(self))


def keys_of_own_queries_only(trainer: Any) -> None:
    """Under CP, keys and values get the gradient of their own rank's queries only.

    The backward of gathering keys and values has to add up what all ranks' queries send back.

    Reference: Megatron-LM issue 1464
    Class: C2
    Technique: CP 2
    Module: layers.*.attention.inner_attention
    First step: 1
    Signature: projections of the last layer wrong, its output right, all below wrong
    Cause: gradient direction
    Says: attention
    """
    import torch.distributed as dist
    from torchtitan.distributed.context_parallel import api

    gather = api.flex_cp_allgather

    def gather_alone(keys: Tensor, values: Tensor, dim: int, group: str) -> Any:
        ranks = dist.distributed_c10d._resolve_process_group(group)

        def own(gradient: Tensor) -> Tensor:
            kept = torch.zeros_like(gradient)
            mine = gradient.chunk(ranks.size(), dim)[ranks.rank()]
            kept.chunk(ranks.size(), dim)[ranks.rank()].copy_(mine)
            return kept

        return tuple(with_gradient(each, own) for each in gather(keys, values, dim, group))

    api.flex_cp_allgather = gather_alone


def attention_keys_perturbed(trainer: Any) -> None:
    """The attention kernel of one layer returns a key gradient that is off by a tenth.

    Reference: class of Megatron-LM issue 1464
    Class: C2
    Technique: FSDP 2
    Module: layers.1.attention.inner_attention
    First step: 1
    Signature: the projection of layer 1 wrong where it makes keys, all below wrong
    Cause: gradient direction
    Says: layer 1 | layers.1
    """
    for module in modules(trainer, "layers.1.attention.inner_attention"):
        change_input_gradient(module, lambda g: g + 0.1 * g.roll(1, 1), argument=1)


def grouped_keys_of_one_head(trainer: Any) -> None:
    """Of the query heads that share a key head, one alone sends a gradient back.

    Reference: class of Megatron-LM issue 1464
    Class: C2
    Technique: FSDP 2, grouped-query attention
    Module: layers.*.attention.inner_attention
    First step: 1
    Needs: fewer key heads than query heads
    Signature: projections of the last layer wrong, its output right, all below wrong
    Cause: gradient direction
    Says: attention
    """

    def first_of_each(gradient: Tensor) -> Tensor:
        kept = gradient.clone()
        kept[:, :, 1::2] = 0
        return kept

    def repeat(_module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        queries, keys, values = arguments
        keys, values = (each.repeat_interleave(2, 2) for each in (keys, values))
        return queries, with_gradient(keys, first_of_each), values

    for module in modules(trainer, "inner_attention"):
        module.register_forward_pre_hook(repeat)


def norm_backward_lacks_term(trainer: Any) -> None:
    """A norm's own backward takes the root mean square for a constant.

    Reference: class of transformers issue 48687
    Class: C2
    Technique: FSDP 2, custom norm kernel
    Module: layers.*.ffn_norm
    First step: 1
    Signature: weights of the last layer's feed-forward right, its attention and all below wrong
    Cause: gradient direction
    """
    for module in modules(trainer, "ffn_norm"):

        def forward(x: Tensor, module: Any = module) -> Tensor:
            scale = x.pow(2).mean(-1, keepdim=True).add(module.eps).rsqrt()
            return x * scale.detach() * module.weight

        module.forward = forward


def gate_backward_lacks_term(trainer: Any) -> None:
    """A fused SwiGLU forgets that the gate's sigmoid depends on its input.

    Reference: class of transformers issue 48687
    Class: C2
    Technique: FSDP 2, custom activation kernel
    Module: layers.*.feed_forward
    First step: 1
    Signature: w1 of the last layer wrong, w2 and w3 right, all below wrong
    Cause: gradient direction
    Says: layer 3
    """
    for module in modules(trainer, "feed_forward"):

        def forward(x: Tensor, module: Any = module) -> Tensor:
            gate = module.w1(x)
            return module.w2(gate * torch.sigmoid(gate).detach() * module.w3(x))

        module.forward = forward


def ignored_tokens_send_gradient(trainer: Any) -> None:
    """The loss's own backward does not mask the labels that its forward ignores.

    Reference: class of torchtitan issue 3412
    Class: C2
    Technique: FSDP 2, fused cross entropy
    Module: loss
    First step: 1
    Needs: ignored labels
    Signature: every gradient wrong in direction, the loss right
    Cause: gradient direction
    Says: loss
    """
    loss = trainer.loss_fn.loss_fn
    compute = loss.fn

    def unmasked(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        ignored = logits[labels == -100]
        extra = functional.cross_entropy(ignored, ignored.argmax(-1), reduction="sum")
        return compute(logits, labels, **options) + extra - extra.detach()

    loss.fn = unmasked


def layer_not_reduced(trainer: Any) -> None:
    """FSDP's ranks keep their own gradient of one layer: its reduction is left out.

    Reference: class of DeepSpeed issue 7985
    Class: C2
    Technique: FSDP 2
    Module: none
    First step: 1
    Signature: gradients of layer 2 wrong in direction, all others right
    Cause: gradient direction
    Says: layer 2 | layers.2
    """
    reduce_scatter_by(
        trainer, "layers.2", lambda output, given, group, _: own_part(output, given, group)
    )


def late_layer_not_reduced(trainer: Any) -> None:
    """From step 6 on, one layer's gradients are no longer reduced.

    Reference: class of DeepSpeed issue 7985
    Class: C2
    Technique: FSDP 2
    Module: none
    First step: 6
    Signature: the grad norm jumps at step 6 while the loss agrees
    Cause: gradient direction
    """

    def reduce_at_first(output: Tensor, given: Tensor, group: Any, reduce: Any) -> Any:
        late = trainer.step >= 6
        return own_part(output, given, group) if late else reduce(output, given)

    reduce_scatter_by(trainer, "layers.1", reduce_at_first)


def shards_exchanged(trainer: Any) -> None:
    """The shards of one layer's gradients reach each other's rank.

    Reference: class of Megatron-LM pull request 5916
    Class: C2
    Technique: FSDP 2
    Module: none
    First step: 1
    Signature: gradients of layer 3 wrong in direction with the right norm, all others right
    Cause: gradient direction
    Says: layer 3 | layers.3
    """

    def turned(output: Tensor, given: Tensor, group: Any, reduce: Any) -> Any:
        return reduce(output, torch.cat(given.chunk(group.size())[::-1]))

    reduce_scatter_by(trainer, "layers.3", turned)


def last_microbatch_not_reduced(trainer: Any) -> None:
    """Under accumulation each rank adds its own gradient of the last microbatch.

    Reference: DeepSpeed issue 7985
    Class: C2
    Technique: FSDP 2, 2 accumulation steps
    Module: none
    First step: 1
    Needs: accumulation > 1
    Signature: every gradient wrong in direction
    Cause: gradient direction
    Says: summed | reduc | accumul
    """
    seen = 0
    backward = trainer.forward_backward_step

    def counting(**arguments: Any) -> Any:
        nonlocal seen
        seen += 1
        return backward(**arguments)

    def reduce_but_last(output: Tensor, given: Tensor, group: Any, reduce: Any) -> Any:
        if seen % trainer.gradient_accumulation_steps:
            return reduce(output, given)
        return own_part(output, given, group)

    trainer.forward_backward_step = counting
    reduce_scatter_by(trainer, "", reduce_but_last)


def gradient_not_cleared(trainer: Any) -> None:
    """One parameter is left out when gradients are set to zero.

    Reference: class of DeepSpeed issue 7985
    Class: C2
    Technique: FSDP 2
    Module: none
    First step: 2
    Signature: its gradient is that of the steps before, too; all others right
    Cause: state lost
    Says: still there
    """
    clear = trainer.optimizers.zero_grad

    def clear_others(*arguments: Any, **options: Any) -> None:
        left = [each for _, each in parameters(trainer, "layers.1.feed_forward.w2")]
        kept = [parameter.grad for parameter in left]
        clear(*arguments, **options)
        for parameter, gradient in zip(left, kept, strict=True):
            parameter.grad = gradient

    trainer.optimizers.zero_grad = clear_others


def first_stage_of_last_microbatch(trainer: Any) -> None:
    """The first pipeline stage keeps the gradient of the last microbatch alone.

    Reference: class of torchtitan issue 1733
    Class: C2
    Technique: PP 2, 1F1B
    Module: the model
    First step: 1
    Needs: more than one microbatch
    Signature: gradients of the first stage wrong in direction, those of the second right
    Cause: gradient direction
    Says: stage
    """
    if not trainer.pp_has_first_stage:
        return
    schedule = trainer.pp_schedule
    stage = schedule._stage
    receive = stage._retrieve_recv_grads

    def last_alone(chunk: int) -> Any:
        kept = chunk == schedule._n_microbatches - 1
        return tuple(gradient if kept else gradient * 0 for gradient in receive(chunk))

    stage._retrieve_recv_grads = last_alone


def gradients_exchanged(trainer: Any) -> None:
    """Gate and up projection of one layer, of one shape, get each other's gradient.

    Reference: class of Megatron-LM pull request 5916
    Class: C2
    Technique: FSDP 2
    Module: none
    First step: 1
    Signature: two gradients wrong in direction, all others right
    Cause: gradient direction
    Says: w1
    """

    def exchange() -> None:
        (_, gate), (_, up) = (
            next(parameters(trainer, f"layers.1.feed_forward.{name}.")) for name in ("w1", "w3")
        )
        theirs = local(gate.grad).clone()
        local(gate.grad).copy_(local(up.grad))
        local(up.grad).copy_(theirs)

    before_clipping(exchange)


def values_detached(trainer: Any) -> None:
    """One layer's values are detached from the graph, and with them their part of a fused weight.

    Reference: class of pytorch issue 179849
    Class: C2
    Technique: FSDP 2, fused projections
    Module: layers.2.attention.inner_attention or layers.2.attention
    First step: 1
    Signature: rows of one weight get no gradient, and all below is wrong
    Cause: gradient direction | no gradient
    Says: layers.2.attention.qkv_linear
    """

    def detach(_module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*arguments[:2], arguments[2].detach(), *arguments[3:])

    for module in modules(trainer, "layers.2.attention.inner_attention"):
        module.register_forward_pre_hook(detach)


def embeddings_detached(trainer: Any) -> None:
    """The embeddings get no gradient at all.

    Reference: class of pytorch issue 179849
    Class: C2
    Technique: FSDP 2
    Module: the model or layers.0
    First step: 1
    Signature: no gradient for the embeddings; all others right
    Cause: no gradient
    Says: tok_embeddings
    """
    for module in modules(trainer, "layers.0"):
        change = lambda _module, arguments: (arguments[0].detach(), *arguments[1:])  # noqa: E731
        module.register_forward_pre_hook(change)
