"""Faults of the stored sample, each called in every rank."""

from typing import Any


def double_gradients(_trainer: Any) -> None:
    """Every gradient twice as large before clipping."""
    from torchtitan.distributed import utils

    clip = utils.clip_grad_norm_

    def scaled(parameters: Any, *arguments: Any, **options: Any) -> Any:
        parameters = list(parameters)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(2)
        return clip(parameters, *arguments, **options)

    utils.clip_grad_norm_ = scaled


def crash(_trainer: Any) -> None:
    """A rank that dies before its first step."""
    raise RuntimeError("this set crashes on purpose")
