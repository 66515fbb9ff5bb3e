"""What a model's forward is given and gives, where the loop itself cannot be edited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

_INPUTS = ("input_ids", "inputs", "input", "x", "pixel_values")
_LABELS = ("labels", "label", "targets", "target", "y")
_MASKS = ("attention_mask", "mask")


class Given(NamedTuple):
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
        self.batches: list[Given] = []
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


def _given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Given | None:
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
    return Given(inputs, labels, mask)


def _first(named: Mapping[str, Any], names: Sequence[str]) -> torch.Tensor | None:
    values = (named.get(name) for name in names)
    return next((value for value in values if isinstance(value, torch.Tensor)), None)
