"""The evidence of each step, the same for every dialect; a dialect only says where things are.

In a training step a dialect calls, in this order::

    begin_step(step)               before anything of the step
    on_batch(inputs, labels)       once per batch taken from the loader, before any CP split
    on_logits(logits, labels)      wherever the loss function is called, outside compiled code
    before_clip()                  gradients are complete and not yet clipped; the first call counts
    on_log(loss, grad_norm)        what the trainer reports
    end_step()                     on **every** rank: the one collective of a plain step

A step that is sampled (``RankJob.sample_steps``) has two more collectives at its end: one adds up
the rows of the per-tensor evidence, one compares replicas. Step 0 is the model as the first step
finds it, with its checkpoint loaded. After the last step comes ``close()``.

Of a run in several passes, ``on_load`` comes before the first step, and ``on_save`` after the step
whose checkpoint is about to be written; both are collective over the world.

Before step 1 there may be frozen steps (``converge_harness.rank.titan.common.frozen_steps``):
``begin_frozen``, the same calls as in a step but for ``on_log``, and ``end_frozen``; after the last
of them ``close_frozen``.

Each rank keeps what it saw; ``end_step`` gathers one small float64 row from every rank, and the
writer (the lowest rank that holds the last pipeline stage) turns the rows into one line of
``metrics.jsonl``. Sums over ranks are made by ``math.fsum`` in rank order, so they are rounded once
and the same in every run.

Attach the recorder **before** a test set's ``inject`` is called: what an injected wrapper does to
gradients or metrics then happens before the recorder sees them, as a bug of the trainer would.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from converge_harness.rank.recorder import world
from converge_harness.rank.recorder.buffers import BufferSamples
from converge_harness.rank.recorder.checkpoint_state import Counters, StateSamples
from converge_harness.rank.recorder.cross_entropy import IGNORE_INDEX, CrossEntropySum, local_part
from converge_harness.rank.recorder.digest import BatchDigest, combine
from converge_harness.rank.recorder.grad_norm import (
    assign_shards,
    global_norm,
    trainable,
    whole_gradients,
)
from converge_harness.rank.recorder.imported import leave_imported
from converge_harness.rank.recorder.post_step_state import PostStepSamples
from converge_harness.rank.recorder.replicas import ReplicaCheck
from converge_harness.rank.recorder.rows import assign_rows
from converge_harness.rank.recorder.tensor_samples import FrozenStepSamples, TensorSamples
from converge_harness.rank.recorder.trainer_view import TrainerView
from converge_harness.run_folder import metrics
from converge_harness.run_folder.checkpoints import set_torn_aside
from converge_harness.run_folder.job import RankJob
from converge_harness.run_folder.layout import LOADED, SAVED, STATE, TENSORS
from converge_harness.run_folder.passes import PassFolder, claim_pass, pass_folder


class StepRecorder:
    """Collects a rank's evidence; on the writer, writes it.

    Making one is collective over the world, and so is every ``end_step``.
    """

    def __init__(self, view: TrainerView, job: RankJob) -> None:
        self.view = view
        parameters = view.parameters
        if parameters is None:
            parameters = trainable(view.model_parts)
        self._parameters = [parameter for _, parameter in parameters]
        self._grad_norm = assign_shards(parameters)
        self._cross_entropy = CrossEntropySum(view.vocab_size, view.tp_group)
        self._digest = BatchDigest()
        self._tokens = 0
        self._paused = False
        self.positions = 0
        """Positions, valid or not, of this step's batches from the loader."""
        self.loss_targets = 0
        """Positions, valid or not, that this rank's loss function was given in this step."""
        self._saw_logits = False
        self.saw_dtensor_logits: bool | None = None
        """Whether the latest logits were a DTensor; None while this rank saw none."""
        self._squares: list[float] | None = None
        self._clipping = False
        """Whether clipping has begun in this step."""
        self._reported: tuple[float | None, float | None] = (None, None)
        self._lr = math.nan
        self._step = 0
        self._began: float | None = None
        self._missing: tuple[str, ...] = ()
        self.writer_rank = _lowest_rank_with(view.has_last_stage)
        self._last_step = job.last_step
        self._run_folder = job.run_folder
        self.this_pass = (
            begin_pass(job.run_folder, requeued=job.is_requeued) if job.resumes else None
        )
        """None but in a run of several passes."""
        self.folder = self.this_pass.folder if self.this_pass else job.run_folder
        """Where the evidence is left."""
        self._writer: metrics.MetricsWriter | None = None
        if self.is_writer:
            header: dict[str, Any] = {
                "identity": job.identity,
                "world_size": world.size(),
                "steps": job.steps,
                "versions": dict(view.versions),
            }
            if self.this_pass:
                header |= {"pass": self.this_pass.number, "segment": job.segment}
            self._writer = metrics.MetricsWriter(self.folder, header)
        self._sample_steps = frozenset(job.sample_steps)
        rows = assign_rows(self._grad_norm, view.fused, view.device)
        after = PostStepSamples(rows, view.optimizers, view.device)
        self._samples = TensorSamples(
            rows,
            self.folder / TENSORS if self.is_writer else None,
            view.device,
            after,
            BufferSamples(view.model_parts, view.device),
        )
        state = self.folder / STATE if self.is_writer else None
        self._state = StateSamples(self._samples, after, view.optimizers, state)
        self._replicas = ReplicaCheck(view)
        self._frozen: FrozenStepSamples | None = None
        """While the steps are frozen."""

    @property
    def is_frozen(self) -> bool:
        """Whether the step under way is a frozen one."""
        return self._frozen is not None

    @property
    def is_writer(self) -> bool:
        return world.rank() == self.writer_rank

    @property
    def saw_gradients(self) -> bool:
        """Whether the gradients of this step have been taken."""
        return self._squares is not None

    @property
    def step(self) -> int:
        """The step under way, or the last one finished."""
        return self._step

    @property
    def samples(self) -> int:
        """Samples of this step's batches from the loader, before any split."""
        return self._digest.samples

    def begin_step(self, step: int) -> None:
        """Forget the last step, note the learning rate and the time. Step 0 is sampled here."""
        if self._began is None:
            self._began = time.perf_counter()
        if step == 1:  # no step 0 in a run that resumes
            self._write_replicas(self._sampled(0))
        self._step = step
        self._forget()

    def begin_frozen(self) -> None:
        """Forget the frozen step before: a forward and backward pass at the initial weights."""
        if self._frozen is None:
            self._frozen = FrozenStepSamples(self._samples.rows)
        self._forget()

    def _forget(self) -> None:
        self._digest = BatchDigest()
        self._tokens = 0
        self.positions = 0
        self.loss_targets = 0
        self._saw_logits = False
        self._squares = None
        self._clipping = False
        self._reported = (None, None)
        self._lr = self.view.learning_rate()

    def on_batch(
        self,
        inputs: torch.Tensor,
        labels: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Count a batch from the loader: tensors of shape (batch, …).

        Where ``mask`` is zero is padding, which is no part of a sample. Without labels, all tokens
        of integer inputs count, and of other inputs every sample.
        """
        self._digest.add(inputs, labels, mask)
        self.positions += inputs.numel()
        if labels is not None:
            self._tokens += int((labels != IGNORE_INDEX).sum())
        elif inputs.is_floating_point() or inputs.is_complex():
            self._tokens += len(inputs)
        else:
            self._tokens += inputs.numel() if mask is None else int(mask.count_nonzero())

    def on_logits(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Count the tokens of a call of the loss function; no collective happens here."""
        if self._paused or not torch.is_grad_enabled():  # without gradients it is validation
            return
        self._saw_logits = True
        self.saw_dtensor_logits = isinstance(logits, DTensor)
        self.loss_targets += int(local_part(labels).numel())
        self._cross_entropy.add(logits, labels)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count calls of the loss function that are no part of training."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def before_clip(self) -> None:
        """Take the gradients' squared norms, and their samples.

        No collective happens here, unless gradients are partial sums.
        Only the first call of a step: what clips the model part by part has clipped some by then.
        """
        if not self._clipping:
            self._clipping = True
            self.take_gradients()

    def before_unknown_clip(self) -> None:
        """The same for a function that may call ``before_clip`` later, which then counts."""
        if not self._clipping:
            self.take_gradients()

    def take_gradients(self) -> None:
        """The gradients of this step are as they are now; what was taken before is forgotten."""
        self._lr = self.view.learning_rate()
        with whole_gradients(self._parameters):
            self._squares = self._grad_norm.squares()
            if self.is_frozen or self._step in self._sample_steps:
                self._samples.gradients()
            if not self.is_frozen and self._step in self._sample_steps:
                self._replicas.gradients()

    def on_log(self, loss: float | None, grad_norm: float | None) -> None:
        """Note what the trainer reports on this rank."""
        self._reported = (loss, grad_norm)

    def end_step(self) -> None:
        """Gather the ranks' rows and write the step's evidence. Collective over the world."""
        with whole_gradients(self._parameters):
            agreement = self._sampled(self._step)
        seen = self._everyones_rows()
        if self._writer is not None:
            self._writer.step(self._line(*seen))
        self._write_replicas(agreement)

    def end_frozen(self) -> None:
        """Gather what the ranks saw of a frozen step. Collective over the world."""
        if self._frozen is None:
            raise RuntimeError("no frozen step has begun")
        gradients = self._samples.gradients_of_all()
        rows, squares, problems = self._everyones_rows()
        self._frozen.add(gradients, self._measured(rows, squares, problems))

    def close_frozen(self) -> None:
        """Write what the frozen steps left; training begins."""
        if self._frozen is not None and self.is_writer:
            self._frozen.write(self.folder)
        self._frozen = None

    def _everyones_rows(self) -> tuple[list[RankRow], list[list[float]], list[str]]:
        """What every rank saw of the step: rows, squares of gradients, and problems. Collective."""
        squares = self._squares or [0.0] * len(self._grad_norm.names)
        high, low = self._digest.halves
        # Every vocabulary shard takes part in the sum; one of them counts it.
        loss_sum = self._cross_entropy.take() if self.view.has_last_stage else 0.0
        problems = [
            *self._grad_norm.problems,
            *self._samples.problems,
            *self._cross_entropy.problems,
        ]
        self._samples.problems.clear()
        reported, _ = self._reported
        row = RankRow(
            dp_rank=self.view.dp_rank,
            first_of_dp=self.view.first_of_dp,
            digest_high=high,
            digest_low=low,
            samples=self._digest.samples,
            tokens=self._tokens,
            loss_sum=loss_sum if self.view.tp_rank == 0 else 0.0,
            saw_logits=self._saw_logits,
            saw_gradients=self._squares is not None,
            problems=len(problems),
            memory=peak_memory_bytes(self.view.device),
            reports=reported is not None,
            reported=0.0 if reported is None else reported,
        )
        everyone = world.gathered([*row, *squares], self.view.device)
        rows = [RankRow(*values[: len(row)]) for values in everyone]
        all_squares = [values[len(row) :] for values in everyone]
        if any(row.problems for row in rows):
            problems = sorted({each for some in world.everyones(problems) for each in some})
        return rows, all_squares, problems

    def on_load(self, step: int | None, counters: Counters) -> None:
        """Note from which checkpoint training goes on, and what it restored.

        0 is the seed checkpoint, None one of no known place. Collective over the world.
        """
        if self._writer is not None:
            self._writer.loaded(step)
        if step:
            self._state.write(LOADED, step, counters)

    def on_save(self, step: int, counters: Counters) -> None:
        """Note what the checkpoint of a step will hold. Collective over the world.

        Raises SupersededError on the writer when a later pass of the run has begun.
        """
        if self.this_pass and self.is_writer:
            self.this_pass.require_newest()
        if self._writer is not None:
            self._writer.sync()
        self._state.write(SAVED, step, counters)

    def close(self) -> None:
        """Training is complete, or as far as this pass was to go: give the evidence its name."""
        leave_imported(self._run_folder, world.rank())
        if self._writer is not None:
            self._writer.finish(self._last_step if self.this_pass else self._step)

    def leave(self) -> None:
        """Training ends before its last step: the evidence stays what it is, not complete."""
        if self._writer is not None:
            self._writer.leave()

    def _sampled(self, step: int) -> dict[str, Any] | None:
        """Per-tensor evidence of a step that is sampled. Collective over the world."""
        if step not in self._sample_steps:
            return None
        self._samples.finish(step)
        return self._replicas.finish(step)

    def _write_replicas(self, agreement: dict[str, Any] | None) -> None:
        if self._writer is not None and agreement is not None:
            self._writer.replicas(agreement)

    def _line(
        self, rows: Sequence[RankRow], squares: Sequence[Sequence[float]], problems: Sequence[str]
    ) -> dict[str, Any]:
        loss, grad_norm = self._reported
        if self.view.loss_is_local:
            loss = mean_loss(rows)
        began = self._began if self._began is not None else time.perf_counter()
        line: dict[str, Any] = {
            "step": self._step,
            metrics.LOSS: loss,
            metrics.GRAD_NORM: grad_norm,
            metrics.LR: self._lr,
            **self._measured(rows, squares, problems),
            metrics.SECONDS: time.perf_counter() - began,
        }
        if self.this_pass:
            line[metrics.AT] = time.time()
        return line

    def _measured(
        self, rows: Sequence[RankRow], squares: Sequence[Sequence[float]], problems: Sequence[str]
    ) -> dict[str, Any]:
        return measured(
            rows,
            squares,
            problems,
            self._grad_norm.names,
            logits_optional=self.view.logits_optional,
        )


def _lowest_rank_with(flag: bool) -> int:  # noqa: FBT001 (one flag, named by the function)
    return world.everyones(flag).index(True)


class RankRow(NamedTuple):
    """What one rank saw of a step. All float64, so that one gather carries it."""

    dp_rank: float
    first_of_dp: float
    digest_high: float
    digest_low: float
    samples: float
    tokens: float
    loss_sum: float
    saw_logits: float
    saw_gradients: float
    problems: float
    memory: float
    reports: float
    reported: float


def measured(
    rows: Sequence[RankRow],
    squares: Sequence[Sequence[float]],
    problems: Sequence[str],
    names: Sequence[str],
    *,
    logits_optional: bool,
) -> dict[str, Any]:
    """The part of the line that the probe measured; None for what could not be.

    Args:
        rows: every rank's, in rank order.
        squares: per rank, of each parameter, the sum of squares of the gradient that it counts.
        problems: what any rank could not count, in sentences.
        names: canonical names of the parameters.
        logits_optional: whether it is no fault that no rank saw logits.
    """
    speakers = [row for row in rows if row.first_of_dp]
    tokens = int(sum(row.tokens for row in speakers))
    loss_sum = math.fsum(row.loss_sum for row in rows)
    unknown = not tokens or (bool(problems) and math.isnan(loss_sum))
    unknown |= logits_optional and not any(row.saw_logits for row in rows)
    counted = all(row.saw_gradients for row in rows) and not problems
    missing = _without_gradient(names, squares) if counted else []
    line: dict[str, Any] = {
        metrics.LOSS_RECOMPUTED: None if unknown else loss_sum / tokens,
        metrics.GRAD_NORM_RECOMPUTED: global_norm(squares) if counted else None,
        metrics.TOKENS: tokens,
        metrics.BATCH_DIGEST: combine(
            (int(row.digest_high), int(row.digest_low), int(row.samples)) for row in speakers
        ),
        metrics.BATCH_AGREES: _agree(rows),
        metrics.GRADS_MISSING: len(missing) if counted else None,
        metrics.MEMORY_BYTES: int(max(row.memory for row in rows)),
    }
    if missing:
        line[metrics.MISSING_NAMES] = missing
    if problems:
        line[metrics.PROBLEMS] = list(problems)
    return line


def mean_loss(rows: Iterable[RankRow]) -> float | None:
    """Of what the ranks that speak report, each over its tokens or all the same; None: nobody."""
    given = [(row.reported, row.tokens) for row in rows if row.reports and row.first_of_dp]
    if not given:
        return None
    losses = {loss for loss, _ in given}
    tokens = sum(count for _, count in given)
    if len(losses) == 1 or not tokens:
        return given[0][0]
    return math.fsum(loss * count for loss, count in given) / tokens


def _without_gradient(names: Sequence[str], squares: Sequence[Sequence[float]]) -> list[str]:
    """Trainable parameters whose whole gradient is absent or zero."""
    return [
        name
        for name, column in zip(names, zip(*squares, strict=True), strict=True)
        if not any(column)
    ]


def _agree(rows: Sequence[RankRow]) -> bool:
    """Whether all ranks of each data-parallel coordinate saw the same samples."""
    seen = {(row.dp_rank, row.digest_high, row.digest_low, row.samples) for row in rows}
    return len(seen) == len({row.dp_rank for row in rows})


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory so far: allocated on the CUDA device, or resident in the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def begin_pass(run_folder: Path, *, requeued: bool = False) -> PassFolder:
    """Make the folder of the next pass. Collective over the world.

    No two lives get the same one, even if they begin at the same time.

    Args:
        run_folder: of the job.
        requeued: whether a scheduler starts the job again, so that nobody but its ranks sets
            torn checkpoints aside.
    """
    found: list[int] = [0]
    if dist.get_rank() == 0:
        found = [claim_pass(run_folder)]
        if requeued:
            set_torn_aside(run_folder)
    dist.broadcast_object_list(found, src=0)
    return PassFolder(found[0], pass_folder(run_folder, found[0]))
