"""Keys of torchtitan's ``checkpoint`` table that the harness keeps to itself.

torchtitan 0.2.2 and 0.3.0 have the same ones. ``exclude_from_loading`` is the user's: it leaves a
part of the state out, which the checks of resumed runs then see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from harness.errors import Problem
from harness.experiment.read import flatten
from harness.model import SetSpec


def _of_table(*keys: str) -> frozenset[str]:
    return frozenset(f"checkpoint.{key}" for key in keys)


START = _of_table(
    "create_seed_checkpoint",
    "enable",
    "folder",
    "initial_load_in_hf",
    "initial_load_in_hf_quantized",
    "initial_load_model_only",
    "initial_load_path",
    "load_only",
    "load_step",
)
"""What a run starts from: no set says it, for then its identity would not tell the weights."""
PASSES = START | _of_table(
    "async_mode",
    "enable_first_step_checkpoint",
    "export_dtype",
    "interval",
    "keep_latest_k",
    "last_save_in_hf",
    "last_save_model_only",
)
"""How the passes of a run are kept together."""
OF_PASSES = (
    "the harness writes and loads the checkpoints of elastic and fault sets, and of all sets with "
    "cluster.checkpoint_every"
)
WHEN = "when: by `until` of segments and checkpoint_every"

Where = Callable[[str], str]


def start_problems(overrides: Mapping[str, Any], where: Where) -> Iterator[Problem]:
    """Settings of any set that would let it start from something else than the others."""
    for key in sorted(START & overrides.keys()):
        yield Problem(
            where(f"set.{key}"),
            "is not set here: the harness decides what a run starts from, the same for all sets",
            "use trainer.seed_checkpoint",
        )


def pass_problems(
    spec: SetSpec, own: Mapping[str, Any], where: Where, where_trainer: Where
) -> Iterator[Problem]:
    """Settings of a set in several passes by which the harness itself writes and loads.

    Args:
        spec: the set, with the settings of ``[trainer.set]`` among its overrides.
        own: the set's own table ``set``.
        where: from a key of the set to its place.
        where_trainer: from a key of ``[trainer]`` to its place.
    """
    mine = {key for key, _ in flatten(dict(own))}
    for key in sorted((PASSES - START) & spec.overrides.keys()):  # START: see start_problems
        place = where if key in mine else where_trainer
        yield Problem(place(f"set.{key}"), f"is not set here: {OF_PASSES}", WHEN)
    config = spec.train_config
    for key in sorted(PASSES & {key for key, _ in flatten(dict(config.settings))}):
        yield Problem(
            f"{config.path}: {key}",
            f"is not set in the train config of such sets: {OF_PASSES}",
            "leave it out, or name a train_config without it in the set",
        )
