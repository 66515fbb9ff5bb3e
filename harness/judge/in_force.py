"""How the configurations of two runs differ: pure questions about what was in force in each.

Whether what a set names is what ran is asked of its trainer's audit (``TrainerSpec.audit``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from converge_harness.model import InForce, SetSpec, flattened


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
