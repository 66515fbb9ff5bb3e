"""Text files line by line, with errors that name the file and the line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from converge_harness.errors import EvidenceError
from converge_harness.model import Column, Integers
from converge_harness.run_folder.documents import unique_keys

LARGEST_STEP = 2**63 - 1
"""Steps are compared as int64."""

Place = Callable[[int], str]
"""Maps a row's number to the beginning of an error message about it."""


def line_of(path: Path) -> Place:
    """Places of the lines of a file, counted from 1: ``curve.csv:12``."""
    return lambda line: f"{path}:{line}"


class NoRowError(EvidenceError):
    """A curve without a row, as one is whose program has not ended a step."""


def fail(where: str, message: str) -> NoReturn:
    """Raise EvidenceError for one place in a file."""
    raise EvidenceError(f"{where}: {message}")


def read_text(path: Path, *, hint: str = "", whole_lines: bool = False) -> str:
    """A UTF-8 file as text, with or without byte order mark.

    ``whole_lines``: without a last line that does not end in a newline. Raises EvidenceError, with
    the hint if the file is not text.
    """
    try:
        content = path.read_bytes()
        if whole_lines:
            content = content[: content.rfind(b"\n") + 1]
        return content.decode("utf-8-sig")
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise EvidenceError(
            f"{path}: is not UTF-8 text (byte {error.start}){hint and f'; {hint}'}"
        ) from error


_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)


def decode_json(text: str) -> Any:
    """A JSON value, NaN and Infinity allowed; raises ValueError, for a repeated key too."""
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def json_objects(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and JSON object of every line that is not blank; raises EvidenceError."""
    place = line_of(path)
    # Not splitlines: it also splits at characters that JSON strings may contain, such as U+2028.
    for line, content in enumerate(text.split("\n"), start=1):
        if not content or content.isspace():
            continue
        try:
            value = decode_json(content)
        except ValueError as error:
            fail(place(line), f"not JSON: {error}")
        if not isinstance(value, dict):
            fail(place(line), f"a {type(value).__name__}, not a JSON object")
        yield line, value


def number_at(place: Place, row: int, name: str, value: object) -> float | None:
    """A cell or JSON value as a number; None for None and empty text; raises EvidenceError.

    Non-finite numbers may have any spelling that ``float`` reads: ``nan``, ``inf``, ``-Infinity``.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        fail(place(row), f"{name} is {value!r}, which is not a number")
    if isinstance(value, str) and "_" in value:  # float accepts 1_000, but no tool writes it
        fail(place(row), f"{name} is {value!r}, which is not a number")
    try:
        return float(value)
    except (ValueError, OverflowError):
        fail(place(row), f"{name} is {value!r}, which is not a number{_with_comma(value)}")


def _with_comma(value: object) -> str:
    """Advice for what is a number but for its commas."""
    if not isinstance(value, str) or not re.fullmatch(r"\s*[-+]?[\d.]+,[\d,.]*\d\S*\s*", value):
        return ""
    return ": write decimal points, not commas"


def numbers(place: Place, rows: Sequence[int], name: str, values: Sequence[object]) -> Column:
    """``number_at`` of every value, one per row."""
    kinds = set(map(type, values))
    try:
        if kinds <= {float, int, type(None)}:
            return Column.of(values)  # type: ignore[arg-type] # types were just checked
        if kinds == {str} and "_" not in "".join(values):  # type: ignore[arg-type]
            return Column.of(np.fromiter(map(float, values), np.float64, len(values)))  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        pass  # a missing value or not a number: distinguished below
    return Column.of(
        number_at(place, row, name, value) for row, value in zip(rows, values, strict=True)
    )


def step_number(place: Place, row: int, value: object) -> int:
    """A step: a whole number from 0 to ``LARGEST_STEP``; raises EvidenceError."""
    step = number_at(place, row, "step", value)
    if (
        step is None
        or not math.isfinite(step)
        or step < 0
        or step != int(step)
        or step > LARGEST_STEP
    ):
        fail(place(row), f"step is {value!r}, which is not a step number")
    return int(step)


def step_numbers(place: Place, rows: Sequence[int], values: Sequence[object]) -> Integers:
    """``step_number`` of every value, one per row."""
    if set(map(type, values)) <= {int}:
        try:
            steps = np.array(values, dtype=np.int64)
        except OverflowError:
            pass  # reported below
        else:
            if not (steps < 0).any():
                return steps
    return np.array(
        [step_number(place, row, value) for row, value in zip(rows, values, strict=True)],
        dtype=np.int64,
    )
