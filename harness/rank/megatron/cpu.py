"""What Megatron-Core assumes of a GPU, and a CPU with gloo lacks.

It asks ``torch.cuda`` for devices, streams and random states without asking whether there is a GPU.
``prepare_torch`` answers with the CPU and must come before Megatron-Core is imported;
``prepare_megatron`` replaces functions of its own afterwards. On a GPU none of this is used.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from converge_harness.rank.cpu import stay_forkable

CPU = torch.device("cpu")
_FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")
_TYPED = ("FloatTensor", "LongTensor", "IntTensor", "HalfTensor", "BFloat16Tensor")


@functools.cache
def prepare_torch() -> None:
    """Adapt torch, once per process; one thread, so that sums are the same everywhere."""
    torch.set_num_threads(1)
    stay_forkable()
    # Its jit_fuser is torch.compile, which would compile small functions on every rank.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    _answer_for_cuda()
    _name_types_as_on_a_gpu()
    _make_on_the_cpu()


class _Stream:
    """The one order in which a CPU computes; it is also any event in it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        """What was to come first has been computed."""

    wait_stream = wait_event = synchronize = record = wait

    def query(self) -> bool:
        return True

    def record_event(self, *_: Any) -> _Stream:
        return self


def _answer_for_cuda() -> None:
    stream = _Stream()
    answers: dict[str, Any] = {
        "current_device": lambda: CPU,
        "set_device": lambda _: None,
        "device_count": lambda: 0,
        "synchronize": lambda *_: None,
        "current_stream": lambda *_: stream,
        "Stream": _Stream,
        "Event": _Stream,
        "empty_cache": lambda: None,
        "stream": lambda _: contextlib.nullcontext(),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        **{name: getattr(torch, name) for name in _TYPED},
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def _make_on_the_cpu() -> None:
    """``device="cuda"`` of a new tensor means the CPU.

    A ``TorchFunctionMode`` would reach all of torch, but not what a backward pass computes again.
    """
    for name in _FACTORIES:
        setattr(torch, name, _on_the_cpu(getattr(torch, name)))


def _on_the_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        return make(*args, **kwargs)

    return made


def _name_types_as_on_a_gpu() -> None:
    """``clip_grads`` and the optimizers compare names of tensor types with ``torch.cuda.…``."""
    name_of = torch.Tensor.type

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = name_of(self, *args, **kwargs)
        if not isinstance(answer, str):
            return answer
        return f"torch.cuda.{answer.rpartition('.')[2]}"

    torch.Tensor.type = named  # type: ignore[assignment, method-assign]


@functools.cache
def prepare_megatron() -> None:
    """Replace functions of Megatron-Core that need a GPU or its libraries, once per process."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if not moe_utils.HAVE_TE:
        moe_utils.te_general_gemm = None  # routers ask whether it is None, and it is not defined
    token_dispatcher.maybe_move_tensor_to_cpu = _counts
    _shard_on_the_cpu()
    _finish_gathers_at_once()
    _exchange_uneven_parts()
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    WrappedTorchNorm.__new__ = _norm


class _Mesh(DeviceMesh):
    """Megatron-FSDP's mesh of ranks, of whatever it calls their devices: ``"cuda"``."""

    @staticmethod
    def from_group(*args: Any, **kwargs: Any) -> DeviceMesh:
        return DeviceMesh.from_group(*args, **{**kwargs, "device_type": CPU.type})


def _shard_on_the_cpu() -> None:
    """Have Megatron-FSDP make its buffers and its mesh here."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter

    # On main the name without a version is a function that chooses one.
    wrapper = getattr(adapter, "FullyShardedDataParallelV1", adapter.FullyShardedDataParallel)
    make = wrapper.__init__

    def made(*args: Any, **kwargs: Any) -> None:
        given = inspect.signature(make).bind(*args, **kwargs)
        given.arguments["device"] = CPU
        answer = torch.cuda.current_device
        torch.cuda.current_device = lambda: 0  # of which it makes the name of a device
        try:
            make(*given.args, **given.kwargs)
        finally:
            torch.cuda.current_device = answer

    wrapper.__init__ = made
    adapter.DeviceMesh = _Mesh
    if not isinstance(getattr(adapter, "TELinear", object), type):
        adapter.TELinear = ()  # 0.16 asks of modules whether they are one, and it is a mock


def _finish_gathers_at_once() -> None:
    """Megatron-FSDP frees weights that are being gathered: a GPU's streams keep the order.

    Gloo's threads do not, and write into what is no longer there.
    """
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as buffers

    together, gather = buffers._coalescing_manager, buffers.AllGatherPipeline.async_bucket_gather

    def gathered(pipeline: Any, bucket_id: int, bwd: Any) -> None:
        gather(pipeline, bucket_id, bwd)
        key = pipeline.get_bucket_key(bucket_id, bwd)
        work, _ = pipeline.param_gather_event_map.get(key, (None, None))
        # Of several together none has begun: the manager waits for them.
        if work is not None and not isinstance(work, dist.distributed_c10d._IllegalWork):
            work.wait()

    buffers._coalescing_manager = lambda group, **_: together(group)
    buffers.AllGatherPipeline.async_bucket_gather = gathered


def _counts(tensor: Any, *, as_numpy: bool = False, **_: Any) -> Any:
    """How many tokens go where, as the host needs it: torch's all-to-all takes no tensor."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _exchange_uneven_parts() -> None:
    """Tensor-parallel ranks get other numbers of tokens for their experts, which gloo refuses."""
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gathered(part: torch.Tensor, group: Any, sizes: Any = None, *more: Any) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return gather(part, group, sizes, *more)
        longest = part.new_zeros(max(sizes), *part.shape[1:])
        longest[: len(part)] = part
        parts = [torch.empty_like(longest) for _ in sizes]
        dist.all_gather(parts, longest, group=group)
        return torch.cat([each[:size] for each, size in zip(parts, sizes, strict=True)])

    def scattered(whole: torch.Tensor, group: Any, sizes: Any = None, *more: Any) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return scatter(whole, group, sizes, *more)
        summed = whole.clone()
        dist.all_reduce(summed, group=group)
        return summed.split(sizes)[group.rank()].clone()

    mappings._gather_along_first_dim = gathered
    mappings._reduce_scatter_along_first_dim = scattered


def _norm(_cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
    """A norm of torch, also under sequence parallelism, which Megatron-Core refuses.

    It lacks nothing for it but the mark by which ``finalize_model_grads`` finds the weights whose
    gradients have to be summed over tensor-parallel ranks. Those of Apex and Transformer Engine,
    which need a GPU, set that mark.
    """
    kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
    norm = kinds[config.normalization](hidden_size, eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm
