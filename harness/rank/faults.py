"""Makes the faults of a job's script happen in its ranks.

Just before a fault, its rank writes and syncs ``faults/<index>.json``: a fault whose file exists
never happens again, however often its step is replayed. A fault of converge (``preempt
agent_loss join``) comes from outside: here the ranks only wait for it at the end of its step. A
fault of a rank that a smaller world does not have does not happen.

A rank dies or hangs in the middle of a step, after the backward of the step's first microbatch (in
a pipeline: of all): others may wait for it in a collective, and no parameter of this rank has been
updated in the step.

Faults of checkpoints: with torch's distributed checkpoint
(``torch.distributed.checkpoint.filesystem``) every rank writes and syncs its shard,
``__<rank>_0.distcp``; then rank 0 writes ``.metadata``, which completes the checkpoint. All of this
assumes that the trainer saves synchronously.
"""

from __future__ import annotations

import functools
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from converge_harness.rank.titan.common.pipelining import stages
from converge_harness.run_folder.faults import (
    HELD,
    hold_until,
    over_file,
    record_struck,
    struck_file,
)
from converge_harness.run_folder.job import RankFault, RankJob
from converge_harness.run_folder.layout import CHECKPOINT_METADATA, checkpoint_of


def install_faults(trainer: Any, job: RankJob, pass_number: int) -> None:
    """Install the job's faults in this rank.

    Call it on every rank of a built trainer, after everything else that wraps its methods (the
    probe, ``inject``, evidence on checkpoints) and before it trains.
    """
    for index, fault in enumerate(job.faults):
        if fault.kind in HELD:
            _hold_after(trainer, fault.step, over_file(job.run_folder, index))
            continue
        checkpoint = checkpoint_of(job.run_folder, fault.step)
        if struck_file(job.run_folder, index).exists():
            if fault.kind == "disk_full" and dist.get_rank() == 0:
                free_disk(checkpoint, fault.rank)
            continue
        record = functools.partial(record_struck, job.run_folder, index, fault, pass_number)
        _install(trainer, fault, checkpoint, record)


def _install(trainer: Any, fault: RankFault, checkpoint: Path, record: Callable[[], None]) -> None:
    if fault.kind == "ckpt_torn":
        if fault.torn == "truncated":
            cut_shard(trainer.checkpointer, fault, checkpoint, record)
        else:
            die_before_metadata(checkpoint, record)
    elif fault.rank == dist.get_rank():
        if fault.kind == "disk_full":
            fill_disk(checkpoint, record)
        else:
            of_step = {
                "kill": die_after_backward,
                "hang": hang_after_backward,
                "nan_batch": poison_forward,
            }
            of_step[fault.kind](trainer, fault.step, record)


def _hold_after(trainer: Any, step: int, over: Path) -> None:
    """Wait for converge once the step has ended and its checkpoint, if due, is complete."""
    save = (
        trainer.checkpointer.save
    )  # called after every step; it decides whether a checkpoint is due

    @functools.wraps(save)
    def save_and_hold(curr_step: int, last_step: bool = False) -> Any:  # noqa: FBT001, FBT002
        saved = save(curr_step, last_step=last_step)
        if curr_step == step:
            hold_until(over)
        return saved

    trainer.checkpointer.save = save_and_hold


def die_after_backward(trainer: Any, step: int, record: Callable[[], None]) -> None:
    """Kill this rank with SIGKILL."""

    def die() -> None:
        record()
        os.kill(os.getpid(), signal.SIGKILL)

    _after_backward(trainer, step, die)


def hang_after_backward(trainer: Any, step: int, record: Callable[[], None]) -> None:
    """Hang this rank for ever. SIGTERM and SIGKILL still end it."""

    def hang() -> None:
        record()
        while True:
            time.sleep(60)

    _after_backward(trainer, step, hang)


def poison_forward(trainer: Any, step: int, record: Callable[[], None]) -> None:
    """Make the step's first forward on this rank return NaN, whichever pipeline stage it runs."""
    poisoned = False

    def poison(output: torch.Tensor) -> torch.Tensor:
        nonlocal poisoned
        if poisoned or trainer.step != step or not torch.is_grad_enabled():
            return output
        poisoned = True
        record()
        return output * math.nan

    if not trainer.parallel_dims.pp_enabled:
        trainer.model_parts[0].register_forward_hook(lambda _module, _inputs, out: poison(out))
        return
    for stage in stages(trainer.pp_schedule):
        # Not a module hook: that would also see the forward in which torch infers shapes.
        forward = stage.forward_maybe_with_nosync
        stage.forward_maybe_with_nosync = _followed_by(forward, poison)


def _followed_by(
    forward: Callable[..., Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(forward(*args, **kwargs))

    return changed


def _after_backward(trainer: Any, step: int, strike: Callable[[], None]) -> None:
    """Call ``strike``, which never returns, in the middle of a step."""
    forward_backward = trainer.forward_backward_step

    @functools.wraps(forward_backward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        loss = forward_backward(*args, **kwargs)
        if trainer.step == step:
            strike()
        return loss

    trainer.forward_backward_step = watched


FULL_DISK = Path("/dev/full")
"""Every write to it fails with ENOSPC."""


def die_before_metadata(checkpoint: Path, record: Callable[[], None]) -> None:
    """Kill every rank when all shards of the checkpoint are on disk but ``.metadata`` is not."""
    write = FileSystemWriter.write_data

    @functools.wraps(write)
    def write_and_die(writer: FileSystemWriter, plan: Any, planner: Any) -> Any:
        written = write(writer, plan, planner)
        if _writes(writer, checkpoint):
            written.wait()
            _all_die(record)
        return written

    FileSystemWriter.write_data = write_and_die


def cut_shard(
    checkpointer: Any, fault: RankFault, checkpoint: Path, record: Callable[[], None]
) -> None:
    """Truncate one shard of the complete checkpoint to half its size, then kill every rank."""
    save = checkpointer.save
    shard = _shard(checkpoint, fault.rank)

    def cut() -> None:
        record()
        with shard.open("r+b") as stream:
            stream.truncate(shard.stat().st_size // 2)
            os.fsync(stream.fileno())

    @functools.wraps(save)
    def save_and_cut(curr_step: int, last_step: bool = False) -> Any:  # noqa: FBT001, FBT002
        saved = save(curr_step, last_step=last_step)
        # No rank truncates before all have looked.
        whole = (checkpoint / CHECKPOINT_METADATA).exists()
        if curr_step == fault.step and whole and shard.exists() and shard.stat().st_size:
            _all_die(cut)
        return saved

    checkpointer.save = save_and_cut


def fill_disk(checkpoint: Path, record: Callable[[], None]) -> None:
    """Let the write of this rank's checkpoint shard fail with "no space left"."""
    write = FileSystemWriter.write_data
    struck = False

    @functools.wraps(write)
    def write_to_full_disk(writer: FileSystemWriter, plan: Any, planner: Any) -> Any:
        nonlocal struck
        if _writes(writer, checkpoint) and plan.items and not struck:
            struck = True
            record()
            shard = checkpoint / f"{plan.storage_data.prefix}0.distcp"
            shard.unlink(missing_ok=True)
            shard.symlink_to(FULL_DISK)
        return write(writer, plan, planner)

    FileSystemWriter.write_data = write_to_full_disk


def free_disk(checkpoint: Path, rank: int) -> None:
    """Undo ``fill_disk``: there is space again."""
    shard = _shard(checkpoint, rank)
    if shard.is_symlink():
        shard.unlink()


def _writes(writer: FileSystemWriter, checkpoint: Path) -> bool:
    return Path(writer.path).absolute() == checkpoint.absolute()


def _shard(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"__{rank}_0.distcp"


def _all_die(strike: Callable[[], None]) -> None:
    """Rank 0 causes the fault once all ranks are here; then every rank is killed by SIGKILL."""
    dist.barrier()
    if dist.get_rank() == 0:
        strike()
    try:
        dist.barrier()
    finally:  # the first death breaks the barrier for those still in it
        os.kill(os.getpid(), signal.SIGKILL)
