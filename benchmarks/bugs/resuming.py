"""A resume in the middle of a run, in the same process; works in torchtitan 0.3.0 and 0.2.2.

All that a new process would not have is lost on purpose: the weights are initialised again, the
optimizer has no state, schedule, loader and step counter are where they were before training. Then
torchtitan's own checkpointer loads what it saved. A run that resumes right goes on bit for bit as
if nothing had been.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from places import Action, parameters

States = dict[str, Any]
"""What a checkpoint holds: tensors of the model by name, and stateful parts by name."""


def resume(
    trainer: Any,
    step: int,
    *,
    without: Collection[str] = (),
    written: Callable[[States], States] = dict,
    read: Callable[[States], States] = dict,
    before_loading: Action = lambda: None,
    after_loading: Action = lambda: None,
) -> None:
    """Make a step the first one after a resume.

    Args:
        trainer: the built trainer, before training.
        step: the checkpoint is that of the step before; at least 2.
        without: parts that are not loaded (checkpoint.exclude_from_loading): ``optimizer``,
            ``lr_scheduler``, ``dataloader``.
        written: makes what is written of what is to be saved.
        read: makes what is read of what is to be loaded.
        before_loading: called when all is as in a new process.
        after_loading: called when all is loaded.
    """
    schedule, loader = trainer.lr_schedulers.state_dict(), trainer.dataloader.state_dict()

    def restart() -> None:
        with _changed(trainer.checkpointer, "dcp_save", written):
            save(trainer, step - 1)
        _forget(trainer, schedule, loader)
        before_loading()
        with _changed(trainer.checkpointer, "dcp_load", read):
            load(trainer, step - 1, without)
        after_loading()
        _remove(trainer)
        _take_batches_from(trainer)

    after_step(trainer, step - 1, restart)


def after_step(trainer: Any, step: int, action: Action) -> None:
    """Call where the trainer asks its checkpointer to save: when a step is complete."""
    ask = trainer.checkpointer.save

    def asked(curr_step: int, last_step: bool = False) -> Any:  # noqa: FBT001, FBT002 (theirs)
        answer = ask(curr_step, last_step=last_step)
        if curr_step == step:
            action()
        return answer

    trainer.checkpointer.save = asked


def save(trainer: Any, step: int) -> None:
    """Write a whole checkpoint as that of a step, until a resume removes it. Collective."""
    checkpointer = trainer.checkpointer
    with _settings(checkpointer, folder=str(_folder(trainer)), load_only=False, interval=1):
        if not type(checkpointer).save(checkpointer, step):
            raise RuntimeError(f"no checkpoint was saved after step {step}")


def load(trainer: Any, step: int, without: Collection[str] = ()) -> None:
    """Read the checkpoint of a step, but for some of its parts. Collective."""
    checkpointer = trainer.checkpointer
    excluded = list(without)
    with _settings(checkpointer, folder=str(_folder(trainer)), exclude_from_loading=excluded):
        if not checkpointer.load(step):
            raise RuntimeError(f"no checkpoint was loaded for step {step}")


def optimizer_states(trainer: Any, part: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of parameters with ``part`` in them, and what the optimizer keeps of each."""
    for name, parameter in parameters(trainer, part):
        for optimizer in trainer.optimizers:
            if parameter in optimizer.state:
                yield name, optimizer.state[parameter]


def _forget(trainer: Any, schedule: States, loader: States) -> None:
    """Be as a new process is before it loads; with its seeds, too."""
    from torchtitan.distributed.utils import set_determinism

    config = trainer.config
    set_determinism(
        trainer.parallel_dims, trainer.device, config.debug, distinct_seed_mesh_dims=["pp"]
    )
    # Gradients must go as well: where there are any, torchtitan prepares no room for the
    # optimizer's state, and loads none.
    trainer.optimizers.zero_grad(set_to_none=True)
    for optimizer in trainer.optimizers:
        optimizer.state.clear()
    with torch.no_grad():
        for model in trainer.model_parts:
            model.init_weights(buffer_device=None)
    trainer.lr_schedulers.load_state_dict(schedule)
    for scheduler in trainer.lr_schedulers.schedulers:
        for group, rate in zip(
            scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True
        ):
            group["lr"] = rate
    trainer.dataloader.load_state_dict(loader)
    trainer.load_state_dict({"step": 0, "ntokens_seen": 0})


def _take_batches_from(trainer: Any) -> None:
    """From now on take a new iterator's batches: the old one belongs to the lost process."""
    batches = trainer.batch_generator(trainer.dataloader)
    train_step = trainer.train_step
    trainer.train_step = lambda _: train_step(batches)


def _folder(trainer: Any) -> Path:
    return Path(trainer.config.dump_folder) / "resume"


def _remove(trainer: Any) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(_folder(trainer))


@contextmanager
def _settings(checkpointer: Any, **settings: Any) -> Iterator[None]:
    """Give the checkpointer other settings for a while: jobs run with ``load_only``."""
    before = {name: getattr(checkpointer, name) for name in settings}
    for name, value in settings.items():
        setattr(checkpointer, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(checkpointer, name, value)


@contextmanager
def _changed(checkpointer: Any, method: str, change: Callable[[States], States]) -> Iterator[None]:
    """Give a method of the checkpointer other states than it is called with."""
    call = getattr(checkpointer, method)
    with _settings(
        checkpointer, **{method: lambda states, *rest, **more: call(change(states), *rest, **more)}
    ):
        yield
