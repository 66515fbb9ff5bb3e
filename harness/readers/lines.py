"""Text files line by line, with errors that name the file and the line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from harness.errors import EvidenceError

LARGEST_STEP = 2**63 - 1
"""Steps are compared as int64."""


def fail(path: Path, line: int, message: str) -> NoReturn:
    """Raise EvidenceError for a line (counted from 1) of a file."""
    raise EvidenceError(f"{path}:{line}: {message}")


def read_text(path: Path) -> str:
    """A UTF-8 file as text, with or without byte order mark; raises EvidenceError."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise EvidenceError(
            f"{path}: is not text in UTF-8 (byte {error.start}); readable are run folders, "
            "TensorBoard folders, JSONL, CSV and torchtitan's console logs"
        ) from error


def json_objects(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and JSON object of every line that is not blank; raises EvidenceError."""
    # Not splitlines: it also splits at characters that JSON strings may hold, such as U+2028.
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:
            fail(path, line, f"not JSON: {error}")
        if not isinstance(value, dict):
            fail(path, line, f"a {type(value).__name__}, where a JSON object should be")
        yield line, value


def number(path: Path, line: int, name: str, value: object) -> float | None:
    """A cell or JSON value as a number; None and empty text are None; raises EvidenceError.

    Text may spell non-finite numbers in any way that ``float`` reads: ``nan``, ``inf``,
    ``-Infinity``.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        fail(path, line, f"{name} is {value!r}, which is no number")
    try:
        return float(value)
    except (ValueError, OverflowError):
        fail(path, line, f"{name} is {value!r}, which is no number")


def step_number(path: Path, line: int, value: object) -> int:
    """A step: a whole number from 0 to ``LARGEST_STEP``; raises EvidenceError."""
    step = number(path, line, "step", value)
    if (
        step is None
        or not math.isfinite(step)
        or step < 0
        or step != int(step)
        or step > LARGEST_STEP
    ):
        fail(path, line, f"step is {value!r}, which is no step number")
    return int(step)
