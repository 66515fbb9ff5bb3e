"""The degrees and settings in force at a step: in a resumed run, those of the pass that owns it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np

from converge_harness.model import (
    LOCAL_BATCH,
    ConfigKeys,
    Evidence,
    Flags,
    InForce,
    Integers,
    Parallelism,
    Pass,
    SetSpec,
    ranks,
)


def owner(evidence: Evidence, step: int) -> Pass | None:
    """The pass whose training of a step is part of the final state: the last that trained it.

    Of step 0, the last that started from the seed checkpoint. None when no pass has the step.
    """
    found = [
        each
        for each in evidence.passes
        if step in each.steps or (step == 0 and not each.loaded_step)
    ]
    return found[-1] if found else None


def ran_at(evidence: Evidence, step: int) -> InForce:
    """What was in force at a step; nothing known when the run left no record."""
    each = owner(evidence, step) if evidence.passes else None
    return (each.in_force if each else evidence.in_force) or InForce()


def in_force_over(evidence: Evidence, steps: Integers) -> Iterator[tuple[InForce, Flags]]:
    """What was in force in each pass that owns some of the steps, and which; else the run's."""
    owners = np.full(steps.size, -1)
    for index, each in enumerate(evidence.passes):
        owners[np.isin(steps, each.steps)] = index
    for index in np.unique(owners).tolist():
        ran = evidence.passes[index].in_force if index >= 0 else evidence.in_force
        yield ran or InForce(), owners == index


def max_norm(ran: InForce | None, keys: ConfigKeys) -> float | None:
    """The norm to which gradients are clipped by the config in force; None if to none."""
    found = ran.config.get(keys.max_norm) if ran else None
    return float(found) if isinstance(found, int | float) and found > 0 else None


def degrees_of(each: Pass) -> str:
    """The degrees that were in force, for people to read; else the number of ranks."""
    degrees = parallelism_of(each.in_force)
    return str(degrees) if degrees else ranks(each.world_size)


def parallelism_of(ran: InForce | None) -> Parallelism | None:
    """The degrees in force; None when none is known."""
    names = {each.name for each in fields(Parallelism)}
    degrees = ran.degrees if ran else {}
    found = {key: n for key, n in degrees.items() if key in names and n is not None}
    return Parallelism(**found) if found else None


def spec_of(spec: SetSpec, each: Pass) -> SetSpec:
    """What a set names for one of its passes: the degrees of its segment, or of its nodes."""
    if spec.segments:
        if each.segment is None or each.segment >= len(spec.segments):
            return spec  # the check segments-as-scheduled says so
        segment = spec.segments[each.segment]
        return replace(
            spec,
            parallelism=segment.parallelism,
            pipeline_schedule=segment.pipeline_schedule,
            cp_rotation=spec.cp_rotation if segment.parallelism.cp > 1 else None,
            overrides={**spec.overrides, LOCAL_BATCH: segment.local_batch_size},
        )
    recovery = spec.recovery
    if recovery is not None and recovery.nodes[0] != recovery.nodes[1]:
        # Nodes come and go (the check faults-struck asks that), and degrees follow from them.
        named = spec.parallelism
        return replace(spec, parallelism=named.on_nodes(each.world_size, named.world_size))
    return spec
