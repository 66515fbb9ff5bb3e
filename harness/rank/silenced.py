"""Methods of a live trainer that do nothing for a while, as its updates do in frozen steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def silenced(*methods: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace methods by stubs; each entry: an object, the method's name, what it returns."""
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in methods]
    for owner, name, answer in methods:
        setattr(owner, name, lambda *_, answer=answer, **__: answer)
    try:
        yield
    finally:
        for owner, name, value in before:
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
