"""Finds out how a model is wrapped, so that its parts can be named and read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from converge_harness.probe import fsdp1
from converge_harness.probe.errors import ProbeError
from converge_harness.probe.wrapping import Wrapped
from converge_harness.rank.recorder.grad_norm import trainable
from converge_harness.rank.recorder.names import canonical


def recognised(model: torch.nn.Module, optimizer: Any) -> Wrapped:
    """The model as the probe needs it.

    ``optimizer`` is one of torch's, a wrapper that has it as ``optimizer`` (accelerate's), a list
    of them, or None if the model has its own (a DeepSpeed engine). Raises ProbeError when they do
    not belong together, or when the model cannot be read.
    """
    if any(base.__name__ == "DeepSpeedEngine" for base in type(model).__mro__):
        from converge_harness.probe.deepspeed import wrapped_engine

        wrapped: Wrapped = wrapped_engine(model)
    else:
        wrapped = _of_torch(model, _torch_optimizers(optimizer))
    _require_readable(wrapped)
    return wrapped


def _of_torch(model: torch.nn.Module, optimizers: tuple[torch.optim.Optimizer, ...]) -> Wrapped:
    inner, wrappers = _without_outer(model)
    if fsdp1.is_wrapped(inner):
        return fsdp1.wrapped_fsdp1(inner, optimizers)
    if any(isinstance(module, FSDPModule) for module in inner.modules()):
        wrappers.append("FSDP2")
    parameters = trainable([inner])
    _require_trained(parameters, optimizers)
    return Wrapped(
        wrapping="+".join(wrappers) or "none",
        modules=(inner,),
        parameters=tuple(parameters),
        copies=tuple((canonical(name), each) for name, each in inner.named_parameters()),
        optimizers=optimizers,
        kept_by=optimizers,
        movable=True,
    )


def _without_outer(model: torch.nn.Module) -> tuple[torch.nn.Module, list[str]]:
    """The program's own module, whose names count, and the wrapper around it."""
    wrappers = []
    while True:
        if isinstance(model, DistributedDataParallel):
            wrappers.append("DDP")
            model = model.module
        elif isinstance(model, torch._dynamo.OptimizedModule):
            model = model._orig_mod
        else:
            return model, wrappers


def _torch_optimizers(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    several = optimizer if isinstance(optimizer, Sequence) else (optimizer,)
    found = []
    for each in several:
        inner = each
        # accelerate's wrapper subclasses Optimizer without calling its __init__: it has no hooks.
        while isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer) or (
            not isinstance(inner, torch.optim.Optimizer) and hasattr(inner, "optimizer")
        ):
            inner = inner.optimizer
        if not isinstance(inner, torch.optim.Optimizer):
            raise ProbeError(
                f"the optimizer is a {type(each).__name__}; allowed are a torch.optim.Optimizer, a "
                "wrapper that has one as its attribute `optimizer`, or a list of them: "
                "Probe.from_env(model, optimizer)"
            )
        found.append(inner)
    return tuple(found)


def _require_trained(
    parameters: Iterable[tuple[str, Any]], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Raises ProbeError when the optimizer has none of the model's parameters."""
    updated = {
        id(parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    names = [name for name, parameter in parameters if id(parameter) not in updated]
    if names and len(names) == len(list(parameters)):
        raise ProbeError(
            f"the optimizer updates none of the model's {len(names)} trainable parameters (such as "
            f"{names[0]}): it was made for another model, or before this one was wrapped. Make the "
            "optimizer after the model is wrapped, and call Probe.from_env after both"
        )


def _require_readable(wrapped: Wrapped) -> None:
    """Raises ProbeError with all reasons why the model cannot be read."""
    problems = list(wrapped.problems)
    problems += [
        f"{name}: is on the meta device and has no values yet; call Probe.from_env after the "
        "model has its weights"
        for name, tensor in wrapped.copies
        if getattr(tensor, "is_meta", False)
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""  # noqa: PLR2004
        raise ProbeError("; ".join(problems[:3]) + more)
