"""CRC-32C of many byte strings at once, as in TensorBoard's records.

Python has no CRC-32C of its own, and computed byte by byte it takes most of the time of reading a
file. Here numpy processes all strings of one length together. Long ones are cut into chunks (the
first is padded with zeros in front) whose CRCs are computed in parallel. A CRC without its initial
value is linear, so the CRCs of a string's chunks can be combined by a table.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_SHORT = 256
"""Bytes: up to this length, strings are grouped by length. A scalar's record has about 50."""
_CHUNK = 64
"""Bytes of a chunk of a longer string."""
_AT_ONCE = 1 << 15
"""Chunks: the working set stays in the cache."""
_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int64]


def _byte_table() -> Words:
    """The effect of a byte at the end of a register."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table.astype(np.uint32)


_BYTE = _byte_table()


def _shift_tables() -> Words:
    """The effect of a chunk of zeros on each of a register's four bytes: 4 x 256."""
    register = np.arange(256, dtype=np.uint32) << (8 * np.arange(4, dtype=np.uint32)[:, None])
    for _ in range(_CHUNK):
        register = _BYTE[register & 0xFF] ^ (register >> 8)
    return register


_SHIFT = _shift_tables()


def masked_crc32c(data: Bytes, starts: Places, lengths: Places) -> Words:
    """The CRC-32C of every ``data[start:start + length]``, masked as TFRecord files store it."""
    crc = np.empty(len(starts), np.uint32)
    for length in np.unique(lengths[lengths <= _SHORT]):
        same = np.flatnonzero(lengths == length)
        for begin in range(0, len(same), _AT_ONCE):
            part = same[begin : begin + _AT_ONCE]
            crc[part] = _of_one_length(data, starts[part], int(length))
    long = np.flatnonzero(lengths > _SHORT)
    crc[long] = _of_chunks(data, starts[long], lengths[long])
    masked: Words = ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(_MASK)
    return masked


def _of_one_length(data: Bytes, starts: Places, length: int) -> Words:
    register = np.full(len(starts), 0xFFFFFFFF, np.uint32)
    for place in range(length):
        register = _BYTE[(register ^ data[starts + place]) & 0xFF] ^ (register >> np.uint32(8))
    crc: Words = ~register
    return crc


def _of_chunks(data: Bytes, starts: Places, lengths: Places) -> Words:
    """The CRCs of strings of at least 4 bytes."""
    counts = -(-lengths // _CHUNK)
    firsts = np.cumsum(counts) - counts
    chunks = _chunks(data, starts, lengths, counts, firsts)
    crc = chunks[firsts]
    for number in range(1, int(counts.max(initial=0))):
        longer = np.flatnonzero(counts > number)
        register = crc[longer]
        shifted = chunks[firsts[longer] + number]
        for byte in range(4):
            shifted = shifted ^ _SHIFT[byte][(register >> np.uint32(8 * byte)) & 0xFF]
        crc[longer] = shifted
    whole: Words = ~crc
    return whole


def _chunks(data: Bytes, starts: Places, lengths: Places, counts: Places, firsts: Places) -> Words:
    """CRCs of all chunks of all strings, in order, starting from a register of zeros."""
    total = int(counts.sum())
    owner = np.repeat(np.arange(len(starts)), counts)
    # Position of a chunk's first byte in its string: negative where zeros are padded in front.
    within = lengths[owner] - (counts[owner] - (np.arange(total) - firsts[owner])) * _CHUNK
    found = np.empty(total, np.uint32)
    for begin in range(0, total, _AT_ONCE):
        part = slice(begin, begin + _AT_ONCE)
        places = within[part] + np.arange(_CHUNK)[:, None]  # chunk bytes x chunks
        content = data[np.maximum(places + starts[owner[part]], 0)]
        content[places < 0] = 0
        # The same as an initial register of ones.
        content[(places >= 0) & (places < 4)] ^= 0xFF  # noqa: PLR2004 - bytes of a register
        register = np.zeros(content.shape[1], np.uint32)
        for byte in content:
            register = _BYTE[(register ^ byte) & 0xFF] ^ (register >> np.uint32(8))
        found[part] = register
    return found
