"""Where the paths of an experiment file lead: beside it, one folder up, or the current one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path


def expanded(written: str) -> Path:
    """The path with a leading ``~`` or ``~user`` replaced.

    Raises ValueError when there is no such user, or no home folder.
    """
    try:
        return Path(written).expanduser()
    except RuntimeError:
        user = Path(written).parts[0]
        raise ValueError(f"nobody's home folder is known as {user!r}") from None


def find(
    written: str, folders: Sequence[Path], is_right: Callable[[Path], bool] = Path.exists
) -> Path | None:
    """The first of ``folders`` in which the path exists; None when none has it.

    Args:
        written: the path as the experiment file writes it, absolute or not.
        folders: where a relative path is looked up.
        is_right: what it should be, as ``Path.is_file``.
    """
    path = expanded(written)
    return next((each for folder in folders if _is(is_right, each := folder / path)), None)


def find_file(written: str, folders: Sequence[Path]) -> Path | None:
    """The first of ``folders`` in which the path exists as a file; None when none has it."""
    return find(written, folders, Path.is_file)


def _is(is_right: Callable[[Path], bool], path: Path) -> bool:
    try:
        return is_right(path)
    except OSError:  # a name that is too long, a folder that may not be searched
        return False
