"""Makes a report's short tables from per-tensor evidence; pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from converge_harness.judge import Comparisons, TensorComparison, TensorDifferences
from converge_harness.model import Disagreement, ReplicaSample
from converge_harness.report.sanitize import plain
from converge_harness.wording import counted, plural

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
SHOWN = 10
"""Rows of a table of tensors: more add length and no insight."""


@dataclass(frozen=True, slots=True)
class TensorRow:
    """Relative differences of one parameter to the control's, each with its limit."""

    name: str
    gradient: float | None
    gradient_limit: float | None
    update: float | None
    update_limit: float | None


@dataclass(frozen=True, slots=True)
class GroupRow:
    """Gradient norm of all parameters of one kind, over the layers."""

    name: str
    """Canonical names with their numbers folded: ``layers.*.attention.wq.weight``."""
    parameters: int
    norm: float
    control: float

    @property
    def ratio(self) -> float | None:
        """Test over control; None where the control's is zero."""
        return self.norm / self.control if self.control else None


@dataclass(frozen=True, slots=True)
class TensorTable:
    """Gradients and updates of one step, largest excess (or nearest to the limit) first."""

    step: int
    parameters: int
    """How many were compared."""
    outside: int
    """How many of them have a gradient or an update outside its limit."""
    rows: tuple[TensorRow, ...]
    """The first few."""
    gradient_origin: str
    """Where the limits come from; empty when there are none."""
    update_origin: str
    groups: tuple[GroupRow, ...] = ()
    """In the order of their names."""

    @property
    def summary(self) -> str:
        """One sentence above the table."""
        outside = f"{self.outside} of {counted(self.parameters, 'parameter')}"
        verb = "has" if self.outside == 1 else "have"
        found = f"{outside} {verb} a gradient or an update outside its limit"
        shown = f"; the worst {SHOWN}:" if self.parameters > SHOWN else ":"
        return f"Step {self.step}: {found}{shown}"


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """A tensor whose copies differ."""

    step: int
    """The first at which they were seen to differ."""
    kind: str
    tensor: str
    mesh_dims: str
    groups: str
    """Ranks that agree with each other, as ``0 2 | 1 3``."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What was compared between ranks that hold the same shard."""

    steps: tuple[int, ...]
    compared: Mapping[str, int]
    """Kind of tensor to shards with more than one copy, at the step that compared most."""
    disagreements: int
    """Tensors that disagreed, at the step with most of them."""
    rows: tuple[ReplicaRow, ...] = ()
    """The first few of them."""

    @property
    def summary(self) -> str:
        """One sentence on what was compared, and what differs."""
        steps = ", ".join(map(str, self.steps))
        when = f"at {plural(len(self.steps), 'step')} {steps}"
        if not any(self.compared.values()):
            return f"No shard has a copy on another rank ({when})."
        kinds = ", ".join(f"{shards} {kind}" for kind, shards in self.compared.items())
        found = "all copies agree"
        if self.disagreements:
            found = f"the copies of {counted(self.disagreements, 'tensor')} differ"
        return f"Shards that several ranks hold, compared bit for bit {when} ({kinds}): {found}."


def first_step_tensors(compared: Comparisons) -> TensorTable | None:
    """Gradients and updates at the first step that both sampled; None when there is none."""
    found = next((each for each in compared if each.gradients), None)
    if found is None:
        return None
    kinds = [kind for kind in (found.gradients, found.updates) if kind]
    outside = np.any([kind.is_outside for kind in kinds], axis=0)
    order = np.argsort(-np.max([kind.excess for kind in kinds], axis=0), kind="stable")
    return TensorTable(
        step=found.step,
        parameters=len(found.names),
        outside=int(np.count_nonzero(outside)),
        rows=tuple(
            TensorRow(
                plain(found.names[index]),
                *_cells(found.gradients, index),
                *_cells(found.updates, index),
            )
            for index in order[:SHOWN].tolist()
        ),
        gradient_origin=plain(found.gradients.origin) if found.gradients else "",
        update_origin=plain(found.updates.origin) if found.updates else "",
        groups=_groups(found),
    )


def _groups(found: TensorComparison) -> tuple[GroupRow, ...]:
    """Gradient norms by kind of parameter: the root of the sum of their squares."""
    ours, theirs = found.test.gradients, found.control.gradients
    if ours is None or theirs is None:
        return ()
    folded = [_NUMBER.sub("*", name) for name in found.names]
    members: dict[str, list[int]] = {}
    for index, name in enumerate(folded):
        members.setdefault(name, []).append(index)
    return tuple(
        GroupRow(
            plain(name),
            len(indices),
            float(np.linalg.norm(ours.norm[indices])),
            float(np.linalg.norm(theirs.norm[indices])),
        )
        for name, indices in sorted(members.items())
    )


def replica_view(samples: tuple[ReplicaSample, ...]) -> ReplicaView | None:
    """What was compared between replicas; None when nothing was."""
    if not samples:
        return None
    compared: Counter[str] = Counter()
    for sample in samples:
        compared |= Counter(sample.compared)
    first: dict[tuple[str, str], tuple[int, Disagreement]] = {}
    for sample in samples:
        for each in sample.disagreements:
            first.setdefault((each.kind, each.tensor), (sample.step, each))
    return ReplicaView(
        steps=tuple(sample.step for sample in samples),
        compared={plain(kind): shards for kind, shards in compared.items()},
        disagreements=max(sample.count for sample in samples),
        rows=tuple(
            ReplicaRow(
                step=step,
                kind=plain(each.kind),
                tensor=plain(each.tensor),
                mesh_dims=plain(", ".join(each.mesh_dims)),
                groups=" | ".join(" ".join(map(str, group)) for group in each.groups),
            )
            for step, each in list(first.values())[:SHOWN]
        ),
    )


def _cells(kind: TensorDifferences | None, index: int) -> tuple[float | None, float | None]:
    return (float(kind.difference[index]), float(kind.limit[index])) if kind else (None, None)
