"""What can be taken from a failing test set and its control, one change at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from converge_harness.model import (
    DATA_TYPE_KEYS,
    DATA_TYPES,
    GLOBAL_BATCH,
    LOCAL_BATCH,
    POWERS_OF_TWO,
    SEQ_LEN,
    TRAINING_STEPS,
    Experiment,
    Kind,
    Precision,
    Repeat,
    SetSpec,
    Setting,
    Stop,
)
from converge_harness.wording import counted

OF_BOTH = frozenset({TRAINING_STEPS, LOCAL_BATCH, GLOBAL_BATCH, SEQ_LEN})
"""Settings that are changed in both sets together."""
SIMPLEST_SCHEDULE = "1F1B"
FEWEST_STEPS = 2
"""The update of the first step shows in the second."""
SHORTEST = 32
"""Tokens of a sequence."""
NARROWEST = 16
"""Width of a model."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """One change of a pair, after which it is simpler or smaller."""

    what: str
    """What it takes away: ``compile``, ``tp 2``, ``4 layers``."""
    change: str
    """The change in words: ``no compile``, ``tp 1 instead of 2``, ``1 layer instead of 4``."""
    made: Experiment
    """The experiment after it."""
    part: bool
    """Whether it takes a part of the set-up away, which the failure may need; else it only makes
    something smaller."""


def why_not(spec: SetSpec) -> str:
    """Why a test set cannot be shrunk, in a clause; empty if it can."""
    if spec.kind not in (Kind.PARALLEL, Kind.SPACE_TIME):
        return "is judged by its resumes, and only sets of one pass can be shrunk"
    if spec.starts_from_control:
        return "is trained by another trainer than its control, and only sets of one can be shrunk"
    return ""


def smallest_pair(
    experiment: Experiment, repeats: tuple[Repeat, ...], waive: tuple[str, ...]
) -> Experiment:
    """An experiment of one control and one test set, without what only its verdict needs.

    That is: anchor, other seeds, checkpoints, stops, and limits of its own.

    Args:
        experiment: with exactly one control and one test set.
        repeats: how the control is repeated.
        waive: names of rules of the converging guide. They keep a comparison fair; here it only has
        to show a known failure.
    """
    (control,), (test,) = experiment.controls, experiment.tests
    return replace(
        experiment,
        anchor=None,
        other_seeds=(),
        repeats=repeats,
        calibration=None,
        baseline=None,
        baseline_across=(),
        frozen_sets=None,
        cadence=POWERS_OF_TWO,
        controls=(replace(control, recovery=None, waive=waive),),
        tests=(replace(test, recovery=None, waive=waive, stop=Stop.NEVER),),
    )


def reductions(experiment: Experiment) -> Iterator[Reduction]:
    """All changes of such an experiment; first those that make the further search cheap."""
    (control,), (test,) = experiment.controls, experiment.tests
    yield from _fewer_steps(experiment, control)
    if not test.trainer.can.techniques:
        # Of all else in its config, nobody knows whether a program reads it: changed in both sets,
        # it would seem not to be needed.
        yield from _smaller_degrees(experiment, test)
        yield from _without_settings(experiment, control, test)
        yield from _smaller_degrees(experiment, control)
        return
    yield from _without_techniques(experiment, test)
    yield from _smaller_degrees(experiment, test)
    yield from _simpler_choices(experiment, test)
    yield from _without_settings(experiment, control, test)
    yield from _in_float32(experiment, test)
    yield from _smaller_degrees(experiment, control)
    yield from _smaller_model(experiment, test)
    yield from _less_data(experiment, control)


def with_steps(experiment: Experiment, steps: int) -> Experiment | None:
    """The pair with so many steps; None if it has no more than that, or says no number of steps."""
    (control,) = experiment.controls
    now = _whole(control, TRAINING_STEPS)
    return (
        _both_with(experiment, {TRAINING_STEPS: steps}) if now is not None and now > steps else None
    )


def _both(experiment: Experiment, change: Callable[[SetSpec], SetSpec]) -> Experiment:
    return replace(
        experiment,
        controls=tuple(map(change, experiment.controls)),
        tests=tuple(map(change, experiment.tests)),
    )


def _both_with(experiment: Experiment, values: Mapping[str, Setting]) -> Experiment:
    return _both(experiment, lambda spec: _set(spec, values))


def _one(experiment: Experiment, spec: SetSpec) -> Experiment:
    """The experiment with another control, or another test set, by its name."""
    return _both(experiment, lambda each: spec if each.name == spec.name else each)


def _set(spec: SetSpec, values: Mapping[str, Setting]) -> SetSpec:
    return replace(spec, overrides={**spec.overrides, **values})


def _unset(spec: SetSpec, keys: Mapping[str, Setting]) -> SetSpec:
    """Without settings that have these values."""
    kept = {
        key: value for key, value in spec.overrides.items() if key not in keys or keys[key] != value
    }
    return replace(spec, overrides=kept)


def _whole(spec: SetSpec, key: str) -> int | None:
    """A setting that is a positive integer."""
    value = spec.setting(key)
    return value if isinstance(value, int) and value > 0 and value is not True else None


def _halves(value: int, least: int) -> list[int]:
    """The least value, then half of the present one: the largest reduction first."""
    return [each for each in dict.fromkeys((least, value // 2)) if least <= each < value]


def _fewer_steps(experiment: Experiment, control: SetSpec) -> Iterator[Reduction]:
    steps = _whole(control, TRAINING_STEPS) or 0
    for fewer in _halves(steps, FEWEST_STEPS):
        made = _both_with(experiment, {TRAINING_STEPS: fewer})
        yield Reduction(f"{steps} steps", f"{fewer} steps instead of {steps}", made, part=False)


def _without_techniques(experiment: Experiment, test: SetSpec) -> Iterator[Reduction]:
    """Also removed from the control, which otherwise would no longer match."""
    for technique in test.techniques:

        def without(spec: SetSpec, leave: object = technique) -> SetSpec:
            return replace(spec, techniques=tuple(t for t in spec.techniques if t != leave))

        yield Reduction(str(technique), f"no {technique}", _both(experiment, without), part=True)
    for own in test.own_techniques:

        def without_own(spec: SetSpec, leave: Any = own) -> SetSpec:
            kept = tuple(each for each in spec.own_techniques if each.name != leave.name)
            return replace(_unset(spec, leave.overrides), own_techniques=kept)

        yield Reduction(own.name, f"no {own.name}", _both(experiment, without_own), part=True)


def _smaller_degrees(experiment: Experiment, spec: SetSpec) -> Iterator[Reduction]:
    """With as many samples a step: a rank gets more of them if there are fewer."""
    whose = "" if spec.control else "the control's "
    for name in ("pp", "cp", "tp", "ep", "dp_replicate", "dp_shard"):
        degree = getattr(spec.parallelism, name)
        for fewer in _halves(degree, 1):
            made = replace(spec, parallelism=replace(spec.parallelism, **{name: fewer}))
            local = _whole(spec, LOCAL_BATCH)
            samples = (local or 0) * spec.parallelism.dp
            if samples % made.parallelism.dp:
                continue
            if local is not None:
                made = _set(made, {LOCAL_BATCH: samples // made.parallelism.dp})
            if made.parallelism.pp == 1:
                made = replace(made, pipeline_schedule=None)
            yield Reduction(
                f"{whose}{name} {degree}",
                f"{whose}{name} {fewer} instead of {degree}",
                _one(experiment, made),
                part=bool(spec.control) and fewer == 1,
            )


def _simpler_choices(experiment: Experiment, test: SetSpec) -> Iterator[Reduction]:
    """Choices of the test set that have a plainer one, or none."""
    if test.pipeline_schedule not in (None, SIMPLEST_SCHEDULE):
        made = replace(test, pipeline_schedule=SIMPLEST_SCHEDULE)
        change = f"{SIMPLEST_SCHEDULE} instead of {test.pipeline_schedule}"
        yield Reduction(str(test.pipeline_schedule), change, _one(experiment, made), part=True)
    if test.cp_rotation is not None:
        made = replace(test, cp_rotation=None)
        what = f"cp_rotation {test.cp_rotation}"
        yield Reduction(what, f"no {what}", _one(experiment, made), part=True)
    for fix in test.without_fixes:
        kept = tuple(each for each in test.without_fixes if each != fix)
        made = replace(test, without_fixes=kept)
        what = f"without_fixes {fix}"
        yield Reduction(what, f"with the fix {fix}", _one(experiment, made), part=True)


def _without_settings(
    experiment: Experiment, control: SetSpec, test: SetSpec
) -> Iterator[Reduction]:
    """Settings that the test set has otherwise than its control."""
    of_techniques = {key for own in test.own_techniques for key in own.overrides}
    for key, value in test.overrides.items():
        usual = control.setting(key)
        if key in OF_BOTH or key in of_techniques or usual == value:
            continue
        kept = {name: each for name, each in test.overrides.items() if name != key}
        made = replace(test, overrides=kept if usual is None else {**kept, key: usual})
        what = f"{key} = {value!r}"
        yield Reduction(what, f"{key} as in the control", _one(experiment, made), part=True)


def _in_float32(experiment: Experiment, test: SetSpec) -> Iterator[Reduction]:
    for key in reversed(DATA_TYPE_KEYS):  # first the one that costs less
        value = test.setting(key)
        if isinstance(value, str) and DATA_TYPES.get(value, Precision.FP32) != Precision.FP32:
            made = _both_with(experiment, {key: "float32"})
            change = f"{key} float32 instead of {value}"
            yield Reduction(f"{key} {value}", change, made, part=True)


def _smaller_model(experiment: Experiment, test: SetSpec) -> Iterator[Reduction]:
    """By ``[converge.model]``; nobody knows the arguments of a model of one's own."""
    model = test.train_config.model
    if test.train_config.import_from is not None:
        return
    for key, least, words in (("n_layers", 1, "layers"), ("dim", NARROWEST, "dim")):
        value = model.get(key, 0)
        for fewer in _halves(value, least):

            def smaller(spec: SetSpec, key: str = key, to: int = fewer) -> SetSpec:
                config = spec.train_config
                if key not in config.model:
                    return spec
                return replace(spec, train_config=replace(config, model={**config.model, key: to}))

            yield Reduction(
                f"{value} {words}",
                f"{words} {fewer} instead of {value}",
                _both(experiment, smaller),
                part=False,
            )


def _less_data(experiment: Experiment, control: SetSpec) -> Iterator[Reduction]:
    """Shorter sequences, and fewer samples a step."""
    length = _whole(control, SEQ_LEN) or 0
    for fewer in _halves(length, SHORTEST):
        made = _both_with(experiment, {SEQ_LEN: fewer})
        change = f"sequences of {fewer} instead of {length} tokens"
        yield Reduction(f"sequences of {length} tokens", change, made, part=False)
    sets = (*experiment.controls, *experiment.tests)
    values = [
        value
        for spec in sets
        for key in (LOCAL_BATCH, GLOBAL_BATCH)
        if (value := _whole(spec, key))
    ]
    # Fewer microbatches than stages would be a set-up of its own.
    enough = all((_whole(spec, LOCAL_BATCH) or 0) // 2 >= spec.parallelism.pp for spec in sets)
    if values and enough and not any(value % 2 for value in values):

        def halved(spec: SetSpec) -> SetSpec:
            keys = (LOCAL_BATCH, GLOBAL_BATCH)
            return _set(spec, {key: each // 2 for key in keys if (each := _whole(spec, key))})

        whole = _whole(control, GLOBAL_BATCH)
        samples = whole or (_whole(control, LOCAL_BATCH) or 0) * control.parallelism.dp
        fewer = samples // 2
        change = f"{counted(fewer, 'sample')} a step instead of {samples}"
        made = _both(experiment, halved)
        yield Reduction(f"{samples} samples a step", change, made, part=False)


def parts_of(spec: SetSpec) -> tuple[str, ...]:
    """What a set consists of besides its sizes: degrees above 1, techniques, a special schedule."""
    degrees = spec.parallelism
    named = [
        f"{field.name} {getattr(degrees, field.name)}"
        for field in fields(degrees)
        if getattr(degrees, field.name) > 1
    ]
    schedule = spec.pipeline_schedule
    if schedule not in (None, SIMPLEST_SCHEDULE):
        named.append(str(schedule))
    return (*named, *spec.technique_names)
