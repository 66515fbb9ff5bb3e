"""The faults of a job's script, made to happen in its ranks.

A fault of the ranks strikes by itself. Just before, it leaves ``faults/<index>.json``, on disk for
sure: a fault whose file is there never strikes again, however often its step is replayed. A fault
of the harness (``preempt agent_loss join``) strikes from outside: here the ranks only hold still
for it once its step has ended. A fault that names a rank which a smaller world does not have does
not strike.

In the middle of a step a rank dies or hangs once the backward of the step's first microbatch (all
of them, in a pipeline) has returned: others may wait for it in a collective, and no parameter of
this rank has been updated in the step.

Of checkpoints: torch's distributed checkpoint (``torch.distributed.checkpoint.filesystem``) has
every rank write its shard, ``__<rank>_0.distcp``, and sync it; then rank 0 writes ``.metadata``,
which makes the checkpoint whole. All of this assumes that the trainer saves synchronously.
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
from converge_harness.run_folder.documents import SCHEMA, write_json
from converge_harness.run_folder.faults import HELD, over_file, struck_file
from converge_harness.run_folder.job import RankFault, RankJob
from converge_harness.run_folder.layout import CHECKPOINT_METADATA, checkpoint_of

HOLD_SECONDS = 120.0
"""The ranks hold still for the harness no longer than this."""
_POLL_SECONDS = 0.05


def install_faults(trainer: Any, job: RankJob, pass_number: int) -> None:
    """Make the job's faults ready to strike in this rank.

    Call it on every rank of a built trainer, after everything else that wraps its methods (the
    probe, ``inject``, evidence on checkpoints) and before it trains.
    """
    for index, fault in enumerate(job.faults):
        if fault.kind in HELD:
            _hold_after(trainer, fault.step, over_file(job.run_folder, index))
            continue
        struck = struck_file(job.run_folder, index)
        checkpoint = checkpoint_of(job.run_folder, fault.step)
        if struck.exists():
            if fault.kind == "disk_full" and dist.get_rank() == 0:
                free_disk(checkpoint, fault.rank)
            continue
        record = functools.partial(_record, struck, index, fault, pass_number)
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


def _record(path: Path, index: int, fault: RankFault, pass_number: int) -> None:
    """Say that a fault strikes now. The file is on disk when this returns."""
    path.parent.mkdir(exist_ok=True)
    write_json(
        path,
        {
            "schema": SCHEMA,
            "index": index,
            "kind": fault.kind,
            "step": fault.step,
            "at": time.time(),
            "pass": pass_number,
            "rank": fault.rank,
            "torn": fault.kind in ("ckpt_torn", "disk_full"),
        },
    )
    for written in (path, path.parent):
        descriptor = os.open(written, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _hold_after(trainer: Any, step: int, over: Path) -> None:
    """Wait for the harness's word where the step has ended and its checkpoint, if due, is whole."""
    save = trainer.checkpointer.save  # called after every step; it decides whether one is due

    @functools.wraps(save)
    def save_and_hold(curr_step: int, last_step: bool = False) -> Any:  # noqa: FBT001, FBT002
        saved = save(curr_step, last_step=last_step)
        if curr_step == step:
            deadline = time.monotonic() + HOLD_SECONDS
            while not over.exists() and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        return saved

    trainer.checkpointer.save = save_and_hold


def die_after_backward(trainer: Any, step: int, record: Callable[[], None]) -> None:
    """SIGKILL of this rank."""

    def die() -> None:
        record()
        os.kill(os.getpid(), signal.SIGKILL)

    _after_backward(trainer, step, die)


def hang_after_backward(trainer: Any, step: int, record: Callable[[], None]) -> None:
    """This rank stops answering, for ever. SIGTERM and SIGKILL still end it."""

    def hang() -> None:
        record()
        while True:
            time.sleep(60)

    _after_backward(trainer, step, hang)


def poison_forward(trainer: Any, step: int, record: Callable[[], None]) -> None:
    """The step's first forward on this rank gives NaN, whichever pipeline stage it runs."""
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
        # Not a hook of the module: that would also see the forward by which torch learns shapes.
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
"""The kernel answers every write to it with ENOSPC."""


def die_before_metadata(checkpoint: Path, record: Callable[[], None]) -> None:
    """Every rank dies when all shards of the checkpoint are on disk and ``.metadata`` is not."""
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
    """One shard of the whole checkpoint is cut to half its size, and every rank dies."""
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
        # No rank cuts before all have looked.
        whole = (checkpoint / CHECKPOINT_METADATA).exists()
        if curr_step == fault.step and whole and shard.exists() and shard.stat().st_size:
            _all_die(cut)
        return saved

    checkpointer.save = save_and_cut


def fill_disk(checkpoint: Path, record: Callable[[], None]) -> None:
    """No space is left for this rank's shard of the checkpoint: the kernel refuses to write it."""
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
    """Rank 0 strikes once all ranks are here; once it has, SIGKILL of every rank."""
    dist.barrier()
    if dist.get_rank() == 0:
        strike()
    try:
        dist.barrier()
    finally:  # the first to die breaks the barrier of those that are still in it
        os.kill(os.getpid(), signal.SIGKILL)
