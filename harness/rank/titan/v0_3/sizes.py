"""The sizes of a job, by the same keys for every series of torchtitan.

An experiment counts in samples: ``training.local_batch_size``, ``training.global_batch_size``,
``training.seq_len`` and ``parallelism.pipeline_parallel_microbatch_size``, which are torchtitan
0.3's own keys. Its main branch counts in tokens (pull request 4121), and what an experiment says is
translated, so that one file trains by either, and a set on main can be judged by a control on 0.3.
The config in force is reported by the same keys, translated back from what the trainer is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from converge_harness.rank.settings import KeyProblem, SettingError, apply_setting
from converge_harness.rank.titan.v0_3.series import SERIES

_FIELDS = {
    "training.local_batch_size": "local",
    "training.global_batch_size": "whole",
    "training.seq_len": "length",
    "parallelism.pipeline_parallel_microbatch_size": "microbatch",
}
_TOKENS = {
    "training.num_tokens_per_microbatch_per_dp_rank": "training.local_batch_size",
    "training.num_tokens_per_train_step": "training.global_batch_size",
    "training.max_context_length": "training.seq_len",
    "parallelism.num_pp_microbatches": "parallelism.pipeline_parallel_microbatch_size",
}
"""Keys of main, with those that say the same in an experiment."""


@dataclass(slots=True)
class Sizes:
    """In samples, but for the length."""

    local: int
    """Per data-parallel rank and accumulation step."""
    whole: int
    """Per step over all ranks; -1: no accumulation."""
    length: int
    """Tokens of a sequence."""
    microbatch: int
    """Of a pipeline."""


def sizes_of(config: Any) -> Sizes:
    """The sizes in a ``Trainer.Config``; what does not make a whole sample counts as none."""
    training, parallelism = config.training, config.parallelism
    if not SERIES.folded:
        return Sizes(
            training.local_batch_size,
            training.global_batch_size,
            training.seq_len,
            parallelism.pipeline_parallel_microbatch_size,
        )
    length = training.max_context_length
    held = training.num_tokens_per_microbatch_per_dp_rank // length
    whole = training.num_tokens_per_train_step
    in_pipeline = parallelism.pipeline_parallel_degree > 1
    return Sizes(
        local=held * parallelism.num_pp_microbatches if in_pipeline else held,
        whole=whole if whole < 0 else whole // length,
        length=length,
        microbatch=held if in_pipeline else 1,
    )


def apart(
    settings: Iterable[tuple[str, Any]],
) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """Settings that are keys of the trainer's config, and sizes that must be translated."""
    settings = list(settings)
    if not SERIES.folded:
        return settings, {}
    rest = [(key, value) for key, value in settings if key not in _FIELDS]
    problems = [
        KeyProblem(key, "follows from the sizes in samples: set those", (_TOKENS[key],))
        for key, _ in rest
        if key in _TOKENS
    ]
    if problems:
        raise SettingError(*problems)
    return rest, {key: value for key, value in settings if key in _FIELDS}


def changed(sizes: Sizes, said: Mapping[str, Any]) -> Sizes:
    """The sizes with those that a job says.

    Raises SettingError for one that is no number of samples.
    """
    for key, value in said.items():
        lowest = -1 if key == "training.global_batch_size" else 1
        if type(value) is not int or value < lowest or value == 0:
            raise SettingError(KeyProblem(key, f"takes a positive integer, not {value!r}"))
    return replace(sizes, **{_FIELDS[key]: value for key, value in said.items()})


def news_of(sizes: Sizes, said: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys that give the sizes another value than they have."""
    return tuple(key for key, value in said.items() if getattr(sizes, _FIELDS[key]) != value)


def put(config: Any, sizes: Sizes) -> None:
    """Write translated sizes into a config whose degrees are known.

    Raises SettingError for a local batch that is no whole number of microbatches.
    """
    if not SERIES.folded:
        return
    held, microbatches = sizes.local, 1
    if config.parallelism.pipeline_parallel_degree > 1:
        held = sizes.microbatch
        microbatches, rest = divmod(sizes.local, held)
        if rest:
            raise SettingError(
                KeyProblem(
                    "parallelism.pipeline_parallel_microbatch_size",
                    f"a local batch of {sizes.local} does not divide into microbatches of {held}",
                )
            )
    whole = sizes.whole if sizes.whole < 0 else sizes.whole * sizes.length
    for key, value in (
        ("training.num_tokens_per_microbatch_per_dp_rank", held * sizes.length),
        ("training.num_tokens_per_train_step", whole),
        ("training.max_context_length", sizes.length),
        ("parallelism.num_pp_microbatches", microbatches),
    ):
        apply_setting(config, key, value)


def by_shared_keys(flat: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """A flat config with its sizes by the keys that every series shares."""
    if not SERIES.folded:
        return dict(flat)
    sizes = sizes_of(config)
    shared = {key: getattr(sizes, name) for key, name in _FIELDS.items()}
    return {key: value for key, value in flat.items() if key not in _TOKENS} | shared
