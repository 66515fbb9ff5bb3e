"""Templates of a command trainer: one argument, path or value, with placeholders in braces."""

from __future__ import annotations

import re
from collections.abc import Callable

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
