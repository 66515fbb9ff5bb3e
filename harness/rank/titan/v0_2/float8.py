"""Float8 of torchtitan 0.2.2 on the CPU, and its Float8 all-gathers of tensor parallelism."""

from __future__ import annotations

import functools
from typing import Any

import torch

CONVERTER = "quantize.linear.float8"
"""The only name under which torchtitan 0.2.2 registers its Float8 converter."""
ALIAS = "float8"
"""The name that its llama3 looks for when it chooses between plain and Float8 TP styles."""

_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


def lift_capability_gate() -> None:
    """Let the converter through: it asks for an SM89 GPU, or for emulation without compile.

    The gate is about speed. torch has ``_scaled_mm`` on the CPU, tensorwise and rowwise, so the
    real scaled matmul runs and nothing is emulated.
    """
    import torchtitan.components.quantization.float8 as quantization

    quantization.has_cuda_capability = lambda *_: True


def use_256_bit_vectors() -> None:
    """Keep Inductor's C++ code off AVX-512 for Float8.

    Its default on such machines gave NaN gradients in the first step of a compiled Float8 model
    (measured on torch 2.13). Also makes the code, and so the numbers, the same on more machines.
    """
    import torch._inductor.config

    torch._inductor.config.cpp.simdlen = 256


_functional_collectives = torch.library.Library("_c10d_functional", "IMPL")
"""Registrations last as long as this object."""


@functools.cache
def gather_float8_as_bytes() -> None:
    """Send Float8 all-gathers as bytes, for gloo has no Float8 element type.

    Only the kernel on the CPU changes: graphs keep the same collective, so that compile and
    async TP see what they would see on a GPU.
    """
    coalesced = torch.ops._c10d_functional.all_gather_into_tensor_coalesced

    def all_gather(tensor: Any, group_size: int, group_name: str) -> Any:
        sent = tensor.view(torch.uint8) if tensor.dtype in _FLOAT8 else tensor
        (gathered,) = coalesced([sent], group_size, group_name)
        return gathered.view(tensor.dtype)

    _functional_collectives.impl("all_gather_into_tensor", all_gather, "CPU")


def register_alias() -> None:
    """Fix ``float8-tp``: register the converter also as ``float8``.

    ``parallelize_llama`` takes the Float8 TP styles only if ``"float8"`` is among the configured
    converters, a name that nothing registers (torchtitan 0.2.2); naming it is a KeyError.
    """
    from torchtitan.components.quantization.float8 import Float8LinearConverter
    from torchtitan.protocols import model_converter

    model_converter._registry_model_converter_cls[ALIAS] = Float8LinearConverter


class StyleCount:
    """Counts the modules to which torchao's Float8 TP styles were really applied."""

    def __init__(self) -> None:
        from torchao.float8 import float8_tensor_parallel as styles

        self.applied = 0
        for style in (
            styles.Float8ColwiseParallel,
            styles.Float8RowwiseParallel,
            styles.PrepareFloat8ModuleInput,
        ):
            style._apply = self._counted(style._apply)

    def _counted(self, apply: Any) -> Any:
        def apply_and_count(style: Any, module: Any, device_mesh: Any) -> Any:
            self.applied += 1
            return apply(style, module, device_mesh)

        return apply_and_count
