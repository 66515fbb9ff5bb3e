"""One rank of a job, from its config to the last step."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager

import torch.distributed as dist
from megatron.core import parallel_state

from converge_harness.rank.cpu import multiply_bf16_by_float32_kernels
from converge_harness.rank.data_order import SampleStream, open_corpus
from converge_harness.rank.inject import call_injected
from converge_harness.rank.megatron import hooks
from converge_harness.rank.megatron.audit import FirstStepWatch, write_in_force
from converge_harness.rank.megatron.config import MegatronConfig, build_config
from converge_harness.rank.megatron.model import (
    build_model,
    build_optimizer,
    build_schedule,
    start_ranks,
    wrap_model,
)
from converge_harness.rank.megatron.parameters import (
    CanonicalPart,
    fused_of,
    optimizers_of,
    pieces_of,
    trained_by,
    weights_of,
)
from converge_harness.rank.megatron.trainer import MegatronTrainer
from converge_harness.rank.recorder.imported import leave_imported
from converge_harness.rank.recorder.step_recorder import StepRecorder
from converge_harness.rank.repeats import move_tensors
from converge_harness.rank.seed_checkpoint import load_weights, save_weights
from converge_harness.rank.silenced import silenced
from converge_harness.rank.waiting import wait_after
from converge_harness.run_folder.job import RankJob
from converge_harness.run_folder.layout import seed_checkpoint_of


def run(job: RankJob) -> None:
    """Train, or write the seed checkpoint.

    Raises SettingError when the config or the seed checkpoint does not fit, InjectError when
    ``inject`` cannot be found, and whatever Megatron-Core raises.
    """
    config = build_config(job)
    if job.device == "cpu":
        multiply_bf16_by_float32_kernels(config.flat)
    device = start_ranks(job, config)
    chunks = build_model(config, device)
    parts = tuple(CanonicalPart(chunk, job.weights) for chunk in chunks)
    pieces, fused = pieces_of(parts), fused_of(parts)
    if job.makes_seed_checkpoint:
        save_weights(seed_checkpoint_of(job.run_folder), pieces, fused)
        leave_imported(job.run_folder, rank=0)  # initial weights are of the model's code, too
        dist.destroy_process_group()
        return
    if job.seed_checkpoint:
        load_weights(job.seed_checkpoint, pieces, fused, job.weights)
    if job.repeat == "ulp":
        move_tensors(weights_of(pieces), job.repeat_seed)
    wrapped = wrap_model(config, chunks)
    optimizer = build_optimizer(config, wrapped)
    trainer = MegatronTrainer(
        config,
        wrapped,
        optimizer,
        build_schedule(config, optimizer),
        _stream(job, config),
        device,
    )
    injected: list[str] = []
    recorder = hooks.attach(
        trainer,
        job,
        parts,
        trained_by(optimizer, pieces),
        device,
        lambda recorder: write_in_force(
            recorder.folder, trainer, parts, pieces, first, recorder, injected
        ),
    )
    if job.inject:
        injected.append(call_injected(job.inject, trainer))
    make_frozen_steps(trainer, job.frozen, recorder)
    first = FirstStepWatch(trainer, parts)
    trainer.train(functools.partial(wait_after, job.run_folder))
    recorder.close()
    # The rank that serves the process group's store must not leave before the others are done.
    dist.barrier()
    dist.destroy_process_group()


def _stream(job: RankJob, config: MegatronConfig) -> SampleStream:
    """The job's batches on this rank."""
    sizes = config.tables.training
    return SampleStream(
        open_corpus(config.data_folder),
        seq_len=sizes.seq_len,
        seed=job.seed,
        global_batch_size=sizes.global_batch_size,
        batch_size=sizes.local_batch_size,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_degree=parallel_state.get_data_parallel_world_size(),
        order_seed=job.order_seed,
    )


def make_frozen_steps(trainer: MegatronTrainer, count: int, recorder: StepRecorder) -> None:
    """Frozen steps: forward and backward passes at the initial weights.

    Of the trainer itself, injected code included; they update nothing. What a pass changes
    (gradients, the stream's place) is put back, so training goes on as if there had been none.
    Dropout is refused, so no random numbers are drawn. One more than ``count``: the first batch
    comes twice. Collective over the world.
    """
    if not count:
        return
    start = trainer.stream.consumed
    with _without_updates(trainer):
        for number in range(count + 1):
            if number == count:
                _rewind(trainer, start)
            recorder.begin_frozen()
            trainer.train_step()
            recorder.end_frozen()
    _rewind(trainer, start)
    recorder.close_frozen()


def _rewind(trainer: MegatronTrainer, consumed: int) -> None:
    trainer.stream.consumed = consumed
    trainer.batches = iter(trainer.stream)


def _without_updates(trainer: MegatronTrainer) -> AbstractContextManager[None]:
    """No update of weights, optimizer states or learning rate, and nothing is logged."""
    return silenced(
        *((each, "step_with_ready_grads", True) for each in optimizers_of(trainer.optimizer)),
        (trainer.schedule, "step", None),
        (trainer, "log", None),
    )
