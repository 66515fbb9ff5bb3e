"""Count sketches: projections (signed sums) from which the distance of tensors can be estimated.

A hash gives every entry of a tensor a sign and one of 64 projections. For two tensors of one name,
the sum of squared differences of their projections estimates the squared norm of the tensors'
difference: without bias, and with a relative standard deviation of at most sqrt(2/64) = 18%,
because the hash is 4-universal. The sums of shards add up to those of the whole tensor, for any
sharding.

Sources: Alon, Matias and Szegedy 1996 (signed sums estimate a second moment); Charikar, Chen and
Farach-Colton 2002 (count sketch: each entry goes into one sum only); Thorup and Zhang 2004,
"Tabulation based 4-universal hashing with applications to second moment estimation" (the variance
of this estimate, and the hash).

The hash of entry (row, column) of a matrix is ``A[row] ^ B[column] ^ C[row + column]``, with tables
A, B and C of random bits: Thorup and Zhang prove that it is 4-universal. The tables hold seven bits
an entry and are as long as a row and a column, so a block of entries is hashed by two XORs of
short integers. A tensor is viewed as a matrix: its dimensions are split in two such that the sum of
rows and columns is smallest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from converge_harness.rank.recorder.bits import mixed
from converge_harness.rank.recorder.placement import Held, HeldRun
from converge_harness.run_folder.arrays import PROJECTIONS

_CODES = 2 * PROJECTIONS
"""A code of seven bits: one for the sign, six for the projection."""
WIDTH = _CODES + 2
"""Columns of the accumulated rows: sums by code, sum of squares, number of nonzero entries.

``folded`` makes the sums by projection of those by code, half as many."""
SQUARES = _CODES
NOT_ZERO = _CODES + 1
_TABLE_BLOCK = 1 << 15
"""Table entries computed at a time: temporaries of less than 1 MiB."""
_ALL = slice(None)
"""The whole of a dimension: nothing has to be cut out."""
_TOGETHER = 1 << 8
"""Largest number of pieces processed together: int16 has no room for more beside a code."""


@dataclass(frozen=True, slots=True)
class ShardHash:
    """The codes of the entries of one shard, from three short tables."""

    shape: tuple[int, int]
    """The shard as a matrix."""
    _rows: torch.Tensor
    """Shape (rows, 1), int16: A."""
    _columns: torch.Tensor
    """Shape (columns,), int16: B."""
    _sums: torch.Tensor
    """Shape (span of rows, span of columns), int16: C as a view that overlaps itself."""
    _row_places: torch.Tensor | None
    """Indices of the rows in ``_sums``; None if they are consecutive."""
    _column_places: torch.Tensor | None

    def write(self, down: slice, across: slice, base: int, codes: torch.Tensor) -> None:
        """Write the codes of a block of the matrix, plus a multiple of the number of codes.

        ``codes`` is an int16 tensor of the block's shape.
        """
        rows, columns, sums = self._rows, self._columns, self._sums
        if down != _ALL:
            rows = rows[down]
        if across != _ALL:
            columns = columns[across]
        if self._row_places is not None:
            sums = sums[self._row_places[down]]
        elif down != _ALL:
            sums = sums[down]
        if self._column_places is not None:
            sums = sums[:, self._column_places[across]]
        elif across != _ALL:
            sums = sums[:, across]
        torch.bitwise_xor(sums, columns, out=codes)
        codes.bitwise_xor_(rows + base if base else rows)


class _Piece(NamedTuple):
    """A block of a shard."""

    row: int
    """The row to which its sums are added."""
    hash: ShardHash
    down: slice
    across: slice
    values: torch.Tensor
    """Shape (rows, columns) of the block."""


class Sketcher:
    """Adds up shards in shared working memory.

    Small shards are processed together, because an operation takes longer than their entries.
    """

    def __init__(self, block: int, device: torch.device) -> None:
        """``block`` is the number of entries processed at a time: ten bytes of memory for each."""
        self._wide = torch.empty(block, dtype=torch.float64, device=device)
        self._codes = torch.empty(block, dtype=torch.int16, device=device)

    @torch.no_grad()
    def add(
        self, shards: Iterable[tuple[int, ShardHash, torch.Tensor]], into: torch.Tensor
    ) -> None:
        """Add shards to rows of ``into``, float64 of shape (rows, WIDTH).

        Of each shard: its row, its hash, its values, a plain tensor of any float dtype and on any
        device. The order of additions is fixed, so a rerun finds the same sums to the last bit.
        """
        for pieces in self._batches(shards):
            self._add(pieces, into)

    def _batches(
        self, shards: Iterable[tuple[int, ShardHash, torch.Tensor]]
    ) -> Iterator[list[_Piece]]:
        """All blocks of all shards in order, as many together as fit."""
        batch: list[_Piece] = []
        room = len(self._wide)
        for row, hashed, values in shards:
            for down, across, block in _blocks(hashed.shape, values, len(self._wide)):
                if block.numel() > room or len(batch) == _TOGETHER:
                    yield batch
                    batch, room = [], len(self._wide)
                batch.append(_Piece(row, hashed, down, across, block))
                room -= block.numel()
        if batch:
            yield batch

    def _add(self, pieces: Sequence[_Piece], into: torch.Tensor) -> None:
        lengths = [piece.values.numel() for piece in pieces]
        wide, codes = self._wide[: sum(lengths)], self._codes[: sum(lengths)]
        parts = wide.split(lengths)
        # Block by block: what is offloaded to the host is never on the device as a whole.
        torch.cat([piece.values.reshape(-1).to(wide.device) for piece in pieces], out=wide)
        for number, (piece, code) in enumerate(zip(pieces, codes.split(lengths), strict=True)):
            block = code.view(piece.values.shape)
            piece.hash.write(piece.down, piece.across, number * _CODES, block)
        sums = _by_code(codes, wide, len(pieces) * _CODES)
        squares = torch.stack([torch.dot(part, part) for part in parts])
        not_zero = torch.stack([torch.count_nonzero(part) for part in parts])
        rows = torch.tensor([piece.row for piece in pieces], device=into.device)
        columns = (sums.view(-1, _CODES), squares[:, None], not_zero[:, None])
        _add_rows(into, rows, torch.cat(columns, dim=1))

    @torch.no_grad()
    def not_finite(self, shard: ShardHash, values: torch.Tensor) -> int:
        """Number of entries of a shard that are NaN or infinite."""
        blocks = _blocks(shard.shape, values, len(self._wide))
        return sum(block.numel() - int(block.isfinite().sum()) for _, _, block in blocks)


def shard_hash(name: str, held: Held, device: torch.device) -> ShardHash:
    """The hash of the entries of a named tensor that a rank holds."""
    leading, trailing = held.divided(_division(held.whole))
    shape = leading.numel, trailing.numel
    if not held.numel:
        empty = torch.empty(shape, dtype=torch.int16, device=device)
        return ShardHash(shape, empty, empty, empty, None, None)
    digest = hashlib.blake2b(name.encode(), digest_size=24).digest()
    keys = [int.from_bytes(digest[start : start + 8], "little") for start in (0, 8, 16)]
    rows, first_row, last_row, row_places = _places(leading, keys[0], device)
    columns, first_column, last_column, column_places = _places(trailing, keys[1], device)
    sums = _table(first_row + first_column, last_row + last_column + 1, keys[2], device)
    windows = sums.unfold(0, last_column - first_column + 1, 1)
    return ShardHash(shape, rows.unsqueeze(1), columns, windows, row_places, column_places)


class HashedPart(NamedTuple):
    """A part of a shard that is a block of the matrix, and its hash."""

    entries: slice
    """Its slice of the flattened shard; ``_ALL`` if the part is the whole shard."""
    hash: ShardHash

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The part's values, from those of the shard."""
        return values if self.entries == _ALL else values.reshape(-1)[self.entries]


def hashed_parts(name: str, held: Held | HeldRun, device: torch.device) -> tuple[HashedPart, ...]:
    """The parts of a rank's shard of a named tensor: one block, or up to three for a run.

    An entry of the whole tensor has the same code in every sharding.
    """
    if isinstance(held, Held):
        return (HashedPart(_ALL, shard_hash(name, held, device)),)
    division = _division(held.whole)
    rows, columns = math.prod(held.whole[:division]), math.prod(held.whole[division:])
    # A matrix of that shape is split into the same rows and columns again, or is one row.
    return tuple(
        HashedPart(part, shard_hash(name, block, device))
        for part, block in held.matrices(rows, max(columns, 1))
    )


def _blocks(
    shape: tuple[int, int], values: torch.Tensor, entries: int
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Blocks of a shard as a matrix: rows, columns, values."""
    rows, columns = shape
    if not rows * columns:
        return
    matrix = values.reshape(shape)
    if rows * columns <= entries:
        yield _ALL, _ALL, matrix
        return
    width = min(columns, entries)
    height = entries // width
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            down, across = slice(top, top + height), slice(left, left + width)
            yield down, across, matrix[down, across]


def _by_code(codes: torch.Tensor, values: torch.Tensor, count: int) -> torch.Tensor:
    """The sum of the values of each code below ``count``, in an order that is fixed.

    On CUDA ``bincount`` adds by atomic operations, whose order is not; ``index_put_`` sorts first.
    """
    if values.device.type == "cpu":
        return torch.bincount(codes, weights=values, minlength=count)
    return values.new_zeros(count).index_put_((codes.long(),), values, accumulate=True)


def _add_rows(into: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Add each row of the values to one of ``into``; a row may come several times. As above."""
    if into.device.type == "cpu":
        into.index_add_(0, rows, values)
    else:
        into.index_put_((rows,), values, accumulate=True)


def folded(added: torch.Tensor) -> torch.Tensor:
    """The sketches, shape (..., PROJECTIONS), from rows that ``Sketcher.add`` filled."""
    return added[..., :PROJECTIONS] - added[..., PROJECTIONS:_CODES]


def _division(whole: tuple[int, ...]) -> int:
    """Number of leading dimensions that become the rows of the matrix."""
    return min(
        range(len(whole) + 1),
        key=lambda dim: math.prod(whole[:dim]) + math.prod(whole[dim:]),
    )


def _places(
    side: Held, key: int, device: torch.device
) -> tuple[torch.Tensor, int, int, torch.Tensor | None]:
    """For the held rows (or columns): codes, the first, the last, and their indices."""
    count = side.numel
    codes = torch.empty(count, dtype=torch.int16, device=device)
    for block, index in side.blocks(_TABLE_BLOCK, device):
        codes[block] = _codes(index, key)
    first = int(side.flat_index(0, 1, device))
    last = int(side.flat_index(count - 1, count, device))
    follow = last - first + 1 == count  # a shard's rows are in ascending order
    return codes, first, last, None if follow else side.flat_index(0, count, device) - first


def _table(start: int, stop: int, key: int, device: torch.device) -> torch.Tensor:
    """Codes of start, start + 1, …, stop - 1."""
    codes = torch.empty(stop - start, dtype=torch.int16, device=device)
    for begin in range(start, stop, _TABLE_BLOCK):
        end = min(begin + _TABLE_BLOCK, stop)
        codes[begin - start : end - start] = _codes(torch.arange(begin, end, device=device), key)
    return codes


def _codes(index: torch.Tensor, key: int) -> torch.Tensor:
    """Seven random bits per index."""
    return (mixed(index, key) >> 57).bitwise_and_(_CODES - 1).to(torch.int16)
