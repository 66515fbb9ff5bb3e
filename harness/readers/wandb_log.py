"""The records of a Weights & Biases run file, ``run-ID.wandb``.

The file is a LevelDB log (google/leveldb, ``doc/log_format.md``) with a header of its own: blocks
of 32 KiB; in them fragments with a checksum, a length and a kind; a record is one whole fragment,
or a first, middle ones and a last. wandb's Python package reads its messages but, since it moved
its reader out of Python, no longer the log.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from harness.errors import EvidenceError
from harness.readers.lines import fail

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
