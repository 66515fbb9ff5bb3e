"""Training on a CPU, by any framework: processes that can be forked, and products of bf16."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import torch

from converge_harness.rank.settings import DATA_TYPE_KEYS


@functools.cache
def stay_forkable() -> None:
    """Let a process that has torch be forked, and the fork train.

    A torch with CUDA pretends to have eight devices once anything was computed on fake tensors, as
    DTensor does of every new operator. The next backward pass then starts a thread for each: such a
    process cannot be forked, and in a fork those threads meet as they repair torch's thread pool,
    which sometimes aborts ("Invalid thread pool!"). So there are none, and every fork repairs it at
    once.
    """
    torch._C._ensureCUDADeviceGuardSet = lambda: None
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def multiply_bf16_by_float32_kernels(settings: Mapping[str, Any]) -> None:
    """Multiply bf16 matrices by float32's kernels, where the config asks for bf16.

    Where oneDNN has no bf16 kernels (without AVX-512), torch multiplies bf16 matrices some 15 times
    slower than float32 ones, although it adds up in float32 either way. The products differ in the
    order of these additions: about one element in 20,000, by a unit in the last place. Graphs of
    ``torch.compile`` call torch's own kernels.

    Args:
        settings: the trainer's config, flat: dotted keys to values.
    """
    if "bfloat16" in map(settings.get, DATA_TYPE_KEYS) and not multiplies_bf16_fast():
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
