"""Weights & Biases offline runs (``wandb/offline-run-*/run-*.wandb``) as evidence.

A run file is a LevelDB log (google/leveldb, ``doc/log_format.md``) with a header of its own: blocks
of 32 KiB; in them fragments with a checksum, a length and a kind; a record is one whole fragment,
or a first, middle ones and a last. wandb's Python package reads its messages but, since it moved
its reader out of Python, no longer the log.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from converge_harness.errors import EvidenceError, installing
from converge_harness.model import Evidence
from converge_harness.readers.foreign.format import Format
from converge_harness.readers.foreign.names import Columns, candidates
from converge_harness.readers.foreign.rows import RowCollector
from converge_harness.readers.lines import decode_json, fail

RUN_FILES = "run-*.wandb"


FORMAT = Format(
    "Weights & Biases offline runs",
    read=lambda source: read_wandb(source.path, source.columns),
    files_in=lambda folder: list(folder.rglob(RUN_FILES)),
    has_name=lambda path: path.suffix == ".wandb",
)


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
    rows = RowCollector(str(path), lambda number: f"{file}: record {number}", columns)
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


HEADER = struct.Struct("<4sHB")
MAGIC = (b":W&B", 0xBEE1, 0)
BLOCK = 1 << 15
_FRAGMENT = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_AFTER = {None: {_WHOLE, _FIRST}, _FIRST: {_MIDDLE, _LAST}, _MIDDLE: {_MIDDLE, _LAST}}
"""Kind of the fragment before, None at the start of a record, to those that may follow."""


def records(path: Path) -> Iterator[bytes]:
    """Every record's content, in order.

    A file that ends within a record, as that of a killed run may, raises EvidenceError there, as
    a damaged one does.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(content) < HEADER.size or HEADER.unpack_from(content) != MAGIC:
        raise EvidenceError(f"{path}: is no run file of Weights & Biases (its header is another)")
    at = HEADER.size
    parts: list[bytes] = []
    before: int | None = None
    number = 1
    while at < len(content):
        left = BLOCK - at % BLOCK
        if left < _FRAGMENT.size:
            at += left  # too short for a fragment: padding
            continue
        place = f"{path}: record {number}"
        if len(content) - at < _FRAGMENT.size:
            fail(place, "the file ends within it; the run was killed, or is still going")
        checksum, length, kind = _FRAGMENT.unpack_from(content, at)
        part = content[at + _FRAGMENT.size : at + _FRAGMENT.size + length]
        if len(part) < length:
            fail(place, "the file ends within it; the run was killed, or is still going")
        if zlib.crc32(part, zlib.crc32(bytes([kind]))) != checksum or kind not in _AFTER[before]:
            fail(place, f"damaged at byte {at}")
        parts.append(part)
        at += _FRAGMENT.size + length
        if kind in (_WHOLE, _LAST):
            yield b"".join(parts)
            parts, before = [], None
            number += 1
        else:
            before = kind
    if parts:
        fail(f"{path}: record {number}", "the file ends within it; the run was killed")
