"""What has to hold where the probe is called; else its evidence would mislead."""

from __future__ import annotations

import os

import torch
from torch.distributed.tensor import DTensor

from harness.probe.errors import ProbeError
from harness.probe.wrapping import Wrapped
from harness.rank import world
from harness.rank.names import canonical


def require_process_group() -> None:
    """Raises ProbeError where ranks would not know of each other."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and world.size() == 1:
        raise ProbeError(
            f"WORLD_SIZE is {ranks}, but torch.distributed is not initialised: call "
            "torch.distributed.init_process_group before Probe.from_env"
        )


def require_batch(
    inputs: torch.Tensor, labels: torch.Tensor | None, mask: torch.Tensor | None
) -> None:
    """Raises ProbeError for what is no batch of samples."""
    for name, tensor in (("inputs", inputs), ("labels", labels), ("mask", mask)):
        if tensor is None and name != "inputs":
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0 or len(tensor) != len(inputs):
            found = getattr(tensor, "shape", type(tensor).__name__)
            raise ProbeError(
                f"probe.batch: {name} is {found}; inputs, labels and mask are tensors whose first "
                "dimension is the samples of the microbatch"
            )
    if mask is not None and inputs.shape[: mask.ndim] != mask.shape:
        raise ProbeError(
            f"probe.batch: mask of shape {tuple(mask.shape)} does not fit inputs of shape "
            f"{tuple(inputs.shape)}: it has their leading dimensions, and is zero at padding"
        )


def require_same_parameters(wrapped: Wrapped, step: int) -> None:
    """Raises ProbeError when the model has other parameters than when the probe was made.

    FSDP 1 has its own, and FSDP 2 may show plain ones while they are gathered.
    """
    now = {
        canonical(name): parameter
        for module in wrapped.modules
        for name, parameter in module.named_parameters()
    }
    for name, known in wrapped.parameters:
        found = now.get(name)
        if not isinstance(known, torch.Tensor) or found is known:
            continue
        if isinstance(known, DTensor) and not isinstance(found, DTensor | None):
            continue
        raise ProbeError(
            f"{name} is another tensor at step {step} than when Probe.from_env was "
            "called: wrap, load and move the model before that, and update weights in place"
        )
