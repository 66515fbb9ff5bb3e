"""``[technique.NAME]``: techniques of one's own, named by sets as the built-in ones are.

::

    [technique.fused_norm]
    what = "RMSNorm by our Triton kernel"               # one sentence, for plans and reports
    set = { "override.imports" = ["my_norm.fused"] }    # keys of sets that name it, and/or
    apply = "my_features.py:use_fused_norm"             # called where its parameter says
    in_force = "my_features.py:count_fused_norms"       # called after the first step: 0 is INVALID

The parameter of ``apply`` is named ``config``, ``model``, ``parallel_model`` or ``trainer``. Files
are parsed here and not run: only ranks run them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from converge_harness.errors import Problem
from converge_harness.model import OwnTechnique, Parallelism, Setting, Technique
from converge_harness.toml import FilePath, Table, Where, find_file, is_printable, show, validate
from converge_harness.wording import plural

PLACES = ("config", "model", "parallel_model", "trainer")
"""What the parameter of ``apply`` may be called, which says where it is called."""
BUILT_IN = frozenset(
    {*map(str, Technique), *asdict(Parallelism()), "dp", "ddp", "fsdp", "hsdp", "plain"}
)
"""Names that mean something already, where techniques are named."""


LONGEST_SENTENCE = 300


def _is_sentence(value: str) -> str:
    if not value.strip():
        raise PydanticCustomError("sentence", "is empty: describe the technique in one sentence")
    return is_printable(value)


class _TechniqueTable(Table):
    what: Annotated[str, Field(max_length=LONGEST_SENTENCE), AfterValidator(_is_sentence)]
    overrides: dict[str, Any] = Field(default={}, alias="set")
    apply: FilePath | None = None
    in_force: FilePath | None = None


def read_own_techniques(
    tables: Mapping[str, Any],
    folders: Sequence[Path],
    where: Where,
    problems: list[Problem],
    overrides_of: Callable[[dict[str, Any], Where], dict[str, Setting]],
) -> dict[str, OwnTechnique]:
    """The techniques of a file by name; what is wrong with them is added to ``problems``.

    Args:
        tables: ``[technique]``.
        folders: where relative paths are resolved; the first is the file's own.
        where: from a key in ``[technique]`` to its place.
        problems: where problems are collected.
        overrides_of: a table ``set`` by dotted keys; adds to the same problems.
    """
    found = {}
    for name, table in tables.items():
        if not isinstance(table, dict):  # reported by the file's own table
            continue
        own = _own_technique(name, table, folders, _inside(where, name), problems, overrides_of)
        if own is not None:
            found[name] = own
    return found


def _inside(where: Where, name: str) -> Where:
    return lambda key: where(f"{name}.{key}" if key else name)


def _own_technique(
    name: str,
    table: dict[str, Any],
    folders: Sequence[Path],
    where: Where,
    problems: list[Problem],
    overrides_of: Callable[[dict[str, Any], Where], dict[str, Setting]],
) -> OwnTechnique | None:
    before = len(problems)
    if name in BUILT_IN:
        problems.append(
            Problem(where(""), f"{name!r} is the name of a built-in technique", "give it another")
        )
    elif not (name.isidentifier() and name.isascii()):
        problems.append(
            Problem(where(""), f"{name!r} is not a name of letters, digits and _", "as fused_norm")
        )
    read = validate(_TechniqueTable, table, where, problems)
    if read is None:
        return None
    if not read.overrides and read.apply is None:
        problems.append(
            Problem(
                where(""),
                "has neither set nor apply, so it would change nothing",
                'name the keys that it sets, or apply = "file.py:function"',
            )
        )
    apply, place = _function(read.apply, where("apply"), folders, problems, _place_of)
    in_force, _ = _function(read.in_force, where("in_force"), folders, problems, _takes_trainer)
    overrides = overrides_of(read.overrides, where)
    if len(problems) > before:
        return None
    return OwnTechnique(name, read.what, overrides, apply, place, in_force, str(folders[0]))


def _function(
    written: str | None,
    place: str,
    folders: Sequence[Path],
    problems: list[Problem],
    accept: Callable[[ast.FunctionDef, str, list[Problem]], str | None],
) -> tuple[str | None, str | None]:
    """``file:function`` with an absolute path, and what ``accept`` says of the function."""
    if written is None:
        return None, None
    path = function_path(written, folders, place, problems)
    if path is None:
        return None, None
    name = written.rpartition(":")[2]
    function = _definition(path, name, place, problems)
    return (f"{path}:{name}", accept(function, place, problems)) if function else (None, None)


def function_path(
    written: str, folders: Sequence[Path], place: str, problems: list[Problem]
) -> Path | None:
    """Absolute path of the file in ``path/to/file.py:function``, as ranks start elsewhere."""
    file, _, function = written.rpartition(":")
    if not file or not function.isidentifier():
        problems.append(Problem(place, f"{show(written)} is not written path/to/file.py:function"))
        return None
    path = find_file(file, folders)
    if path is None:
        looked = ", ".join(str(folder) for folder in folders)
        problems.append(Problem(place, f"there is no file {file!r}", f"looked in: {looked}"))
        return None
    return path.resolve()


def _definition(
    path: Path, name: str, place: str, problems: list[Problem]
) -> ast.FunctionDef | None:
    """The function of that name in a file, which is parsed and not run."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except OSError as error:
        problems.append(Problem(place, f"{path} cannot be read: {error.strerror}"))
        return None
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        problems.append(Problem(place, f"{path}{line} is not Python: {said}"))
        return None
    functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
    if name not in functions:
        hint = f"it defines: {', '.join(functions)}" if functions else "write one"
        problems.append(Problem(place, f"{path} defines no function {name!r}", hint))
    return functions.get(name)


def _place_of(function: ast.FunctionDef, place: str, problems: list[Problem]) -> str | None:
    """Where ``apply`` is called: the name of its only parameter without a default."""
    names = _required(function)
    if len(names) == 1 and names[0] in PLACES:
        return names[0]
    has = f"has the {plural(len(names), 'parameter')} {', '.join(names)}"
    problems.append(
        Problem(
            place,
            f"{function.name} {has if names else 'has no parameter'}: the name of its only one "
            "says where it is called",
            f"valid: {', '.join(PLACES)}",
        )
    )
    return None


def _takes_trainer(function: ast.FunctionDef, place: str, problems: list[Problem]) -> None:
    names = _required(function)
    if len(names) != 1:
        problems.append(
            Problem(
                place,
                f"{function.name} is called with the trainer alone, and has {len(names)} "
                "parameters without a default",
                f"def {function.name}(trainer): …",
            )
        )


def _required(function: ast.FunctionDef) -> list[str]:
    """Parameters without a default."""
    arguments = function.args
    positional = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    without = positional[: len(positional) - len(arguments.defaults)]
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return [*without, *(each.arg for each, default in named if default is None)]
