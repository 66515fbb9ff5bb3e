"""Faults put into real runs on purpose. Each function is called in every rank (``inject``)."""

from typing import Any


def double_gradients(_trainer: Any) -> None:
    """Every gradient twice as large before clipping, as a wrong world-size factor makes it."""
    from torchtitan.distributed import utils

    clip = utils.clip_grad_norm_

    def scaled(parameters: Any, *arguments: Any, **options: Any) -> Any:
        parameters = list(parameters)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(2)
        return clip(parameters, *arguments, **options)

    utils.clip_grad_norm_ = scaled


def crash_at_step_2(trainer: Any) -> None:
    """An exception in one rank only: the others must not be blamed for it."""
    import os

    train_step = trainer.train_step

    def failing(*arguments: Any, **options: Any) -> Any:
        if trainer.step == 2 and os.environ["RANK"] == "1":
            raise ValueError("the disk of rank 1 is on fire")
        return train_step(*arguments, **options)

    trainer.train_step = failing
