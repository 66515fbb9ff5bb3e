"""A user's own model module, found beside the experiment file and read without importing it.

``[converge] module`` means what torchtitan's ``--module`` means, and the ranks import it. Whether
the config function exists and takes the arguments is read from the source, before any rank starts.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converge_harness.errors import Problem

REGISTRY = "config_registry"
"""The submodule in which torchtitan looks for config functions first."""


@dataclass(frozen=True, slots=True)
class UserModule:
    """A module in one of the user's own folders."""

    folder: Path
    """What the name of the module starts from: a folder of ``sys.path``."""
    file: Path
    """Where the config function is looked for."""


def find_user_module(name: str, folders: Sequence[Path]) -> UserModule | None:
    """The module in the first of the folders that has it; None where it is an installed one."""
    parts = name.split(".")
    if parts[0] == "torchtitan" or not all(part.isidentifier() for part in parts):
        return None
    for folder in folders:
        place = folder.joinpath(*parts)
        for file in (place / f"{REGISTRY}.py", place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                return UserModule(folder, file)
    return None


def config_problems(
    own: UserModule, config: str | None, arguments: Mapping[str, Any], place: str
) -> Iterator[Problem]:
    """What is wrong with a config function and its arguments, by the source of its module.

    A name that is imported or assigned may be anything: the ranks find out.
    """
    try:
        tree = ast.parse(own.file.read_bytes(), filename=str(own.file))
    except SyntaxError as error:
        where = f"{own.file}:{error.lineno}"
        yield Problem(f"{place} converge.module", f"is not Python: {where}: {error.msg}")
        return
    except (OSError, ValueError) as error:
        yield Problem(f"{place} converge.module", f"cannot be read: {own.file}: {error}")
        return
    functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
    if config in functions:
        yield from _argument_problems(functions[config], arguments, place)
    elif _other_names(tree).isdisjoint((config, "*")):
        public = ", ".join(name for name in functions if not name.startswith("_")) or "none"
        said = f"there is no function {config!r} in {own.file}" if config else "is missing"
        yield Problem(f"{place} converge.config", said, f"functions there: {public}")


def _other_names(tree: ast.Module) -> set[str]:
    """Names that a module binds by anything but a function at its top level."""
    names: set[str] = set()
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.alias):
                names.add(node.asname or node.name.partition(".")[0])
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names


def _argument_problems(
    function: ast.FunctionDef, arguments: Mapping[str, Any], place: str
) -> Iterator[Problem]:
    if function.decorator_list:  # which may change what it takes
        return
    signature = function.args
    named = [each.arg for each in (*signature.args, *signature.kwonlyargs)]
    takes = f"{function.name}({ast.unparse(signature)})"
    for name in arguments:
        if name not in named and signature.kwarg is None:
            yield Problem(
                f"{place} converge.arguments.{name}", "is not a parameter of the config", takes
            )
    positional = signature.args[: len(signature.args) - len(signature.defaults)]
    by_name = zip(signature.kwonlyargs, signature.kw_defaults, strict=True)
    needed = [*positional, *(each for each, default in by_name if default is None)]
    for each in needed:
        if each.arg not in arguments:
            yield Problem(f"{place} converge.arguments.{each.arg}", "is missing", takes)
