"""Places of a training step that these bugs need besides those of all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from places import Action


def modules(trainer: Any, ending: str) -> Iterator[Any]:
    """Modules of this rank's model whose name ends with ``ending``."""
    for model in trainer.model_parts:
        for name, module in model.named_modules():
            if name.endswith(ending):
                yield module


def replace_forward(module: Any, make: Callable[[Any], Any]) -> None:
    """Put ``make(forward)`` in the place of a module's forward, outside its redistributions."""
    module.forward = make(module.forward)


def before_reduction(action: Callable[[list[Any]], None]) -> None:
    """Call before FSDP reduces the gradients of one of its modules over ranks.

    ``action`` gets the list of this rank's own whole gradients and may replace its elements.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    reduce = _fsdp_param_group.foreach_reduce

    def reducing(parameters: Any, gradients: Any, *arguments: Any, **options: Any) -> Any:
        action(gradients)
        return reduce(parameters, gradients, *arguments, **options)

    _fsdp_param_group.foreach_reduce = reducing


def count_microbatches(trainer: Any) -> dict[str, int]:
    """A counter whose ``"now"`` is the running accumulation microbatch of a step, from 0.

    It is -1 in passes outside of a training step.
    """
    count = {"now": -1}
    steps = {"inside": False}
    forward_backward, train_step = trainer.forward_backward_step, trainer.train_step

    def counted(*arguments: Any, **options: Any) -> Any:
        count["now"] += steps["inside"]
        return forward_backward(*arguments, **options)

    def stepping(*arguments: Any, **options: Any) -> Any:
        steps["inside"] = True
        try:
            return train_step(*arguments, **options)
        finally:
            steps["inside"] = False
            count["now"] = -1

    trainer.forward_backward_step, trainer.train_step = counted, stepping
    return count


def replace_update(trainer: Any, make: Callable[[Action], Action]) -> None:
    """Put ``make(step)`` in the place of the step of all optimizers."""
    trainer.optimizers.step = make(trainer.optimizers.step)
