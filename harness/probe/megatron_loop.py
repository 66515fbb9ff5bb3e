"""Megatron-LM's training loop, watched: ``pretrain`` of ``megatron.training``, of release 0.16.

Two of its functions are wrapped: the one that builds model and optimizer, after which the recorder
is attached, and the one that trains a step. Parameters, gradients and states are read as in
converge's own loop on Megatron-Core (``converge_harness.rank.megatron``), and their names do not
depend on the layout. All names of Megatron-LM's loop are in ``_Names``.

Only the first tensor-parallel rank of the first and the last pipeline stage reads batches
(``get_batch_on_this_tp_rank``), so the batches of the others are not compared.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from converge_harness.probe.errors import ProbeError
from converge_harness.probe.leaving import wait_at_exit
from converge_harness.probe.loop import FirstStep, dtypes, flattened, observed_sizes
from converge_harness.probe.starting_weights import job_of
from converge_harness.rank.megatron.audit import data_parallel, experts_of, shards, tp_degree
from converge_harness.rank.megatron.parameters import (
    CanonicalPart,
    pieces_of,
    trained_by,
    weights_of,
)
from converge_harness.rank.megatron.view import (
    view_of,
    watch_clipping,
    watch_logits,
    without_wrappers,
)
from converge_harness.rank.recorder import world
from converge_harness.rank.recorder.cross_entropy import IGNORE_INDEX
from converge_harness.rank.recorder.placement import local_shard
from converge_harness.rank.recorder.step_recorder import StepRecorder
from converge_harness.rank.repeats import move_tensors
from converge_harness.rank.settings import SettingError
from converge_harness.run_folder import in_force
from converge_harness.run_folder.in_force import BEFORE_CLIPPING
from converge_harness.run_folder.job import RankJob


class _Names:
    """What Megatron-LM calls the parts of its training loop."""

    MODULE = "megatron.training.training"
    SET_UP = "setup_model_and_optimizer"
    """Returns the model's chunks, the optimizer and the learning rate's schedule."""
    ARGUMENTS = "get_args"
    """Returns the command line as it was parsed, checked and changed by the checks."""
    STEP = "train_step"
    """Its first arguments are the forward step and the batches; its result begins with the losses
    to log, which are empty but on the last pipeline stage."""
    LOSS = "lm loss"
    TOKENS, LABELS, MASK = "tokens", "labels", "loss_mask"
    """Of a batch; the mask is also a keyword of the model."""


def watch_training(path: str) -> None:
    """Wrap the loop's functions, for the job in a file.

    Raises ProbeError if Megatron-LM does not have them, if they are wrapped already, and for a job
    that needs what this loop does not give.
    """
    job = job_of(path)
    _require_plain(job)
    try:
        training = importlib.import_module(_Names.MODULE)
    except ImportError as error:
        raise ProbeError(
            f"megatron_lm.watch(): {_Names.MODULE} cannot be imported ({error}): call it in a "
            "program of Megatron-LM, such as pretrain_gpt.py, whose folder is on the path"
        ) from error
    for name in (_Names.SET_UP, _Names.STEP, _Names.ARGUMENTS):
        found = getattr(training, name, None)
        if not callable(found):
            raise ProbeError(
                f"megatron_lm.watch(): {_Names.MODULE} has no function {name}: converge knows the "
                "training loop of Megatron-LM 0.16"
            )
        if hasattr(found, _MARK):
            raise ProbeError(f"{job.name}: megatron_lm.watch() was called twice: call it once")
    set_up = getattr(training, _Names.SET_UP)

    def watched(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, *others = set_up(*args, **kwargs)
        arguments = vars(getattr(training, _Names.ARGUMENTS)())
        loop = WatchedLoop(job, model, optimizer, arguments)
        setattr(training, _Names.STEP, _marked(loop.watched(getattr(training, _Names.STEP))))
        return (model, optimizer, *others)

    setattr(training, _Names.SET_UP, _marked(watched))


_MARK = "_watched_by_converge"


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    setattr(function, _MARK, True)
    return function


def _require_plain(job: RankJob) -> None:
    """Raises ProbeError for what the probe cannot do in this loop yet."""
    if job.resumes:
        raise ProbeError(
            f"{job.name} is resumed from checkpoints, which megatron_lm.watch() does not watch: "
            "leave out checkpoint_every, segments and faults"
        )
    if job.weights is not None:
        raise ProbeError(
            f"{job.name} starts from another trainer's checkpoint, which megatron_lm.watch() does "
            "not load: name a control that Megatron-LM trains"
        )
    if job.repeat == "rounding":
        raise ProbeError(
            f"{job.name} rounds what modules compute otherwise, which megatron_lm.watch() does not "
            'do: set repeats = ["rerun", "ulp"] in the experiment'
        )


class WatchedLoop:
    """One rank of ``pretrain``, whose steps are recorded.

    Its making and every step are collective over the world.
    """

    def __init__(
        self, job: RankJob, model: Any, optimizer: Any, arguments: Mapping[str, Any]
    ) -> None:
        """Raises ProbeError if the model cannot be read, or is trained in another way.

        ``arguments`` are those that Megatron-LM goes by.
        """
        self._job = job
        self._arguments = arguments
        self._chunks = list(model)
        gpts = [without_wrappers(chunk) for chunk in self._chunks]
        for chunk in self._chunks:
            _require_ddp(chunk)
        _require_readable(gpts, optimizer)
        self._optimizer = optimizer
        self._parts = tuple(CanonicalPart(gpt) for gpt in gpts)
        pieces = pieces_of(self._parts)
        if job.repeat == "ulp":
            move_tensors(weights_of(pieces), job.repeat_seed)
            optimizer.reload_model_params()
        try:
            trained = trained_by(optimizer, pieces)
        except SettingError as error:
            raise ProbeError(f"megatron_lm.watch(): {error}") from error
        self._reading = _reading_chunk(self._chunks, gpts)
        """The chunk whose batches count; None on a rank that reads none."""
        device = _device_of(gpts)
        view = view_of(
            self._parts,
            trained,
            optimizer,
            int(gpts[-1].vocab_size),
            device,
            reads_batches=self._reading is not None,
            logits_optional=True,
        )
        self._recorder = StepRecorder(view, job)
        self._named = tuple((piece.name, piece.parameter) for piece in pieces)
        self._batches: dict[int, _Batches] = {}
        """Of each chunk."""
        self._first = FirstStep()
        self._saw_logits = False
        self._grad_norm: float | None = None
        self._step = 0
        """The last step that ended."""
        watch_clipping(optimizer, self._recorder)
        self._watch_norm()
        for gpt in gpts:
            if gpt.post_process:
                self._watch_logits(gpt)
        wait_at_exit(model)

    def watched(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron-LM's ``train_step``, recorded."""

        def step(forward_step: Any, batches: Any, *args: Any, **kwargs: Any) -> Any:
            if self._step == self._job.last_step:
                raise ProbeError(
                    f"{self._job.name}: a step after the job's {self._job.steps}: give Megatron-LM "
                    "--train-iters {steps}"
                )
            self._recorder.begin_step(self._step + 1)
            result = train_step(self._forward(forward_step), batches, *args, **kwargs)
            self._end(result[0])
            return result

        return step

    # ---------------------------------------------------------------- watching

    def _forward(self, forward_step: Any) -> Callable[..., Any]:
        def watched(batches: Any, chunk: Any, *args: Any, **kwargs: Any) -> Any:
            return forward_step(self._seen(batches, chunk), chunk, *args, **kwargs)

        return watched

    def _seen(self, batches: Any, chunk: Any) -> Any:
        """The batches of a chunk, looked at while the program takes them.

        In the first step all tensor-parallel ranks learn the tokens, so that modules' results are
        of known samples. Megatron-LM reads them on the first of these ranks alone.
        """
        gpt = without_wrappers(chunk)
        if not (gpt.pre_process or gpt.post_process):
            self._recorder.on_microbatch(None)
            return batches
        mine = None
        if batches is not None:
            mine = self._batches.get(id(chunk))
            if mine is None or mine.source is not batches:
                seen = self._taken if chunk is self._reading else None
                mine = self._batches[id(chunk)] = _Batches(batches, seen)
        if self._step == 0:
            tokens = None if mine is None else mine.next_tokens()
            self._recorder.on_microbatch(_of_tensor_parallel(tokens, self._recorder.view.device))
        return mine

    def _taken(self, batch: Mapping[str, torch.Tensor]) -> None:
        tokens, labels = batch[_Names.TOKENS], batch[_Names.LABELS]
        mask = batch.get(_Names.MASK)
        if mask is not None:
            labels = labels.where(mask != 0, IGNORE_INDEX)
        self._recorder.on_batch(tokens, labels)
        if self._step == 0:
            self._first.add(tokens, labels)

    def _watch_logits(self, gpt: Any) -> None:
        """The loss can be recomputed if the model gets the mask, as in ``pretrain_gpt.py``."""
        latest: list[torch.Tensor | None] = [None]

        def called(_gpt: torch.nn.Module, _args: Any, kwargs: Mapping[str, Any]) -> None:
            latest[0] = kwargs.get(_Names.MASK)

        def counted(labels: torch.Tensor) -> torch.Tensor | None:
            mask = latest[0]
            if mask is None:
                return None
            self._saw_logits = True
            return labels.where(mask.view_as(labels) != 0, IGNORE_INDEX)

        gpt.register_forward_pre_hook(called, with_kwargs=True)
        watch_logits(gpt, self._recorder, counted)

    def _watch_norm(self) -> None:
        """The norm by which the optimizer clips; None if it did not update."""
        step = self._optimizer.step

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            _, norm, *_ = result
            self._grad_norm = None if norm is None else float(norm)
            return result

        self._optimizer.step = watched

    # ---------------------------------------------------------------- steps

    def _end(self, losses: Mapping[str, Any]) -> None:
        loss = losses.get(_Names.LOSS)
        self._recorder.on_log(None if loss is None else float(loss), self._grad_norm)
        self._recorder.end_step()
        self._step += 1
        if self._step == 1:
            self._write_in_force()
        if self._step == self._job.last_step:
            self._recorder.close()

    def _write_in_force(self) -> None:
        """What is in force, as far as it can be seen. Collective over the world."""
        sizes = observed_sizes(self._first, first_of_dp=self._recorder.view.first_of_dp)
        dtype, by_type = in_force.param_dtypes(dtypes(self._named, local_shard))
        everyone = world.everyones(
            (
                tp_degree(self._parts),
                int(experts_of(self._parts)["ep"]),
                tuple(sorted(number for part in self._parts for number in part.layers)),
                self._saw_logits,
                data_parallel(self._chunks[0], self._optimizer),
            )
        )
        if not self._recorder.is_writer:
            return
        tps, eps, layers, saw_logits, dps = zip(*everyone, strict=True)
        in_force.write_in_force(
            self._recorder.folder,
            {
                "world_size": world.size(),
                "degrees": {
                    **{name: max(dp[name] for dp in dps) for name in ("dp_replicate", "dp_shard")},
                    "tp": max(tps),
                    "cp": 1,
                    "pp": len(set(layers)),
                    "ep": max(eps),
                },
                **sizes,
                "param_dtype": dtype,
                "param_dtypes": by_type,
                "config": {
                    **flattened(self._job.train_config.settings),
                    **self._job.overrides,
                },
                "declared": sorted(self._job.overrides),
                "probe": {
                    "wrapping": "Megatron-Core's DDP"
                    + (" and distributed optimizer" if shards(self._optimizer) else ""),
                    "gradients": BEFORE_CLIPPING,
                    "recomputes_loss": any(saw_logits),
                    "switched_off": switched_off(sys.argv[1:], self._arguments),
                },
            },
        )


class _Batches:
    """The batches of a chunk: what is taken is looked at, and the next one may be looked at."""

    def __init__(
        self, source: Iterator[Any], taken: Callable[[Mapping[str, torch.Tensor]], None] | None
    ) -> None:
        """``taken`` looks at a batch; None: those of another chunk count."""
        self.source = source
        self._taken = taken
        self._waiting: list[Any] = []

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        batch = self._waiting.pop() if self._waiting else _readable(next(self.source))
        if self._taken is not None:
            self._taken(batch)
        return batch

    def next_tokens(self) -> torch.Tensor:
        """The tokens of the batch that is taken next."""
        if not self._waiting:
            self._waiting.append(_readable(next(self.source)))
        found: torch.Tensor = self._waiting[0][_Names.TOKENS]
        return found


def _readable(batch: Any) -> Any:
    """Raises ProbeError for a batch in which the samples cannot be found."""
    if isinstance(batch, Mapping) and {_Names.TOKENS, _Names.LABELS} <= set(batch):
        return batch
    found = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
    raise ProbeError(
        f"megatron_lm.watch(): a batch is {found}, and has to be a mapping with {_Names.TOKENS!r} "
        f"and {_Names.LABELS!r}, as those of pretrain_gpt.py"
    )


def switched_off(given: Sequence[str], used: Mapping[str, Any]) -> list[str]:
    """The switches of a command line that are false in the arguments that Megatron-LM goes by.

    Its checks turn some off with a warning, such as ``--sequence-parallel`` without tensor
    parallelism (``validate_args`` of ``megatron/training/arguments.py``).
    """
    following = (*given, "--")[1:]
    return [
        argument
        for argument, after in zip(given, following, strict=True)
        if argument.startswith("--") and after.startswith("--")
        if used.get(argument.removeprefix("--").replace("-", "_")) is False
    ]


def _of_tensor_parallel(tokens: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """The tokens that the first tensor-parallel rank has. Collective over these ranks."""
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return tokens
    given = [None if tokens is None else tokens.cpu()]
    source = parallel_state.get_tensor_model_parallel_src_rank()
    dist.broadcast_object_list(given, source, group=group, device=device)
    return None if given[0] is None else given[0].to(device)


def _reading_chunk(chunks: list[Any], gpts: list[Any]) -> Any:
    """The chunk whose batches stand for this rank's; None if other ranks read them."""
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return None
    for of_a_reader in ("pre_process", "post_process"):
        for chunk, gpt in zip(chunks, gpts, strict=True):
            if getattr(gpt, of_a_reader):
                return chunk
    return None


def _require_ddp(chunk: Any) -> None:
    """Raises ProbeError for a model in any other wrapper than Megatron-Core's DDP."""
    if isinstance(chunk, DistributedDataParallel):
        return
    found, leave_out = f"a {type(chunk).__name__}", "what chooses it"
    for argument, module, name in _OTHER_WRAPPERS:
        if module in type(chunk).__module__:
            found, leave_out = f"{name} ({argument})", argument
    raise ProbeError(
        f"megatron_lm.watch(): the model is in {found}, whose shards it does not read: leave out "
        f"{leave_out}, so that Megatron-Core's DistributedDataParallel is used, or judge "
        'Megatron-FSDP with kind = "megatron" (docs/megatron.md)'
    )


_OTHER_WRAPPERS = (
    ("--use-megatron-fsdp", "mcore_fsdp_adapter", "Megatron-FSDP"),
    ("--use-torch-fsdp2", "torch_fully_sharded_data_parallel", "torch's FSDP 2"),
)
"""Megatron-LM's argument, a part of the name of the wrapper's module, and what it is."""


def _device_of(gpts: list[Any]) -> torch.device:
    """Where the parameters of this rank's chunks are; raises ProbeError if it has none."""
    devices = (parameter.device for gpt in gpts for parameter in gpt.parameters())
    if (device := next(devices, None)) is None:
        raise ProbeError(
            "megatron_lm.watch(): this rank has no parameters, and converge compares those that "
            "each rank has: lay the pipeline out so that every stage has a layer"
        )
    return device


def _require_readable(gpts: list[Any], optimizer: Any) -> None:
    """Raises ProbeError for models and optimizers that the probe does not know."""
    for gpt in gpts:
        missing = [
            name for name in ("decoder", "pre_process", "vocab_size") if not hasattr(gpt, name)
        ]
        if missing:
            raise ProbeError(
                f"megatron_lm.watch(): the model is a {type(gpt).__name__} without "
                f"{', '.join(missing)}: converge reads Megatron-Core's GPTModel"
            )
        config = gpt.config
        for key, what in _UNREAD.items():
            if getattr(config, key, None):
                raise ProbeError(
                    f"megatron_lm.watch(): {what} ({key}) is not supported: converge cannot say "
                    "which entries a rank holds, or which tokens its loss is of"
                )
        for key in _WEIGHTS_DIVIDED:
            if getattr(config, key, 1) > 1:
                raise ProbeError(
                    f"megatron_lm.watch(): weights divided over data-parallel ranks ({key}) are "
                    "not supported: converge cannot say which entries a rank holds"
                )
    if not hasattr(optimizer, "chained_optimizers"):
        raise ProbeError(
            f"megatron_lm.watch(): the optimizer is a {type(optimizer).__name__}, and converge "
            "reads the ChainedOptimizer that get_megatron_optimizer makes"
        )
    if parallel_state.get_context_parallel_world_size() > 1:
        raise ProbeError("megatron_lm.watch(): context parallelism is not supported yet")


_UNREAD = {
    "fp16": "float16 with its loss scaler",
    "multi_latent_attention": "multi-latent attention",
    "mtp_num_layers": "multi-token prediction",
    "moe_grouped_gemm": "grouped products of experts",
    "fp8": "FP8",
    "fp4": "FP4",
    "use_mup": "maximal update parametrisation",
    "enable_mhc_connections": "several residual streams",
    "moe_single_grouped_weight": "experts in one weight",
    "moe_mlp_glu_interleave_size": "interleaved gates",
    "tensor_parallel_num_weight_shards": "weights in shards",
    "expert_tensor_parallel_num_weight_shards": "experts in shards",
}
"""Keys of a ``TransformerConfig``, and what they switch on; some only in newer releases."""
_WEIGHTS_DIVIDED = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
"""Degrees; 1: not divided."""
