"""``[trainer] seed_checkpoint``: a distributed checkpoint that all sets start from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from harness.errors import Problem
from harness.experiment.paths import find

METADATA = ".metadata"
"""Written last by torch.distributed.checkpoint, so a folder without it was never finished."""
SHARDS = "*.distcp"
EXPECTED = f"a distributed checkpoint is a folder with {METADATA} and {SHARDS} shards"
MAX_SHOWN = 8


def find_seed_checkpoint(
    written: str | None,
    folders: Sequence[Path],
    where: Callable[[str], str],
    problems: list[Problem],
) -> Path | None:
    """The checkpoint's absolute path; None when none is named, or it is none.

    Args:
        written: the path as the experiment file writes it.
        folders: where a relative path is looked up, first match wins.
        where: from a key of ``[trainer]`` to its place, for messages.
        problems: where what is wrong is added.
    """
    if written is None:
        return None
    place = where("seed_checkpoint")
    path = find(written, folders)
    if path is None:
        looked = ", ".join(map(str, folders))
        problems.append(Problem(place, f"there is no folder {written!r}", f"looked in: {looked}"))
        return None
    wrong = _wrong_with(path)
    if wrong:
        problems.append(Problem(place, f"{written!r} {wrong}", EXPECTED))
        return None
    return path.resolve()


def _wrong_with(path: Path) -> str:
    """What keeps a path from being a checkpoint; empty when it is one."""
    if not path.is_dir():
        return "is a file"
    try:
        metadata = path / METADATA
        if not metadata.is_file():
            return f"has no {METADATA}: there is {_content(path)}"
        if not metadata.stat().st_size:
            return f"has an empty {METADATA}: its writing was cut short"
        if not any(path.glob(SHARDS)):
            return f"has no {SHARDS} shard: there is {_content(path)}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return ""


def _content(path: Path) -> str:
    names = sorted(each.name + "/" * each.is_dir() for each in path.iterdir())
    shown = ", ".join(names[:MAX_SHOWN]) or "nothing"
    return f"{shown} and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else shown
