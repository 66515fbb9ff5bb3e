"""The faults of a job's script, made to happen in its ranks.

A fault of the ranks strikes by itself (``fault_steps``, ``fault_checkpoints``). Just before, it
leaves ``faults/<index>.json``, on disk for sure: a fault whose file is there never strikes again,
however often its step is replayed. A fault of the harness (``preempt agent_loss join``) strikes
from outside: here the ranks only hold still for it once its step has ended.

A fault that names a rank which a smaller world does not have does not strike.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.rank.fault_checkpoints import cut_shard, die_before_metadata, fill_disk, free_disk
from harness.rank.fault_steps import die_after_backward, hang_after_backward, poison_forward
from harness.run_folder.documents import SCHEMA, write_json
from harness.run_folder.faults import HELD, over_file, struck_file
from harness.run_folder.job import Fault, Job
from harness.run_folder.layout import checkpoint_of

HOLD_SECONDS = 120.0
"""The ranks hold still for the harness no longer than this."""
_POLL_SECONDS = 0.05


def install_faults(trainer: Any, job: Job, pass_number: int) -> None:
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


def _install(trainer: Any, fault: Fault, checkpoint: Path, record: Callable[[], None]) -> None:
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


def _record(path: Path, index: int, fault: Fault, pass_number: int) -> None:
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
