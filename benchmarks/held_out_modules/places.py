"""How the held-out bugs reach into a parallelised model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def modules(trainer: Any, pattern: str) -> Iterator[Any]:
    """The modules of this rank whose name, such as ``layers.1.attention``, matches."""
    from fnmatch import fnmatchcase

    for part in trainer.model_parts:
        for name, module in part.named_modules():
            if fnmatchcase(name, pattern):
                yield module


def replace_forward(module: Any, make: Callable[[Callable], Callable]) -> None:
    """Put ``make(forward)`` in the place of the whole forward, redistributions included."""
    module.forward = make(module.forward)


def replace_inner(module: Any, make: Callable[[Callable], Callable]) -> None:
    """Put ``make(forward)`` in the place of the forward between the redistributions.

    torchtitan's ``Module.parallelize`` wraps a forward in one that redistributes its inputs and
    its output; the function within is a free variable, ``fn``, of that wrapper. A module that has
    no such wrapper computes all by itself, so that its whole forward is replaced.
    """
    cell = _redistributed(module.__dict__.get("forward"))
    if cell is None:
        replace_forward(module, make)
    else:
        cell.cell_contents = make(cell.cell_contents)


def _redistributed(function: Any, depth: int = 4) -> Any:
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or not closure:
        return None
    if code.co_name == "forward_with_redistribution":
        return dict(zip(code.co_freevars, closure, strict=True))["fn"]
    if depth:
        for cell in closure:
            found = _redistributed(cell.cell_contents, depth - 1)
            if found is not None:
                return found
    return None


def axis(trainer: Any, name: str) -> tuple[int, int]:
    """This rank's index along an axis of the mesh and the axis's size: (0, 1) where it is off."""
    mesh = trainer.parallel_dims.get_optional_mesh(name)
    return (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())


def probing(trainer: Any) -> bool:
    """Whether the pipeline runs a stage on placeholders, to learn shapes, before the first step."""
    schedule = trainer.pp_schedule
    return not (
        getattr(schedule, "_stage_forward_initialized", False)
        or getattr(schedule, "_stages_forward_initialized", False)
    )


def local(tensor: Any) -> Any:
    """The plain tensor of a parameter within a forward."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def reversed_chunks(tensor: Any, count: int) -> Any:
    """The tensor with its ``count`` equal pieces along the sequence in reverse order."""
    import torch

    return torch.cat(tensor.chunk(count, dim=1)[::-1], dim=1)


def with_gradient_of(value: Any, carrier: Any) -> Any:
    """``value``, bit for bit, whose gradient goes to ``carrier`` instead."""
    import torch

    class Swap(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, _carrier: Any, value: Any) -> Any:
            return value.clone()

        @staticmethod
        def backward(_ctx: Any, grad: Any) -> tuple[Any, None]:
            return grad, None

    return Swap.apply(carrier, value.detach())


def own_chunk_of_gradient(tensor: Any, index: int, count: int) -> Any:
    """The tensor, to whose gradient only this rank's piece of the sequence is passed.

    Where the tensor was gathered along the sequence, the sum over ranks in that gather's backward
    then holds nothing but the rank's own contribution.
    """
    import torch

    class OwnChunk(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, tensor: Any) -> Any:
            return tensor.view_as(tensor)

        @staticmethod
        def backward(_ctx: Any, grad: Any) -> Any:
            pieces = list(grad.chunk(count, dim=1))
            return torch.cat(
                [p if i == index else torch.zeros_like(p) for i, p in enumerate(pieces)], dim=1
            )

    return OwnChunk.apply(tensor) if tensor.requires_grad else tensor


def linear_with_backward(x: Any, weight: Any, weight_gradient: Callable[[Any, Any], Any]) -> Any:
    """``x @ weight.T``, whose weight gradient is ``weight_gradient(grad, x)`` of 2-d tensors."""
    import torch

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight)
            return torch.nn.functional.linear(x, weight)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, Any]:
            x, weight = ctx.saved_tensors
            return grad @ weight, weight_gradient(grad.flatten(0, -2), x.flatten(0, -2))

    return Linear.apply(x, weight)
