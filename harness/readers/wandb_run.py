"""Weights & Biases offline runs (``wandb/offline-run-*/run-*.wandb``) as evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.errors import EvidenceError, installing
from harness.model import Evidence
from harness.readers.lines import decode_json, fail
from harness.readers.names import Columns, candidates
from harness.readers.rows import Rows
from harness.readers.wandb_log import records

RUN_FILES = "run-*.wandb"


def is_wandb(path: Path) -> bool:
    """Whether a folder holds run files somewhere below, or a file is one."""
    return any(path.rglob(RUN_FILES)) if path.is_dir() else path.suffix == ".wandb"


def read_wandb(path: Path, columns: Columns) -> Evidence:
    """The history of one run, at the steps of its loss; incomplete without a clean exit.

    Raises EvidenceError when wandb is not installed, when several runs are below the folder, when
    the file is damaged, or when no key is a known name of the loss.
    """
    try:
        from google.protobuf.message import DecodeError  # noqa: PLC0415 # comes with wandb
        from wandb.proto.wandb_internal_pb2 import (  # noqa: PLC0415
            Record,  # imported on use: the light part works without it
        )
    except ImportError as error:
        raise EvidenceError(
            f"{path}: reading runs of Weights & Biases needs wandb: {installing('wandb')}"
        ) from error
    file = _one_run(path)
    rows = Rows(str(path), lambda number: f"{file}: record {number}", columns)
    wanted = candidates(columns)
    exit_code: int | None = None
    for number, content in enumerate(records(file), start=1):
        try:
            record = Record.FromString(content)
        except DecodeError as error:
            fail(f"{file}: record {number}", f"no record of Weights & Biases: {error}")
        if record.HasField("history"):
            rows.add(number, _values(f"{file}: record {number}", record.history, wanted))
        elif record.HasField("exit"):
            exit_code = record.exit.exit_code
    return rows.evidence(
        file.stem if path.is_file() else path.name,
        grid=("loss",),
        source=str(path),
        complete=exit_code == 0,
    )


def _values(where: str, history: Any, wanted: frozenset[str]) -> dict[str, Any]:
    """What was logged at once; what is not wanted keeps its name only (it may be a table)."""
    values: dict[str, Any] = {}
    for item in history.item:
        name = item.key or ".".join(item.nested_key)
        try:
            values[name] = decode_json(item.value_json) if name in wanted else None
        except ValueError as error:
            fail(where, f"{name} is not JSON: {error}")
    return values


def _one_run(path: Path) -> Path:
    """The file of the only run at or below a path."""
    if path.is_file():
        return path
    files = sorted(path.rglob(RUN_FILES))
    if len(files) > 1:
        shown = ", ".join(str(file.parent) for file in files[:4])
        raise EvidenceError(f"{path}: {len(files)} runs are below it; give one: {shown}")
    return files[0]
