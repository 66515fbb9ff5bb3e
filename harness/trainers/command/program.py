"""The files of a command trainer: its Python, and the files in its template.

Which arguments are the program, a file or a module, is decided by the template alone.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, TypeGuard

from converge_harness.errors import Problem
from converge_harness.model import SetSpec
from converge_harness.toml import PythonTable, Where, find_file
from converge_harness.trainers.command.settings import (
    CONFIG,
    Command,
    RankLauncher,
    TemplateError,
    fill,
    listed_key,
    placeholders,
)
from converge_harness.trainers.table import environment_of, python_at

_MODULE = frozenset({"-m", "--module", "--module_mode"})
"""Options after which torchrun, composer, deepspeed and Python expect a module."""
_PROGRAM = frozenset({"--no-python", "--no_python", "-c", "--command_mode"})
"""Options after which torchrun, deepspeed and composer expect an executable."""
_STARTS_PYTHON = frozenset({RankLauncher.TORCHRUN, RankLauncher.COMPOSER, RankLauncher.DEEPSPEED})


@dataclass(frozen=True, slots=True)
class File:
    """An argument that must be a file."""

    index: int
    path: str
    by_itself: bool = False
    """Whether it is started directly, without Python."""


@dataclass(frozen=True, slots=True)
class Module:
    """An argument that names a module, installed or in the working directory."""

    index: int
    name: str


Program: TypeAlias = File | Module


def program_of(argv: Sequence[str], launcher: RankLauncher) -> tuple[Program, ...]:
    """The script or module of a template, then every other Python file in it.

    Arguments with placeholders are left out, since they are not known yet.
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
    """The first argument that is not an option; a launcher's options have values by ``=``."""
    return next((index for index, text in enumerate(argv) if not text.startswith("-")), None)


def _of_python(argv: Sequence[str], start: int) -> Iterator[Program]:
    """The module that a Python in the template runs."""
    for index in range(start, len(argv) - 1):
        if argv[index] == "-m" and _is_plain(argv[index + 1]):
            yield Module(index + 1, argv[index + 1])
            return


def _is_plain(text: str) -> bool:
    return "{" not in text and not text.startswith("-")


_STARTED = re.compile(r"python[\d.]*|torchrun|composer|deepspeed|mpirun|mpiexec|srun")
"""What people write in front of their script; a template must not contain it."""


@dataclass(frozen=True, slots=True)
class ProgramFiles:
    """The program's working directory, and those of its files that exist."""

    folder: Path
    sources: tuple[Path, ...]


def interpreter_of(
    toolchain: str | PythonTable | None,
    written: str | None,
    where: Where,
    folders: Sequence[Path],
    problems: list[Problem],
) -> str:
    """The toolchain's name, or the absolute path of the Python that trains."""
    if toolchain is not None:
        if written is not None:
            problems.append(
                Problem(where("python"), "and toolchain are two environments", "leave one out")
            )
        return environment_of(toolchain, where, folders, problems)
    if written is None:
        default = shutil.which("python") or shutil.which("python3")
        if default is None:
            problems.append(
                Problem(where("python"), "is missing: there is no python on PATH", "or a toolchain")
            )
        return str(Path(default or "python").absolute())
    return python_at(written, where("python"), folders, problems)


def program_files(
    argv: Sequence[str],
    launcher: RankLauncher,
    files: Sequence[str],
    where: Where,
    folders: Sequence[Path],
    problems: list[Problem],
) -> ProgramFiles:
    """The folder in which the program's first file is found, and all known files."""
    written = program_of(argv, launcher)
    folder = _folder_of(written, folders)
    problems += _missing_files(written, folder, where, folders, launcher)
    sources = [folder / each.path for each in written if isinstance(each, File)]
    modules = (_module_file(each, folder) for each in written)
    sources += [folder / file for file in modules if file is not None]
    for index, text in enumerate(files):
        found = find_file(text, (folder, *folders))
        if found is None:
            looked = ", ".join(map(str, folders))
            problems.append(
                Problem(where(f"files[{index}]"), f"there is no file {text!r}", f"in {looked}")
            )
        else:
            sources.append(found)
    there = (each.absolute() for each in sources if each.is_file())
    return ProgramFiles(folder.absolute(), tuple(dict.fromkeys(there)))


def with_files_of(command: Command, spec: SetSpec) -> Command:
    """The command of one set, with the files that its arguments name among its sources.

    Values of ``{config.KEY}`` may be different files in different sets. An argument may be
    ``--option=PATH``; environment variables are searched, too. These files come first, whether they
    are listed as well or not: the order counts to the identity, and a written pair lists none of
    them.
    """
    templates = (*command.argv, *command.environment.values())
    texts = (text for template in templates for text in texts_of(template, spec))
    paths = (command.folder / path for text in texts for path in paths_in(text))
    found = (path for path in paths if _is_file(path))
    return replace(command, sources=tuple(dict.fromkeys((*found, *command.sources))))


def paths_in(text: str) -> tuple[str, ...]:
    """What of an argument may be a path."""
    return tuple(path for path in (text, text.partition("=")[2]) if path)


def texts_of(template: str, spec: SetSpec) -> tuple[str, ...]:
    """A template filled from the train config's texts; nothing if it needs anything else."""
    try:
        names = placeholders(template)
    except TemplateError:  # which is reported elsewhere
        return ()
    values = {name: spec.setting(name.removeprefix(CONFIG)) for name in names}
    if (key := listed_key(template)) is not None:
        listed = values[CONFIG + key]
        return tuple(each for each in listed if isinstance(each, str)) if is_list(listed) else ()
    if not all(name.startswith(CONFIG) and isinstance(values[name], str) for name in names):
        return ()
    return (fill(template, lambda name: str(values[name])),)


def is_list(value: object) -> TypeGuard[list[object]]:
    """Whether a value of the train config can be several arguments."""
    return isinstance(value, list) and all(isinstance(each, str | int | float) for each in value)


def _folder_of(written: Sequence[Program], folders: Sequence[Path]) -> Path:
    """The first folder that has the program's first file or module, else the experiment's."""
    for each in written:
        match each:
            case File(path=path):
                found = [folder for folder in folders if (folder / path).is_file()]
            case Module():
                found = [folder for folder in folders if _module_file(each, folder)]
        if found:
            return found[0]
    return folders[0]


def _missing_files(
    written: Sequence[Program],
    folder: Path,
    where: Where,
    folders: Sequence[Path],
    launcher: RankLauncher,
) -> Iterator[Problem]:
    for each in written:
        if isinstance(each, File) and not (folder / each.path).is_file():
            first = each is written[0]
            looked = ", ".join(map(str, folders if first else (folder,)))
            yield Problem(
                where(f"command[{each.index}]"),
                f"there is no file {each.path!r}",
                _left_out(each, launcher) or f"looked in: {looked}",
            )
        elif isinstance(each, File) and each.by_itself and not _starts(each.path, folder):
            yield Problem(
                where(f"command[{each.index}]"),
                f"{each.path!r} is not executable by itself",
                f'as ["{{python}}", "{each.path}", …]',
            )


def _left_out(written: File, launcher: RankLauncher) -> str:
    """A hint if the template begins with the launcher of the program; else empty."""
    name = written.path
    if written.by_itself or _STARTED.fullmatch(name) is None:
        return ""
    other = RankLauncher.MPIRUN if name == "mpiexec" else name
    if other in list(RankLauncher) and other != launcher:
        return f'launcher = "{other}" starts it: name it, and leave {name} out here'
    return f"the launcher starts {name} itself: leave it out"


def _starts(path: str, folder: Path) -> bool:
    """Whether a file can be started: without a slash it would be searched on PATH."""
    return "/" in path and os.access(folder / path, os.X_OK)


def _module_file(each: Program, folder: Path) -> str | None:
    """The file of a local module, relative to the folder; None for an installed one."""
    if not isinstance(each, Module):
        return None
    stem = each.name.replace(".", "/")
    return next(
        (file for file in (f"{stem}.py", f"{stem}/__main__.py") if (folder / file).is_file()), None
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # an argument that cannot be a path
        return False
