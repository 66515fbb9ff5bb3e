"""``baseline`` at the top of an experiment file: a golden that stands for the control."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.errors import Problem
from harness.experiment.paths import expanded, find
from harness.experiment.sets import Where
from harness.model import GOLDENS


def baseline_of(written: str | None, folders: tuple[Path, ...]) -> Path | None:
    """The golden's folder: ``baselines/NAME``, else the path, be it there or not.

    ``folders`` are those in which relative paths are looked up.
    """
    if written is None:
        return None
    named = find(f"{GOLDENS}/{written}", folders, Path.is_dir) if "/" not in written else None
    found = named or find(written, folders, Path.is_dir)
    if found is not None:
        return found
    return folders[0] / (expanded(written) if "/" in written else Path(GOLDENS) / written)


def baseline_problems(data: dict[str, Any], where: Where, problems: list[Problem]) -> None:
    """What a file says beside ``baseline`` that would have no meaning, or two."""
    if "baseline" not in data:
        if "baseline_across" in data:
            problems.append(
                Problem(where("baseline_across"), "says nothing without a baseline", "leave it out")
            )
        return
    reasons = {
        "calibration": "the golden brings what repeats of it taught",
        "controls": "a golden stands for the one control of a file",
        "anchor": "the control is not run, so nothing challenges it",
    }
    problems += [
        Problem(
            where(key), f"cannot be there with a baseline: {why}", f"leave out {key} or baseline"
        )
        for key, why in reasons.items()
        if key in data
    ]
