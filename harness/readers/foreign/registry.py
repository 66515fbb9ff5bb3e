"""The formats of curves that other tools write: finds the format of a path, and reads it.

To add a reader, add a module with a ``FORMAT`` to this package, and a line to ``FORMATS``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from converge_harness.errors import EvidenceError
from converge_harness.model import Evidence
from converge_harness.readers.foreign import (
    console,
    csv_table,
    golden_values,
    jsonl,
    loss_text,
    megatron_console,
    mllog,
    tensorboard,
    trainer_state,
    wandb,
)
from converge_harness.readers.foreign.format import Format, Source
from converge_harness.readers.foreign.names import Columns, check_columns
from converge_harness.readers.lines import NoRowError

FORMATS: tuple[Format, ...] = (
    # An output folder of the Trainer may have event files too; prefer its own state.
    trainer_state.FORMAT,
    tensorboard.FORMAT,
    wandb.FORMAT,
    golden_values.FORMAT,
    jsonl.FORMAT,
    mllog.FORMAT,
    console.FORMAT,
    megatron_console.FORMAT,
    loss_text.FORMAT,
    csv_table.FORMAT,
)
"""The formats that are recognised most reliably come first."""

_NAMES = tuple(each.name for each in FORMATS)
_ANY_OTHER = "write any other as CSV with the header step,loss,grad_norm"
READABLE = f"readable are run folders, {', '.join(_NAMES[:-1])} and {_NAMES[-1]}"


def read_foreign(path: Path, columns: Columns, *, unfinished: bool = False) -> Evidence:
    """Read a curve outside of converge's run folders; ``columns`` as for ``read_curves``.

    ``unfinished`` as for ``Source``.

    Raises EvidenceError when the path is not readable, cannot be understood or lacks a mapped name.
    """
    check_columns(columns)
    if not path_exists(path):
        raise EvidenceError(f"{path}: does not exist")
    if not (path.is_dir() or path.is_file()):
        raise EvidenceError(
            f"{path}: is a pipe or a device, but a curve is read more than once; "
            "write it to a file, and give that file"
        )
    if not path.is_dir():
        return _read_file(path, columns, unfinished=unfinished)
    for each in FORMATS:
        files = each.files_in(path)
        if files and each.reads_folders:
            return each.read(Source(path, columns, READABLE, unfinished=unfinished))
        if files:
            read = _read_file(files[0], columns, unfinished=unfinished)
            return replace(read, name=path.resolve().name)
    raise EvidenceError(f"{path}: has no run; {READABLE}")


def read_unfinished(path: Path, columns: Columns) -> Evidence:
    """The same of a curve whose program still writes it, or was killed while it did.

    The last line of a text counts only if it has its end: half of a number would be another one. A
    curve that does not exist yet, or has no row, has no step.

    Raises EvidenceError as ``read_foreign`` does.
    """
    try:
        if path_exists(path):
            return read_foreign(path, columns, unfinished=True)
    except NoRowError:
        pass
    return Evidence(name="", source=str(path), steps=np.zeros(0, dtype=np.int64), signals={})


def _read_file(path: Path, columns: Columns, *, unfinished: bool) -> Evidence:
    """Read a file, recognised by its name if that is enough, else by its content."""
    source = Source(path, columns, READABLE, unfinished=unfinished)
    named = next((each for each in FORMATS if each.has_name(path)), None)
    found = named or next((each for each in FORMATS if each.has_content(source)), None)
    if found is None:
        raise EvidenceError(f"{path}: is not a curve; {READABLE}; {_ANY_OTHER}")
    return found.read(source)


def file_of_foreign(path: Path) -> Path:
    """The file that ``read_foreign`` reads for a path; the path itself if it reads several."""
    if not path.is_dir():
        return path
    files = next((files for each in FORMATS if (files := each.files_in(path))), ())
    return files[0] if len(files) == 1 else path


def path_exists(path: Path) -> bool:
    """As ``Path.exists``, which raises for a name longer than the file system takes.

    Raises EvidenceError instead.
    """
    try:
        return path.exists()
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be read: {error.strerror or error}") from error
