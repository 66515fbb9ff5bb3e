"""How the script of a scheduler's job ended, from ``ended.json`` of its run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple, cast

from converge_harness.errors import StoreError
from converge_harness.run_folder.ended import REQUIRED, SHAPES, EndedDocument
from converge_harness.run_folder.layout import ENDED
from converge_harness.run_folder.shapes import misfit
from converge_harness.store import upgraded


class ScriptEnd(NamedTuple):
    """The end of the last start of a script."""

    returncode: int
    restart: int
    """How often the scheduler had started it again by then."""
    ran_s: float | None
    """Seconds that it ran; None under Slurm, which says it itself."""


def has_ended(folder: Path) -> bool:
    """Whether a job's script has written ``ended.json``, whatever the scheduler says."""
    return (folder / ENDED).is_file()


def read_script_end(folder: Path) -> ScriptEnd | None:
    """How the script ended; None if it has not written that.

    Raises StoreError for a file that is damaged, newer, or lacks what is required.
    """
    if not has_ended(folder):
        return None
    path = folder / ENDED
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, f"cannot be read as JSON ({error})") from None
    if not isinstance(found, dict) or "schema" not in found:
        raise _damaged(path, "is no JSON object with a schema")
    found = upgraded(path, ENDED, found)
    missing = [key for key in REQUIRED if found.get(key) is None]
    wrong = f"lacks {', '.join(missing)}" if missing else misfit(found, SHAPES)
    if wrong:
        raise _damaged(path, wrong)
    document = cast("EndedDocument", found)
    ran_s = document.get("ran_s")
    seconds = None if ran_s is None else float(ran_s)
    return ScriptEnd(document["returncode"], document["restart"], seconds)


def known_end(folder: Path) -> ScriptEnd | None:
    """The same, but None for such a file, too: it concerns its own job, not all jobs of a plan."""
    try:
        return read_script_end(folder)
    except StoreError:
        return None


def damage_of_end(folder: Path) -> str:
    """Why the file of a script that is over cannot be understood; empty if nothing is wrong."""
    try:
        read_script_end(folder)
    except StoreError as error:
        return str(error)
    return ""


def _damaged(path: Path, wrong: str) -> StoreError:
    return StoreError(
        f"{path}: is damaged: {wrong}; see how the job ended in {path.parent}, then run or submit "
        "the experiment again"
    )
