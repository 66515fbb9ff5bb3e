"""64 bits that stand for the bits of a tensor, computed where the tensor is.

A tensor's bytes are read as 64-bit words. To each word its position is added, times the golden
ratio, and the sum is mixed by the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", 2014); the digest is the sum of all that, with arithmetic that
wraps. Another bit anywhere, two entries swapped, -0.0 for 0.0 or another NaN all change it;
tensors that differ have the same digest by chance only, once in 2**64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from harness.rank.cross_entropy import local_part

_WORD_BYTES = 8
_BLOCK_WORDS = {"cpu": 1 << 15, "cuda": 1 << 20}
"""Words mixed at a time. Two temporary tensors of this size are all the memory that it takes: 512
KiB on a CPU, where a block should fit a cache, 16 MiB on a GPU, where a launch should pay."""


def _signed(value: int) -> int:
    """A 64-bit pattern as the signed number that int64 tensors hold."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


@torch.no_grad()
def bit_digest(tensor: torch.Tensor) -> torch.Tensor:
    """Digest of a tensor's bits: int64, no dimensions, on the tensor's device.

    Of a DTensor it is this rank's shard that counts, of other wrappers the tensors inside. Any
    dtype and layout of strides; a tensor that is not contiguous is copied first. No collective
    happens, and the device is not waited for.
    """
    parts = [_plain_digest(part) for part in _plain_tensors(tensor)]
    total = parts[0]
    for part in parts[1:]:
        total = mix_(total) + part.to(total.device)
    return total


def mix_(words: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser, in place on an int64 tensor of any shape: one-to-one."""
    # int64 shifts keep the sign, so what they shift in is masked away.
    words ^= (words >> 30).bitwise_and_((1 << 34) - 1)
    words *= _FIRST
    words ^= (words >> 27).bitwise_and_((1 << 37) - 1)
    words *= _SECOND
    words ^= (words >> 31).bitwise_and_((1 << 33) - 1)
    return words


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """What is inside DTensors, Float8 weights and other wrappers."""
    tensor = local_part(tensor)
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _plain_tensors(getattr(tensor, name))


def _plain_digest(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    content = flat.view(torch.uint8)
    # The length, so that trailing zeros count; the golden ratio, so that no digest is plain zero.
    total = torch.full((), _GOLDEN ^ content.numel(), dtype=torch.int64, device=content.device)
    block = _BLOCK_WORDS.get(content.device.type, _BLOCK_WORDS["cuda"]) * _WORD_BYTES
    for start in range(0, content.numel(), block):
        words = _as_words(content[start : start + block])
        first = start // _WORD_BYTES
        mixed = torch.arange(first, first + len(words), device=words.device).mul_(_GOLDEN)
        total += mix_(mixed.add_(words)).sum()
    return total


def _as_words(content: torch.Tensor) -> torch.Tensor:
    """Bytes as int64; the last word is filled up with zeros."""
    missing = -content.numel() % _WORD_BYTES
    if missing:
        content = torch.nn.functional.pad(content, (0, missing))
    if content.storage_offset() % _WORD_BYTES:  # torch views only what is aligned
        content = content.clone()
    return content.view(torch.int64)
