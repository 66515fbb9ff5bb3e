"""What has to be done to torch and torchtitan before a config can run, and run right.

Everything here follows from the built config and the device, never from the environment, and
happens when a job starts: a warm process may be forked for any job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from harness.rank.fusion import FusionCount
from harness.rank.titan_0_2 import fixes


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters put into the real code paths, None where the config does not go there."""

    rotation: Any = None
    """``ring_attention.RotationCount``"""
    fusion: FusionCount | None = None
    """``harness.rank.fusion.FusionCount``"""
    float8_styles: Any = None
    """``float8.StyleCount``"""


def prepare(
    config: Any, device: str, without_fixes: Collection[str], parallelize: Callable[..., Any]
) -> Counts:
    """Apply what a JobConfig needs, once per process, before its trainer is built.

    ``parallelize`` is the parallelize function of the model's train spec.
    """
    on_cpu = device == "cpu"
    if config.compile.enable:
        _prepare_compile(without_fixes)
    return Counts(
        rotation=_prepare_context_parallel(config, without_fixes, on_cpu=on_cpu),
        fusion=_prepare_async_tp(config, device, without_fixes, parallelize),
        float8_styles=_prepare_float8(config, without_fixes, on_cpu=on_cpu),
    )


def _prepare_compile(without_fixes: Collection[str]) -> None:
    import torch._functorch.config
    import torch._inductor.config

    # Cached graphs hold the names of process groups of the run that filled the cache: a later run
    # dies with "Could not resolve the process group".
    torch._functorch.config.enable_autograd_cache = False
    # A pool of compile workers per rank costs more than it gives where ranks share few cores.
    torch._inductor.config.compile_threads = 1
    if fixes.ACT_GRAD not in without_fixes:
        from harness.rank.titan_0_2 import act_grad

        act_grad.keep_requires_grad()


def _prepare_context_parallel(
    config: Any, without_fixes: Collection[str], *, on_cpu: bool
) -> Any | None:
    if config.parallelism.context_parallel_degree == 1:
        return None
    from harness.rank.titan_0_2 import ring_attention

    if on_cpu:
        ring_attention.register_cpu_kernel()
    if fixes.CP_ROTATION not in without_fixes:
        ring_attention.apply_rotation(config.parallelism.context_parallel_rotate_method)
    return ring_attention.RotationCount()


def _prepare_float8(config: Any, without_fixes: Collection[str], *, on_cpu: bool) -> Any | None:
    from harness.rank.titan_0_2 import float8

    if not {float8.CONVERTER, float8.ALIAS} & set(config.model.converters):
        return None
    if on_cpu:
        float8.lift_capability_gate()
        float8.gather_float8_as_bytes()
        if config.compile.enable:
            float8.use_256_bit_vectors()
    if fixes.FLOAT8_TP not in without_fixes:
        float8.register_alias()
    return float8.StyleCount()


def _prepare_async_tp(
    config: Any, device: str, without_fixes: Collection[str], parallelize: Callable[..., Any]
) -> FusionCount | None:
    if not config.parallelism.enable_async_tensor_parallel:
        return None
    import torch._inductor.config

    from harness.rank.titan_0_2 import async_tp

    # The cache's key knows nothing of symmetric memory: a graph cached without it would be taken
    # for one with it, and the pass whose work is counted would not run at all.
    torch._inductor.config.fx_graph_cache = False
    if device == "cpu":
        async_tp.run_fused_operators_on_gloo()
    if fixes.RS_SCATTER not in without_fixes:
        async_tp.scatter_sequence_rows()
    if fixes.SYMM_MEM not in without_fixes:
        async_tp.enable_symmetric_memory(parallelize)
    return FusionCount(device)
