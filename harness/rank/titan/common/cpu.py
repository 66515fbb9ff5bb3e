"""What torchtitan, of any release, assumes of a GPU and a CPU with gloo lacks.

One function per assumption; ``prepare_torch`` makes them all, and must come before torchtitan is
imported. What one release assumes beyond these is in its dialect's package.
"""

from __future__ import annotations

import functools
import os
import types
from typing import Any

import torch
import torch._utils
import torch.distributed as dist

from converge_harness.rank.cpu import stay_forkable


@functools.cache
def prepare_torch() -> None:
    """Adapt torch, once per process; one thread, so that sums are the same everywhere."""
    torch.set_num_threads(1)
    stay_forkable()
    select_cpu()
    give_cpu_memory_statistics()
    ignore_device_ids_of_barriers()
    sum_gradients_without_premultiplication()


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
