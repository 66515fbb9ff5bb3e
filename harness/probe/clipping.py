"""Sees gradients before torch's own functions clip them.

The functions are replaced where they are looked up. A program that has imported ``clip_grad_norm_``
by name before keeps the original, but that looks up what does the clipping, which is replaced too
(torch 2.7 and later).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad

_NAMES = (
    "clip_grad_norm_",
    "clip_grad_norm",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "_clip_grads_with_norm_",
)


class ClippingWatch:
    """Calls ``seen`` before gradients of some parameters are clipped, until ``undo``.

    A model may be clipped part by part: only the first part's call counts then. Parameters that are
    clipped a second time in a step begin anew.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], seen: Callable[[], None]) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        self._seen = seen
        self._clipped: set[int] = set()
        self._inside = False
        self._replaced = [
            (module, name, getattr(module, name))
            for module in (torch.nn.utils, clip_grad)
            for name in _NAMES
            if hasattr(module, name)
        ]
        for module, name, function in self._replaced:
            setattr(module, name, self._watched(function))

    def forget(self) -> None:
        """A new step begins."""
        self._clipped.clear()

    def undo(self) -> None:
        for module, name, function in self._replaced:
            setattr(module, name, function)

    def _watched(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(clip)
        def watched(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return clip(parameters, *args, **kwargs)
            if not isinstance(parameters, torch.Tensor):
                parameters = list(parameters)  # it may be a generator, and is read twice
            self._look([parameters] if isinstance(parameters, torch.Tensor) else parameters)
            self._inside = True
            try:
                return clip(parameters, *args, **kwargs)
            finally:
                self._inside = False

        return watched

    def _look(self, parameters: Iterable[torch.Tensor]) -> None:
        mine = {id(parameter) for parameter in parameters} & self._parameters
        if mine and (not self._clipped or mine & self._clipped):
            self._clipped.clear()
            self._seen()
        self._clipped |= mine
