"""What ``python -m converge_harness.rank --check JOB.json …`` prints: one JSON object.

The rank side is ``rank/__main__.py``, the reader ``launch/check.py``; both are of one converge, so
the object has no schema version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

from converge_harness.run_folder.shapes import TEXT, TEXTS, Shape, misfit

PROBLEMS = "problems"


class ConfigProblemDocument(TypedDict):
    """A key or value of a job's config that its trainer refuses."""

    job: str
    """Path of the ``job.json`` that was checked."""
    key: str
    """Dotted; empty if unknown."""
    message: str
    valid: list[str]
    """Valid keys or values, nearest first; empty if they are not known."""


SHAPES: Mapping[str, Shape] = {"job": TEXT, "key": TEXT, "message": TEXT, "valid": TEXTS}


def answer(problems: Sequence[ConfigProblemDocument]) -> str:
    """The line that a rank prints."""
    return json.dumps({PROBLEMS: problems}) + "\n"


def read_answer(text: str | bytes) -> list[ConfigProblemDocument]:
    """The problems in such a line. Raises ValueError for anything else."""
    document: Any = json.loads(text)
    found = document.get(PROBLEMS) if isinstance(document, dict) else None
    if not isinstance(found, list) or not all(map(_is_problem, found)):
        raise ValueError("no list of problems")
    return cast("list[ConfigProblemDocument]", found)


def _is_problem(value: object) -> bool:
    has_all = isinstance(value, dict) and all(value.get(key) is not None for key in SHAPES)
    return has_all and not misfit(cast("dict[str, Any]", value), SHAPES)
