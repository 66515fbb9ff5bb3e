"""The audit of trainers that converge's rank code drives: it records their whole config.

Releases of a trainer ignore some settings silently (async TP that never fuses, Float8 recipes
that fall back, a rotation that stays the default): the numbers are then correct, but those of
another technique. Only an audit of what really ran can notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from converge_harness.model import InForce, OwnTechnique, SetSpec, Technique, ranks


@dataclass(frozen=True, slots=True)
class ImpliedSetting:
    """A key that sets may name, of which a trainer's config in force shows the value by others."""

    key: str
    value: str
    null: str = ""
    """A key that is there and null."""
    has: str = ""
    """A key that is there."""
    lacks: str = ""
    """A key that is not there."""


def bf16_missing(ran: InForce) -> str:
    """What is missing of parameters in bfloat16, as a clause; empty: nothing."""
    return "" if ran.param_dtype == "bfloat16" else f"parameters are {ran.param_dtype}"


@dataclass(frozen=True)
class ConfigAudit:
    """An audit (``Audit`` of the model) of a trainer whose whole config is known.

    A subclass also knows the trainer's own techniques.
    """

    missing: Mapping[Technique, Callable[[InForce], str]] = field(
        default_factory=lambda: MappingProxyType({Technique.BF16: bf16_missing})
    )
    """By technique that sets may name: what is missing of it, as a clause; empty: nothing."""
    named_by: Mapping[Technique, tuple[tuple[str, object], ...]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """By technique, keys and values of a train config that name it as ``techniques`` does."""
    deterministic: str = ""
    """Key of whether torch may use deterministic algorithms only; empty: there is none."""
    implied: tuple[ImpliedSetting, ...] = ()
    """The first that fits a config gives the value of its key."""

    def not_in_force(self, spec: SetSpec, ran: InForce) -> Iterator[str]:
        for technique in spec.techniques:
            missing = self.missing[technique](ran)
            if missing:
                yield f"{technique.value} is named but not in force: {missing}"
        yield from _own_not_in_force(spec, ran)
        for dimension, degree in asdict(spec.parallelism).items():
            if ran.degrees.get(dimension) != degree:
                yield f"{dimension} {degree} is named, {ran.degrees.get(dimension)} is in force"
        if ran.world_size != spec.parallelism.world_size:
            named = ranks(spec.parallelism.world_size)
            yield f"a world of {named} is named, {ran.world_size} in force"
        yield from self._other_choices(spec, ran)
        if sorted(ran.without_fixes) != sorted(spec.without_fixes):
            yield (
                f"without_fixes {', '.join(spec.without_fixes) or 'none'} is named, "
                f"{', '.join(ran.without_fixes) or 'none'} is in force"
            )
        if bool(ran.injected) != bool(spec.inject):
            yield f"inject {spec.inject} is named, {ran.injected} is in force"
        yield from _batches(spec, ran)
        yield from self._overrides(spec, ran)

    def not_named(self, spec: SetSpec, ran: InForce) -> Iterator[str]:
        if ran.param_dtype == "bfloat16" and Technique.BF16 not in self.named(spec):
            yield "parameters are bfloat16 but bf16 is not named"
        if ran.pipeline_schedule and spec.parallelism.pp == 1:
            yield f"schedule {ran.pipeline_schedule} is in force but pp is 1"

    def named(self, spec: SetSpec) -> set[Technique]:
        """The techniques that a set names, by itself or by its train config."""
        return set(spec.techniques) | {
            technique
            for technique, settings in self.named_by.items()
            if any(spec.setting(key) == value for key, value in settings)
        }

    def _other_choices(self, spec: SetSpec, ran: InForce) -> Iterator[str]:
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
        deterministic = ran.config.get(self.deterministic, spec.deterministic)
        if deterministic != spec.deterministic:
            named, found = (str(each).lower() for each in (spec.deterministic, deterministic))
            yield f"deterministic = {named} is named, {found} is in force"

    def _overrides(self, spec: SetSpec, ran: InForce) -> Iterator[str]:
        """Values that the file sets, against the config that the trainer was built from."""
        config = {**_implied(self.implied, ran.config), **ran.config}
        for key, value in spec.overrides.items():
            if key not in config:
                yield f"{key} = {value} is named but cannot be verified: no such key in the config"
            elif config[key] != value and str(config[key]) != str(value):
                yield f"{key} = {value} is named, {config[key]} is in force"


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


def _implied(settings: Iterable[ImpliedSetting], config: Mapping[str, Any]) -> dict[str, str]:
    """Values that a config in force shows by other keys than the one that sets may name."""
    found: dict[str, str] = {}
    for each in settings:
        null = not each.null or (each.null in config and config[each.null] is None)
        there = not each.has or each.has in config
        if null and there and not (each.lacks and each.lacks in config):
            found.setdefault(each.key, each.value)
    return found


def _plain(name: object) -> str:
    """``Schedule1F1B`` and ``1F1B``, ``allgather`` and ``all_gather`` are one name each."""
    return str(name).removeprefix("Schedule").replace("-", "").replace("_", "").lower()
