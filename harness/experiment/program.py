"""Which arguments of a command's template are the program: a file, or a module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from harness.model import RankLauncher

_MODULE = frozenset({"-m", "--module", "--module_mode"})
"""Options after which torchrun, composer, deepspeed and Python want a module."""
_PROGRAM = frozenset({"--no-python", "--no_python", "-c", "--command_mode"})
"""Options after which torchrun, deepspeed and composer want a program that starts by itself."""
_STARTS_PYTHON = frozenset({RankLauncher.TORCHRUN, RankLauncher.COMPOSER, RankLauncher.DEEPSPEED})


@dataclass(frozen=True, slots=True)
class File:
    """An argument that must be a file."""

    index: int
    path: str
    by_itself: bool = False
    """Whether it is started as it is, without a Python before it."""


@dataclass(frozen=True, slots=True)
class Module:
    """An argument that names a module, installed or beside."""

    index: int
    name: str


Program: TypeAlias = File | Module


def program_of(argv: Sequence[str], launcher: RankLauncher) -> tuple[Program, ...]:
    """The script or module of a template, then every other Python file in it.

    What holds a placeholder is known only when it is filled in, and left out.
    """
    index = _first(argv)
    if index is None:
        return ()
    before, first = argv[:index], argv[index]
    found: list[Program] = []
    by_itself = launcher not in _STARTS_PYTHON or bool(_PROGRAM & set(before))
    if "{" in first:
        pass
    elif not by_itself:
        is_module = bool(before) and before[-1] in _MODULE
        found.append(Module(index, first) if is_module else File(index, first))
    elif "/" in first or first.endswith(".py"):
        found.append(File(index, first, by_itself=True))
    if by_itself:
        found += _of_python(argv, index + 1)
    known = {each.index for each in found}
    found += [
        File(place, text)
        for place, text in enumerate(argv)
        if place > index and place not in known and text.endswith(".py") and _is_plain(text)
    ]
    return tuple(found)


def _first(argv: Sequence[str]) -> int | None:
    """The first argument that is no option; options of a launcher have their values by ``=``."""
    return next((index for index, text in enumerate(argv) if not text.startswith("-")), None)


def _of_python(argv: Sequence[str], start: int) -> Iterator[Program]:
    """The module that a Python in the template is told to run."""
    for index in range(start, len(argv) - 1):
        if argv[index] == "-m" and _is_plain(argv[index + 1]):
            yield Module(index + 1, argv[index + 1])
            return


def _is_plain(text: str) -> bool:
    return "{" not in text and not text.startswith("-")
