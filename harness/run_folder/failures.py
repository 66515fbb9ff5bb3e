"""``failures.json`` of a call's logs: the ranks that failed under torchrun.

The format is converge's own: torchrun only prints this, so its agent (``rank/start/agent.py``)
writes down what torch's ``ChildFailedError`` has. The file of a rank's own error, which
``error_file`` names, is torchrun's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict, cast

from converge_harness.run_folder.layout import FAILURES
from converge_harness.run_folder.shapes import COUNT, OBJECTS, TEXT, TIME, Shape, is_integer, misfit


class FailureDocument(TypedDict, total=False):
    """A rank that failed."""

    rank: int
    exitcode: int
    """Negative: the number of the signal that killed it."""
    timestamp: float
    """Seconds since 1970."""
    error_file: str
    """Path of the rank's error file, which exists only if the rank wrote one."""


SHAPES: Mapping[str, Shape] = {
    "rank": COUNT,
    "exitcode": (is_integer, "a whole number"),
    "timestamp": TIME,
    "error_file": TEXT,
}
REQUIRED = ("rank", "exitcode")


def write_failures(path: Path, failures: list[FailureDocument]) -> None:
    path.write_text(json.dumps({"failures": failures}), encoding="utf-8")


def read_failures(logs: Path) -> list[FailureDocument]:
    """The ranks that failed in a call, by the file in its ``logs``.

    Raises OSError without the file, and ValueError for one that is damaged or lacks what is
    required.
    """
    value = json.loads((logs / FAILURES).read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"is a {type(value).__name__}, not a JSON object")  # noqa: TRY004 (a damaged file)
    if found := misfit(value, {"failures": OBJECTS}):
        raise ValueError(found)
    if "failures" not in value:
        raise ValueError("lacks failures")
    for failure in value["failures"]:
        if found := misfit(failure, SHAPES):
            raise ValueError(found)
        if missing := [key for key in REQUIRED if failure.get(key) is None]:
            raise ValueError(f"lacks {', '.join(missing)}")
    return cast("list[FailureDocument]", value["failures"])
