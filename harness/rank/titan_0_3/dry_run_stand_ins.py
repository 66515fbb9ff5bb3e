"""What a dry run of torchtitan 0.3 puts in the place of what is not on this machine."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.quantization import float8
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.models.common import attention
from torchtitan.tools import utils

from harness.rank.dry_run_meter import Meter
from harness.run_folder.job import Job

MARK = "converge_would_compile"
"""Attribute of a module that torch.compile was asked for."""
_HOPPER = (9, 0)


def prepare(job: Job, meter: Meter) -> list[str]:
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
    config.dataloader = Loader.Config(dataset="stand-in", vocab_size=vocabulary)
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
    if not config.training.disable_cuda_graphs:
        config.training.disable_cuda_graphs = True
        said.append("CUDA graphs are left out")
    return said


class Tokenizer(BaseTokenizer):
    """Stands where a tokenizer is wanted; the loader needs none."""

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


class Loader(BaseDataLoader):
    """Batches of the right shape and vocabulary, without end."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """What tokens there are."""

        vocab_size: int

    def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **_: Any) -> None:
        self._vocab_size = config.vocab_size
        self._shape = (local_batch_size, seq_len)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        samples, length = self._shape
        while True:
            positions = torch.arange(length).expand(samples, -1)
            tokens = positions % self._vocab_size
            yield {"input": tokens, "positions": positions}, tokens.clone()

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
