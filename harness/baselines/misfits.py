"""What a golden and the control that a file describes differ in.

Versions, rank code and SPMD backend are free: what they change is what a golden is there to show.
All else must mean the same, or the file says what may differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from harness.calibrations import what_changed
from harness.model import Across

FREE = ("versions", "rank_code", "software", "spmd_backend")
"""Facts that a golden may always differ in. Which SPMD backend is the default follows the torch."""
_DTYPE = re.compile(r"^train_config\.training\.(dtype|mixed_precision_\w+)\b")
_PRECISE = ("bf16", "float8", "float8_rowwise", "float8_tp")
"""Techniques that choose a data type."""


class Misfits(NamedTuple):
    """Clauses on what differs."""

    refused: tuple[str, ...]
    """What makes it another training, or is not named in ``baseline_across``."""
    named: tuple[str, ...]
    """What is, and so may differ."""
    across: frozenset[Across]
    """Which words of ``baseline_across`` would excuse all that is refused; empty: none would."""


def misfits(
    then: Mapping[str, Any], now: Mapping[str, Any], across: tuple[Across, ...] = ()
) -> Misfits:
    """Compare the facts of a golden with those of a control (``harness.plan.identity_facts``)."""
    found = list(_differences(_meaning(then), _meaning(now)))
    refused = [each for each in found if each.kind is None or each.kind not in across]
    kinds = [each.kind for each in refused]
    return Misfits(
        tuple(each.clause for each in refused),
        tuple(each.clause for each in found if each not in refused),
        frozenset() if None in kinds else frozenset(kind for kind in kinds if kind),
    )


class _Difference(NamedTuple):
    clause: str
    kind: Across | None


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[_Difference]:
    for key in dict.fromkeys((*now, *then)):
        before = {key: then[key]} if key in then else {}
        after = {key: now[key]} if key in now else {}
        for clause in what_changed(before, after):
            yield _Difference(clause, _kind(key, then.get(key), now.get(key)))


def _kind(key: str, before: Any, after: Any) -> Across | None:
    """Which word of ``baseline_across`` is about a fact."""
    if key == "hardware":
        return Across.HARDWARE
    if _DTYPE.match(key):
        return Across.DTYPE
    if key == "techniques" and {*(before or ())} ^ {*(after or ())} <= {*_PRECISE}:
        return Across.DTYPE
    return None


def _meaning(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the training, by dotted key; ``set`` and train config say one thing."""
    config = facts["train_config"]
    settings = {**dict(_flat(config["settings"])), **facts["overrides"]}
    told = {f"train_config.{key}": value for key, value in sorted(settings.items())}
    shape = {f"model.{key}": value for key, value in config["model"].items()}
    skipped = {*FREE, "train_config", "overrides"}
    rest = {key: value for key, value in facts.items() if key not in skipped}
    return {"module": config["module"], "config": config["config"], **shape, **told, **rest}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
