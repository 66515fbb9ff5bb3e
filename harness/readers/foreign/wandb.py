"""Weights & Biases offline runs (``wandb/offline-run-*/run-*.wandb``) as evidence.

A run file is a LevelDB log (google/leveldb, ``doc/log_format.md``) with a different header: blocks
of 32 KiB, in which fragments have a checksum, a length and a kind; a record is one whole fragment,
or a first, any number of middle ones and a last. wandb's Python package can parse the messages, but
no longer reads the log, since its reader moved out of Python.
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
from converge_harness.readers.lines import NoRowError, decode_json, fail

RUN_FILES = "run-*.wandb"


FORMAT = Format(
    "Weights & Biases offline runs",
    read=lambda source: read_wandb(source.path, source.columns, unfinished=source.unfinished),
    files_in=lambda folder: list(folder.rglob(RUN_FILES)),
    has_name=lambda path: path.suffix == ".wandb",
)


def read_wandb(path: Path, columns: Columns, *, unfinished: bool = False) -> Evidence:
    """Read the history of one run, at the steps of its loss; incomplete without a clean exit.

    ``unfinished``: a record that the end of the file cuts off is left out.

    Raises EvidenceError when wandb is not installed, when the folder has several runs, when the
    file is damaged, or when no key is a known name of the loss.
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
    for number, content in enumerate(records(file, unfinished=unfinished), start=1):
        try:
            record = Record.FromString(content)
        except DecodeError as error:
            fail(f"{file}: record {number}", f"not a record of Weights & Biases: {error}")
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
    """The values of one log call; for columns that are not read, only the name."""
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
        raise EvidenceError(f"{path}: it has {len(files)} runs; give one: {shown}")
    return files[0]


HEADER = struct.Struct("<4sHB")
MAGIC = (b":W&B", 0xBEE1, 0)
BLOCK = 1 << 15
_FRAGMENT = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_AFTER = {None: {_WHOLE, _FIRST}, _FIRST: {_MIDDLE, _LAST}, _MIDDLE: {_MIDDLE, _LAST}}
"""By kind of a fragment (None: the start of a record), the kinds that may follow."""


def records(path: Path, *, unfinished: bool = False) -> Iterator[bytes]:
    """Yield every record's content, in order.

    Raises EvidenceError at a damaged record, and at one that the end of the file cuts off, as in
    the file of a killed run; ``unfinished``: ends before that one.
    """
    content = _content(path, unfinished=unfinished)
    at = HEADER.size
    parts: list[bytes] = []
    before: int | None = None
    number = 1
    while at < len(content):
        left = BLOCK - at % BLOCK
        if left < _FRAGMENT.size:
            at += left  # too short for a fragment: padding
            continue
        fragment = _fragment(content, at)
        if fragment is None:
            break
        checksum, kind, part = fragment
        if zlib.crc32(part, zlib.crc32(bytes([kind]))) != checksum or kind not in _AFTER[before]:
            fail(f"{path}: record {number}", f"damaged at byte {at}")
        parts.append(part)
        at += _FRAGMENT.size + len(part)
        if kind in (_WHOLE, _LAST):
            yield b"".join(parts)
            parts, before = [], None
            number += 1
        else:
            before = kind
    if (parts or at < len(content)) and not unfinished:
        place = f"{path}: record {number}"
        fail(place, "the file ends within it; the run was killed, or is still going")


def _content(path: Path, *, unfinished: bool) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be read: {error.strerror or error}") from error
    if unfinished and content == HEADER.pack(*MAGIC)[: len(content)]:
        raise NoRowError(f"{path}: has no record yet")
    if len(content) < HEADER.size or HEADER.unpack_from(content) != MAGIC:
        raise EvidenceError(f"{path}: is not a run file of Weights & Biases (different header)")
    return content


def _fragment(content: bytes, at: int) -> tuple[int, int, bytes] | None:
    """Checksum, kind and content of the fragment at a byte; None if the file ends within it."""
    start = at + _FRAGMENT.size
    if len(content) < start:
        return None
    checksum, length, kind = _FRAGMENT.unpack_from(content, at)
    part = content[start : start + length]
    return None if len(part) < length else (checksum, kind, part)
