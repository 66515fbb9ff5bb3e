"""The ``Command`` of a command trainer, and its templates: texts with placeholders in braces."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class RankLauncher(StrEnum):
    """What starts the ranks of a command trainer: ``[trainer] launcher``."""

    TORCHRUN = "torchrun"
    COMPOSER = "composer"
    DEEPSPEED = "deepspeed"
    MPIRUN = "mpirun"
    NONE = "none"
    """Nothing: the template is the whole argv, and starts its ranks itself."""


@dataclass(frozen=True, slots=True)
class Command:
    """How a set's program is called, and what it leaves.

    Everything here changes numbers or what is read as evidence, and counts to the identity of a
    job, but for ``folder``.
    """

    argv: tuple[str, ...]
    """The template: what follows the launcher's own options, or with ``NONE`` the whole argv. Each
    entry is one argument, in which ``{name}`` stands for a value (docs/any-trainer.md); ``{{`` and
    ``}}`` are braces. No shell ever sees it."""
    folder: Path
    """Absolute: where the program is started."""
    launcher: RankLauncher = RankLauncher.TORCHRUN
    probed: bool = True
    """Whether the program calls ``probe``, which then leaves all evidence; else it leaves a
    curve of its own, and that is all there is."""
    curves: str | None = None
    """Template of the path of that curve, ``{output}/…``, in any format that ``converge compare``
    reads; None for a probed program."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Signal, or ``step``, to its name in the curve; others are found by their known names."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that its ranks are given beside the harness's environment; values are templates."""
    sources: tuple[Path, ...] = ()
    """Absolute paths of the files whose bytes count to the identity: those of the template that are
    there, and those that the file names (``files``)."""


PLACEHOLDERS = (
    "steps",
    "seed",
    "output",
    "data",
    "python",
    "name",
    "ranks",
    "dp",
    "dp_replicate",
    "dp_shard",
    "tp",
    "cp",
    "pp",
    "ep",
    "local_batch_size",
    "global_batch_size",
    "gradient_accumulation_steps",
    "seq_len",
)
"""What stands between braces, beside keys of the train config."""
CONFIG = "config."
"""How a placeholder of the train config starts: ``{config.zero.stage}``."""
_PART = re.compile(r"\{\{|\}\}|\{(?P<name>[^{}]*)\}|[{}]")


def placeholders(template: str) -> tuple[str, ...]:
    """The names between the braces of a template, in order, known or not.

    Raises:
        ValueError: a brace is alone; those that are meant are doubled.
    """
    found = []
    for part in _PART.finditer(template):
        if part["name"] is not None:
            found.append(part["name"])
        elif part[0] in "{}":
            raise ValueError(f"the brace {part[0]!r} at character {part.start() + 1} is alone")
    return tuple(found)


def fill(template: str, value_of: Callable[[str], str]) -> str:
    """The template with every placeholder replaced by its value, and doubled braces by one.

    What a value brings is not looked at again. Raises whatever ``value_of`` raises, and ValueError
    as ``placeholders`` does.
    """
    placeholders(template)

    def filled(part: re.Match[str]) -> str:
        return part[0][0] if part["name"] is None else value_of(part["name"])

    return _PART.sub(filled, template)
