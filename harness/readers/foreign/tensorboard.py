"""TensorBoard event folders as evidence. TensorBoard stores float32.

Many records are decoded at once. Almost every one is an event with one scalar, as PyTorch's
SummaryWriter writes it: time, step, and a summary of one tag and one float32. Records of one length
have the same keys at the same bytes, so numpy finds them and reads their numbers as columns.
protobuf decodes all others.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from converge_harness.errors import EvidenceError, installing
from converge_harness.model import Column, Evidence, Flags
from converge_harness.readers.foreign.crc32c import masked_crc32c
from converge_harness.readers.foreign.format import Format
from converge_harness.readers.foreign.names import Columns, find_signals
from converge_harness.readers.points import Points, last_values

EVENT_FILES = "events.out.tfevents*"
_LENGTH = struct.Struct("<Q")
_FLOAT32 = 1
"""``DT_FLOAT`` of TensorFlow's types.proto."""
_CHECKSUM = 4
"""Bytes; a record is its length, the length's checksum, the content, the content's checksum."""


def event_files_in(folder: Path) -> list[Path]:
    """All event files below a folder."""
    return list(folder.rglob(EVENT_FILES))


FORMAT = Format(
    "TensorBoard folders",
    read=lambda source: read_tensorboard(source.path, source.columns),
    files_in=event_files_in,
    has_name=lambda path: path.match(EVENT_FILES),
)


def read_tensorboard(path: Path, columns: Columns) -> Evidence:
    """The scalars of one run, at the steps of its loss; incomplete if the last file is cut.

    Raises EvidenceError when tensorboard is not installed, when the folder has several runs, when a
    file is damaged, or when no tag is a known name of the loss.
    """
    source = _one_run(path)
    files = [source] if source.is_file() else sorted(source.glob(EVENT_FILES))
    tags: dict[str, list[Scalars]] = {}
    whole = True
    for file in files:
        whole = _read(path, file, tags)
    found = find_signals(str(path), tags, columns)
    points: dict[str, Points] = {}
    for signal, tag in found.items():
        scalars = _joined(tags[tag])
        points[signal] = Points(scalars.steps, Column.of(scalars.values))
        if signal == "loss":
            times = scalars.wall_times
            points["seconds"] = Points(scalars.steps, Column.of(times - times[0]))
    return last_values(points, grid=("loss",)).evidence(
        path.stem if path.is_file() else path.name, source=str(path), complete=whole
    )


def _one_run(path: Path) -> Path:
    """The folder (or file) of the only run at or below a path."""
    if path.is_file():
        return path
    folders = sorted({file.parent for file in path.rglob(EVENT_FILES)})
    if len(folders) > 1:
        shown = ", ".join(str(folder) for folder in folders[:4])
        raise EvidenceError(f"{path}: it has {len(folders)} runs; give one: {shown}")
    return folders[0]


def _read(path: Path, file: Path, tags: dict[str, list[Scalars]]) -> bool:
    """Add the scalars of a file; return whether it ends after a record (a killed run may not).

    Records are split, checked and mostly decoded here, all at once: TensorBoard's own loader does
    it one by one, and computes checksums byte by byte in Python.
    """
    parse = _parser(path)
    try:
        return _add(file, file.read_bytes(), parse, tags)
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise EvidenceError(f"{file}: cannot be read: {said or error}") from error


def _add(
    file: Path, content: bytes, parse: Callable[[bytes], Any], tags: dict[str, list[Scalars]]
) -> bool:
    starts, ends, whole = _records(content)
    data = np.frombuffer(content, np.uint8)
    _require_intact(file, data, starts, ends)
    if not whole:
        _require_cut(file, data, int(ends[-1]) + _CHECKSUM if ends.size else 0)
    made: dict[str, list[Scalars]] = {}
    others = np.ones(len(starts), np.bool_)
    for name, scalars in plain_scalars(data, starts, ends - starts):
        made.setdefault(name.decode(), []).append(scalars)
        others[scalars.records] = False
    by_one: dict[str, _Slowly] = {}
    for record in np.flatnonzero(others).tolist():
        event = parse(content[starts[record] : ends[record]])
        for value in event.summary.value:
            number = value.simple_value if value.HasField("simple_value") else _scalar(value)
            if number is not None:
                by_one.setdefault(value.tag, _Slowly()).add(record, event, number)
    for tag, found in by_one.items():
        made.setdefault(tag, []).append(found.scalars())
    # Tags in the order of their appearance, points in the order of their records.
    for tag, parts in sorted(made.items(), key=lambda each: min(one.records[0] for one in each[1])):
        tags.setdefault(tag, []).append(_joined(parts).in_order())
    return whole


class _Slowly:
    """Points of one tag, added one by one."""

    def __init__(self) -> None:
        self._records, self._steps = array("q"), array("q")
        self._values, self._times = array("d"), array("d")

    def add(self, record: int, event: Any, number: float) -> None:
        self._records.append(record)
        self._steps.append(event.step)
        self._values.append(number)
        self._times.append(event.wall_time)

    def scalars(self) -> Scalars:
        counts = np.array(self._records), np.array(self._steps)
        return Scalars(*counts, np.array(self._values), np.array(self._times))


def _joined(parts: list[Scalars]) -> Scalars:
    records, steps, values, times = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Scalars(records, steps, values, times)


def _parser(path: Path) -> Callable[[bytes], Any]:
    """The function that parses a record's content as an event."""
    try:
        from google.protobuf.message import DecodeError  # noqa: PLC0415 # imported on use
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 # imported on use
    except ImportError as error:
        raise EvidenceError(
            f"{path}: reading TensorBoard files needs tensorboard: {installing('tensorboard')}"
        ) from error

    def parse(content: bytes) -> Any:
        try:
            return Event.FromString(content)
        except DecodeError as error:
            raise ValueError(f"a record is not an event: {error}") from error

    return parse


def _scalar(value: Any) -> float | None:
    """A number stored as a tensor, as newer writers do; None for anything else."""
    if not value.HasField("tensor") or value.tensor.tensor_shape.dim:
        return None
    if value.tensor.dtype == _FLOAT32 and len(value.tensor.float_val) == 1:
        return float(value.tensor.float_val[0])  # the usual case: ten times as fast
    from tensorboard.util.tensor_util import make_ndarray  # noqa: PLC0415 # imported on use

    number = make_ndarray(value.tensor)
    return float(number) if np.issubdtype(number.dtype, np.number) else None


def _records(content: bytes) -> tuple[Integers, Integers, bool]:
    """Start and end of the content of each complete record, and whether the file ends after one."""
    starts, ends = array("q"), array("q")
    at, size, length_of = 0, len(content), _LENGTH.unpack_from
    whole = True
    while whole and at + _LENGTH.size <= size:
        start = at + _LENGTH.size + _CHECKSUM
        end = start + length_of(content, at)[0]
        at = end + _CHECKSUM
        whole = at <= size
        if whole:
            starts.append(start)
            ends.append(end)
    return np.array(starts, np.int64), np.array(ends, np.int64), whole and at == size


def _require_intact(file: Path, data: Bytes, starts: Integers, ends: Integers) -> None:
    """Raise EvidenceError for the first record that does not match its two checksums."""
    lengths = starts - _CHECKSUM - _LENGTH.size
    wrong = ~_agrees(data, lengths, starts - _CHECKSUM) | ~_agrees(data, starts, ends)
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0]) + 1
        raise EvidenceError(f"{file}: record {first} of {len(starts)} is damaged")


def _require_cut(file: Path, data: Bytes, at: int) -> None:
    """Raise EvidenceError if the record beyond the end of the file is only a damaged length."""
    end = at + _LENGTH.size
    if end + _CHECKSUM <= data.size and not _agrees(data, np.array([at]), np.array([end])).all():
        raise EvidenceError(f"{file}: the record at byte {at} is damaged")


def _agrees(data: Bytes, starts: Integers, ends: Integers) -> Flags:
    """Whether pieces of the file match the checksums after them."""
    there = data[ends[:, None] + np.arange(_CHECKSUM)].view("<u4").ravel()
    return np.asarray(masked_crc32c(data, starts, ends - starts) == there, np.bool_)


_WALL_TIME, _STEP, _SUMMARY, _VALUE, _TAG, _FLOAT = 0x09, 0x10, 0x2A, 0x0A, 0x0A, 0x15
"""Keys of the fields in the protobuf messages Event, Summary and Summary.Value."""
_LONGEST = 127
"""Bytes of a message whose length is one byte."""
_AROUND = 21
"""Bytes of a record besides its step and tag."""
_MOST_STEP = 8
"""Bytes of a step: 56 bits of it."""
_AT_ONCE = 1 << 15
"""Records: the working set stays in the cache."""

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Scalars(NamedTuple):
    """Points of one tag."""

    records: Integers
    """Which records of the file they are, in order."""
    steps: Integers
    values: Floats
    wall_times: Floats
    """Seconds since 1970."""

    def in_order(self) -> Scalars:
        """The same points in the order of the records."""
        order = np.argsort(self.records, kind="stable")
        return Scalars(
            self.records[order], self.steps[order], self.values[order], self.wall_times[order]
        )


def plain_scalars(
    data: Bytes, starts: Integers, lengths: Integers
) -> Iterator[tuple[bytes, Scalars]]:
    """Tag and points of all records with one scalar; a record is ``data[start:start + length]``."""
    for length in np.unique(lengths[lengths <= _LONGEST]):
        same = np.flatnonzero(lengths == length)
        for begin in range(0, len(same), _AT_ONCE):
            records = same[begin : begin + _AT_ONCE]
            content = _columns(data, starts[records], int(length))
            for width in range(1, min(_MOST_STEP, int(length) - _AROUND) + 1):  # of the step
                name = int(length) - _AROUND - width
                fits = _fits(content, width, name)
                if fits.any():
                    yield from _by_tag(records[fits], content[:, fits], width, name)


def _columns(data: Bytes, starts: Integers, length: int) -> Bytes:
    """The first, second … byte of every record; shape (length, records)."""
    content = np.empty((length, len(starts)), np.uint8)
    for place in range(length):
        content[place] = data[starts + place]
    return content


def _fits(content: Bytes, width: int, name: int) -> npt.NDArray[np.bool_]:
    """Which records are one scalar whose step and tag have these numbers of bytes."""
    length = len(content)
    at = 10 + width
    head = {0: _WALL_TIME, 9: _STEP, at: _SUMMARY, at + 1: length - at - 2, at + 2: _VALUE}
    tail = {at + 3: length - at - 4, at + 4: _TAG, at + 5: name, at + 6 + name: _FLOAT}
    fits: npt.NDArray[np.bool_] = content[at - 1] < 0x80  # noqa: PLR2004 - the last byte of a varint
    for place in range(10, at - 1):
        fits &= content[place] >= 0x80  # noqa: PLR2004 - not the last one
    for place, byte in {**head, **tail}.items():
        fits &= content[place] == byte
    return fits


def _by_tag(
    records: Integers, content: Bytes, width: int, name: int
) -> Iterator[tuple[bytes, Scalars]]:
    steps = np.zeros(len(records), np.int64)
    for place in range(width):
        steps |= (content[10 + place] & 0x7F).astype(np.int64) << (7 * place)
    times = np.ascontiguousarray(content[1:9].T).view("<f8").ravel()
    values = np.ascontiguousarray(content[-4:].T).view("<f4").ravel().astype(np.float64)
    names = np.ascontiguousarray(content[16 + width : 16 + width + name].T).view(f"V{name}").ravel()
    # A stable sort puts the records of one tag together, in their order.
    order = np.argsort(names, kind="stable")
    ends = np.flatnonzero(names[order][1:] != names[order][:-1]) + 1
    for found in np.split(order, ends):
        tag = names[found[0]].tobytes()
        yield tag, Scalars(records[found], steps[found], values[found], times[found])
