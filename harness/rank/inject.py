"""A test set's ``inject``: break a run on purpose, in every rank, before training starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


class InjectError(Exception):
    """The function that a test set's ``inject`` names cannot be found."""


def call_injected(target: str, trainer: Any) -> None:
    """Call ``path/to/file.py:function`` with the built trainer.

    Raises InjectError when the file or the function is not there; what the function raises passes
    through.
    """
    path, _, name = target.rpartition(":")
    file = Path(path)
    if not path or not file.is_file():
        raise InjectError(f"inject = {target!r}: no such file; write path/to/file.py:function")
    spec = importlib.util.spec_from_file_location(f"converge_inject_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise InjectError(f"inject = {target!r}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        found = sorted(key for key, value in vars(module).items() if callable(value))
        raise InjectError(f"inject = {target!r}: no function {name!r}; the file has {found}")
    function(trainer)
