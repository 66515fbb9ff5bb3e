"""Hugging Face's ``trainer_state.json`` as evidence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converge_harness.model import Evidence
from converge_harness.readers.foreign.format import Format
from converge_harness.readers.foreign.names import Columns
from converge_harness.readers.foreign.rows import RowCollector
from converge_harness.readers.foreign.tensorboard import event_files_in
from converge_harness.readers.lines import fail

FILE = "trainer_state.json"
HISTORY = "log_history"


def _state_of(path: Path) -> tuple[Path, ...]:
    """The state file of a folder: its own, else that of its last checkpoint.

    A folder with event files counts as TensorBoard's, unless the state file is directly in it.
    """
    if (path / FILE).is_file():
        return (path / FILE,)
    if event_files_in(path):
        return ()
    states = {
        int(number): state
        for state in path.glob(f"checkpoint-*/{FILE}")
        if (number := state.parent.name.removeprefix("checkpoint-")).isdecimal()
    }
    return (states[max(states)],) if states else ()


FORMAT = Format(
    FILE,
    read=lambda source: read_trainer_state(source.path, source.document, source.columns),
    files_in=_state_of,
    reads_folders=False,
    has_content=lambda source: is_trainer_state(source.document),
)


def is_trainer_state(document: object) -> bool:
    return isinstance(document, dict) and HISTORY in document


def read_trainer_state(path: Path, document: Mapping[str, Any], columns: Columns) -> Evidence:
    """Read the training rows of ``log_history``: those with a loss, without evaluations.

    Raises EvidenceError naming file and entry.
    """
    history = document[HISTORY]
    if not isinstance(history, list):
        fail(f"{path}: {HISTORY}", f"a {type(history).__name__}, not a list")
    rows = RowCollector(str(path), lambda entry: f"{path}: {HISTORY}[{entry}]", columns)
    for number, entry in enumerate(history):
        if not isinstance(entry, dict):
            fail(
                f"{path}: {HISTORY}[{number}]",
                f"a {type(entry).__name__}, not a JSON object",
            )
        rows.add(number, entry)
    # Trainer logs the mean of the steps since it last logged (``_maybe_log_save_evaluate``).
    return rows.evidence(_name(path), grid=("loss",), mean_over=0)


def _name(path: Path) -> str:
    """The folder's name, since all state files have the same name."""
    return path.resolve().parent.name if path.name == FILE else path.stem
