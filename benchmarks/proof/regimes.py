"""The precisions in which the benchmark is run: the same bugs and configurations in each of them.

A regime is applied to an existing matrix: every control and test set that does not name a precision
gets the regime's. The goals of a regime are in ``proof.goals``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from converge_harness.model import DATA_TYPE_KEYS, SetSpec, Technique
from converge_harness.plan.sizes import numerics_of

_STORED, _COMPUTED = DATA_TYPE_KEYS
_BFLOAT16 = "bfloat16"
_MEGATRON = "megatron"
"""Kind of its trainer, and prefix of its toolchains. Its bfloat16 is a technique: gradients and
optimizer states stay in float32.
"""
_NOT_1D = "control-is-1d-fsdp"
"""The rule that is waived for a control with a technique."""


class Regime(StrEnum):
    """A precision to train in."""

    FP32 = "fp32"
    MIXED = "mixed"
    """Parameters in float32, cast to bfloat16 by FSDP for computing."""
    BF16 = "bf16"
    """Parameters, gradients and optimizer state in bfloat16."""
    FLOAT8 = "float8"
    """Linear layers in Float8, tensorwise; the rest in float32."""

    @property
    def title(self) -> str:
        return _TITLES[self]


_TITLES: Mapping[Regime, str] = {
    Regime.FP32: "fp32",
    Regime.MIXED: "bf16 mixed",
    Regime.BF16: "bf16 parameters",
    Regime.FLOAT8: "Float8",
}
_SETTINGS: Mapping[Regime, Mapping[str, str]] = {
    Regime.FP32: {},
    Regime.MIXED: {_COMPUTED: _BFLOAT16},
    Regime.BF16: {_STORED: _BFLOAT16, _COMPUTED: _BFLOAT16},
    Regime.FLOAT8: {},
}


def regime_of(spec: SetSpec) -> Regime:
    """The regime of a set as written."""
    numerics = numerics_of(spec)
    if numerics.float8:
        return Regime.FLOAT8
    if numerics.stored == _BFLOAT16:
        return Regime.BF16
    return Regime.MIXED if numerics.computed == _BFLOAT16 else Regime.FP32


def home_of(test: SetSpec, control: SetSpec) -> Regime | None:
    """The only regime of a test set; None: it names no precision, and fits in all.

    It is the regime of its control: a set in low precision against a control in fp32 is run with
    fp32.
    """
    if regime_of(test) is regime_of(control) is Regime.FP32:
        return None
    return regime_of(control)


def why_not(test: SetSpec, control: SetSpec, regime: Regime) -> str:
    """Why a test set cannot run in a regime; empty if it can."""
    home = home_of(test, control)
    if home not in (None, regime):
        if home is Regime.FP32:
            return f"it compares {regime_of(test).title} with fp32, and is run with fp32"
        return f"it names a precision of its own, and is run with {home.title if home else ''}"
    if regime in (Regime.MIXED, Regime.FLOAT8) and test.toolchain.startswith(_MEGATRON):
        return "Megatron-Core is run in fp32 and in bf16"
    if regime is Regime.FLOAT8 and home is None:
        techniques = {*test.techniques, *control.techniques}
        if Technique.COMPILE in techniques and test.toolchain.startswith("torchtitan-0.3"):
            return "torchtitan 0.3 emulates Float8 on a CPU, and only without compile"
    return ""


def rewritten(data: Mapping[str, Any], regime: Regime, named: frozenset[str]) -> dict[str, Any]:
    """A copy of a parsed matrix for a regime.

    Args:
        data: the matrix.
        regime: the regime of the copy.
        named: names of controls, anchors and test sets with their own precision, which is kept.
    """
    result: dict[str, Any] = copy.deepcopy(dict(data))
    if regime is Regime.FP32:
        return result
    # The repeats in a matrix were chosen for its fp32 controls: a cast would lose an ulp of a
    # float32 weight. In low precision, use the defaults, as users would.
    result.pop("repeats", None)
    settings, techniques = _SETTINGS[regime], []
    if regime is Regime.FLOAT8:
        techniques = [Technique.FLOAT8.value]
    elif result.get("trainer", {}).get("kind") == _MEGATRON:
        settings, techniques = {}, [Technique.BF16.value]
    for name, table, is_control in _tables(result):
        if name in named:
            continue
        if settings:
            table["set"] = {**table.get("set", {}), **settings}
        if techniques:
            table["techniques"] = [*table.get("techniques", []), *techniques]
        if regime is Regime.FLOAT8 and is_control and _NOT_1D not in table.get("waive", []):
            table["waive"] = [*table.get("waive", []), _NOT_1D]
    return result


def _tables(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Name, table, and whether it is a control, of the anchor, every control and ``[[test]]``."""
    if "anchor" in data:
        yield data["anchor"].get("name", "anchor"), data["anchor"], False
    if "control" in data:
        yield data["control"].get("name", "control"), data["control"], True
    for name, table in data.get("controls", {}).items():
        yield table.get("name", name), table, True
    for table in data.get("test", []):
        yield table.get("name", ""), table, False
