"""What a rank of a dry run prints: one JSON object, of which converge reads the sizes.

The rank side is ``rank/dry_run/run.py``, the reader ``launch/dry_run.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypedDict, cast

from converge_harness.run_folder.documents import SCHEMA, check_schema
from converge_harness.run_folder.shapes import (
    COUNT,
    OBJECT,
    OBJECTS,
    TEXT,
    TEXTS,
    TIME,
    Shape,
    misfit,
)


class ProblemDocument(TypedDict, total=False):
    """A key or value of the job that does not work."""

    key: str
    """Dotted; empty if unknown."""
    message: str
    valid: list[str]


class ParametersDocument(TypedDict):
    """Parameters on the rank."""

    count: int
    of_model: int
    """Of the whole model, all pipeline stages."""
    bytes: int


class BytesDocument(TypedDict, total=False):
    """Memory of one kind on the rank."""

    bytes: int
    how: str
    """Of activations: how they were measured."""


class DryRunDocument(TypedDict, total=False):
    """The object without its schema version. With ``problems`` it has no sizes."""

    rank: int
    problems: list[ProblemDocument]
    seconds: float
    peak_rss_bytes: int
    """The highest resident memory of the rank's process."""
    unsupported: str
    """Why the toolchain has no dry run."""
    world_size: int
    degrees: dict[str, int]
    stages: list[int]
    parameters: ParametersDocument
    gradients: BytesDocument
    optimizer_states: BytesDocument
    activations: BytesDocument
    peak_bytes: int
    float8_modules: int
    compiled_blocks: int
    async_tp: bool
    mixed_precision_param: str
    microbatches: int
    gradient_accumulation_steps: int
    sharding_problems: list[str]
    stand_ins: list[str]
    """Sentences on what was replaced, because this machine does not have it."""


SHAPES: Mapping[str, Shape] = {
    "rank": COUNT,
    "problems": OBJECTS,
    "seconds": TIME,
    "peak_rss_bytes": COUNT,
    "unsupported": TEXT,
    "parameters": OBJECT,
    "parameters.count": COUNT,
    "parameters.of_model": COUNT,
    "parameters.bytes": COUNT,
    "gradients": OBJECT,
    "gradients.bytes": COUNT,
    "optimizer_states": OBJECT,
    "optimizer_states.bytes": COUNT,
    "activations": OBJECT,
    "activations.how": TEXT,
    "peak_bytes": COUNT,
    "sharding_problems": TEXTS,
    "stand_ins": TEXTS,
}
REQUIRED = ("rank", "problems", "seconds", "peak_rss_bytes")


def answer(document: DryRunDocument) -> str:
    """The line that the rank prints."""
    return json.dumps({"schema": SCHEMA, **document}) + "\n"


def read_answer(content: bytes) -> DryRunDocument:
    """What a rank printed.

    Raises ValueError for anything that is not such an object, and if it lacks what is required.
    """
    value = json.loads(content)
    if not isinstance(value, dict):
        raise ValueError(f"is a {type(value).__name__}, not a JSON object")  # noqa: TRY004 (a damaged answer)
    check_schema(value.get("schema"))
    if found := misfit(value, SHAPES):
        raise ValueError(found)
    if missing := [key for key in REQUIRED if value.get(key) is None]:
        raise ValueError(f"lacks {', '.join(missing)}")
    return cast("DryRunDocument", value)
