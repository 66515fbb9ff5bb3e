"""A test set's ``inject``: breaks a run on purpose, in every rank, before training starts."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from converge_harness.rank.settings import KeyProblem


class InjectError(Exception):
    """The function that a test set's ``inject`` names cannot be found."""


def call_injected(target: str, trainer: Any) -> str:
    """Call ``path/to/file.py:function`` with the built trainer; return what was called.

    The file may import modules from its own folder, unless an installed one has the same name.

    The result names the loaded file and the function found in it. Raises InjectError when the file
    or the function does not exist; exceptions of the function pass through.
    """
    file, name = _parts(target)
    try:
        module = load_module(file)
    except InjectError as error:
        raise InjectError(f"inject = {target!r}: {error}") from None
    function = getattr(module, name, None)
    if not callable(function):
        found = sorted(key for key, value in vars(module).items() if callable(value))
        raise InjectError(f"inject = {target!r}: no function {name!r}; the file has {found}")
    function(trainer)
    return f"{module.__file__}:{name}"


def load_module(file: Path) -> ModuleType:
    """Import one of the user's files as a new module.

    Raises InjectError for a file that is not Python; what its code raises passes through.
    """
    spec = importlib.util.spec_from_file_location(f"converge_inject_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise InjectError("not a Python file")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inject_problems(target: str | None) -> list[KeyProblem]:
    """Why ``inject`` cannot be called, found by parsing the file without running it."""
    if target is None:
        return []
    try:
        file, name = _parts(target)
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (InjectError, OSError, SyntaxError, ValueError) as error:
        return [KeyProblem("inject", str(error))]
    bound, functions = _module_names(tree)
    if name in bound or "*" in bound:
        return []
    return [KeyProblem("inject", f"{file} has no function {name!r}", tuple(sorted(functions)))]


def _parts(target: str) -> tuple[Path, str]:
    path, _, name = target.rpartition(":")
    file = Path(path)
    if not path or not file.is_file():
        raise InjectError(f"inject = {target!r}: no such file; write path/to/file.py:function")
    return file, name


def _module_names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """All names that a module binds (including imports and assignments), and its functions."""
    bound: set[str] = set()
    functions: set[str] = set()
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            functions.add(statement.name)
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                bound.add(node.name)
            elif isinstance(node, ast.alias):
                bound.add(node.asname or node.name.partition(".")[0])
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.add(node.id)
    return bound | functions, functions
