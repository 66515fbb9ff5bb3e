"""Scalars of TensorBoard's event files, decoded many records at once.

Almost every record is one event with one scalar, as PyTorch's SummaryWriter leaves it: time, step,
and a summary of one tag and one float32. Records of one length have the same keys at the same
bytes, so numpy finds them and reads their numbers as columns. protobuf decodes all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_WALL_TIME, _STEP, _SUMMARY, _VALUE, _TAG, _FLOAT = 0x09, 0x10, 0x2A, 0x0A, 0x0A, 0x15
"""Keys of the fields in the protobuf messages Event, Summary and Summary.Value."""
_LONGEST = 127
"""Bytes of a message whose length is one byte."""
_AROUND = 21
"""Bytes of a record beside its step and tag."""
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
        """The same in the order of the records."""
        order = np.argsort(self.records, kind="stable")
        return Scalars(
            self.records[order], self.steps[order], self.values[order], self.wall_times[order]
        )


def plain_scalars(
    data: Bytes, starts: Integers, lengths: Integers
) -> Iterator[tuple[bytes, Scalars]]:
    """Tag and points of all records that hold one scalar; ``data[start:start + length]`` is one."""
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
    """The first, second … byte of every record: length x records."""
    content = np.empty((length, len(starts)), np.uint8)
    for place in range(length):
        content[place] = data[starts + place]
    return content


def _fits(content: Bytes, width: int, name: int) -> npt.NDArray[np.bool_]:
    """Which records are one scalar with a step of that many bytes and a tag of that many."""
    length = len(content)
    at = 10 + width
    head = {0: _WALL_TIME, 9: _STEP, at: _SUMMARY, at + 1: length - at - 2, at + 2: _VALUE}
    tail = {at + 3: length - at - 4, at + 4: _TAG, at + 5: name, at + 6 + name: _FLOAT}
    fits: npt.NDArray[np.bool_] = content[at - 1] < 0x80  # noqa: PLR2004 - the last byte of a varint
    for place in range(10, at - 1):
        fits &= content[place] >= 0x80  # noqa: PLR2004 - one that goes on
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
    # Sorted, stably: records of one tag then stand together, in their order.
    order = np.argsort(names, kind="stable")
    ends = np.flatnonzero(names[order][1:] != names[order][:-1]) + 1
    for found in np.split(order, ends):
        tag = names[found[0]].tobytes()
        yield tag, Scalars(records[found], steps[found], values[found], times[found])
