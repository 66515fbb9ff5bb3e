"""``[seeds]``: how many seeds every control and test set is trained with.

As TOML::

    seed = 42                       # the first

    [seeds]
    count = 3                       # 42, 43 and 44

What one seed cannot tell, whether a change of the loss is more than another seed would make, is
judged over all of them (``docs/judging.md``, "Several seeds").
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any

from pydantic import Field

from harness.errors import Problem
from harness.experiment.sets import Where
from harness.experiment.tables import LARGEST_SEED, FileTable, Table, validate
from harness.model import Command
from harness.model.trainer import placeholders

FEWEST, MOST = 2, 100
SEED = "seed"


class SeedsTable(Table):
    count: Annotated[int, Field(ge=FEWEST, le=MOST)]


def other_seeds(top: FileTable, where: Where, problems: list[Problem]) -> tuple[int, ...]:
    """The seeds after the file's ``seed``; none without ``[seeds]``."""
    if top.seeds is None:
        return ()
    table = validate(SeedsTable, top.seeds, lambda key: where(f"seeds.{key}"), problems)
    last = top.seed + table.count - 1 if table else top.seed
    if last > LARGEST_SEED:
        problems.append(
            Problem(where("seeds.count"), f"ends at seed {last}; the largest is {LARGEST_SEED}")
        )
    return tuple(range(top.seed + 1, last + 1))


def seed_problems(
    data: Mapping[str, Any], where: Where, *, given_weights: bool, command: Command | None
) -> Iterator[Problem]:
    """What a file says beside ``[seeds]`` that leaves several seeds without a meaning.

    ``given_weights`` says that ``[trainer]`` names a seed checkpoint.
    """
    if "seeds" not in data:
        return
    if "baseline" in data:
        why = "cannot be there with a baseline: a golden is of one seed"
        yield Problem(where("seeds"), why, "leave out one")
    if given_weights:
        yield Problem(
            where("seeds"),
            "cannot be there with trainer.seed_checkpoint: every seed would begin with its weights",
            "leave out one",
        )
    if command is not None and SEED not in _given(command):
        yield Problem(
            where("seeds"),
            "says nothing to a program that is not given its seed: all of its runs would be one",
            'give it, as ["train.py", "--seed", "{seed}"]',
        )


def _given(command: Command) -> Collection[str]:
    """Placeholders of all that a program is started with."""
    found: set[str] = set()
    for text in (*command.argv, *command.environment.values()):
        with suppress(ValueError):  # a brace too many, which is said of the command
            found.update(placeholders(text))
    return found
