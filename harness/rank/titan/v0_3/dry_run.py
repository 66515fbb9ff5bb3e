"""torchtitan's own trainer through two steps, on fake tensors and a fake process group.

The device of all tensors is a fake CPU (a torch without CUDA refuses even fake tensors of a GPU in
its autograd), but the config is that of the job's device: FlexAttention, bf16 and real Float8
stay what they are on a GPU. Stand-ins take the place of what is not on this machine.

Before the first step, pipeline stages exchange the shapes of the tensors that they will send. On a
fake process group nobody answers, so ``Neighbours`` does: all stages of a decoder pass on hidden
states of one shape, and the gradient of an output has the output's shape.
"""

from __future__ import annotations

import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._inductor.config
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    unset_fake_temporarily,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining._utils import (
    InferenceMode,
    _StageBackwardMeta,
    _StageForwardMeta,
    extract_tensor_meta,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torchtitan.components.quantization import float8
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.models.common import attention
from torchtitan.tools import utils

from converge_harness.rank.dry_run.meter import Meter
from converge_harness.rank.dry_run.run import TRACED, Stepped
from converge_harness.rank.titan.v0_3.config import build_config
from converge_harness.rank.titan.v0_3.series import (
    CUDA_GRAPHS,
    SERIES,
    BaseDataLoader,
    as_batch,
    loader_sizes,
)
from converge_harness.rank.titan.v0_3.sizes import sizes_of
from converge_harness.run_folder.job import RankJob

_STEPS = 2
_CANNOT_TRACE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)


def take_steps(job: RankJob, meter: Meter) -> Stepped:
    """Build the rank of the job's world that ``RANK`` and ``NGPU`` say, and take two steps.

    Raises SettingError for a config that cannot be built, and whatever the trainer raises.
    """
    said = prepare(job, meter)
    config = build_config(job).trainer
    said += replace_assets(config)
    with ExitStack() as stack:
        config.dump_folder = stack.enter_context(tempfile.TemporaryDirectory())
        config.comm.mode = "fake_backend"
        whole = _model_parameters(config)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(meter)
        trainer = config.build()
        neighbours = Neighbours(trainer)
        estimated = None
        how = TRACED
        try:
            _step(trainer, meter)
        except _CANNOT_TRACE as error:
            estimated, how = _by_formula(trainer, error)
        return Stepped(
            parts=tuple(trainer.model_parts),
            optimizers=tuple(trainer.optimizers),
            stages=neighbours.stages,
            model_parameters=whole,
            estimated=estimated,
            how=how,
            stand_ins=tuple(said),
            more={
                "compiled_blocks": sum(
                    hasattr(module, MARK)
                    for part in trainer.model_parts
                    for module in part.modules()
                ),
                "async_tp": bool(torch._inductor.config._micro_pipeline_tp),
                "mixed_precision_param": config.training.mixed_precision_param,
                "microbatches": getattr(trainer, SERIES.pipeline_microbatches),
                "gradient_accumulation_steps": trainer.gradient_accumulation_steps,
            },
        )


def _step(trainer: Any, meter: Meter) -> None:
    batches = trainer.batch_generator(trainer.dataloader)
    meter.peak = meter.now
    for _ in range(_STEPS):
        trainer.step += 1
        trainer.train_step(batches)


def _model_parameters(config: Any) -> int:
    with torch.device("meta"):
        return sum(each.numel() for each in config.model_spec.model.build().parameters())


def _by_formula(trainer: Any, error: Exception) -> tuple[int, str]:
    """Bytes of activations that layers keep for the backward pass.

    34 bytes per entry of the hidden state and layer with 16-bit activations and an attention that
    keeps no scores, 2 with full recomputation; sequence parallelism divides by TP (Korthikanti et
    al. 2022, "Reducing Activation Recomputation in Large Transformer Models", table 2). The
    microbatches of a pipeline that are in flight at once are at most all of them.
    """
    config, dims = trainer.config, trainer.parallel_dims
    full = type(config.activation_checkpoint).__qualname__.startswith("FullAC")
    layers = sum(len(part.layers) for part in trainer.model_parts)
    sizes = sizes_of(config)
    entries = sizes.local * sizes.length * trainer.model_config.dim // (dims.tp * dims.cp)
    wider = 2 if config.training.mixed_precision_param == "float32" else 1
    why = f"{type(error).__name__} of {getattr(error, 'func', error)}"
    return (
        (2 if full else 34) * wider * entries * layers,
        f"estimated by formula (Korthikanti et al. 2022, table 2): fake tensors cannot do {why}",
    )


_DYNAMIC = types.SimpleNamespace(item=lambda: 0)
"""The vote of a stage that asks for shapes."""


class Neighbours:
    """Answers for the other stages of a built trainer's pipeline."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        if not trainer.parallel_dims.pp_enabled:
            self.stages: tuple[int, ...] = (0,)
            return
        schedule = trainer.pp_schedule
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        self.stages = tuple(stage.stage_index for stage in stages)
        # torch 2.15 decides for all stages at once, and refuses a fake group; before, each voted.
        schedule._initialize_pipeline_distributed_state = _ask_for_shapes
        for stage in stages:
            stage._warmup_forward_vote = lambda *_, **__: _DYNAMIC
            stage._warmup_backward_result = lambda *_, **__: _DYNAMIC
            stage._recv_meta = lambda source, stage=stage: self._say(stage, source)
            stage._send_meta = lambda meta, target, stage=stage: self._hear(stage, meta, target)

    def _say(self, stage: Any, source: int) -> Any:
        if source < stage.stage_index:
            return _StageForwardMeta(forward_metas=(extract_tensor_meta(self._hidden()),))
        outputs = stage._stage_meta.outputs
        return _StageBackwardMeta(
            backward_metas=tuple(replace(output, requires_grad=False) for output in outputs)
        )

    def _hear(self, stage: Any, meta: Any, target: int) -> None:
        """Raises RuntimeError when a stage sends other hidden states than the next expects."""
        if target < stage.stage_index:
            return
        expected = (extract_tensor_meta(self._hidden()),)
        if meta.forward_metas != expected:
            raise RuntimeError(
                f"dry run: pipeline stage {stage.stage_index} passes on {meta.forward_metas}, "
                f"not one hidden state {expected}"
            )

    def _hidden(self) -> torch.Tensor:
        """The hidden state of a microbatch between two stages, as one of them holds it."""
        trainer = self._trainer
        config, dims = trainer.config, trainer.parallel_dims
        split = config.parallelism.enable_sequence_parallel
        sizes = sizes_of(config)
        sequence = 0 if SERIES.folded else 1  # dimension
        shape = [sizes.microbatch, sizes.length, trainer.model_config.dim]
        if SERIES.folded:
            shape[:2] = [sizes.microbatch * sizes.length]
        shape[sequence] //= dims.cp * (dims.tp if split else 1)
        local = torch.empty(shape, dtype=TORCH_DTYPE_MAP[config.training.mixed_precision_param])
        over_tp = Shard(sequence) if split else Replicate()
        if dims.spmd_backend == "partial_dtensor" and dims.tp_enabled:
            local = DTensor.from_local(local, dims.get_mesh("tp"), [over_tp], run_check=False)
        elif dims.spmd_backend == "full_dtensor":
            mesh = dims.get_activated_mesh(["dp_replicate", "dp_shard", "cp", "tp"])
            placed = {"cp": Shard(1), "tp": over_tp}
            placements = [placed.get(name, Shard(0)) for name in mesh.mesh_dim_names]
            local = DTensor.from_local(local, mesh, placements, run_check=False)
        return local.requires_grad_()


def _ask_for_shapes(stages: Sequence[Any], *_has_backward_and_transport: bool) -> None:
    """What a schedule does once before its first step, with no rank to agree with."""
    for stage in stages:
        stage._inference_mode = InferenceMode.DYNAMIC


MARK = "converge_would_compile"
"""Attribute of a module that torch.compile was asked for."""
_HOPPER = (9, 0)


def prepare(job: RankJob, meter: Meter) -> list[str]:
    """Adapt torch and torchtitan, before the config is built; what was adapted, in sentences."""
    said = []
    # With an index, a fake tensor's device would differ from that of plain CPU tensors.
    utils.get_local_device = lambda: torch.device("cpu")
    _keep_meshes_real()
    _leave_out_shape_propagation(meter)
    if "compile" in job.techniques:
        _mark_instead_of_compiling()
        said.append("compile: blocks are marked for compilation and run as they are")
    if "async_tp" in job.techniques:
        said.append("async_tp: its settings are checked, no operator is fused")
    if job.device == "cuda":
        float8.has_cuda_capability = lambda *wanted: wanted <= _HOPPER
        attention.FlexAttention.compiled_flex_attn = staticmethod(_flex_attention)
        said.append("a GPU of compute capability 9.0 (Hopper) is taken for granted")
        said.append("FlexAttention: a stand-in that allocates what its kernel does")
    for module in (attention, ring):
        module._compiled_create_block_mask = meter.uncounted(module._compiled_create_block_mask)
    return said


def replace_assets(config: Any) -> list[str]:
    """Take tokenizer, data set and what needs a network or a disk out of a built config."""
    config.tokenizer = Tokenizer.Config()
    vocabulary = config.model_spec.model.vocab_size
    config.dataloader = ShapedLoader.Config(vocab_size=vocabulary)
    config.checkpoint.enable = False
    config.metrics.enable_tensorboard = False
    config.metrics.enable_wandb = False
    config.debug.save_config_file = None
    said = [
        f"tokenizer and data: one document of {vocabulary:,} different tokens at most, no files"
    ]
    if config.validator.enable:
        config.validator.enable = False
        said.append("validation is left out")
    if CUDA_GRAPHS and not config.training.disable_cuda_graphs:
        config.training.disable_cuda_graphs = True
        said.append("CUDA graphs are left out")
    return said


class Tokenizer(BaseTokenizer):
    """Replaces the tokenizer; the loader needs none."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to say."""

    def __init__(self, config: Config, **_: Any) -> None:  # noqa: ARG002 - by its name
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 0


class ShapedLoader(BaseDataLoader):  # type: ignore[misc]  # of a module that the series names
    """Batches of the right shape and vocabulary, without end."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """What tokens there are."""

        vocab_size: int

    def __init__(self, config: Config, **more: Any) -> None:
        self._vocab_size = config.vocab_size
        sizes = loader_sizes(more)
        self._shape = (sizes.batch_size, sizes.seq_len)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        samples, length = self._shape
        while True:
            positions = torch.arange(length).expand(samples, -1)
            tokens = positions % self._vocab_size
            tokens, positions, labels = as_batch(tokens, positions, tokens.clone())
            yield {"input": tokens, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class _Flex(torch.autograd.Function):
    """The allocations of FlexAttention's kernels.

    An output and one float32 per query and head, kept for the backward pass; there one more such,
    and the gradients.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        logsumexp = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, _out, logsumexp = ctx.saved_tensors
        delta = torch.empty_like(logsumexp)
        found = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        del delta
        return found


def _flex_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, Any]:
    """Shapes (batch, heads, sequence, dimension) as ``flex_attention`` has them."""
    logsumexp = q.new_empty(q.shape[:-1], dtype=torch.float32)
    return _Flex.apply(q, k, v), types.SimpleNamespace(lse=logsumexp)


def _mark_instead_of_compiling() -> None:
    """Compiling for a GPU takes one, and would take minutes."""
    torch.compile = lambda model=None, **_: model or (lambda function: function)
    torch.nn.Module.compile = lambda module, **_: setattr(module, MARK, True)


def _keep_meshes_real() -> None:
    """Which rank is where must be known: meshes are tensors of numbers that are looked at."""
    full = DeviceMesh._get_mesh_tensor_from_full_mesh
    DeviceMesh.__init__ = _real(DeviceMesh.__init__)
    DeviceMesh._get_mesh_tensor_from_full_mesh = staticmethod(_real(full))
    ParallelDims.build_mesh = _real(ParallelDims.build_mesh)


def _real(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return run


def _leave_out_shape_propagation(meter: Meter) -> None:
    """DTensor finds shapes by running operators on whole fake tensors, in any real run too."""
    ShardingPropagator._propagate_tensor_meta_non_cached = meter.uncounted(
        ShardingPropagator._propagate_tensor_meta_non_cached
    )
