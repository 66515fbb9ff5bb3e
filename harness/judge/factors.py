"""Naming a factor: which number of a run the ratio of two curves equals."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from harness.judge.curves import series
from harness.model import Evidence, Floats, Integers

FIRST_STEP_MATCH = 1e-2
"""A ratio equals a quantity when it does so within 1% at the first step, where nothing drifts …"""
LATER_MATCH = 3e-2
"""… and within 3% in the median over all steps."""

_DEGREES = {
    "dp_replicate": "the replicate degree",
    "dp_shard": "the shard degree",
    "tp": "the TP degree",
    "cp": "the CP degree",
    "pp": "the PP degree",
    "ep": "the EP degree",
}


class Quantity(NamedTuple):
    """A number of a run by which a bug may multiply or divide."""

    name: str
    values: Floats
    """One per step: most are constant, valid tokens are not."""

    def __str__(self) -> str:
        return f"{self.name} ({self.values[0]:g})"


def named_factor(ratio: Floats, steps: Integers, test: Evidence, control: Evidence) -> str:
    """In words, which quantities (or one over them) a ratio equals; empty when none does.

    ``ratio`` has one entry per step. Quantities that are the same in the control explain a
    difference to it less well, so they are named only when no other fits.
    """
    theirs = {quantity.name: quantity for quantity in _quantities(control, steps)}
    special: list[str] = []
    common: list[str] = []
    for quantity in _quantities(test, steps):
        for fits, words in (
            (_equal(ratio, quantity.values), str(quantity)),
            (_equal(ratio, 1 / quantity.values), f"1 / {quantity}"),
        ):
            if fits:
                other = theirs.get(quantity.name)
                shared = other is not None and _equal(quantity.values, other.values)
                (common if shared else special).append(words)
    return " and ".join(special or common)


def _quantities(evidence: Evidence, steps: Integers) -> list[Quantity]:
    """What the run is made of, without ones: a factor of one changes nothing."""
    found: list[Quantity] = []

    def add(name: str, value: object) -> None:
        if isinstance(value, int) and value > 1:
            found.append(Quantity(name, np.full(steps.size, float(value))))

    ran = evidence.in_force or {}
    degrees: dict[str, Any] = dict(ran.get("degrees") or {})
    for key, name in _DEGREES.items():
        add(name, degrees.get(key))
    dp = _product(degrees, "dp_replicate", "dp_shard")
    if dp not in (degrees.get("dp_replicate"), degrees.get("dp_shard")):
        add("the data-parallel degree", dp)
    loss_mesh = _product(degrees, "dp_replicate", "dp_shard", "cp")
    if loss_mesh not in (dp, degrees.get("cp")):
        add("the number of ranks that share the loss (dp x cp)", loss_mesh)
    if ran.get("world_size") not in (*degrees.values(), dp, loss_mesh):
        add("the world size", ran.get("world_size"))
    add("gradient accumulation steps", ran.get("gradient_accumulation_steps"))
    add("pipeline microbatches", ran.get("pipeline_microbatches"))

    tokens = series(evidence, "tokens")
    known = dict(zip(tokens.steps.tolist(), tokens.values.tolist(), strict=True))
    counts = np.array([known.get(step, np.nan) for step in steps.tolist()])
    if counts.size and np.all(counts > 1):
        found.append(Quantity("the valid tokens of the step", counts))
        if isinstance(dp, int) and dp > 1:
            found.append(Quantity("the valid tokens of a data-parallel rank", counts / dp))
    return found


def _product(degrees: dict[str, Any], *names: str) -> int | None:
    """Product of degrees; None when one is not known."""
    product = 1
    for name in names:
        degree = degrees.get(name)
        if not isinstance(degree, int):
            return None
        product *= degree
    return product


def _equal(ratio: Floats, values: Floats) -> bool:
    off = np.abs(ratio / values - 1)
    return bool(off[0] <= FIRST_STEP_MATCH and np.median(off) <= LATER_MATCH)
