"""The part of an experiment that ``--only`` selects."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from converge_harness.errors import ConfigError, Problem, suggest
from converge_harness.model import Experiment, Kind
from converge_harness.plan.references import referenced, references_of


def select(experiment: Experiment, names: Collection[str]) -> Experiment:
    """The experiment with these test sets (or controls) only, and the controls that they need.

    The prefix of generated sets' names, up to an underscore, selects all of them. The anchor is
    kept if it, or the first control, is selected by name.

    Raises:
        ConfigError: there is no set of that name.
    """
    controls = [spec.name for spec in experiment.controls]
    anchors = [experiment.anchor.name] if experiment.anchor else []
    known = [*controls, *anchors, *(spec.name for spec in experiment.tests)]
    groups = {name: _generated(experiment, name) for name in names}
    if unknown := [name for name in names if name not in known and not groups[name]]:
        path = str(experiment.path)
        raise ConfigError(
            [
                Problem(path, f"{name!r} is left out: {experiment.left_out[name].why}")
                if name in experiment.left_out
                else Problem(path, f"no set {name!r}", suggest(name, known))
                for name in unknown
            ]
        )
    asked = set(names).union(*groups.values())
    kept = tuple(spec for spec in experiment.tests if spec.name in asked)
    first = experiment.controls[0].name
    anchor = experiment.anchor
    if anchor is not None and not {anchor.name, first} & asked:
        anchor = None
    needed = {spec.control for spec in kept} | (set(controls) & asked)
    needed |= {first} if anchor is not None else set()
    return replace(
        experiment,
        anchor=anchor,
        controls=tuple(spec for spec in experiment.controls if spec.name in needed),
        tests=kept,
        left_out={
            name: each
            for name, each in experiment.left_out.items()
            if not each.was_asked_for and any(name.startswith(f"{start}_") for start in names)
        },
        frozen_sets=references_of(experiment).frozen_sets,
    )


def _generated(experiment: Experiment, start: str) -> set[str]:
    """Names of the space_time sets with that prefix."""
    return {
        spec.name
        for spec in experiment.tests
        if spec.kind is Kind.SPACE_TIME and spec.name.startswith(f"{start}_")
    }


def select_controls(
    experiment: Experiment, names: Collection[str], *, references: bool = False
) -> Experiment:
    """Only the experiment's controls (those named, or all), to learn from their repeats.

    With ``references``, also the float32 references that its test sets need.

    Raises:
        ConfigError: there is no control of that name.
    """
    known = [spec.name for spec in experiment.controls]
    if unknown := [name for name in names if name not in known]:
        path = str(experiment.path)
        raise ConfigError(
            [Problem(path, f"no control {name!r}", suggest(name, known)) for name in unknown]
        )
    kept = tuple(spec for spec in experiment.controls if not names or spec.name in names)
    return replace(
        experiment,
        controls=kept,
        tests=(),
        anchor=None,
        calibration=None,
        baseline=None,
        other_seeds=(),
        frozen_sets=references_of(experiment).frozen_sets,
        referenced=referenced(experiment) & {spec.name for spec in kept}
        if references
        else frozenset(),
    )
