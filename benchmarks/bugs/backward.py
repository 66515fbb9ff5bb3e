"""The places of a backward pass where a bug is put, in torchtitan 0.3.0 on FSDP2."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

ReduceScatter = Callable[[Tensor, Tensor, Any, Callable[..., Any]], Any]
"""Output, input, process group, and the true ``reduce(output, input)``."""


def modules(trainer: Any, ending: str) -> Iterator[Any]:
    """Modules of this rank's model whose canonical name ends so."""
    for model in trainer.model_parts:
        for name, module in model.named_modules():
            if name.replace("_checkpoint_wrapped_module.", "").endswith(ending):
                yield module


def with_gradient(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The same values; what goes back through them is ``change`` of the true gradient."""
    seen = tensor.view_as(tensor)
    if seen.requires_grad:
        seen.register_hook(change)
    return seen


def change_input_gradient(
    module: Any, change: Callable[[Tensor], Tensor], argument: int = 0
) -> None:
    """Change the gradient of a module's positional argument, and not its value."""

    def before(_module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        changed = with_gradient(arguments[argument], change)
        return (*arguments[:argument], changed, *arguments[argument + 1 :])

    module.register_forward_pre_hook(before)


def reduce_scatter_by(trainer: Any, ending: str, act: ReduceScatter) -> None:
    """Let FSDP reduce the gradients of the modules with such names by ``act``."""

    class Changed(DefaultReduceScatter):
        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: Any,
            op: Any,
            async_op: bool = False,  # noqa: FBT001, FBT002 (FSDP's own signature)
        ) -> Any:
            def reduce(output: Tensor, given: Tensor) -> Any:
                return DefaultReduceScatter.__call__(self, output, given, group, op, async_op)

            return act(output_tensor, input_tensor, group, reduce)

    for module in modules(trainer, ending):
        if hasattr(module, "_get_fsdp_state"):
            for parameters in module._get_fsdp_state()._fsdp_param_groups:
                parameters._reduce_scatter_comm = Changed()


def own_part(output: Tensor, given: Tensor, group: Any) -> None:
    """What a rank has without any reduction: its own gradient of its own shard."""
    output.copy_(given.chunk(group.size())[group.rank()])


def skip_all_reduce(part: str, when: Callable[[], bool] = lambda: True) -> None:
    """Leave out the reduction over replicas for modules with ``part`` in their names."""
    reduce = _fsdp_param_group.foreach_reduce
    signature = inspect.signature(reduce)

    def skipping(parameters: list[Any], *others: Any, **named: Any) -> Any:
        call = signature.bind(parameters, *others, **named)
        if part in parameters[0]._param_fqn and when():
            call.arguments["all_reduce_group"] = None
        return reduce(*call.args, **call.kwargs)

    _fsdp_param_group.foreach_reduce = skipping


def take_partial_as_whole(part: str) -> None:
    """Where TP leaves a part of a gradient on each rank, take each part for the whole."""
    inner = FSDPParam._get_grad_inner_tensor

    def unreduced(parameter: Any, gradient: Any) -> Any:
        # Of spmd_types gradients are plain tensors, and the parameter knows where they are partial.
        known = getattr(parameter, "_spmd_grad_placements", None) or ()
        placements = getattr(gradient, "placements", known)
        over_tp = [
            place
            for number, place in enumerate(placements)
            if number not in getattr(parameter, "_dp_dim_indices", ())
        ]
        if any(place.is_partial() for place in over_tp) and part in parameter._param_fqn:
            return gradient.to_local() if isinstance(gradient, DTensor) else gradient
        return inner(parameter, gradient)

    FSDPParam._get_grad_inner_tensor = unreduced
