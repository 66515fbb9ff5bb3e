"""The places of a training step where a bug is put; they work in torchtitan 0.3.0 and 0.2.2.

What an action does is seen by the probe as a bug of the trainer would be: gradients changed
``before_clipping`` are those that clipping finds, ``before_update`` those that the optimizer finds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

Action = Callable[[], None]


def rank() -> int:
    """The global rank of this process."""
    return int(os.environ["RANK"])


def coordinate(trainer: Any, dimension: str) -> int:
    """This rank's place on a mesh dimension; 0 where there is no such dimension.

    The names are torchtitan's: ``tp cp pp ep dp_replicate fsdp batch``.
    """
    mesh = trainer.parallel_dims.get_optional_mesh(dimension)
    return mesh.get_local_rank() if mesh is not None else 0


def parameters(trainer: Any, part: str = "") -> Iterator[tuple[str, Any]]:
    """Names and parameters of this rank's model whose canonical name contains ``part``."""
    for model in trainer.model_parts:
        for name, parameter in model.named_parameters():
            plain = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
            if part in plain:
                yield plain, parameter


def local(tensor: Any) -> Any:
    """The shard of a DTensor that this rank holds, or the plain tensor itself; shares memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def scale_gradients(trainer: Any, factor: float, part: str = "") -> None:
    """Multiply the gradients of all parameters with ``part`` in their name, in place."""
    for _, parameter in parameters(trainer, part):
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor)


def before_clipping(action: Action) -> None:
    """Call when gradients are complete and not yet clipped, once a step."""
    from torchtitan.distributed import utils

    clip = utils.clip_grad_norm_

    def clipped(*arguments: Any, **options: Any) -> Any:
        action()
        return clip(*arguments, **options)

    utils.clip_grad_norm_ = clipped


def before_update(action: Action) -> None:
    """Call when gradients are clipped, before the optimizer takes them, once a step."""
    from torchtitan.distributed import utils

    clip = utils.clip_grad_norm_

    def clipped(*arguments: Any, **options: Any) -> Any:
        norm = clip(*arguments, **options)
        action()
        return norm

    utils.clip_grad_norm_ = clipped


def before_step(trainer: Any, step: int | None, action: Action) -> None:
    """Call before a step begins; before each with ``step`` None.

    The first step is 1; the seed checkpoint is loaded by then.
    """
    train_step = trainer.train_step

    def stepping(*arguments: Any, **options: Any) -> Any:
        if step is None or trainer.step == step:
            action()
        return train_step(*arguments, **options)

    trainer.train_step = stepping


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
