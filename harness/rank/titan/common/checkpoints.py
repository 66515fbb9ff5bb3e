"""When a trainer writes checkpoints and from which it starts, the same for every dialect.

The checkpoints are torchtitan's own, and so are the load and the choice of the newest complete one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from converge_harness.rank.recorder.checkpoint_state import Counters
from converge_harness.rank.recorder.step_recorder import StepRecorder
from converge_harness.rank.recorder.trainer_view import rate_of
from converge_harness.rank.repeats import move_by_one_ulp
from converge_harness.run_folder.arrays import UNKNOWN
from converge_harness.run_folder.checkpoints import write_manifest
from converge_harness.run_folder.job import RankJob
from converge_harness.run_folder.layout import CHECKPOINTS, checkpoint_of

ASYNC_MODE = "checkpoint.async_mode"


def checkpoint_settings(job: RankJob) -> Iterator[tuple[str, Any]]:
    """What a job means for the trainer's table ``checkpoint``."""
    if job.makes_seed_checkpoint:
        yield "checkpoint.enable", True
        yield "checkpoint.create_seed_checkpoint", True
        return
    if job.resumes:
        yield "checkpoint.enable", True
        yield "checkpoint.load_only", False
        yield "checkpoint.folder", CHECKPOINTS
        # The watched save decides at which steps a checkpoint is really written. A run that waits
        # writes them at other steps than when it continues: its config stays the same.
        yield "checkpoint.interval", 1
        yield ASYNC_MODE, job.overrides.get(ASYNC_MODE, "disabled")
        yield "checkpoint.keep_latest_k", 0
    elif job.seed_checkpoint:
        yield "checkpoint.enable", True
        yield "checkpoint.load_only", True
    if job.seed_checkpoint:
        yield "checkpoint.initial_load_path", str(job.seed_checkpoint)


def stateful_parts(trainer: Any) -> list[Any]:
    """What a checkpoint consists of, and what injected code has added; nothing if there is none."""
    return list(getattr(trainer.checkpointer, "states", {}).values())


def watch_checkpoints(trainer: Any, job: RankJob, recorder: StepRecorder) -> None:
    """Save and stop where the job says, and leave evidence of each save and load.

    What was loaded is looked at when training is about to begin, not when the load returns: what
    an injected wrapper does to the load is then seen.
    """
    checkpointer = trainer.checkpointer
    save, load = checkpointer.save, checkpointer.dcp_load
    continues = trainer.should_continue_training
    source: str | None = None
    began = False

    def watched_load(state_dict: Any, checkpoint_id: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal source
        source = checkpoint_id
        return load(state_dict, checkpoint_id, *args, **kwargs)

    def watched_save(curr_step: int, last_step: bool = False) -> Any:  # noqa: FBT001, FBT002 (theirs)
        saved = save_and_record(curr_step, last_step) if job.saves_at(curr_step) else False
        writing = getattr(checkpointer, "save_future", None)
        if writing is not None and (curr_step == job.last_step or curr_step in job.saves_after):
            # The process ends here, or waits for other runs: a write that fails must be an error.
            writing.result()
        return saved

    def save_and_record(curr_step: int, last_step: bool) -> Any:  # noqa: FBT001
        recorder.on_save(curr_step, counters(trainer))
        saved = save(curr_step, last_step=last_step)
        writing = getattr(checkpointer, "save_future", None)
        if dist.get_rank() == 0:
            leave = functools.partial(leave_manifest, job, recorder.folder, curr_step)
            leave() if writing is None else writing.add_done_callback(leave)
        return saved

    def watched_continues() -> bool:
        nonlocal began
        if not began:
            began = True
            recorder.on_load(_loaded_step(source, job), counters(trainer))
        return trainer.step < job.last_step and continues()

    checkpointer.dcp_load = watched_load
    checkpointer.save = watched_save
    trainer.should_continue_training = watched_continues


def leave_manifest(
    job: RankJob, of_pass: Path, step: int, written: Future[Any] | None = None
) -> None:
    """Once a checkpoint is complete, which was written in the background if there is a future.

    Rank 0 writes its last file, once all ranks have written theirs.
    """
    if written is None or written.exception() is None:
        write_manifest(checkpoint_of(job.run_folder, step), step, of_pass)


def move_loaded_weights(trainer: Any, seed: int) -> None:
    """Move the weights once the seed checkpoint is loaded, which ``train`` begins with."""
    load = trainer.checkpointer.load

    @functools.wraps(load)
    def load_and_move(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        if trainer.step == 0:  # a resume loads weights that were moved before
            move_by_one_ulp(trainer.model_parts, seed)
        return loaded

    trainer.checkpointer.load = load_and_move


def counters(trainer: Any) -> Counters:
    """The trainer's own counters as they are now. Collective over the ranks of each loss."""
    tokens = torch.tensor(trainer.ntokens_seen, dtype=torch.int64, device=trainer.device)
    mesh = trainer.parallel_dims.get_optional_mesh("loss")
    if mesh is not None:  # as torchtitan's own metric n_tokens_seen
        dist.all_reduce(tokens, group=mesh.get_group())
    return Counters(
        lr=rate_of(trainer.optimizers),
        trainer_step=trainer.step,
        tokens_seen=int(tokens),
        samples_consumed=int(trainer.dataloader.state_dict().get("consumed", UNKNOWN)),
        schedule_steps=int(trainer.lr_schedulers.state_dict().get("last_epoch", UNKNOWN)),
    )


def _loaded_step(source: str | None, job: RankJob) -> int | None:
    """The step of the loaded checkpoint; 0: the seed checkpoint; None: one from somewhere else.

    A run without a seed checkpoint starts at step 0 from the trainer's own weights.
    """
    if source is None:
        return 0 if job.seed_checkpoint is None else None
    path = Path(source)
    if path == job.seed_checkpoint:
        return 0
    if path.parent != job.run_folder / CHECKPOINTS:
        return None
    return int(path.name.removeprefix("step-"))
