"""Whether what a set names is what really ran, and nothing else: pure questions about one run.

Releases of torchtitan ignore some settings silently (async TP that never fuses, Float8 recipes
that fall back, a rotation that stays the default): the numbers are then correct, but those of
another technique. Only an audit of what really ran can notice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, NamedTuple

from converge_harness.judge.degrees import ranks
from converge_harness.judge.probed_runs import not_as_called
from converge_harness.model import (
    ImpliedSetting,
    InForce,
    OwnTechnique,
    SetSpec,
    Technique,
    flattened,
)


def not_in_force(spec: SetSpec, ran: InForce) -> Iterator[str]:
    """One clause per setting that the set names and that was not in force."""
    audited = spec.trainer.can.audits_config
    yield from _not_in_force(spec, ran) if audited else not_as_called(spec, ran)


def _not_in_force(spec: SetSpec, ran: InForce) -> Iterator[str]:
    for technique in spec.techniques:
        missing = _TECHNIQUES[technique](ran)
        if missing:
            yield f"{technique.value} is named but not in force: {missing}"
    yield from _own_not_in_force(spec, ran)
    for dimension, degree in asdict(spec.parallelism).items():
        if ran.degrees.get(dimension) != degree:
            yield f"{dimension} {degree} is named, {ran.degrees.get(dimension)} is in force"
    if ran.world_size != spec.parallelism.world_size:
        named = ranks(spec.parallelism.world_size)
        yield f"a world of {named} is named, {ran.world_size} in force"
    yield from _other_choices(spec, ran)
    if sorted(ran.without_fixes) != sorted(spec.without_fixes):
        yield (
            f"without_fixes {', '.join(spec.without_fixes) or 'none'} is named, "
            f"{', '.join(ran.without_fixes) or 'none'} is in force"
        )
    if bool(ran.injected) != bool(spec.inject):
        yield f"inject {spec.inject} is named, {ran.injected} is in force"
    yield from _batches(spec, ran)
    yield from _overrides(spec, ran)


def _own_not_in_force(spec: SetSpec, ran: InForce) -> Iterator[str]:
    """The experiment file's own techniques: by its function ``in_force``, else by what we saw."""
    seen = {each.name: each for each in ran.own_techniques}
    for own in spec.own_techniques:
        found = seen.get(own.name)
        if found is None or not found.called:
            yield f"{own.name} is named but {_function(own.apply)} was not called"
        elif own.in_force is not None and not found.count:
            yield (
                f"{own.name} is named but changed nothing: {_function(own.in_force)} returned 0 on "
                "all ranks"
            )
        elif own.in_force is None and not found.changed:
            yield f"{own.name} is named but changed nothing{_unseen(own)}"


def _unseen(own: OwnTechnique) -> str:
    if own.apply is None:
        return ": its keys have the values that they had without it"
    what = {"config": "the config", "trainer": "the trainer"}.get(own.place or "", "the model")
    return (
        f": {what} was the same after {_function(own.apply)}. What it replaces elsewhere cannot be "
        "seen: count it in a function, and name that as in_force"
    )


def _function(target: str | None) -> str:
    """``file.py:function``, without the folder."""
    return (target or "").rpartition("/")[2]


def _other_choices(spec: SetSpec, ran: InForce) -> Iterator[str]:
    """Schedule, rotation and SPMD backend, where one is named, and deterministic algorithms."""
    schedule = ran.pipeline_schedule
    if spec.pipeline_schedule and _plain(schedule) != _plain(spec.pipeline_schedule):
        yield f"schedule {spec.pipeline_schedule} is named, {schedule} is in force"
    rotation = ran.cp_rotation
    if spec.cp_rotation and _plain(rotation) != _plain(spec.cp_rotation):
        yield f"CP rotation {spec.cp_rotation} is named, {rotation} is in force"
    backend = ran.spmd_backend
    if spec.spmd_backend and backend != spec.spmd_backend:
        yield f"SPMD backend {spec.spmd_backend} is named, {backend} is in force"
    deterministic = ran.config.get(spec.trainer.keys.deterministic, spec.deterministic)
    if deterministic != spec.deterministic:
        named, found = (str(each).lower() for each in (spec.deterministic, deterministic))
        yield f"deterministic = {named} is named, {found} is in force"


def not_named(spec: SetSpec, ran: InForce) -> Iterator[str]:
    """One clause per technique that ran although neither the set nor its train config names it."""
    if not spec.trainer.can.audits_config:
        return  # the techniques of other programs are not known
    named = set(spec.techniques) | _named_by_train_config(spec)
    wants_float8 = named & {Technique.FLOAT8, Technique.FLOAT8_ROWWISE}
    if ran.float8.modules and not (wants_float8 or _converts_float8(spec)):
        yield f"Float8 is in force ({ran.float8.modules} modules) but not named"
    if ran.float8.tp_styles and Technique.FLOAT8_TP not in named:
        yield f"Float8 TP is in force ({ran.float8.tp_styles} styles) but not named"
    if ran.compile.regions and Technique.COMPILE not in named:
        yield f"compile is in force ({ran.compile.regions} regions) but not named"
    if ran.is_fused and Technique.ASYNC_TP not in named:
        yield f"async TP is in force ({sum(ran.fused_nodes.values())} fused nodes) but not named"
    if ran.param_dtype == "bfloat16" and Technique.BF16 not in named:
        yield "parameters are bfloat16 but bf16 is not named"
    if ran.pipeline_schedule and spec.parallelism.pp == 1:
        yield f"schedule {ran.pipeline_schedule} is in force but pp is 1"


class ConfigDifference(NamedTuple):
    """A key that only one of two configs has, or that has another value in each."""

    key: str
    expected: bool
    """Whether a run declares it, or only one of two toolchains has it."""


def config_differences(
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    declared: Collection[str],
    *,
    same_toolchain: bool = True,
) -> tuple[ConfigDifference, ...]:
    """How two configs with dotted keys differ, by key.

    ``declared``: keys that either run declares. Between toolchains the keys themselves differ.
    """
    both = ours.keys() & theirs.keys()
    return tuple(
        ConfigDifference(key, is_declared(key, declared) or not (same_toolchain or key in both))
        for key in differing_keys(ours, theirs)
    )


def planned_settings(spec: SetSpec) -> dict[str, Any]:
    """What an experiment file says of a set's train config, by dotted key."""
    return {**flattened(spec.train_config.settings), **spec.overrides}


def undeclared_differences(
    ours: InForce, theirs: InForce, *, same_toolchain: bool = True
) -> tuple[str, ...]:
    """Keys of the trainer's config that differ though neither run declares them."""
    declared = {*ours.declared, *theirs.declared}
    found = config_differences(ours.config, theirs.config, declared, same_toolchain=same_toolchain)
    return tuple(each.key for each in found if not each.expected)


def differing_keys(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys, sorted, that only one of two configs has or that have another value in each."""
    absent = object()
    keys = ours.keys() | theirs.keys()
    return tuple(sorted(key for key in keys if ours.get(key, absent) != theirs.get(key, absent)))


def is_declared(key: str, declared: Collection[str]) -> bool:
    """Whether one of the declared keys covers one that differs."""
    return any(_covers(name, key) for name in declared)


def _covers(declared: str, key: str) -> bool:
    """Whether a declared key covers one that differs: itself, its table, or a key inside it.

    A key inside it: where one run has a table, the other may have a single value, such as None.
    """
    inside = key.startswith((f"{declared}.", f"{declared}["))
    return key == declared or inside or declared.startswith((f"{key}.", f"{key}["))


def unlike_a_repeat(
    ours: InForce, theirs: InForce, of_repeats: Collection[str] = ()
) -> tuple[str, ...]:
    """Keys of the trainer's config that differ although no repeat of a run changes them.

    Declared or not. Paths are left out: every run has its own. ``of_repeats``: keys that may differ
    in repeats (``ConfigKeys.of_repeats``).
    """

    def is_path(value: object) -> bool:
        return isinstance(value, str) and "/" in value

    return tuple(
        key
        for key in differing_keys(ours.config, theirs.config)
        if key not in of_repeats
        and not (is_path(ours.config.get(key)) and is_path(theirs.config.get(key)))
    )


def _batches(spec: SetSpec, ran: InForce) -> Iterator[str]:
    """Accumulation and pipeline microbatches follow from the batch sizes in force."""
    local, whole, dp = ran.local_batch_size, ran.global_batch_size, ran.dp
    accumulation = ran.gradient_accumulation_steps
    if local is None or whole is None or accumulation is None:
        yield "batch sizes or accumulation steps in force are not known"
        return
    if local * dp * accumulation != whole:
        yield (
            f"{whole} samples were read in a step, but {local} x dp {dp} x {accumulation} "
            f"accumulation steps make {local * dp * accumulation}"
        )
    stages, microbatches = ran.degrees.get("pp") or 1, ran.pipeline_microbatches
    if stages == 1:
        return
    size = ran.config.get(spec.trainer.keys.pipeline_microbatch_size)
    if isinstance(size, int) and size > 0 and microbatches != local // size:
        yield f"{local // size} pipeline microbatches are named, {microbatches} are in force"
    elif microbatches is None or microbatches < stages:
        yield f"{microbatches} pipeline microbatches are in force for {stages} stages"


def _overrides(spec: SetSpec, ran: InForce) -> Iterator[str]:
    """Values that the file sets, against the config that the trainer was built from."""
    config = {**_implied(spec.trainer.keys.implied, ran.config), **ran.config}
    for key, value in spec.overrides.items():
        if key not in config:
            yield f"{key} = {value} is named but cannot be verified: no such key in the config"
        elif config[key] != value and str(config[key]) != str(value):
            yield f"{key} = {value} is named, {config[key]} is in force"


def _implied(settings: Iterable[ImpliedSetting], config: Mapping[str, Any]) -> dict[str, str]:
    """Values that a config in force shows by other keys than the one that sets may name."""
    found: dict[str, str] = {}
    for each in settings:
        null = not each.null or (each.null in config and config[each.null] is None)
        there = not each.has or each.has in config
        if null and there and not (each.lacks and each.lacks in config):
            found.setdefault(each.key, each.value)
    return found


def _float8_modules(ran: InForce) -> str:
    return "" if ran.float8.modules else "no Float8 module"


def _float8_recipe(recipe: str) -> Callable[[InForce], str]:
    def missing(ran: InForce) -> str:
        found = ran.float8.recipe
        return _float8_modules(ran) or ("" if found == recipe else f"the recipe is {found}")

    return missing


def _float8_tp(ran: InForce) -> str:
    return "" if ran.float8.tp_styles else "no Float8 TP style"


def _compile(ran: InForce) -> str:
    if not ran.compile.regions:
        return "no compiled region"
    return "" if ran.compile.graphs else "no graph was compiled"


def _async_tp(ran: InForce) -> str:
    """Any fused node counts: under Float8 only the reduce-scatters have a form that fuses."""
    return "" if ran.is_fused else "no fused node in any graph"


def _bf16(ran: InForce) -> str:
    return "" if ran.param_dtype == "bfloat16" else f"parameters are {ran.param_dtype}"


_TECHNIQUES: Mapping[Technique, Callable[[InForce], str]] = MappingProxyType(
    {
        Technique.COMPILE: _compile,
        Technique.ASYNC_TP: _async_tp,
        Technique.FLOAT8: _float8_recipe("tensorwise"),
        Technique.FLOAT8_ROWWISE: _float8_recipe("rowwise"),
        Technique.FLOAT8_TP: _float8_tp,
        Technique.BF16: _bf16,
    }
)
"""Technique to a clause that says what is missing of it; empty when it is in force."""


def _named_by_train_config(spec: SetSpec) -> set[Technique]:
    return {
        technique
        for technique, settings in spec.trainer.keys.techniques.items()
        if any(spec.setting(key) == value for key, value in settings)
    }


def _converts_float8(spec: SetSpec) -> bool:
    """Whether the train config itself lists a Float8 converter."""
    converters = spec.setting(spec.trainer.keys.float8_converters)
    return isinstance(converters, list) and any("float8" in str(name) for name in converters)


def _plain(name: object) -> str:
    """``Schedule1F1B`` and ``1F1B``, ``allgather`` and ``all_gather`` are one name each."""
    return str(name).removeprefix("Schedule").replace("-", "").replace("_", "").lower()
