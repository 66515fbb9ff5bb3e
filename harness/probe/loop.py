"""The probe of a job that converge runs: turns the calls of a training loop into evidence.

Its requirements are checked first, because its evidence would be misleading otherwise. In the first
step the sizes of batches are counted, for ``in_force.json``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from converge_harness.probe.coordinates import Coordinates, coordinates
from converge_harness.probe.errors import ProbeError
from converge_harness.probe.faults import ScriptedFaults
from converge_harness.probe.leaving import wait_at_exit
from converge_harness.probe.recognising import recognised
from converge_harness.probe.seed_weights import evidence_names
from converge_harness.probe.starting_weights import job_of, move_wrapped_weights
from converge_harness.probe.watches import ClippingWatch, ForwardWatch
from converge_harness.probe.wrapping import Wrapped
from converge_harness.rank.recorder import world
from converge_harness.rank.recorder.activations import is_compiled
from converge_harness.rank.recorder.checkpoint_state import Counters
from converge_harness.rank.recorder.cross_entropy import IGNORE_INDEX
from converge_harness.rank.recorder.names import canonical, names_by_type
from converge_harness.rank.recorder.placement import local_shard
from converge_harness.rank.recorder.step_recorder import StepRecorder
from converge_harness.rank.recorder.trainer_view import TrainerView, rate_of
from converge_harness.rank.repeats import round_otherwise
from converge_harness.run_folder import in_force
from converge_harness.run_folder.arrays import UNKNOWN
from converge_harness.run_folder.checkpoints import write_manifest
from converge_harness.run_folder.in_force import AT_THE_STEP, BEFORE_CLIPPING

_probed: set[str] = set()
"""Jobs for which this process has made a probe."""


class ProbedLoop:
    """The implementation of ``Probe``; its making and ``step`` are collective over the world."""

    def __init__(
        self,
        job_path: str,
        model: torch.nn.Module,
        optimizer: Any,
        *,
        schedule: Any,
        hooks: bool,
        dp_rank: int | None,
        dp_degree: int | None,
        activations: bool = True,
    ) -> None:
        """Raises ProbeError if the job, the model or the world cannot be probed."""
        require_process_group()
        self._job = job_of(job_path)
        if job_path in _probed:
            raise ProbeError(
                f"{self._job.name}: Probe.from_env was called a second time, so the evidence of "
                "the first would be lost: a run has one probe, for the one model that it trains"
            )
        self._wrapped = recognised(model, optimizer)
        self._schedule = _require_counted(schedule)
        self._names = evidence_names(self._wrapped, self._job, job_path)
        move_wrapped_weights(self._wrapped, self._job, job_path)
        self._place = coordinates(self._wrapped.modules, self._wrapped.degrees, dp_rank, dp_degree)
        _probed.add(job_path)
        shown = activations and not _is_compiled_whole(model, self._wrapped)
        self._recorder = StepRecorder(self._view(self._place, shows_modules=shown), self._job)
        self._undo: list[Callable[[], None]] = []
        if self._job.repeat == "rounding":
            seed = self._job.repeat_seed
            self._undo += round_otherwise(self._wrapped.modules, seed, self._place.dp_rank)
        self._hooks = hooks
        self._forward = ForwardWatch(model) if hooks else None
        self._first = FirstStep()
        self._gradients_at = AT_THE_STEP
        """Where the gradients of this step were recorded last."""
        self._asked = False
        """Whether the loop itself has called ``gradients`` in this step."""
        self._saw_logits = False
        self._batches = 0
        self._stepped: set[int] = set()
        """With hooks: the optimizers that have made this step's update."""
        self._unwritten: ProbeError | None = None
        """What was wrong with a checkpoint that was written in the background."""
        self._makes_states = False
        """Whether the optimizer's step under way is no update (``makes_states``)."""
        self._noted: tuple[Any, Any] = (None, None)
        self._step = 0
        """The current step, or the last that ended; at first the one of the loaded checkpoint."""
        self._first_step = 1
        self._under_way = False
        self._closed = False
        this_pass = self._recorder.this_pass
        self._faults = (
            None if this_pass is None else ScriptedFaults(self._job, world.rank(), this_pass.number)
        )
        """Only in a run of several passes; else None."""
        self._placed = this_pass is None
        """Whether it is known from which step training goes on."""
        if self._faults is not None:
            remove_poison = self._faults.poison(model, lambda: self._step + (not self._under_way))
            self._undo += [] if remove_poison is None else [remove_poison]
        if self._placed:
            self._begin()
        self._watch()
        wait_at_exit(model)

    # ---------------------------------------------------------------- calls of the loop

    def loaded(self, step: int) -> None:
        self._require_loadable(step)
        if not self._job.resumes:
            return
        self._placed = True
        self._step = step
        self._first_step = step + 1
        self._recorder.on_load(step, self._counters(step))
        self._begin()

    def saved(self, step: int, written: Future[Any] | None) -> None:
        if not self._job.resumes or step == self._job.steps:
            return  # after the run's last step nothing goes on from it
        if self._under_way or step != self._step:
            now = f"in step {self._step}" if self._under_way else f"after step {self._step}"
            raise ProbeError(
                f"{self._job.name}: probe.saved({step}) {now}: call it right after the checkpoint "
                "was written, with the number of the last step that the checkpoint has"
            )
        if written is not None and not hasattr(written, "add_done_callback"):
            raise ProbeError(
                f"{self._job.name}: written= of probe.saved({step}) is a "
                f"{type(written).__name__}, not a future: of what async_save returns, give its "
                "upload_completion"
            )
        if self._faults is not None:
            if written is not None:
                self._faults.require_none_of_writing(step)
            self._faults.written(step)
        self._recorder.on_save(step, self._counters(step))
        if world.rank() == 0:
            if written is None:
                self._leave_manifest(step)
            else:
                written.add_done_callback(lambda done: self._leave_manifest_of(done, step))
        if self._faults is not None:
            self._faults.saved(step)

    def batch(
        self, inputs: torch.Tensor, labels: torch.Tensor | None, mask: torch.Tensor | None
    ) -> None:
        if self._closed:
            return
        require_batch(inputs, labels, mask)
        self._begin()
        self._batches += 1
        self._recorder.on_batch(inputs, labels, mask)
        if self._step == self._first_step:
            self._first.add(inputs, labels)

    def logits(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        if self._closed:
            return
        if logits.shape[:-1] != labels.shape:
            raise ProbeError(
                f"probe.logits: logits of shape {tuple(logits.shape)} need labels of shape "
                f"{tuple(logits.shape[:-1])}, shifted as in the loss; these are "
                f"{tuple(labels.shape)}"
            )
        self._saw_logits = True
        self._recorder.on_logits(logits, labels)

    def terms(
        self, weights: torch.Tensor, labels: torch.Tensor, terms: Mapping[str, torch.Tensor]
    ) -> None:
        if self._closed:
            return
        require_terms(weights, labels, terms)
        self._begin()
        self._recorder.on_terms(weights, labels, terms)

    def gradients(self) -> None:
        if self._closed:
            return
        self._asked = True
        self._take(BEFORE_CLIPPING)

    def step(self, loss: Any, grad_norm: Any) -> None:
        """End the step; with hooks, store what to report when the optimizer ends it."""
        if self._hooks and not self._closed:
            self._noted = (loss, grad_norm)
            return
        self._end(loss, grad_norm)

    def close(self) -> None:
        """Remove all hooks; the evidence is complete only if all steps have ended."""
        if not self._closed:
            self._stop()
            self._recorder.leave()

    def _stop(self) -> None:
        self._closed = True
        if self._faults is not None:
            self._faults.end_of_writing()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    # ---------------------------------------------------------------- steps

    def _begin(self) -> None:
        if self._unwritten is not None:
            raise self._unwritten
        if not self._under_way:
            if not self._placed:
                raise ProbeError(
                    f"{self._job.name} is resumed from checkpoints: call probe.loaded(step) before "
                    "the first step, on every rank, with the last step of the checkpoint that was "
                    "loaded, or 0"
                )
            if self._faults is not None:
                self._faults.end_of_writing()
                self._faults.after_step(self._step)
            self._step += 1
            self._under_way = True
            self._recorder.begin_step(self._step)

    def _end(self, loss: Any, grad_norm: Any) -> None:
        if self._closed:
            raise ProbeError(f"{self._job.name}: step() was called after {self._all_steps()}")
        if not self._batches:
            raise ProbeError(
                f"{self._job.name}: step() of step {self._step + (not self._under_way)} without "
                "probe.batch(inputs, labels): call it for every microbatch, on every rank"
            )
        self._recorder.on_log(_number(loss), _number(grad_norm))
        is_first = self._step == self._first_step
        if is_first or self._step in self._job.sample_steps:
            require_same_parameters(self._wrapped, self._step)
        if self._faults is not None:
            self._faults.step_ended(self._step)
        self._recorder.end_step()
        if is_first:
            self._write_in_force()
        self._batches = 0
        self._asked = False
        self._under_way = False
        self._stepped.clear()
        self._noted = (None, None)
        if self._clipping is not None:
            self._clipping.forget()
        if self._forward is not None:
            self._forward.forget()
        if self._step == self._job.last_step:
            self._recorder.close()
            self._stop()
        elif self._faults is not None:
            self._faults.checkpoint_due(self._step, self._smallest_file)

    def _all_steps(self) -> str:
        """How many steps there should be, and what says so to the program."""
        if self._job.segment is None:
            return (
                f"the job's {self._job.steps} steps: the program must make as many optimizer steps "
                "as {steps} in its command says, and call step() once for each"
            )
        return (
            f"step {self._job.last_step}, where segment {self._job.segment + 1} ends: the program "
            "must stop after the step that {stop_at} in its command says"
        )

    # ---------------------------------------------------------------- checkpoints

    def _require_loadable(self, step: int) -> None:
        """Raises ProbeError for a call of ``loaded`` that cannot be right."""
        if self._job.resumes and self._placed:
            raise ProbeError(
                f"{self._job.name}: probe.loaded({step}) after training has begun: call it once, "
                "before the first step"
            )
        last = self._job.last_step - 1 if self._job.resumes else 0
        if not 0 <= step <= last:
            ends = f"trains up to step {self._job.last_step}"
            why = ends if self._job.resumes else "starts from its initial weights"
            raise ProbeError(
                f"{self._job.name}: probe.loaded({step}), but this start {why}: the program has "
                "loaded another run's checkpoint, or counts steps otherwise"
            )

    def _counters(self, step: int) -> Counters:
        """What is known of the program's own counters: it keeps its place in the data itself."""
        return Counters(
            lr=rate_of(self._wrapped.optimizers),
            trainer_step=step,
            tokens_seen=UNKNOWN,
            samples_consumed=UNKNOWN,
            schedule_steps=schedule_steps(self._schedule),
        )

    def _leave_manifest(self, step: int) -> None:
        """Once all ranks have written the checkpoint; on rank 0."""
        form = self._job.checkpoints
        checkpoint = form.path(self._job.run_folder, step)
        if not form.is_finished(checkpoint):
            missing = checkpoint if form.last_file is None else checkpoint / form.last_file
            raise ProbeError(
                f"{self._job.name}: probe.saved({step}), but there is no {missing}: write the "
                "checkpoint before the call, where [trainer.checkpoints] of the experiment says"
            )
        write_manifest(checkpoint, step, self._recorder.folder, form)

    def _leave_manifest_of(self, written: Future[Any], step: int) -> None:
        """The same once a checkpoint was written in the background; none if that failed.

        A future only logs the error of its callback, so the next step raises it.
        """
        if not written.cancelled() and written.exception() is None:
            try:
                self._leave_manifest(step)
            except ProbeError as error:
                self._unwritten = error

    def _smallest_file(self) -> int:
        """Bytes that some file of a checkpoint surely has.

        By the largest parameter, because there may be many files, and in lower precision.
        """
        sizes = (local_shard(each).nbytes for _, each in self._wrapped.parameters)
        return max(sizes, default=0) // 4

    # ---------------------------------------------------------------- watching

    def _watch(self) -> None:
        """Hook into torch: when gradients are complete, and when the optimizer has stepped."""
        self._clipping: ClippingWatch | None = None
        clips = self._wrapped.watch_clipping
        if clips is not None:
            self._undo.append(clips(self._before_clipping))
        parameters = [each for part in self._wrapped.modules for each in part.parameters()]
        self._clipping = ClippingWatch(parameters, self._before_clipping)
        self._undo.append(self._clipping.undo)
        if self._forward is not None:
            self._undo.append(self._forward.undo)
        ours = [each for each in self._wrapped.optimizers if _is_torchs(each)]
        if self._hooks and not ours:
            raise ProbeError("hooks=True needs an optimizer of torch: give it to Probe.from_env")
        for optimizer in ours:
            handles = [optimizer.register_step_pre_hook(self._before_update)]
            if self._hooks:
                handles.append(optimizer.register_step_post_hook(self._after_update))
            self._undo += [handle.remove for handle in handles]

    def _before_clipping(self) -> None:
        if not self._asked:
            self._take(BEFORE_CLIPPING)

    def _before_update(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._makes_states = not self._saw_batch() and makes_states(optimizer)
        if not self._makes_states and not self._recorder.saw_gradients:
            self._take(AT_THE_STEP)

    def _saw_batch(self) -> bool:
        return bool(self._batches or (self._forward is not None and self._forward.batches))

    def _after_update(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._makes_states:
            return
        self._stepped.add(id(optimizer))
        if len(self._stepped) < sum(map(_is_torchs, self._wrapped.optimizers)):
            return
        loss, grad_norm = self._noted
        if self._forward is not None and not self._batches:
            loss = _mean(self._forward) if loss is None else loss
            for given in self._forward.batches:
                self.batch(*given)
        self._end(loss, grad_norm)

    def _take(self, where: str) -> None:
        self._begin()
        self._gradients_at = where
        self._recorder.take_gradients()
        if self._faults is not None:
            self._faults.in_step(self._step)

    # ---------------------------------------------------------------- the model

    def _view(self, place: Coordinates, *, shows_modules: bool) -> TrainerView:
        wrapped = self._wrapped
        return TrainerView(
            model_parts=wrapped.modules,
            dp_rank=place.dp_rank,
            first_of_dp=place.first_of_dp,
            has_last_stage=True,
            tp_rank=place.tp_rank,
            tp_group=None,
            vocab_size=0,  # unknown: vocabulary shards are recognised by DTensors only
            device=_device(wrapped),
            optimizers=wrapped.kept_by,
            learning_rate=lambda: rate_of(wrapped.optimizers),
            versions={"torch": torch.__version__, **wrapped.versions},
            parameters=self._names.parameters,
            copies=self._names.copies,
            fused=self._names.fused,
            module_names=self._names.modules,
            shows_modules=shows_modules,
            loss_is_local=True,
            frames_steps=False,
            logits_optional=True,
        )

    def _write_in_force(self) -> None:
        """Collective over the world."""
        sizes = observed_sizes(self._first, first_of_dp=self._place.first_of_dp)
        dtype, by_type = in_force.param_dtypes(dtypes(self._names.parameters, local_shard))
        if not self._recorder.is_writer:
            return
        settings = flattened(self._job.train_config.settings)
        in_force.write_in_force(
            self._recorder.folder,
            {
                "world_size": world.size(),
                "degrees": dict(self._place.degrees),
                **sizes,
                "param_dtype": dtype,
                "param_dtypes": by_type,
                "config": {**settings, **self._job.overrides},
                "declared": sorted(self._job.overrides),
                "probe": {
                    "wrapping": self._wrapped.wrapping,
                    "gradients": self._gradients_at,
                    "recomputes_loss": self._saw_logits,
                },
            },
        )


def _is_compiled_whole(model: Any, wrapped: Wrapped) -> bool:
    """Whether the calls of all modules are compiled: of the model, or of a wrapper around it."""
    inner = {id(module) for module in wrapped.modules}
    return any(
        is_compiled(each) and any(id(module) in inner for module in each.modules())
        for each in model.modules()
    )


def _number(value: Any) -> float | None:
    """A loss or norm as a number; collective for a DTensor, whose full value counts."""
    if value is None:
        return None
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)


def _mean(forward: ForwardWatch) -> float | None:
    """The mean of the losses that the model returned in a step, weighted by tokens."""
    if not forward.losses or len(forward.losses) != len(forward.batches):
        return None
    weights = [
        len(given.inputs) if given.labels is None else int((given.labels != IGNORE_INDEX).sum())
        for given in forward.batches
    ]
    losses = [float(loss) for loss in forward.losses]
    total = sum(weights)
    weighted = (loss * weight for loss, weight in zip(losses, weights, strict=True))
    return math.fsum(weighted) / total if total else math.fsum(losses) / len(losses)


def _is_torchs(optimizer: Any) -> bool:
    return isinstance(optimizer, torch.optim.Optimizer)


def makes_states(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step of an optimizer that begins only makes its states, to be loaded into.

    ``torch.distributed.checkpoint.state_dict`` does so, with zero gradients and a rate of 0.
    """
    return not optimizer.state and all(group.get("lr") == 0 for group in optimizer.param_groups)


def _require_counted(schedule: Any) -> Any:
    """A schedule of the learning rate. Raises ProbeError for one that does not count its steps."""
    if schedule is not None and schedule_steps(schedule) == UNKNOWN:
        raise ProbeError(
            f"schedule= of Probe.from_env is a {type(schedule).__name__}, which does not count its "
            "steps (last_epoch, or DeepSpeed's last_batch_iteration): give a schedule of "
            "torch.optim.lr_scheduler or DeepSpeed, or leave it out"
        )
    return schedule


def schedule_steps(schedule: Any) -> int:
    """Steps that a schedule of the learning rate has made; UNKNOWN if it does not count them."""
    if isinstance(made := getattr(schedule, "last_epoch", None), int):
        return made
    if isinstance(last := getattr(schedule, "last_batch_iteration", None), int):  # DeepSpeed
        return last + 1  # counted from 0
    # accelerate's wrapper, and torch's ChainedScheduler, whose schedules step together.
    inside = getattr(schedule, "scheduler", None), *getattr(schedule, "_schedulers", ())
    return next((schedule_steps(each) for each in inside if each is not None), UNKNOWN)


def _device(wrapped: Wrapped) -> torch.device:
    tensors = (local_shard(each) for _, each in (*wrapped.parameters, *wrapped.copies))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


@dataclass(slots=True)
class FirstStep:
    """One rank's batches of the first step."""

    sizes: list[int] = field(default_factory=list)
    """Samples of every batch."""
    lengths: set[int] = field(default_factory=set)
    """Tokens of a sample, including padding."""

    def add(self, inputs: torch.Tensor, labels: torch.Tensor | None) -> None:
        """Count a batch; a sample with one label, or not of integers, has length 1."""
        self.sizes.append(len(inputs))
        if labels is not None:
            tokens = labels.numel()
        else:
            tokens = len(inputs) if inputs.is_floating_point() else inputs.numel()
        self.lengths.add(tokens // max(len(inputs), 1))


def observed_sizes(mine: FirstStep, *, first_of_dp: bool) -> in_force.InForceDocument:
    """The run's sizes; None for a size that differs between batches or ranks. Collective.

    Ranks without a batch do not count.
    """
    everyone = world.everyones((mine.sizes, sorted(mine.lengths), first_of_dp))
    return {
        "seq_len": _one([length for _, lengths, _ in everyone for length in lengths]),
        "local_batch_size": _one([size for sizes, _, _ in everyone for size in sizes]),
        "global_batch_size": sum(sum(sizes) for sizes, _, first in everyone if first),
        "gradient_accumulation_steps": _one([len(sizes) for sizes, _, _ in everyone if sizes]),
    }


def dtypes(parameters: Sequence[tuple[str, Any]], local: Any) -> dict[str, list[str]]:
    """Names of all ranks' parameters by their data type; usually there is one type. Collective."""
    mine = {name: str(local(each).dtype).removeprefix("torch.") for name, each in parameters}
    return names_by_type(world.everyones(mine))


def flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """As ``converge_harness.model.flattened``, which ranks cannot import."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _one(values: Sequence[int]) -> int | None:
    return values[0] if len(set(values)) == 1 else None


def require_process_group() -> None:
    """Raises ProbeError if ranks are not connected to each other."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and world.size() == 1:
        raise ProbeError(
            f"WORLD_SIZE is {ranks}, but torch.distributed is not initialised: call "
            "torch.distributed.init_process_group before Probe.from_env"
        )


def require_batch(
    inputs: torch.Tensor, labels: torch.Tensor | None, mask: torch.Tensor | None
) -> None:
    """Raises ProbeError for anything but a batch of samples."""
    for name, tensor in (("inputs", inputs), ("labels", labels), ("mask", mask)):
        if tensor is None and name != "inputs":
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0 or len(tensor) != len(inputs):
            found = getattr(tensor, "shape", type(tensor).__name__)
            raise ProbeError(
                f"probe.batch: {name} is {found}; inputs, labels and mask must be tensors whose "
                "first dimension is the samples of the microbatch"
            )
    if mask is not None and inputs.shape[: mask.ndim] != mask.shape:
        raise ProbeError(
            f"probe.batch: mask of shape {tuple(mask.shape)} does not fit inputs of shape "
            f"{tuple(inputs.shape)}: it must have their leading dimensions, and is zero at padding"
        )


def require_terms(
    weights: torch.Tensor, labels: torch.Tensor, terms: Mapping[str, torch.Tensor]
) -> None:
    """Raises ProbeError for anything but numbers of the tokens of a microbatch."""
    for name, tensor in (("weights", weights), ("labels", labels), *terms.items()):
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor):
            raise ProbeError(
                f"probe.terms: {name} is a {type(tensor).__name__}; weights, labels and terms must "
                "be plain tensors"
            )
        alike = tensor.shape == weights.shape[: max(tensor.ndim, 1)]
        if not alike or (name == "labels" and tensor.ndim != weights.ndim):
            raise ProbeError(
                f"probe.terms: {name} has the shape {tuple(tensor.shape)}; labels must have that "
                f"of weights, {tuple(weights.shape)}, and each term that or its leading dimensions"
            )


def require_same_parameters(wrapped: Wrapped, step: int) -> None:
    """Raises ProbeError when the model's parameters were replaced after the probe was made.

    FSDP 1 has its own parameters, and FSDP 2 may show plain ones while they are gathered.
    """
    now = {
        canonical(name): parameter
        for module in wrapped.modules
        for name, parameter in module.named_parameters()
    }
    for name, known in wrapped.parameters:
        found = now.get(name)
        if not isinstance(known, torch.Tensor) or found is known:
            continue
        if isinstance(known, DTensor) and not isinstance(found, DTensor | None):
            continue
        raise ProbeError(
            f"{name} is another tensor at step {step} than when Probe.from_env was "
            "called: wrap, load and move the model before that, and update weights in place"
        )
