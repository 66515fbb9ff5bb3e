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


def double_gradients_under_tp(trainer: Any) -> None:
    """The same, if there is tensor parallelism."""
    if trainer.parallel_dims.tp > 1:
        double_gradients(trainer)


def dropout(trainer: Any) -> None:
    """No fault: dropout of feed-forward outputs, whose numbers each rank draws by itself."""
    import torch

    torch.manual_seed(1234 + torch.distributed.get_rank())
    for name, module in trainer.model_parts[0].named_modules():
        if name.endswith("feed_forward"):
            module.register_forward_hook(
                lambda _module, _inputs, output: torch.dropout(output, 0.1, train=True)
            )


def dropout_and_scaled_matrix(trainer: Any) -> None:
    dropout(trainer)
    scale_one_matrix(trainer)


def scale_one_matrix(trainer: Any) -> None:
    """One matrix' gradient half as large again: the global norm hardly moves."""
    from torchtitan.distributed import utils

    clip = utils.clip_grad_norm_
    names = dict(trainer.model_parts[0].named_parameters())
    (matrix,) = (
        parameter for name, parameter in names.items() if name.endswith("1.feed_forward.w2.weight")
    )

    def scaled(*arguments: Any, **options: Any) -> Any:
        matrix.grad.mul_(1.5)
        return clip(*arguments, **options)

    utils.clip_grad_norm_ = scaled


def clip_on_one_rank(_trainer: Any) -> None:
    """Rank 1 clips to another norm than rank 0 (BLOOM's bug, DeepSpeed issue 1801)."""
    import os

    from torchtitan.distributed import utils

    clip = utils.clip_grad_norm_

    def clipped(parameters: Any, max_norm: float, *arguments: Any, **options: Any) -> Any:
        if os.environ["RANK"] == "1":
            max_norm = 0.9 * max_norm
        return clip(parameters, max_norm, *arguments, **options)

    utils.clip_grad_norm_ = clipped


def freeze_one_matrix(trainer: Any) -> None:
    """The optimizer never reaches one matrix, which gets its gradient as it should."""
    names = dict(trainer.model_parts[0].named_parameters())
    (matrix,) = (
        parameter for name, parameter in names.items() if name.endswith("0.feed_forward.w1.weight")
    )
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group["params"] = [
                parameter for parameter in group["params"] if parameter is not matrix
            ]


def crash_at_step_2(trainer: Any) -> None:
    """An exception in one rank only: the others must not be blamed for it."""
    import os

    train_step = trainer.train_step

    def failing(*arguments: Any, **options: Any) -> Any:
        if trainer.step == 2 and os.environ["RANK"] == "1":
            raise ValueError("the disk of rank 1 is on fire")
        return train_step(*arguments, **options)

    trainer.train_step = failing


def hold_in_the_first_life(trainer: Any) -> None:
    """As step 6 begins, wait to be killed; ``holding`` in the run folder tells the test."""
    import time
    from pathlib import Path

    run = Path(trainer.checkpointer.folder).parent
    if (run / "passes" / "002").exists():
        return
    train_step = trainer.train_step

    def held(*arguments: Any, **options: Any) -> Any:
        if trainer.step == 6:
            (run / "holding").touch()
            time.sleep(600)
        return train_step(*arguments, **options)

    trainer.train_step = held


def sleep_at_step_2(trainer: Any) -> None:
    """One rank stops answering for longer than any test waits."""
    import os
    import time

    train_step = trainer.train_step

    def sleeping(*arguments: Any, **options: Any) -> Any:
        if trainer.step == 2 and os.environ["RANK"] == "1":
            time.sleep(3600)
        return train_step(*arguments, **options)

    trainer.train_step = sleeping


def report_twice_the_loss(trainer: Any) -> None:
    """Training is right, and its metric is not."""
    log = trainer.metrics_processor.log

    def doubled(step: int, loss: float, *more: Any, **others: Any) -> Any:
        return log(step, 2 * loss, *more, **others)

    trainer.metrics_processor.log = doubled


def writes_later_weights(trainer: Any) -> None:
    """A checkpoint in the background is no copy, and is written once the next step has ended."""
    import time

    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.staging import DefaultStager

    write, until = FileSystemWriter.write_data, 0

    def stage(_self: Any, state_dict: Any, **_: Any) -> Any:
        nonlocal until
        until = min(trainer.step + 2, trainer.config.training.steps)
        return state_dict

    def write_later(self: Any, plan: Any, planner: Any) -> Any:
        while trainer.step < until:
            time.sleep(0.01)
        return write(self, plan, planner)

    DefaultStager.stage = stage
    FileSystemWriter.write_data = write_later


def gate_with_gelu(trainer: Any) -> None:
    """One feed-forward has another activation."""
    import torch

    module = trainer.model_parts[0].layers["1"].feed_forward

    def forward(rows: Any) -> Any:
        return module.w2(torch.nn.functional.gelu(module.w1(rows)) * module.w3(rows))

    module.forward = forward
