"""torchtitan's audit: its own techniques, and by which keys of its config they are named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType

from converge_harness.model import InForce, SetSpec, Technique
from converge_harness.trainers.config_audit import ConfigAudit, ImpliedSetting, bf16_missing

FLOAT8_CONVERTERS = "model.converters"
"""A list of names (torchtitan 0.2); one with ``float8`` in it converts the model."""
CHECKPOINTING = "activation_checkpoint"


@dataclass(frozen=True)
class TorchtitanAudit(ConfigAudit):
    """Also: Float8, compile and async TP that ran although nobody named them."""

    def not_named(self, spec: SetSpec, ran: InForce) -> Iterator[str]:
        named = self.named(spec)
        wants_float8 = named & {Technique.FLOAT8, Technique.FLOAT8_ROWWISE}
        if ran.float8.modules and not (wants_float8 or _converts_float8(spec)):
            yield f"Float8 is in force ({ran.float8.modules} modules) but not named"
        if ran.float8.tp_styles and Technique.FLOAT8_TP not in named:
            yield f"Float8 TP is in force ({ran.float8.tp_styles} styles) but not named"
        if ran.compile.regions and Technique.COMPILE not in named:
            yield f"compile is in force ({ran.compile.regions} regions) but not named"
        if ran.is_fused and Technique.ASYNC_TP not in named:
            nodes = sum(ran.fused_nodes.values())
            yield f"async TP is in force ({nodes} fused nodes) but not named"
        yield from super().not_named(spec, ran)


def _converts_float8(spec: SetSpec) -> bool:
    """Whether the train config itself lists a Float8 converter."""
    converters = spec.setting(FLOAT8_CONVERTERS)
    return isinstance(converters, list) and any("float8" in str(name) for name in converters)


def _float8_modules(ran: InForce) -> str:
    return "" if ran.float8.modules else "no Float8 module"


def _float8_recipe(recipe: str) -> Callable[[InForce], str]:
    def missing(ran: InForce) -> str:
        found = ran.float8.recipe
        return _float8_modules(ran) or ("" if found == recipe else f"the recipe is {found}")

    return missing


def _float8_tp(ran: InForce) -> str:
    return "" if ran.float8.tp_styles else "no Float8 TP style"


def _compile(ran: InForce) -> str:
    if not ran.compile.regions:
        return "no compiled region"
    return "" if ran.compile.graphs else "no graph was compiled"


def _async_tp(ran: InForce) -> str:
    """Any fused node counts: under Float8 only the reduce-scatters have a form that fuses."""
    return "" if ran.is_fused else "no fused node in any graph"


AUDIT = TorchtitanAudit(
    missing=MappingProxyType(
        {
            Technique.COMPILE: _compile,
            Technique.ASYNC_TP: _async_tp,
            Technique.FLOAT8: _float8_recipe("tensorwise"),
            Technique.FLOAT8_ROWWISE: _float8_recipe("rowwise"),
            Technique.FLOAT8_TP: _float8_tp,
            Technique.BF16: bf16_missing,
        }
    ),
    named_by=MappingProxyType(
        {
            Technique.COMPILE: (("compile.enable", True), ("training.compile", True)),
            Technique.ASYNC_TP: (
                ("parallelism.enable_async_tensor_parallel", True),
                ("compile.enable_async_tensor_parallel", True),
            ),
            Technique.BF16: (("training.dtype", "bfloat16"),),
        }
    ),
    deterministic="debug.deterministic",
    # torchtitan 0.3 has a class for each mode of activation checkpointing, and no key.
    implied=(
        ImpliedSetting(f"{CHECKPOINTING}.mode", "none", null=CHECKPOINTING),
        ImpliedSetting(
            f"{CHECKPOINTING}.mode",
            "selective",
            has=f"{CHECKPOINTING}.force_recompute_mm_shapes_by_fqns",
        ),
        ImpliedSetting(
            f"{CHECKPOINTING}.mode",
            "full",
            has=f"{CHECKPOINTING}.preserve_rng_state",
            lacks=f"{CHECKPOINTING}.memory_budget",
        ),
    ),
)
