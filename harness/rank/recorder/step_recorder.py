"""Records the evidence of each step, in the same way for every dialect.

In a training step a dialect calls, in this order::

    begin_step(step)               at the start of the step
    on_batch(inputs, labels)       once per batch taken from the loader, before any CP split
    on_logits(logits, labels)      wherever the loss function is called, outside compiled code
    forward_backward()             around each call of what runs a microbatch and may be a CUDA
                                   graph: a replay calls no loss function
    before_clip()                  gradients are complete and not yet clipped; the first call counts
    on_log(loss, grad_norm)        the values that the trainer reports
    end_step()                     on **every** rank: the one collective of a plain step

A sampled step (``RankJob.sample_steps``) has two more collectives at its end: one adds up the rows
of the per-tensor evidence, one compares replicas. Step 0 is the model before the first step, with
its checkpoint loaded. ``close()`` is called after the last step.

In a run with several passes, ``on_load`` is called before the first step, and ``on_save`` after a
step whose checkpoint is about to be written; both are collective over the world.

Before step 1 there may be frozen steps (``converge_harness.rank.titan.common.frozen_steps``):
``begin_frozen``, the same calls as in a step except ``on_log``, and ``end_frozen``; after the last
one ``close_frozen``.

Each rank keeps what it saw, on its device: until ``end_step`` nothing waits for the device, but for
the gradients of steps that are sampled. ``end_step`` gathers one small float64 row from every rank,
and the writer (the lowest rank that holds the last pipeline stage) alone reads the rows of all and
turns them into one line of ``metrics.jsonl``. Sums over ranks are made by ``math.fsum``, so they
are rounded once and the same in every run.

Attach the recorder **before** a test set's ``inject`` is called: an injected wrapper then changes
gradients or metrics before the recorder sees them, like a bug of the trainer.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from converge_harness.rank.recorder import world
from converge_harness.rank.recorder.activations import activation_samples
from converge_harness.rank.recorder.buffers import BufferSampler
from converge_harness.rank.recorder.checkpoint_state import Counters, StateSampler
from converge_harness.rank.recorder.cross_entropy import CrossEntropySum, local_part
from converge_harness.rank.recorder.digest import BatchDigest, combine
from converge_harness.rank.recorder.dropout_masks import MaskWatch
from converge_harness.rank.recorder.grad_norm import (
    SquareSums,
    assign_shards,
    global_norm,
    trainable,
    whole_gradients,
)
from converge_harness.rank.recorder.imported import leave_imported
from converge_harness.rank.recorder.objective_terms import Shown, TermSums, terms_of
from converge_harness.rank.recorder.post_step_state import PostStepSampler
from converge_harness.rank.recorder.random_states import (
    RandomStates,
    combined,
    halves,
    shared,
    watched,
)
from converge_harness.rank.recorder.replicas import ReplicaCheck
from converge_harness.rank.recorder.rows import assign_rows
from converge_harness.rank.recorder.tensor_samples import FrozenStepSampler, TensorSampler
from converge_harness.rank.recorder.trainer_view import TrainerView
from converge_harness.run_folder import metrics
from converge_harness.run_folder.checkpoints import OUR_FORM, CheckpointForm, set_torn_aside
from converge_harness.run_folder.job import RankJob
from converge_harness.run_folder.layout import LOADED, SAVED, STATE, TENSORS
from converge_harness.run_folder.passes import PassFolder, claim_pass, pass_folder


class StepRecorder:
    """Collects a rank's evidence; on the writer, also writes it.

    The constructor and every ``end_step`` are collective over the world.
    """

    _ended_a_step = False
    _frozen: FrozenStepSampler | None = None
    """Only during frozen steps; else None."""

    def __init__(self, view: TrainerView, job: RankJob) -> None:
        self.view = view
        given = view.parameters
        parameters = trainable(view.model_parts) if given is None else given
        self._parameters = [parameter for _, parameter in parameters]
        self._grad_norm = assign_shards(parameters)
        self._cross_entropy = CrossEntropySum(view.vocab_size, view.tp_group)
        self._digest = BatchDigest()
        self._terms = TermSums()
        self._random = watched(view)
        self._masks = MaskWatch(view.model_parts, view.device)
        self._paused = False
        self.positions = 0
        """Positions, valid or not, of this step's batches from the loader."""
        self.loss_targets = 0
        """Positions, valid or not, that this rank's loss function got in this step."""
        self._saw_logits = False
        self._without_logits = 0
        """Microbatches of this step whose logits nobody has seen."""
        self._calls = _Calls()
        self._captured = _Calls()
        self.saw_dtensor_logits: bool | None = None
        """Whether the latest logits were a DTensor; None if this rank has not seen any."""
        self._squares: SquareSums | None = None
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
            begin_pass(job.run_folder, job.checkpoints, set_aside=job.may_continue)
            if job.resumes
            else None
        )
        """Only in a run with several passes; else None."""
        self.folder = self.this_pass.folder if self.this_pass else job.run_folder
        """The folder for the evidence."""
        self._writer: metrics.MetricsWriter | None = None
        if self.is_writer:
            self._writer = metrics.MetricsWriter(self.folder, _header(view, job, self.this_pass))
        self._sample_steps = frozenset(job.sample_steps)
        self._look_at_masks(1, begins=False)
        written = self.folder if self.is_writer else None
        rows = assign_rows(self._grad_norm, view.fused, view.device)
        post_step = PostStepSampler(rows, view.optimizers, view.device)
        self._samples = TensorSampler(
            rows,
            written and written / TENSORS,
            view.device,
            post_step,
            BufferSampler(view.model_parts, view.device),
        )
        self._state = StateSampler(
            self._samples,
            post_step,
            view.optimizers,
            BufferSampler(view.model_parts if job.resumes else (), view.device, persistent=True),
            written and written / STATE,
        )
        self._replicas = ReplicaCheck(view)
        self._activations = activation_samples(view, job, written)
        """Until they are written; else None."""

    @property
    def is_frozen(self) -> bool:
        """Whether the current step is a frozen one."""
        return self._frozen is not None

    @property
    def is_writer(self) -> bool:
        return world.rank() == self.writer_rank

    @property
    def saw_gradients(self) -> bool:
        """Whether the gradients of this step have been recorded."""
        return self._squares is not None

    @property
    def step(self) -> int:
        """The current step, or the last finished one."""
        return self._step

    @property
    def samples(self) -> int:
        """Samples of this step's batches from the loader, before any split."""
        return self._digest.samples

    def begin_step(self, step: int) -> None:
        """Start a step: record the learning rate and the time. Step 0 is sampled here."""
        if self._began is None:
            self._began = time.perf_counter()
        if step == 1:  # a resumed run has no step 0
            self._write_replicas(self._sampled(0))
        self._step = step
        self._forget()
        self._look_at_modules()
        self._look_at_masks(step, begins=True)
        for each in self._random.values():
            each.begin()

    def begin_frozen(self) -> None:
        """Start a frozen step: a forward and backward pass at the initial weights."""
        if self._frozen is None:
            self._frozen = FrozenStepSampler(self._samples.rows)
        self._forget()
        self._look_at_modules()

    def _look_at_modules(self) -> None:
        """Only in the first batches of a run that starts at the initial weights."""
        if self._activations and (self.is_frozen or self._step == 1):
            self._activations.begin()

    def _look_at_masks(self, step: int, *, begins: bool) -> None:
        """Of a sampled step that is next; ``begins`` if it is known that it begins now."""
        if step in self._sample_steps and begins == self.view.frames_steps:
            self._masks.begin()

    def _leave_modules(self) -> None:
        """A batch is over. Collective over the world after the last one that is recorded."""
        if self._activations and self._activations.end_batch():
            self._activations.finish()
            self._activations = None

    def _forget(self) -> None:
        self._digest = BatchDigest()
        self._terms = TermSums()
        self.positions = 0
        self.loss_targets = 0
        self._saw_logits = False
        self._without_logits = 0
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

        Positions where ``mask`` is zero are padding and ignored. Without labels, all tokens of
        integer inputs count, and every sample of other inputs.
        """
        self._digest.add(inputs, labels, mask)
        self.positions += inputs.numel()

    def on_logits(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Count the tokens of a call of the loss function; no collective happens here."""
        if self._paused or not torch.is_grad_enabled():  # validation has no gradients
            return
        self.saw_dtensor_logits = isinstance(logits, DTensor)
        targets = int(local_part(labels).numel())
        if _is_captured(logits):
            if not self._calls.captured:
                self._cross_entropy.forget_captured()
            self._calls = self._calls.with_captured(targets)
            self._cross_entropy.capture(logits, labels)
            return
        self._calls = self._calls.with_seen()
        self._saw_logits = True
        self.loss_targets += targets
        self._cross_entropy.add(logits, labels)

    def on_terms(
        self, weights: torch.Tensor, labels: torch.Tensor, values: Mapping[str, torch.Tensor]
    ) -> None:
        """Record what the objective of a microbatch is made of, in sampled steps of training."""
        if self._step in self._sample_steps and torch.is_grad_enabled():
            self._terms.add(weights, labels, values)

    def on_microbatch(self, tokens: torch.Tensor | None) -> None:
        """The token ids, shape (batch, sequence), that a pipeline stage is about to work on."""
        if self._activations:
            self._activations.tokens = tokens

    @contextmanager
    def forward_backward(self) -> Iterator[None]:
        """The forward and backward pass of a microbatch, which may be that of a CUDA graph.

        A graph is captured in one call, and replayed in that call and in later ones. Where neither
        a call of the loss function was seen nor a graph is known that had one, the step's loss
        cannot be recomputed.
        """
        self._calls = _Calls()
        yield
        if self._calls.captured:
            self._captured = self._calls
        replayed = self._calls.captured or not self._calls.seen
        if replayed and self._captured.captured:
            self._saw_logits = True
            self.loss_targets += self._captured.targets
            self._cross_entropy.replayed()
        elif not self._calls.seen:
            self._without_logits += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count calls of modules and of the loss function that are not part of training."""
        self._paused = True
        if self._activations:
            self._activations.paused = True
        try:
            yield
        finally:
            self._paused = False
            if self._activations:
                self._activations.paused = False

    def before_clip(self) -> None:
        """Record the gradients' squared norms, and their samples.

        No collective happens here, unless gradients are partial sums. Only the first call in a step
        counts: if the model is clipped part by part, a later call would see clipped gradients.
        """
        if not self._clipping:
            self._clipping = True
            self.take_gradients()

    def before_unknown_clip(self) -> None:
        """The same for a function that may itself call ``before_clip`` later, which then counts."""
        if not self._clipping:
            self.take_gradients()

    def take_gradients(self) -> None:
        """Record the current gradients as those of this step, replacing earlier ones."""
        self._lr = self.view.learning_rate()
        with whole_gradients(self._parameters):
            self._squares = self._grad_norm.take()
            if self.is_frozen or self._step in self._sample_steps:
                self._samples.gradients()
            if not self.is_frozen and self._step in self._sample_steps:
                self._replicas.gradients()

    def on_log(self, loss: float | None, grad_norm: float | None) -> None:
        """Record the values that the trainer reports on this rank."""
        self._reported = (loss, grad_norm)

    def end_step(self) -> None:
        """Gather the ranks' rows and write the step's evidence. Collective over the world."""
        self._leave_modules()
        with whole_gradients(self._parameters):
            agreement = self._sampled(self._step)
        seen = self._everyones()
        if not self._ended_a_step:
            # A run that is stopped later does not get to leave them when it closes.
            leave_imported(self._run_folder, world.rank())
            self._ended_a_step = True
        if self._writer is not None:
            self._writer.step(self._reported_values(seen), self._measured(seen))
        self._write_replicas(agreement)
        self._look_at_masks(self._step + 1, begins=False)

    def end_frozen(self) -> None:
        """Gather the ranks' evidence of a frozen step. Collective over the world."""
        if self._frozen is None:
            raise RuntimeError("no frozen step has begun")
        self._leave_modules()
        gradients = self._samples.gradients_of_all()
        seen = self._everyones()
        if self.is_writer:
            self._frozen.add(gradients, self._measured(seen))

    def close_frozen(self) -> None:
        """Write the evidence of the frozen steps; training begins."""
        if self._frozen is not None and self.is_writer:
            self._frozen.write(self.folder)
        self._frozen = None

    def _everyones(self) -> Everyone:
        """What every rank saw of the step. Collective over the world."""
        squares = self._squares.numbers() if self._squares else [0.0] * len(self._grad_norm.names)
        self._digest.finish()
        high, low = self._digest.halves
        random_high, random_low = halves(self._drew("torch"))
        python_high, python_low = halves(self._drew("python"))
        numpy_high, numpy_low = halves(self._drew("numpy"))
        kept = self._masks.end()
        masks_high, masks_low = halves(kept.sums if kept else 0)
        # All vocabulary shards take part in the sum; one of them counts it.
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
            tokens=self._digest.tokens,
            loss_sum=loss_sum if self.view.tp_rank == 0 else 0.0,
            reads=self.view.reads_batches,
            needs_logits=self.view.has_last_stage and not self.view.logits_optional,
            saw_logits=self._saw_logits and not self._without_logits,
            saw_gradients=self._squares is not None,
            problems=len(problems),
            memory=peak_memory_bytes(self.view.device),
            reports=reported is not None,
            reported=0.0 if reported is None else reported,
            random_high=random_high,
            random_low=random_low,
            python_high=python_high,
            python_low=python_low,
            numpy_high=numpy_high,
            numpy_low=numpy_low,
            mask_units=kept.units if kept else _UNKNOWN,
            mask_kept=kept.kept if kept else 0,
            masks_high=masks_high,
            masks_low=masks_low,
            terms=len(self._terms.microbatches),
        )
        everyone = world.gathered([*row, *squares], self.view.device)
        if bool(everyone[:, RankRow._fields.index("problems")].any()):
            found = {each for some in world.everyones(problems) for each in some}
            problems = sorted(found, key=lambda each: each.sentence)
        shown: list[Shown | None] = []
        if bool(everyone[:, RankRow._fields.index("terms")].any()):
            shown = world.everyones(self._terms.take())
        return Everyone(everyone, problems, shown)

    @property
    def random(self) -> RandomStates:
        """Of torch's generators."""
        return self._random["torch"]

    def _drew(self, library: str) -> int:
        """As ``RandomStates.end``; 0 in frozen steps, which put torch's states back."""
        return 0 if self.is_frozen else self._random[library].end()

    def on_load(self, step: int | None, counters: Counters) -> None:
        """Record from which checkpoint training resumes, and the restored state.

        0 is the seed checkpoint, None an unknown one. Collective over the world.
        """
        if self._writer is not None:
            self._writer.loaded(step)
        for each in self._random.values():
            each.note()
        self._masks.leave()
        if step is not None:
            self._look_at_masks(step + 1, begins=False)
        if step:
            self._state.write(LOADED, step, counters, world.everyones(self.random.now()))

    def on_save(self, step: int, counters: Counters) -> None:
        """Record the state that a step's checkpoint will have. Collective over the world.

        Raises SupersededError on the writer when a later pass of the run has begun.
        """
        if self.this_pass and self.is_writer:
            self.this_pass.require_newest()
        if self._writer is not None:
            self._writer.sync()
        self._state.write(SAVED, step, counters, world.everyones(self.random.now()))

    def close(self) -> None:
        """Training has reached its last step (of the run or the pass): rename the metrics file."""
        self._masks.leave()
        leave_imported(self._run_folder, world.rank())
        if self._writer is not None:
            self._writer.finish(self._last_step if self.this_pass else self._step)

    def leave(self) -> None:
        """Training ends before its last step: the evidence stays incomplete."""
        self._masks.leave()
        if self._writer is not None:
            self._writer.leave()

    def _sampled(self, step: int) -> metrics.ReplicasDocument | None:
        """Write the per-tensor evidence of a sampled step. Collective over the world."""
        if step not in self._sample_steps:
            return None
        self._samples.finish(step)
        return self._replicas.finish(step)

    def _write_replicas(self, agreement: metrics.ReplicasDocument | None) -> None:
        if self._writer is not None and agreement is not None:
            self._writer.replicas(agreement)

    def _reported_values(self, seen: Everyone) -> metrics.ReportedDocument:
        loss, grad_norm = self._reported
        if self.view.loss_is_local:
            loss = mean_loss(seen.rows())
        began = self._began if self._began is not None else time.perf_counter()
        reported: metrics.ReportedDocument = {
            "step": self._step,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": self._lr,
            "seconds": time.perf_counter() - began,
        }
        if self.this_pass:
            reported["at"] = time.time()
        return reported

    def _measured(self, seen: Everyone) -> metrics.MeasuredDocument:
        rows = seen.rows()
        line = measured(
            rows,
            seen.squares(),
            seen.problems,
            self._grad_norm.names,
            logits_optional=self.view.logits_optional,
        )
        if seen.shown:
            whole = zip(rows, seen.shown, strict=True)
            if terms := terms_of([shown for row, shown in whole if row.first_of_dp]):
                line["terms"] = terms
        return line


class _Calls(NamedTuple):
    """Calls of the loss function in one forward and backward pass."""

    seen: int = 0
    """Those that ran as they were called."""
    captured: int = 0
    """Those that went into a CUDA graph."""
    targets: int = 0
    """Positions, valid or not, that the captured ones were given."""

    def with_seen(self) -> _Calls:
        return self._replace(seen=self.seen + 1)

    def with_captured(self, targets: int) -> _Calls:
        return self._replace(captured=self.captured + 1, targets=self.targets + targets)


def _is_captured(tensor: torch.Tensor) -> bool:
    """Whether what is computed of the tensor now is put into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _lowest_rank_with(flag: bool) -> int:  # noqa: FBT001 (one flag, named by the function)
    return world.everyones(flag).index(True)


_UNKNOWN = -1
"""Units of masks that are not recorded."""


class RankRow(NamedTuple):
    """One rank's evidence of a step. All float64, so that one gather is enough."""

    dp_rank: float
    first_of_dp: float
    digest_high: float
    digest_low: float
    samples: float
    tokens: float
    loss_sum: float
    reads: float
    """Whether its batches can be seen."""
    needs_logits: float
    """Whether the loss is not whole without what this rank sees of its loss function."""
    saw_logits: float
    """Whether it saw logits in the step, and those of every microbatch."""
    saw_gradients: float
    problems: float
    memory: float
    reports: float
    reported: float
    random_high: float
    random_low: float
    """Digest of the states before the step of torch's generators that it drew from; 0: none."""
    python_high: float
    python_low: float
    """The same of the generator of Python's ``random``."""
    numpy_high: float
    numpy_low: float
    """The same of the generator of ``numpy.random``."""
    mask_units: float
    """Units of the step's dropout masks; ``_UNKNOWN`` if they are not recorded."""
    mask_kept: float
    masks_high: float
    masks_low: float
    """As in ``dropout_masks.Kept``."""
    terms: float
    """Microbatches whose terms the program showed."""

    @property
    def random(self) -> tuple[int, int]:
        return int(self.random_high), int(self.random_low)

    @property
    def python_random(self) -> tuple[int, int]:
        return int(self.python_high), int(self.python_low)

    @property
    def numpy_random(self) -> tuple[int, int]:
        return int(self.numpy_high), int(self.numpy_low)

    @property
    def masks(self) -> tuple[int, int]:
        return int(self.masks_high), int(self.masks_low)


class Everyone(NamedTuple):
    """What all ranks saw of a step; what of it one rank reads alone is left on its device."""

    table: torch.Tensor
    """Per rank a ``RankRow``, then the squares of its gradients."""
    problems: Sequence[metrics.Unmeasured]
    """Of any rank, in sentences."""
    shown: Sequence[Shown | None] = ()
    """Per rank; empty if none showed the terms of its objective."""

    def rows(self) -> list[RankRow]:
        """In rank order."""
        return [RankRow(*values) for values in self.table[:, : len(RankRow._fields)].tolist()]

    def squares(self) -> npt.NDArray[np.float64]:
        """Shape (ranks, parameters)."""
        return self.table[:, len(RankRow._fields) :].cpu().numpy()


def _header(
    view: TrainerView, job: RankJob, this_pass: PassFolder | None
) -> metrics.HeaderDocument:
    header: metrics.HeaderDocument = {
        "identity": job.identity,
        "world_size": world.size(),
        "steps": job.steps,
        "versions": dict(view.versions),
    }
    if this_pass:
        header["pass"] = this_pass.number
        header["segment"] = job.segment
    return header


def measured(
    rows: Sequence[RankRow],
    squares: npt.NDArray[np.float64],
    problems: Sequence[metrics.Unmeasured],
    names: Sequence[str],
    *,
    logits_optional: bool,
) -> metrics.MeasuredDocument:
    """The recomputed part of the line; None for a value that could not be measured.

    Args:
        rows: every rank's, in rank order.
        squares: per rank and parameter, the sum of squares of the gradient that it counts.
        problems: what some rank could not count.
        names: canonical names of the parameters.
        logits_optional: whether it is allowed that no rank saw logits.
    """
    speakers = [row for row in rows if row.first_of_dp]
    tokens = int(sum(row.tokens for row in speakers))
    loss_sum = math.fsum(row.loss_sum for row in rows)
    unknown = not tokens or (bool(problems) and math.isnan(loss_sum))
    unknown |= logits_optional and not any(row.saw_logits for row in rows)
    blind = [rank for rank, row in enumerate(rows) if row.needs_logits and not row.saw_logits]
    unknown |= bool(blind)
    counted = all(row.saw_gradients for row in rows) and not problems
    missing = _without_gradient(names, squares) if counted else []
    if blind:
        problems = [*problems, metrics.Unmeasured(f"{_UNSEEN} (rank {blind[0]})")]
    line: metrics.MeasuredDocument = {
        "loss_recomputed": None if unknown else loss_sum / tokens,
        "grad_norm_recomputed": global_norm(squares) if counted else None,
        "tokens": tokens,
        "batch_digest": combine(
            (int(row.digest_high), int(row.digest_low), int(row.samples)) for row in speakers
        ),
        "batch_agrees": _agree(rows),
        "grads_missing": len(missing) if counted else None,
        "random_state": combined(row.random for row in rows),
        "random_shared": shared([(int(row.dp_rank), row.random) for row in rows]),
        "python_random_state": combined(row.python_random for row in rows),
        "numpy_random_state": combined(row.numpy_random for row in rows),
        "memory_bytes": int(max(row.memory for row in rows)),
    }
    if masks := _masks(rows):
        line["dropout_masks"] = masks
    if missing:
        line["grads_missing_names"] = missing
    if problems:
        line["problems"] = [each.sentence for each in problems]
        line["uncounted"] = metrics.uncounted_parameters(problems)
    return line


def _masks(rows: Sequence[RankRow]) -> metrics.MasksDocument | None:
    """The dropout masks of all ranks; None if no rank drew any, or if one's were not seen."""
    units = [int(row.mask_units) for row in rows]
    if _UNKNOWN in units or not any(units):
        return None
    return {
        "units": units,
        "kept": [int(row.mask_kept) for row in rows],
        "sums": [combined([row.masks]) for row in rows],
        "shared": shared([(int(row.dp_rank), row.masks) for row in rows]),
    }


_UNSEEN = (
    "the loss cannot be recomputed: the loss function was not called where converge sees it; if a "
    "CUDA graph replays it, set training.disable_cuda_graphs = true"
)


def mean_loss(rows: Iterable[RankRow]) -> float | None:
    """The mean of the reported losses, weighted by tokens or equally; None: no rank has one."""
    given = [(row.reported, row.tokens) for row in rows if row.reports and row.first_of_dp]
    if not given:
        return None
    losses = {loss for loss, _ in given}
    tokens = sum(count for _, count in given)
    if len(losses) == 1 or not tokens:
        return given[0][0]
    return math.fsum(loss * count for loss, count in given) / tokens


def _without_gradient(names: Sequence[str], squares: npt.NDArray[np.float64]) -> list[str]:
    """Trainable parameters whose whole gradient is missing or zero."""
    there = (squares != 0).any(axis=0)
    return [name for name, some in zip(names, there.tolist(), strict=True) if not some]


def _agree(rows: Sequence[RankRow]) -> bool:
    """Whether all ranks of each data-parallel coordinate saw the same samples."""
    readers = [row for row in rows if row.reads]
    seen = {(row.dp_rank, row.digest_high, row.digest_low, row.samples) for row in readers}
    return len(seen) == len({row.dp_rank for row in rows})


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory so far: allocated on the CUDA device, or resident in the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def begin_pass(
    run_folder: Path, form: CheckpointForm = OUR_FORM, *, set_aside: bool = False
) -> PassFolder:
    """Make the folder of the next pass. Collective over the world.

    No two starts get the same one, even at the same time.

    Args:
        run_folder: of the job.
        form: what its checkpoints look like.
        set_aside: whether the ranks set torn checkpoints aside, because nobody else does it before
        they start.
    """
    mine = 0
    if world.rank() == 0:
        mine = claim_pass(run_folder)
        if set_aside:
            set_torn_aside(run_folder, form)
    number = world.everyones(mine)[0]
    return PassFolder(number, pass_folder(run_folder, number))
