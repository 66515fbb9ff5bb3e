"""A curve in any format that other tools write: find out what a path is, and read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.errors import EvidenceError
from harness.model import Evidence
from harness.readers.console import is_console, read_console
from harness.readers.csv_table import is_csv, read_csv
from harness.readers.golden_values import is_golden_values, read_golden_values
from harness.readers.jsonl import read_jsonl
from harness.readers.lines import READABLE, decode_json, json_objects, read_text
from harness.readers.loss_text import is_loss_text, read_loss_text
from harness.readers.mllog import is_mllog, read_mllog
from harness.readers.names import Columns, check_columns
from harness.readers.tensorboard import EVENT_FILES, is_tensorboard, read_tensorboard
from harness.readers.trainer_state import is_trainer_state, read_trainer_state, trainer_state_of
from harness.readers.wandb_run import RUN_FILES, is_wandb, read_wandb


def read_foreign(path: Path, columns: Columns) -> Evidence:
    """A curve that is none of a run folder of ours; ``columns`` as for ``read_curves``.

    Raises EvidenceError when the path is nothing readable, cannot be understood or lacks a mapped
    name.
    """
    check_columns(columns)
    if not path_exists(path):
        raise EvidenceError(f"{path}: does not exist")
    if not (path.is_dir() or path.is_file()):
        raise EvidenceError(
            f"{path}: is a pipe or a device, and a curve is read more than once; "
            "write it to a file, and name that file here"
        )
    state = trainer_state_of(path)
    # An output folder of the Trainer may hold event files too; its own state is nearer.
    if state is not None and (state.parent == path or not is_tensorboard(path)):
        return _read_text(state, columns)
    if is_tensorboard(path):
        return read_tensorboard(path, columns)
    if is_wandb(path):
        return read_wandb(path, columns)
    if path.is_dir():
        raise EvidenceError(f"{path}: holds no run; {READABLE}")
    return _read_text(path, columns)


def file_of_foreign(path: Path) -> Path:
    """The file that ``read_foreign`` reads for a path; the path itself where it reads several."""
    if not path.is_dir():
        return path
    state = trainer_state_of(path)
    if state is not None and (state.parent == path or not is_tensorboard(path)):
        return state
    for pattern in (EVENT_FILES, RUN_FILES):
        files = list(path.rglob(pattern))
        if files:
            return files[0] if len(files) == 1 else path
    return path


def path_exists(path: Path) -> bool:
    """As ``Path.exists``, which raises for a name longer than the file system takes.

    Raises EvidenceError instead.
    """
    try:
        return path.exists()
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_text(path: Path, columns: Columns) -> Evidence:
    """A text file, by what it looks like."""
    if path.suffix in (".csv", ".tsv"):
        return read_csv(path, columns)
    text = read_text(path)
    if not text.strip():
        raise EvidenceError(f"{path}: is empty; {READABLE}")
    if path.suffix in (".jsonl", ".ndjson") or text.lstrip().startswith("{"):
        return _read_json(path, text, columns)
    if path.suffix == ".json":
        raise EvidenceError(f"{path}: is no JSON object; {READABLE}")
    if is_mllog(text):
        return read_mllog(path, text, columns)
    if is_console(text):
        return read_console(path, text)
    if is_loss_text(text):
        return read_loss_text(path, text, columns)
    if is_csv(text, columns):
        return read_csv(path, columns)
    raise EvidenceError(f"{path}: is no curve; {READABLE}")


def _read_json(path: Path, text: str, columns: Columns) -> Evidence:
    """One JSON document, or one per line."""
    document: Any = None
    if path.suffix not in (".jsonl", ".ndjson"):
        try:
            document = decode_json(text)
        except ValueError as error:
            # Extra data is the second line of a JSONL; another error in a document that spans
            # lines is not that of its first line.
            document_meant = path.suffix == ".json" or text.lstrip().split("\n", 1)[0] == "{"
            if document_meant and not str(error).startswith("Extra data"):
                raise EvidenceError(f"{path}: not JSON: {error}") from error
    if is_trainer_state(document):
        return read_trainer_state(path, document, columns)
    if is_golden_values(document):
        return read_golden_values(path, document, columns)
    if document is not None and "\n" in text.strip():
        raise EvidenceError(
            f"{path}: is one JSON object, but neither a trainer_state.json (it has no "
            f"'log_history') nor golden values (no entry has 'values'); {READABLE}"
        )
    _require_foreign(path, text)
    return read_jsonl(path, text, columns)


def _require_foreign(path: Path, text: str) -> None:
    """Raise EvidenceError for a metrics file of ours that lies outside of its run folder.

    Read as anybody's JSONL it would be judged without any audit.
    """
    _, first = next(json_objects(path, text), (0, {}))
    if first.get("kind") == "header" and "identity" in first:
        raise EvidenceError(
            f"{path}: holds the metrics of a run of converge, but {path.parent / 'job.json'} is "
            "missing, so nothing says what the run was meant to be; give its whole run folder"
        )
