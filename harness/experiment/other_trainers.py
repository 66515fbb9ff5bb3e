"""``[trainers.NAME]``: trainers of test sets whose control is trained by ``[trainer]``.

::

    [trainers.megatron]
    kind = "megatron"
    train_config = "train_configs/megatron_llama3.toml"
    weights = "train_configs/llama3_to_megatron.toml"   # names in the control's checkpoint

    [[test]]
    name = "tp2"
    trainer = "megatron"
    parallelism = { tp = 2 }

Such a set starts from its control's seed checkpoint, so its trainer has to know the names of the
parameters there, and leaves its evidence by these names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from converge_harness.errors import Problem, suggest
from converge_harness.experiment.sets import SetBuilder
from converge_harness.model import SetSpec
from converge_harness.toml import Where
from converge_harness.trainers import FOR_ALL_SETS, read_trainer, trainer_of

KEY = "trainers"


def other_builders(tables: Mapping[str, Any], main: SetBuilder) -> dict[str, SetBuilder]:
    """What builds the sets of each ``[trainers.NAME]``, by name; problems are added to ``main``'s.

    Args:
        tables: as written; values that are no tables were reported.
        main: of ``[trainer]``, with all that does not depend on the trainer.
    """
    found = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            continue
        key = f"{KEY}.{name}"
        where = _below(main.where_file, key)
        main.problems += [
            Problem(where(each), "is for all sets of a file", f"put it under [{main.key}]")
            for each in sorted(FOR_ALL_SETS & table.keys())
        ]
        own = {each: value for each, value in table.items() if each not in FOR_ALL_SETS}
        before = len(main.problems)
        read = read_trainer(own, where, main.problems)
        is_right = len(main.problems) == before
        made = replace(main, table=read, key=key, where_trainer=where, train_configs={})
        found[name] = made
        if is_right and not made.of_file.maps_weights:
            main.problems.append(_unmapped(made, main))
    return found


def _below(where: Where, prefix: str) -> Where:
    return lambda key: where(f"{prefix}.{key}" if key else prefix)


def _unmapped(made: SetBuilder, main: SetBuilder) -> Problem:
    kind, theirs = made.trainer.kind, main.trainer.kind
    if key := made.trainer.mapping_key:
        return Problem(
            made.where_trainer(key),
            f"is missing: its sets start from {theirs}'s checkpoint, which has other names",
            "name a file with the names (docs/across_frameworks.md)",
        )
    return Problem(
        made.where_trainer("kind"),
        f"{kind!r} cannot start from the checkpoint of another trainer, here {theirs!r}",
        f"make {kind} the [{main.key}], or compare two curves: converge compare",
    )


def builder_of(
    named: str | None, main: SetBuilder, others: Mapping[str, SetBuilder], where: Where
) -> SetBuilder | None:
    """What builds a test set that names a trainer, or none; None if there is no such trainer."""
    if named is None:
        return main
    if named not in others:
        hint = suggest(named, others) if others else f"add a table [{KEY}.{named}]"
        main.problems.append(Problem(where("trainer"), f"there is no [{KEY}.{named}]", hint))
    return others.get(named)


def trainer_table_problems(
    main: SetBuilder,
    others: Mapping[str, SetBuilder],
    named: Sequence[str | None],
    specs: Sequence[SetSpec],
) -> Iterator[Problem]:
    """Tables without a use, and toolchains that two trainers would share.

    Args:
        main: of ``[trainer]``.
        others: of ``[trainers.NAME]``, by name.
        named: the trainers that test sets name.
        specs: all sets that could be built.
    """
    if main.of_file.maps_weights:
        yield Problem(
            main.where_trainer(main.trainer.mapping_key),
            "names the parameters of another trainer's checkpoint, and controls start from their "
            "own",
            f'put it under [{KEY}.NAME], and trainer = "NAME" into test sets',
        )
    for name, made in others.items():
        if name not in named:
            hint = f'add trainer = "{name}" to the sets that it should train, or leave it out'
            yield Problem(made.where_trainer(""), "no test set names it", hint)
    first: dict[str, SetSpec] = {}
    shared = set()
    for spec in specs:
        other = first.setdefault(spec.toolchain, spec)
        # Each looks for its own packages in it.
        if trainer_of(other) is not trainer_of(spec) and spec.toolchain not in shared:
            shared.add(spec.toolchain)
            yield Problem(
                main.where_file(f"{KEY} and {main.key}"),
                f"toolchain {spec.toolchain!r} is for {other.trainer.kind} and, in {spec.name!r}, "
                f"for {spec.trainer.kind}",
                "name another toolchain for one of them",
            )
