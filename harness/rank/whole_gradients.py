"""Gradients that are partial sums when they are clipped, made whole for as long as one looks.

A gradient may be a DTensor of partial sums (a replicated norm weight under TP alone, in torchtitan
0.2.2): clipping and the optimizer, which are DTensor operations, reduce it when they read it. Each
rank's own part is neither the gradient nor a copy of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor


@contextmanager
def whole_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """While it lasts, ``grad`` of each parameter lies as the parameter does.

    Collective over the meshes of gradients that are partial sums; nothing happens where none is.
    """
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        for parameter in parameters:
            if not isinstance(parameter, DTensor):
                continue
            gradient = parameter.grad
            if not isinstance(gradient, DTensor):
                continue
            if any(placement.is_partial() for placement in gradient.placements):
                kept.append((parameter, gradient))
                parameter.grad = gradient.redistribute(placements=parameter.placements)
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
