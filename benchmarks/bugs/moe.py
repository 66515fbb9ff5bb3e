"""Bugs of a mixture of experts under expert parallelism, on Qwen 3's debug model.

They carry their true classes. Each acts where the layer, its dispatcher or its buffers do the work;
``ep`` below is the number of ranks that share the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from places import before_clipping, before_step, coordinate, local, parameters, scale_gradients
from torchtitan.distributed import utils as distributed_utils


def layers(trainer: Any) -> Iterator[Any]:
    """The mixtures of experts of this rank's model, in order."""
    for model in trainer.model_parts:
        yield from (block.moe for block in model.layers.values())


def patch(thing: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a method; ``change`` gets the old one first, then what the method was called with."""
    old = getattr(thing, name)
    setattr(thing, name, lambda *arguments: change(old, *arguments))


class OwnRows(torch.autograd.Function):
    """Identity, whose gradient is kept in this rank's shard of the rows alone."""

    @staticmethod
    def forward(ctx: Any, weight: Any, rank: int, ranks: int) -> Any:
        ctx.place = rank, ranks
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rank, ranks = ctx.place
        kept = torch.zeros_like(gradients[0])
        kept.chunk(ranks)[rank].copy_(gradients[0].chunk(ranks)[rank])
        return kept, None, None


def expert_gradients_times_ep(trainer: Any) -> None:
    """Expert gradients are summed over ep ranks and not divided as those of dense weights are.

    Each expert sees the tokens of all ep ranks, so its gradient is complete after the backward of
    the all-to-all; whoever divides dense gradients by a world size must divide these, too.

    Reference: torchtitan issue 1551, pytorch issue 160285
    Class: C1
    Technique: EP 2
    First step: 1
    Signature: gradients of all experts twice the control's, all others right but for clipping
    Cause: gradient scale of a group
    Says: expert
    """
    before_clipping(lambda: scale_gradients(trainer, trainer.parallel_dims.ep, "experts"))


def router_gradient_not_summed(trainer: Any) -> None:
    """A rank's shard of the router's gradient comes from its own tokens alone.

    Reference: transformers issue 48687
    Class: C2
    Technique: EP 2
    First step: 1
    Signature: router gradients of another direction, loss and all other gradients right
    Cause: gradient direction
    Says: router
    """
    mesh = trainer.parallel_dims.get_mesh("fsdp")
    place = mesh.get_local_rank(), mesh.size()
    for moe in layers(trainer):
        gate = moe.router.gate

        def forward(old: Any, x: Any, gate: Any = gate) -> Any:
            del old
            return torch.nn.functional.linear(x, OwnRows.apply(gate.weight, *place), gate.bias)

        patch(gate, "forward", forward)


def router_not_synchronised(trainer: Any) -> None:
    """Copies of the router on tp ranks are trained apart: one rank misses their reduction.

    Under TP with EP each tp rank routes a part of the sequence, so the router's gradient is the
    sum over tp. A rank that keeps its own part lets its copy drift from the others.

    Reference: Megatron-LM issue 599
    Class: C3
    Technique: TP 2, EP 2
    First step: 1
    Signature: router gradients, then router weights differ between tp ranks
    Cause: replicas differ
    Says: router
    """
    keep = 1.0 if coordinate(trainer, "tp") == 0 else 0.5

    def unreduced() -> None:
        for _, parameter in parameters(trainer, "router"):
            local(parameter.grad).mul_(keep)

    before_clipping(unreduced)


def expert_bias_frozen(trainer: Any) -> None:
    """The hook that balances experts is registered on an optimizer that is never stepped.

    Reference: torchtitan issue 3686
    Class: C6
    Technique: EP 2
    First step: 1
    Signature: expert_bias_E stays zero; routes, and with them the loss, part from the control
    Cause: parameters do not move | state lost
    Says: bias | buffer
    """
    trainer.optimizers._optimizer_step_pre_hooks.clear()


def expert_bias_not_reduced(trainer: Any) -> None:
    """Every rank balances experts by the tokens that it counted itself.

    Reference: torchtitan issue 4154
    Class: C3
    Technique: EP 2
    First step: 1
    Signature: expert_bias_E, a replicated buffer, differs between data-parallel ranks
    Cause: replicas differ
    Says: bias
    """
    hooks = trainer.optimizers._optimizer_step_pre_hooks

    def alone(hook: Callable[..., Any]) -> Callable[..., Any]:
        def balance(*arguments: Any) -> None:
            reduce, dist.all_reduce = dist.all_reduce, lambda *_, **__: None
            try:
                hook(*arguments)
            finally:
                dist.all_reduce = reduce

        return balance

    for key, hook in list(hooks.items()):
        hooks[key] = alone(hook)


def expert_bias_moves_away_from_balance(trainer: Any) -> None:
    """The balancing step has the wrong sign: busy experts are favoured.

    Reference: class of torchtitan issue 3686
    Class: C6
    Technique: EP 2
    First step: 1
    Signature: expert_bias_E is the negative of the control's after the first update
    Cause: state lost | update
    Says: bias | buffer
    """
    hooks = trainer.optimizers._optimizer_step_pre_hooks

    def reversed_(hook: Callable[..., Any]) -> Callable[..., Any]:
        def balance(*arguments: Any) -> None:
            before = [moe.expert_bias_E.clone() for moe in layers(trainer)]
            hook(*arguments)
            for moe, old in zip(layers(trainer), before, strict=True):
                moe.expert_bias_E.copy_(2 * old - moe.expert_bias_E)

        return balance

    for key, hook in list(hooks.items()):
        hooks[key] = reversed_(hook)


def tokens_to_wrong_expert(trainer: Any) -> None:
    """Tokens that arrive in the order of ranks are taken to lie in the order of experts.

    Reference: class of torchtitan issue 3206 (a wrong dimension)
    Class: C4
    Technique: EP 2
    First step: 1
    Signature: loss off at step 1 by little, expert gradients by much
    Cause: forward or objective
    """
    for moe in layers(trainer):

        def unpermuted(old: Any, tokens: Any, counts: Any) -> Any:
            shape, permuted, indices, per_expert = old(tokens, counts)
            del permuted
            return shape, tokens, torch.arange(len(indices)), per_expert

        patch(moe.routed_experts.token_dispatcher, "_permute", unpermuted)


def combined_with_unsorted_scores(trainer: Any) -> None:
    """Expert outputs are weighted by scores that are still in the order of tokens.

    Reference: class of torchtitan issue 3604 (indices of the wrong order)
    Class: C4
    Technique: EP 2
    First step: 1
    Signature: loss off at step 1 by little, expert and router gradients by much
    Cause: forward or objective
    """
    for moe in layers(trainer):

        def unsorted(old: Any, x: Any, scores: Any, experts: Any) -> Any:
            tokens, indices, _ = old(x, scores, experts)
            return tokens, indices, scores.view(-1)

        patch(moe.routed_experts.token_dispatcher, "_local_reorder", unsorted)


def scores_not_normalised(trainer: Any) -> None:
    """The scores of the chosen experts are not divided by their sum.

    Reference: class of torchtitan issue 2575 (a step of the forward pass lost)
    Class: C4
    Technique: EP 2
    First step: 1
    Signature: experts' outputs smaller by a factor that each token has of its own
    Cause: forward or objective
    """
    for moe in layers(trainer):
        moe.router.route_norm = False


def tokens_over_capacity_dropped(trainer: Any) -> None:
    """An expert drops the tokens beyond a fair share of them, which its dispatcher has no word of.

    Reference: class of torchtitan issue 3604; capacity factors of Megatron-LM
    Class: C4
    Technique: EP 2
    First step: 1
    Needs: experts that are not evenly loaded
    Signature: loss off at step 1 by little, expert and router gradients by much
    Cause: forward or objective
    """
    for moe in layers(trainer):

        def dropped(old: Any, tokens: Any, counts: Any) -> Any:
            outputs = old(tokens, counts)
            capacity = len(tokens) // len(counts)
            place = torch.cat([torch.arange(int(count)) for count in counts])
            return outputs * (place < capacity).unsqueeze(-1)

        patch(moe.routed_experts.inner_experts, "forward", dropped)


def dispatch_without_gradient(trainer: Any) -> None:
    """The all-to-all that sends tokens to experts has no backward.

    The experts' own gradients stay right, and so does the path of the residual; what the experts
    ask of their inputs is lost.

    Reference: class of Megatron-LM issue 1464 (the backward of a collective)
    Class: C2
    Technique: EP 2
    First step: 1
    Signature: gradients off from the last mixture of experts down to the embeddings
    Cause: gradient direction
    """
    for moe in layers(trainer):

        def detached(old: Any, tokens: Any, *arguments: Any) -> Any:
            return old(tokens.detach(), *arguments)

        patch(moe.routed_experts.token_dispatcher, "_dispatch_token_exchange", detached)


def experts_swapped_after_load(trainer: Any) -> None:
    """Ranks load each other's shard of the experts; shapes fit, so strict loading succeeds.

    Reference: Megatron-LM issue 7452 (finding 12)
    Class: C6
    Technique: EP 2
    First step: 1
    Signature: experts' weights are not those of the seed checkpoint before the first step
    Cause: state lost
    Says: expert
    """
    group = trainer.parallel_dims.get_mesh("ep").get_group()
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    def swap() -> None:
        for _, parameter in parameters(trainer, "inner_experts"):
            shard = local(parameter.detach())
            shards = [torch.empty_like(shard) for _ in range(ranks)]
            dist.all_gather(shards, shard.contiguous(), group=group)
            shard.copy_(shards[(rank + 1) % ranks])

    before_step(trainer, 1, swap)


def norm_without_experts(trainer: Any) -> None:
    """The norm that clips gradients is that of the dense parameters alone.

    Reference: Megatron-LM pull request 5916; torchtitan issue 596 for the same over stages
    Class: C5
    Technique: EP 2
    First step: 1
    Needs: clipping active
    Signature: reported grad norm below the recomputed one; gradients before clipping right
    Cause: clipping | metric only
    Says: norm
    """
    del trainer
    patch_norm = torch.nn.utils.get_total_norm

    def dense(gradients: Any, *arguments: Any) -> Any:
        if any("ep" in (gradient.device_mesh.mesh_dim_names or ()) for gradient in gradients):
            gradients = []
        return patch_norm(gradients, *arguments)

    distributed_utils.torch.nn.utils.get_total_norm = dense
