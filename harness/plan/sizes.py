"""The sizes and the precision of a set, and what a plan cannot be made without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

from harness.errors import Problem, suggest
from harness.model import (
    DATA_TYPES,
    GLOBAL_BATCH,
    Experiment,
    Precision,
    SetSpec,
    Setting,
    Technique,
)

DEFAULTS = {"seq_len": 1}
"""Sizes that a command trainer's config may leave out: its samples may be no sequences."""
DTYPE_KEYS = ("training.dtype", "training.mixed_precision_param")
FLOAT8_RECIPES = frozenset({Technique.FLOAT8, Technique.FLOAT8_ROWWISE})


def precision_of(spec: SetSpec) -> Precision:
    """The coarsest arithmetic of a set.

    torchtitan's own default is bfloat16 mixed precision; that of a command trainer's config is
    float32.
    """
    if spec.command is not None:
        named = [str(spec.setting(key, "float32")) for key in DTYPE_KEYS]
    elif FLOAT8_RECIPES & set(spec.techniques):
        return Precision.FLOAT8
    else:
        _, stored, computed = numerics_of(spec)
        named = [stored, computed]
    # What torchtitan does not know either is refused by its own check.
    coarsest = [DATA_TYPES.get(each, Precision.FP32) for each in named]
    return max(coarsest, key=list(Precision).index)


class Numerics(NamedTuple):
    """What a set computes in: two sets that differ in it round otherwise."""

    float8: tuple[Technique, ...]
    stored: str
    """Data type of parameters."""
    computed: str
    """What FSDP casts parameters to."""


def numerics_of(spec: SetSpec) -> Numerics:
    """Of a torchtitan set. Its own default is bfloat16 mixed precision."""
    float8 = tuple(sorted(FLOAT8_RECIPES & set(spec.techniques)))
    if Technique.BF16 in spec.techniques:
        return Numerics(float8, "bfloat16", "bfloat16")
    stored = spec.setting("training.dtype", "float32")
    return Numerics(float8, str(stored), str(spec.setting(DTYPE_KEYS[1], "bfloat16")))


def size_problems(experiment: Experiment, spec: SetSpec) -> Iterator[Problem]:
    """Sizes that a plan cannot be made without."""
    for name in ("steps", "local_batch_size", "seq_len"):
        value = spec.setting(f"training.{name}", DEFAULTS.get(name) if spec.command else None)
        if positive(value) is None:
            stated = "is not set" if value is None else f"must be a positive integer, not {value!r}"
            yield Problem(
                f"{experiment.path}: {spec.name!r}: training.{name}",
                stated,
                f"in {spec.train_config.path}, or by set",
            )
    written = spec.setting(GLOBAL_BATCH, -1)
    if written != -1 and positive(written) is None:
        yield Problem(
            f"{experiment.path}: {spec.name!r}: training.global_batch_size",
            f"must be a positive integer, or -1 for local batch x dp, not {written!r}",
        )
    if written == -1 and (spec.segments or _changes_nodes(spec)):
        yield Problem(
            f"{experiment.path}: {spec.name!r}: training.global_batch_size",
            "is not set, and would change with the data-parallel degree",
            f"in {spec.train_config.path}, or by set",
        )
    yield from _dtype_problems(experiment, spec)
    steps = positive(spec.setting("training.steps"))
    if isinstance(experiment.cadence, tuple) and steps is not None:
        for step in (step for step in experiment.cadence if step > steps):
            yield Problem(
                f"{experiment.path}: probe.cadence",
                f"step {step} comes after the last step of {spec.name!r}",
                f"training.steps is {steps}",
            )


def _dtype_problems(experiment: Experiment, spec: SetSpec) -> Iterator[Problem]:
    """Data types in a command trainer's config that tell no precision."""
    for key in DTYPE_KEYS if spec.command is not None else ():
        value = spec.setting(key, "float32")
        if not isinstance(value, str) or value not in DATA_TYPES:
            yield Problem(
                f"{experiment.path}: {spec.name!r}: {key}",
                f"{value!r} is no known data type",
                suggest(str(value), DATA_TYPES),
            )


def _changes_nodes(spec: SetSpec) -> bool:
    return spec.recovery is not None and spec.recovery.nodes[0] < spec.recovery.nodes[1]


def positive(value: Setting) -> int | None:
    valid = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return cast("int", value) if valid else None


def size(spec: SetSpec, name: str) -> int:
    """A size that ``size_problems`` has passed."""
    return cast("int", spec.setting(f"training.{name}", DEFAULTS.get(name)))
