"""``wait.json``: the steps after which a run's ranks wait, so that other runs can come as far.

The harness writes it before they start, and again without a step to let them train on after that.
A run without it never waits. ``saves`` are those of the steps after which they write a checkpoint
before they wait, from which the run continues if nobody ever lets it train on.
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


def told_to_wait(job: RankJob) -> RankJob:
    """The job of a rank with the checkpoints that it writes before it waits, if it was told to.

    Call it once, before any rank trains: until then the file stays as it is, so all ranks read the
    same. A run that has left passes continues in passes, also if it does not wait any more.
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
