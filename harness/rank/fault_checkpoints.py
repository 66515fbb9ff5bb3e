"""Faults while a checkpoint is written: it is torn, or the disk is full.

torch's distributed checkpoint (``torch.distributed.checkpoint.filesystem``) has every rank write
its shard, ``__<rank>_0.distcp``, and sync it; then rank 0 writes ``.metadata``, which makes the
checkpoint whole. All of this assumes that the trainer saves synchronously.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from harness.run_folder.job import Fault

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
    checkpointer: Any, fault: Fault, checkpoint: Path, record: Callable[[], None]
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
        whole = (checkpoint / ".metadata").exists()
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
