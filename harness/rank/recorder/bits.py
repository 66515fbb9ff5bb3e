"""A 64-bit digest of a tensor's bits, computed on the tensor's device.

A tensor's bytes are read as 64-bit words. To each word its position times the golden ratio is
added, and the sum is mixed by the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", 2014); the digest is the sum of the results, with wrapping
arithmetic. It changes if any bit differs, if two entries are swapped, and for -0.0 instead of 0.0
or another NaN; different tensors have the same digest only by chance, once in 2**64.

``mixed`` is the generator itself: a hash of counters, on any device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from converge_harness.rank.recorder.cross_entropy import local_part

_WORD_BYTES = 8
_BLOCK_WORDS = {"cpu": 1 << 15, "cuda": 1 << 20}
"""Words mixed at a time. Memory use is five temporary tensors of at most twice this size, and one
that is kept: a few MiB on a CPU, where a batch should fit in the cache, and 88 MiB on a GPU, where
launches should be few."""


class _Part(NamedTuple):
    """One of the plain tensors inside a tensor."""

    owner: int
    place: int
    """Its index among those of its owner."""
    tensor: torch.Tensor


class _Piece(NamedTuple):
    """Consecutive words of a part."""

    part: int
    first: int
    """Position of the first word in the part."""
    words: torch.Tensor


def _signed(value: int) -> int:
    """A 64-bit pattern as the signed number that int64 tensors hold."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


@torch.no_grad()
def bit_digests(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Digests of the bits of tensors: shape (tensors,), int64, on ``device``.

    For a DTensor this rank's shard counts, for other wrappers the tensors inside. Any dtype, device
    and strides are possible; a non-contiguous tensor is copied first. Small tensors are mixed
    together, because a launch takes longer than they do. No collective happens.
    """
    parts = [
        _Part(owner, place, plain)
        for owner, tensor in enumerate(tensors)
        for place, plain in enumerate(_plain_tensors(tensor))
    ]
    result = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    for there in {part.tensor.device for part in parts}:
        mine = [part for part in parts if part.tensor.device == there]
        # The lengths are mixed in, so that trailing zeros count.
        totals = torch.tensor([part.tensor.nbytes + 1 for part in mine], device=there)
        block = _BLOCK_WORDS.get(there.type, _BLOCK_WORDS["cuda"])
        for pieces in _batches(mine, block):
            of_part = torch.tensor([piece.part for piece in pieces], device=there)
            totals.index_add_(0, of_part, _sums(pieces, block))
        totals += torch.tensor([part.place for part in mine], device=there) * _GOLDEN
        owners = torch.tensor([part.owner for part in mine], device=device)
        result.index_add_(0, owners, mix_(totals).to(device))
    return result


def mix_(words: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser, in place on an int64 tensor of any shape; it is one-to-one."""
    # int64 shifts keep the sign, so the bits shifted in are masked.
    words ^= (words >> 30).bitwise_and_((1 << 34) - 1)
    words *= _FIRST
    words ^= (words >> 27).bitwise_and_((1 << 37) - 1)
    words *= _SECOND
    words ^= (words >> 31).bitwise_and_((1 << 33) - 1)
    return words


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors inside DTensors, Float8 weights and other wrappers."""
    tensor = local_part(tensor)
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _plain_tensors(getattr(tensor, name))


def _content(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor as flat bytes, in the logical order of its entries."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor.detach().view(-1).view(torch.uint8)
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def _batches(parts: Sequence[_Part], words: int) -> Iterator[list[_Piece]]:
    """All bytes of the parts in order, about ``words`` words at a time."""
    batch: list[_Piece] = []
    room = words
    for number, part in enumerate(parts):
        content = _content(part.tensor)
        for start in range(0, len(content), words * _WORD_BYTES):
            piece = _as_words(content[start : start + words * _WORD_BYTES])
            batch.append(_Piece(number, start // _WORD_BYTES, piece))
            room -= len(piece)
            if room <= 0:
                yield batch
                batch, room = [], words
    if batch:
        yield batch


def _sums(pieces: Sequence[_Piece], block: int) -> torch.Tensor:
    """Shape (pieces,): the sum of each piece's words, mixed with their positions."""
    device = pieces[0].words.device
    lengths = [piece.words.numel() for piece in pieces]
    steps = _steps(block, device)
    marked = torch._foreach_add(
        [piece.words for piece in pieces], [steps[:length] for length in lengths]
    )
    for piece, words in zip(pieces, marked, strict=True):
        if piece.first:
            words.add_(_signed(piece.first * _GOLDEN % (1 << 64)))
    if len(marked) == 1:
        return mix_(marked[0]).sum().reshape(1)
    total = mix_(torch.cat(marked)).cumsum_(0)
    ends = torch.tensor(lengths, device=device).cumsum_(0)
    return total[ends - 1].diff(prepend=ends.new_zeros(1))


@functools.cache
def _steps(count: int, device: torch.device) -> torch.Tensor:
    """The values added for positions 0, 1, …, count - 1; cached, because every batch needs them."""
    return torch.arange(count, device=device).mul_(_GOLDEN)


def _as_words(content: torch.Tensor) -> torch.Tensor:
    """Bytes as int64; the last word is padded with zeros."""
    missing = -content.numel() % _WORD_BYTES
    if missing:
        content = torch.nn.functional.pad(content, (0, missing))
    if content.storage_offset() % _WORD_BYTES:  # torch can view only aligned data
        content = content.clone()
    return content.view(torch.int64)


def mixed(counter: torch.Tensor, key: int) -> torch.Tensor:
    """SplitMix64 of an int64 tensor: the value of each counter in the sequence of a 64-bit key.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014). The 64 bits are
    signed numbers, because int64 arithmetic wraps like unsigned arithmetic.
    """
    return mix_((counter * _GOLDEN).add_(_signed(key)))
