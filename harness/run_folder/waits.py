"""``wait.json``: the steps after which a run's ranks wait for other runs to catch up.

converge writes it before the ranks start. To let them train on after a step, it writes the file
again without that step. A run without the file never waits. ``saves`` has the steps at which ranks
write a checkpoint before they wait; a run that is ended while it waits continues from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from converge_harness.run_folder.job import RankJob
from converge_harness.run_folder.layout import PASSES, WAIT


def wait_file(run_folder: Path) -> Path:
    return run_folder / WAIT


def waits_document(steps: Iterable[int], *, saves: Iterable[int] = ()) -> Mapping[str, Any]:
    """The file's content."""
    return {"after": sorted(steps), "saves": sorted(saves)}


def read_waits(run_folder: Path) -> frozenset[int]:
    """The steps that the file names; none if it is not there. It is replaced as a whole."""
    return frozenset(_read(run_folder)["after"])


def with_saves_before_waits(job: RankJob) -> RankJob:
    """A rank's job, with the steps of ``saves``: there it writes a checkpoint before it waits.

    Call it once, before any rank trains: until then nobody changes the file, so all ranks read the
    same. A run that has left passes continues in passes, also if it no longer waits.
    """
    saves = frozenset(_read(job.run_folder)["saves"])
    waited = bool(saves) or (job.run_folder / PASSES).is_dir()
    return replace(job, saves_after=saves, waited=waited)


def _read(run_folder: Path) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = json.loads(wait_file(run_folder).read_bytes())
    except FileNotFoundError:
        return {"after": (), "saves": ()}
    return found
