"""Part of an experiment: what ``--only`` asks for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from harness.errors import ConfigError, Problem, suggest
from harness.model import Experiment


def select(experiment: Experiment, names: Collection[str]) -> Experiment:
    """The experiment with these test sets (or controls) only, and the controls that they need.

    Raises:
        ConfigError: a name is that of no set.
    """
    controls = [spec.name for spec in experiment.controls]
    known = [*controls, *(spec.name for spec in experiment.tests)]
    if unknown := [name for name in names if name not in known]:
        path = str(experiment.path)
        raise ConfigError(
            [Problem(path, f"no set {name!r}", suggest(name, known)) for name in unknown]
        )
    kept = tuple(spec for spec in experiment.tests if spec.name in names)
    needed = {spec.control for spec in kept} | (set(controls) & set(names))
    return replace(
        experiment,
        controls=tuple(spec for spec in experiment.controls if spec.name in needed),
        tests=kept,
    )
