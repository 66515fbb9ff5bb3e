"""torchtitan 0.2.2 on a CPU with gloo: what it expects of a device and gloo does not give."""

from __future__ import annotations

import functools
import os
import types
from typing import Any

import torch


@functools.cache
def announce_cpu() -> None:
    """Make ``torchtitan.tools.utils.device_type`` come out as ``cpu``.

    torchtitan asks ``torch._utils._get_available_device_type``, which knows accelerators only, and
    falls back to ``cuda``. It asks once, when it is first imported: this must run before that.
    The methods of a device module that ``torch.cpu`` lacks answer with what is true of a host.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda *_: "cpu"
    torch.cpu.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=memory)
    torch.cpu.memory_stats = lambda *_: {}
    torch.cpu.reset_peak_memory_stats = lambda *_: None
    torch.cpu.empty_cache = lambda: None
    torch.cpu.current_device = lambda: 0  # an index, as torchtitan passes it on to barrier()


@functools.cache
def adapt_gloo() -> None:
    """Drop what gloo refuses: ``device_ids`` of a barrier, and a pre-multiplied sum.

    torchtitan sets every gradient divide factor to 1, which FSDP2 turns into the reduction
    ``PREMUL_SUM`` that only NCCL has; a plain sum is the same arithmetic for that factor.
    """
    from torch.distributed.fsdp import FSDPModule

    barrier = torch.distributed.barrier
    set_divide_factor = FSDPModule.set_gradient_divide_factor

    def barrier_without_devices(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
        del device_ids
        return barrier(*args, **kwargs)

    def set_factor_and_plain_sum(module: Any, factor: float) -> None:
        module.set_force_sum_reduction_for_comms(True)
        set_divide_factor(module, factor)

    torch.distributed.barrier = barrier_without_devices
    FSDPModule.set_gradient_divide_factor = set_factor_and_plain_sum
