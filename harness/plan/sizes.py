"""The sizes and the precision of a set, and problems that prevent a plan."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import NamedTuple, cast

from converge_harness.errors import Problem, suggest
from converge_harness.model import (
    DATA_TYPE_KEYS,
    DATA_TYPES,
    GLOBAL_BATCH,
    TRAINING_STEPS,
    Experiment,
    Precision,
    SetSpec,
    Setting,
    Technique,
)

SIZES = ("steps", "local_batch_size", "seq_len")
"""Keys of ``training`` that have to be set, or have a default."""
FLOAT8_RECIPES = frozenset({Technique.FLOAT8, Technique.FLOAT8_ROWWISE})


def precision_of(spec: SetSpec) -> Precision:
    """The coarsest arithmetic of a set.

    Each trainer has defaults for what a config leaves out (``TrainerSpec.defaults``): bfloat16
    mixed precision for torchtitan, float32 for a command trainer.
    """
    if FLOAT8_RECIPES & set(spec.techniques):
        return Precision.FLOAT8
    _, stored, computed = numerics_of(spec)
    named = [stored, computed]
    # torchtitan's own check refuses what it does not know.
    coarsest = [DATA_TYPES.get(each, Precision.FP32) for each in named]
    return max(coarsest, key=list(Precision).index)


class Numerics(NamedTuple):
    """Data types of a set's arithmetic: sets that differ in them round differently."""

    float8: tuple[Technique, ...]
    stored: str
    """Data type of parameters."""
    computed: str
    """The data type to which FSDP casts parameters."""


def numerics_of(spec: SetSpec) -> Numerics:
    """What the set names, else its trainer's default."""
    float8 = tuple(sorted(FLOAT8_RECIPES & set(spec.techniques)))
    if Technique.BF16 in spec.techniques:
        return Numerics(float8, "bfloat16", "bfloat16")
    stored, computed = (str(_setting(spec, key)) for key in DATA_TYPE_KEYS)
    return Numerics(float8, stored, computed)


def size_problems(experiment: Experiment, spec: SetSpec) -> Iterator[Problem]:
    """Missing or wrong sizes, without which no plan can be made."""
    for name in SIZES:
        value = _setting(spec, f"training.{name}")
        if positive(value) is None:
            stated = "is not set" if value is None else f"must be a positive integer, not {value!r}"
            misspelt = _written_as(spec, name) if value is None else ""
            yield Problem(
                f"{experiment.path}: {spec.name!r}: training.{name}",
                stated,
                f"in {spec.train_config.path}, or by set{misspelt}",
            )
    written = spec.setting(GLOBAL_BATCH, -1)
    if written != -1 and positive(written) is None:
        yield Problem(
            f"{experiment.path}: {spec.name!r}: {GLOBAL_BATCH}",
            f"must be a positive integer, or -1 for local batch x dp, not {written!r}",
        )
    if written == -1 and (spec.segments or _changes_nodes(spec)):
        yield Problem(
            f"{experiment.path}: {spec.name!r}: {GLOBAL_BATCH}",
            "is not set, and would change with the data-parallel degree",
            f"in {spec.train_config.path}, or by set",
        )
    yield from _dtype_problems(experiment, spec)
    steps = positive(spec.setting(TRAINING_STEPS))
    if isinstance(experiment.cadence, tuple) and steps is not None:
        for step in (step for step in experiment.cadence if step > steps):
            yield Problem(
                f"{experiment.path}: probe.cadence",
                f"step {step} comes after the last step of {spec.name!r}",
                f"{TRAINING_STEPS} is {steps}",
            )


def _dtype_problems(experiment: Experiment, spec: SetSpec) -> Iterator[Problem]:
    """Unknown data types, in a config that its trainer cannot check."""
    for key in () if spec.trainer.can.checks_config else DATA_TYPE_KEYS:
        value = _setting(spec, key)
        if not isinstance(value, str) or value not in DATA_TYPES:
            yield Problem(
                f"{experiment.path}: {spec.name!r}: {key}",
                f"{value!r} is not a known data type",
                suggest(str(value), DATA_TYPES),
            )


def _changes_nodes(spec: SetSpec) -> bool:
    return spec.recovery is not None and spec.recovery.nodes[0] < spec.recovery.nodes[1]


def positive(value: Setting) -> int | None:
    valid = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return cast("int", value) if valid else None


def size(spec: SetSpec, name: str) -> int:
    """A size that ``size_problems`` has passed."""
    return cast("int", _setting(spec, f"training.{name}"))


def _written_as(spec: SetSpec, name: str) -> str:
    """A clause on a key of the train config that looks like a misspelt one; or empty."""
    table = spec.train_config.settings.get("training")
    keys = [key for key in table if key not in SIZES] if isinstance(table, Mapping) else []
    near = difflib.get_close_matches(name, keys, n=1, cutoff=0.8)
    return f"; training.{near[0]} is there: is it meant?" if near else ""


def _setting(spec: SetSpec, key: str) -> Setting:
    """The value of a key, or its trainer's default."""
    return spec.setting(key, spec.trainer.defaults.get(key))
