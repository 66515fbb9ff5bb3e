"""Further runs against which a set in low precision is judged.

Rounding alone makes a bfloat16 gradient differ from the float32 one by about a percent, and two
correct bfloat16 implementations differ nearly as much from each other. The size of the error shows
whether it is rounding: a correct implementation in low precision is about as far from float32 as
another correct one. So there is a **reference**, the control's configuration in float32, and, if a
test set has lower precision than its control, a **matched control**, the control's configuration in
the precision of the test set. Both train one step only, because everything that is compared comes
before the first update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from converge_harness.model import (
    DATA_TYPE_KEYS,
    TRAINING_STEPS,
    Ask,
    Experiment,
    Precision,
    Role,
    SetSpec,
    Technique,
)
from converge_harness.plan.sizes import (
    FLOAT8_RECIPES,
    Numerics,
    numerics_of,
    precision_of,
)

FLOAT32 = "float32"
FLOAT32_NUMERICS = Numerics((), FLOAT32, FLOAT32)
_COARSE = FLOAT8_RECIPES | {Technique.FLOAT8_TP, Technique.BF16}


class Measure(NamedTuple):
    """Names of the runs by which a set's errors are judged."""

    matched: str
    reference: str


class References(NamedTuple):
    """Runs that are added to a plan, and what for."""

    extra: tuple[tuple[SetSpec, Role], ...]
    """Short runs, references first."""
    measures: Mapping[str, Measure]
    """By name of the judged set: a test set, or a control that has an anchor."""

    frozen_sets: frozenset[str]
    """Names of all runs with frozen steps, also if the experiment is only a selection (``--only``):
    a control must be the same job whichever of its test sets are selected.
    """


def references_of(experiment: Experiment) -> References:
    """References and matched controls of an experiment or of a selection from one."""
    of_the_whole = experiment.frozen_sets or frozenset()
    if not experiment.reference:
        return References((), {}, of_the_whole)
    controls = {spec.name: spec for spec in experiment.controls}
    extra: dict[str, tuple[SetSpec, Role]] = {}
    measures: dict[str, Measure] = {}
    for test in experiment.tests:
        control = controls[test.control or ""]
        if not (_measurable(control) and _measurable(test)):
            continue
        if _both_float32(test, control) and not test.own_random_numbers:
            continue
        if test.ask is Ask.NO_WORSE:  # its gradients are not compared
            continue
        like = control.name
        if precision_of(test) is not Precision.FP32 and _differ(test, control):
            made = _with_numerics_of(test, control)
            like = made.name
            extra.setdefault(like, (made, Role.MATCHED))
        measures[test.name] = Measure(like, _reference_of(control, extra))
    anchor, first = experiment.anchor, experiment.controls[0]
    comparable = anchor is not None and _measurable(first) and not _differ(first, anchor)
    if anchor is not None and comparable and not _both_float32(first, anchor):
        measures[first.name] = Measure(anchor.name, _reference_of(first, extra))
    for name in sorted(experiment.referenced):
        _reference_of(controls[name], extra)
        of_the_whole |= {name, *extra}
    short = sorted(extra.values(), key=lambda each: each[1] is not Role.REFERENCE)
    compared = {part for judged, measure in measures.items() for part in (judged, *measure)}
    return References(tuple(short), measures, of_the_whole | compared)


def referenced(experiment: Experiment) -> frozenset[str]:
    """Names of the controls of an experiment that have a reference."""
    made = {spec.name for spec, role in references_of(experiment).extra if role is Role.REFERENCE}
    return frozenset(spec.name for spec in experiment.controls if _in_float32(spec).name in made)


def in_float32(experiment: Experiment) -> Experiment:
    """The experiment with every set in float32, and otherwise unchanged.

    A calibration or baseline of another precision is left out, and so are other seeds: this only
    has to show where a difference comes from.
    """

    def plain(spec: SetSpec) -> SetSpec:
        return _with_numerics(spec, FLOAT32_NUMERICS)

    return replace(
        experiment,
        controls=tuple(map(plain, experiment.controls)),
        tests=tuple(map(plain, experiment.tests)),
        anchor=plain(experiment.anchor) if experiment.anchor is not None else None,
        calibration=None,
        baseline=None,
        frozen_sets=None,
        other_seeds=(),
    )


def _reference_of(control: SetSpec, extra: dict[str, tuple[SetSpec, Role]]) -> str:
    """Name of the run in float32; it is added to ``extra`` if missing."""
    if precision_of(control) is Precision.FP32:
        return control.name
    spec = _in_float32(control)
    extra.setdefault(spec.name, (spec, Role.REFERENCE))
    return spec.name


def _both_float32(test: SetSpec, control: SetSpec) -> bool:
    return {precision_of(test), precision_of(control)} == {Precision.FP32}


def _measurable(spec: SetSpec) -> bool:
    """Whether its first steps can be compared with those in another precision."""
    return spec.trainer.can.references and not spec.resumes


def _differ(test: SetSpec, control: SetSpec) -> bool:
    return numerics_of(test) != numerics_of(control)


def _in_float32(control: SetSpec) -> SetSpec:
    return _short(control, FLOAT32, FLOAT32_NUMERICS)


def _with_numerics_of(test: SetSpec, control: SetSpec) -> SetSpec:
    numerics = numerics_of(test)
    stored = {numerics.stored, numerics.computed} - {FLOAT32}
    plain = numerics.stored
    if numerics.stored == FLOAT32:
        plain = "mixed" if numerics.computed == "bfloat16" else f"mixed_{numerics.computed}"
    parts = [*numerics.float8, *([plain] if stored else [])]
    return _short(control, "_".join(parts) or FLOAT32, numerics)


def _short(control: SetSpec, name: str, numerics: Numerics) -> SetSpec:
    """A control as a one-step run in another precision."""
    made = _with_numerics(control, numerics)
    overrides = {**made.overrides, TRAINING_STEPS: 1}
    return replace(made, name=f"{control.name}.{name}", overrides=overrides, note="")


def _with_numerics(spec: SetSpec, numerics: Numerics) -> SetSpec:
    """A set in another precision."""
    kept = [technique for technique in spec.techniques if technique not in _COARSE]
    types = dict(zip(DATA_TYPE_KEYS, (numerics.stored, numerics.computed), strict=True))
    return replace(
        spec, techniques=(*kept, *numerics.float8), overrides={**spec.overrides, **types}
    )
