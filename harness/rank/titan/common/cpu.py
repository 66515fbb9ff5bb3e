"""What torchtitan, of any release, assumes of a GPU and a CPU with gloo lacks.

One function per assumption; ``prepare_torch`` makes them all, and must come before torchtitan is
imported. What one release assumes beyond these is in its dialect's package.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Mapping
from typing import Any

import torch
import torch._utils
import torch.distributed as dist


@functools.cache
def prepare_torch() -> None:
    """Adapt torch, once per process; one thread, so that sums are the same everywhere."""
    torch.set_num_threads(1)
    stay_forkable()
    select_cpu()
    give_cpu_memory_statistics()
    ignore_device_ids_of_barriers()
    sum_gradients_without_premultiplication()


@functools.cache
def stay_forkable() -> None:
    """Let a process that has torch be forked, and the fork train.

    A torch with CUDA pretends to have eight devices once anything was computed on fake tensors, as
    DTensor does of every new operator. The next backward pass then starts a thread for each: such a
    process cannot be forked, and in a fork those threads meet in mending torch's thread pool, which
    sometimes aborts ("Invalid thread pool!"). So there are none, and every fork mends it at once.
    """
    torch._C._ensureCUDADeviceGuardSet = lambda: None
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def select_cpu() -> None:
    """Answer "cpu" when torchtitan asks for the accelerator; it takes "cuda" for no answer.

    ``torchtitan.tools.utils.get_device_info`` asks this function while it is imported; a GPU in
    the machine must not be taken either when a job is to run on the CPU.
    """
    torch._utils._get_available_device_type = lambda: "cpu"


def give_cpu_memory_statistics() -> None:
    """``torchtitan.components.metrics`` asks the device module for memory statistics.

    ``torch.cpu`` has no such functions. Its numbers go to the console line only; the probe
    measures memory itself.
    """
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    answers: dict[str, Any] = {
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=pages),
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda *_: None,
        "memory_stats": lambda *_: {},
    }
    for name, answer in answers.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, answer)
    # "cpu" as torch returns it is no device index, which barriers are given.
    torch.cpu.current_device = lambda: 0


def ignore_device_ids_of_barriers() -> None:
    """``set_pg_timeouts`` passes ``device_ids`` to its barrier; gloo refuses the argument."""
    barrier = dist.barrier

    def barrier_without_device_ids(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_ids", None)
        return barrier(*args, **kwargs)

    dist.barrier = barrier_without_device_ids


def sum_gradients_without_premultiplication() -> None:
    """Let FSDP sum gradients over gloo, which has no PREMUL_SUM.

    torchtitan sets FSDP's gradient divide factor to 1.0, which FSDP turns into that reduction.
    ``set_force_sum_reduction_for_comms`` is FSDP's own switch for
    back ends like it: a plain sum, then a division by the factor.
    """
    from torch.distributed.fsdp import FSDPModule

    set_factor = FSDPModule.set_gradient_divide_factor

    def set_gradient_divide_factor(self: Any, factor: float) -> None:
        self.set_force_sum_reduction_for_comms(True)
        set_factor(self, factor)

    FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor


def multiply_bf16_by_float32_kernels(settings: Mapping[str, Any]) -> None:
    """Multiply bf16 matrices by float32's kernels, where the config asks for bf16.

    Where oneDNN has no bf16 kernels (without AVX-512), torch multiplies bf16 matrices some 15 times
    slower than float32 ones, although it adds up in float32 either way. The products differ in the
    order of these additions: about one element in 20,000, by a unit in the last place. Graphs of
    ``torch.compile`` call torch's own kernels.

    Args:
        settings: the config, flat: dotted keys of torchtitan to values.
    """
    keys = ("training.dtype", "training.mixed_precision_param")
    if "bfloat16" in map(settings.get, keys) and not multiplies_bf16_fast():
        replace_products()


def multiplies_bf16_fast() -> bool:
    """Whether torch has kernels for bf16 on this CPU; without oneDNN it is not replaced either."""
    return not torch._C._has_mkldnn or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def replace_products() -> torch.library.Library:
    """Once per process. The kernels stay as long as what is returned, which the cache keeps.

    What is not all bf16 goes to the operator that writes into a given tensor: the same kernel, with
    the same errors.
    """
    library = torch.library.Library("aten", "IMPL")

    def replace(name: str) -> None:
        product = getattr(torch, name)

        def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            low = a.dtype is b.dtype is torch.bfloat16
            if low:
                a, b = a.float(), b.float()
            out = product(a, b, out=a.new_empty((*a.shape[:-1], b.shape[-1])))
            return out.bfloat16() if low else out

        library.impl(name, multiply, "CPU")

    add_product = torch.addmm

    def add(
        bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
    ) -> torch.Tensor:
        low = bias.dtype is a.dtype is b.dtype is torch.bfloat16
        if low:
            bias, a, b = bias.float(), a.float(), b.float()
        out = a.new_empty((a.shape[0], b.shape[1]))
        add_product(bias, a, b, beta=beta, alpha=alpha, out=out)
        return out.bfloat16() if low else out

    replace("mm")
    replace("bmm")
    library.impl("addmm", add, "CPU")
    return library
