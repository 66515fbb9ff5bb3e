"""The files of a run in several passes, as ``docs/architecture.md`` describes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHECKPOINTS = "checkpoint"
"""In the run folder: the checkpoints that join passes."""


def pass_folders(folder: Path) -> tuple[Path, ...]:
    """The folders of a run's passes so far, in the order of their starts."""
    found = (folder / "passes").glob("[0-9]*")
    return tuple(sorted(found, key=lambda path: int(path.name)))


def pass_files(of_pass: Path) -> tuple[Path, Path]:
    """Where a pass's steps appear while it lives, and where they are once it has ended well."""
    return of_pass / "metrics.jsonl.part", of_pass / "metrics.jsonl"


def last_step(folder: Path) -> int | None:
    """The step that the newest pass was meant to reach and has; None when it has not ended well."""
    passes = pass_folders(folder)
    if not passes:
        return None
    try:
        lines = pass_files(passes[-1])[1].read_bytes().splitlines()
        end: dict[str, Any] = json.loads(lines[-1])
        return int(end["steps"]) if end["kind"] == "end" else None
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def checkpoint_of(folder: Path, step: int) -> Path:
    """The checkpoint of a step, whether it is there or not."""
    return folder / CHECKPOINTS / f"step-{step}"


def has_metadata(checkpoint: Path) -> bool:
    """Whether a checkpoint says that it is whole: torch.distributed.checkpoint writes it last."""
    return (checkpoint / ".metadata").is_file()
