"""What torch's functions and a model's forward are given, where the loop does not say it.

``ClippingWatch`` sees gradients before torch's own functions clip them. The functions are replaced
where they are looked up. A program that has imported ``clip_grad_norm_`` by name before keeps the
original, but that looks up what does the clipping, which is replaced too (torch 2.7 and later).

``ForwardWatch`` sees batches and losses of a loop that cannot be edited.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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


_INPUTS = ("input_ids", "inputs", "input", "x", "pixel_values")
_LABELS = ("labels", "label", "targets", "target", "y")
_MASKS = ("attention_mask", "mask")


class ForwardCall(NamedTuple):
    """A call of the model's forward in training."""

    inputs: torch.Tensor
    labels: torch.Tensor | None
    mask: torch.Tensor | None


class ForwardWatch:
    """Keeps the batches that a model is called with in training, and the losses that it returns.

    Found are arguments by usual names, else the first tensor, and the next one as labels; a loss is
    the output's ``loss`` or a tensor with one entry.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.batches: list[ForwardCall] = []
        self.losses: list[torch.Tensor] = []
        before = model.register_forward_pre_hook(self._before, with_kwargs=True)
        after = model.register_forward_hook(self._after)
        self._handles = (before, after)

    def forget(self) -> None:
        """A new step begins."""
        self.batches.clear()
        self.losses.clear()

    def undo(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            found = _given(args, kwargs)
            if found is not None:
                self.batches.append(found)

    def _after(self, module: torch.nn.Module, _args: Any, output: Any) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None and isinstance(output, torch.Tensor) and output.numel() == 1:
            loss = output
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self.losses.append(loss.detach())


def _given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ForwardCall | None:
    named: dict[str, Any] = {}
    tensors: list[torch.Tensor] = []
    for argument in args:
        if isinstance(argument, torch.Tensor):
            tensors.append(argument)
        elif isinstance(argument, Mapping):
            named |= argument
        elif isinstance(argument, tuple | list):
            tensors += [each for each in argument if isinstance(each, torch.Tensor)]
    named |= kwargs
    inputs = _first(named, _INPUTS)
    labels = _first(named, _LABELS)
    if inputs is None and tensors:
        inputs = tensors.pop(0)
    if inputs is None or inputs.ndim == 0:
        return None
    if labels is None and tensors and tensors[0].shape[:1] == inputs.shape[:1]:
        labels = tensors[0]
    mask = _first(named, _MASKS)
    if mask is not None and mask.shape != inputs.shape[: mask.ndim]:
        mask = None
    return ForwardCall(inputs, labels, mask)


def _first(named: Mapping[str, Any], names: Sequence[str]) -> torch.Tensor | None:
    values = (named.get(name) for name in names)
    return next((value for value in values if isinstance(value, torch.Tensor)), None)
