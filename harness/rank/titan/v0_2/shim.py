"""Prepares torch and torchtitan so that a config runs, and runs correctly.

Everything here follows from the built config and the device, never from the environment, and
happens when a job starts: a warm process may be forked for any job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from converge_harness.rank.titan.common.counters import FusionCount, RotationCount
from converge_harness.rank.titan.v0_2 import fixes


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was done; counters in the real code paths, None where the config does not go there."""

    fixes_left_out: tuple[str, ...]
    """Fixes that the config calls for and that were not made."""
    rotation: RotationCount | None
    fusion: FusionCount | None
    float8_styles: Any
    """``float8.StyleCount``"""


class Repairs:
    """Makes the fixes that a config calls for, but some, and keeps account of them."""

    def __init__(self, unwanted: Collection[str]) -> None:
        self._unwanted = frozenset(unwanted)
        self._called_for: set[str] = set()
        self._made: set[str] = set()

    def make(self, name: str, repair: Callable[[], None]) -> None:
        """Call ``repair`` unless the fix of that name is to be left out."""
        self._called_for.add(name)
        if name not in self._unwanted:
            repair()
            self._made.add(name)

    @property
    def left_out(self) -> tuple[str, ...]:
        return tuple(sorted(self._called_for - self._made))


def prepare(
    config: Any, device: str, without_fixes: Collection[str], parallelize: Callable[..., Any]
) -> Prepared:
    """Apply what a JobConfig needs, once per process, before its trainer is built.

    ``parallelize`` is the parallelize function of the model's train spec.
    """
    repairs = Repairs(without_fixes)
    if config.checkpoint.initial_load_path and not config.checkpoint.load_only:
        repairs.make(fixes.INITIAL_LOAD, fixes.fall_back_to_initial_load)
    if config.compile.enable:
        _prepare_compile(repairs)
    rotation = _prepare_context_parallel(config, device, repairs)
    fusion = _prepare_async_tp(config, device, repairs, parallelize)
    float8_styles = _prepare_float8(config, device, repairs)
    return Prepared(repairs.left_out, rotation, fusion, float8_styles)


def _prepare_compile(repairs: Repairs) -> None:
    import torch._functorch.config
    import torch._inductor.config

    # Cached graphs hold the names of process groups of the run that filled the cache: a later run
    # dies with "Could not resolve the process group".
    torch._functorch.config.enable_autograd_cache = False
    # A pool of compile workers per rank costs more than it gives where ranks share few cores.
    torch._inductor.config.compile_threads = 1
    repairs.make(fixes.ACT_GRAD, fixes.keep_requires_grad)


def _prepare_context_parallel(config: Any, device: str, repairs: Repairs) -> RotationCount | None:
    if config.parallelism.context_parallel_degree == 1:
        return None
    from converge_harness.rank.titan.v0_2 import ring_attention

    if device == "cpu":
        ring_attention.register_cpu_kernel()
    method = config.parallelism.context_parallel_rotate_method
    repairs.make(fixes.CP_ROTATION, lambda: ring_attention.apply_rotation(method))
    return RotationCount(device)


def _prepare_float8(config: Any, device: str, repairs: Repairs) -> Any | None:
    from converge_harness.rank.titan.v0_2 import float8

    if not {float8.CONVERTER, float8.ALIAS} & set(config.model.converters):
        return None
    if device == "cpu":
        float8.lift_capability_gate()
        float8.gather_float8_as_bytes()
        if config.compile.enable:
            float8.use_256_bit_vectors()
    repairs.make(fixes.FLOAT8_TP, float8.register_alias)
    return float8.StyleCount()


def _prepare_async_tp(
    config: Any, device: str, repairs: Repairs, parallelize: Callable[..., Any]
) -> FusionCount | None:
    if not config.parallelism.enable_async_tensor_parallel:
        return None
    import torch._inductor.config

    from converge_harness.rank.titan.v0_2 import async_tp

    # The cache's key knows nothing of symmetric memory: a graph cached without it would be taken
    # for one with it, and the pass whose work is counted would not run at all.
    torch._inductor.config.fx_graph_cache = False
    if device == "cpu":
        async_tp.run_fused_operators_on_gloo()
    repairs.make(fixes.RS_SCATTER, async_tp.scatter_sequence_rows)
    repairs.make(fixes.SYMM_MEM, lambda: async_tp.enable_symmetric_memory(parallelize))
    return FusionCount(device)
