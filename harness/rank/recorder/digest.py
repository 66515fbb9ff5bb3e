"""An order-independent fingerprint of a global batch.

Every sample is hashed to 64 bits and the hashes are **summed** modulo 2**64. A sum, unlike the
cheaper XOR, notices a sample that two ranks both read: XOR would cancel it out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

_MODULUS = 1 << 64
_HALF = 1 << 32


@dataclass(slots=True)
class BatchDigest:
    """The samples of one step that one rank has seen so far."""

    total: int = 0
    samples: int = 0

    def add(
        self,
        inputs: torch.Tensor,
        labels: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Count a batch: tensors of shape (batch, …), also labels and mask.

        Integers are hashed by value, other numbers by their bits. Entries whose mask is zero are
        padding and do not count: the mask has the leading dimensions of the inputs; it is not
        applied to labels of another shape.
        """
        columns = [_samples(inputs, mask)]
        if labels is not None:
            padded = mask is not None and labels.shape[: mask.ndim] == mask.shape
            columns.append(_samples(labels, mask if padded else None))
        for sample in zip(*columns, strict=True):
            self.total = (self.total + sample_hash(*sample)) % _MODULUS
            self.samples += 1

    @property
    def halves(self) -> tuple[int, int]:
        """High and low 32 bits: each fits a float64, and so do sums over 2**21 ranks."""
        return divmod(self.total, _HALF)


def sample_hash(*parts: np.ndarray) -> int:
    """64 bits of BLAKE2b over the bytes of a sample's input, then of its labels."""
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(part.tobytes())
    return int.from_bytes(state.digest(), "little")


def combine(parts: Iterable[tuple[int, int, int]]) -> str:
    """16 hex digits for the whole batch from (high half, low half, samples) of each part."""
    total = samples = 0
    for high, low, count in parts:
        total = (total + high * _HALF + low) % _MODULUS
        samples += count
    mixed = total.to_bytes(8, "little") + samples.to_bytes(8, "little")
    return hashlib.blake2b(mixed, digest_size=8).hexdigest()


def _samples(batch: torch.Tensor, mask: torch.Tensor | None) -> Iterable[np.ndarray]:
    """Per sample, its entries without padding: little-endian int64, or other numbers' bytes."""
    plain = batch.detach().cpu()
    if mask is None:
        return _little_endian(plain)
    kept = mask.detach().cpu() != 0
    return [_little_endian(row[where].unsqueeze(0)) for row, where in zip(plain, kept, strict=True)]


def _little_endian(batch: torch.Tensor) -> np.ndarray:
    if batch.is_floating_point() or batch.is_complex():
        # NumPy does not have all of torch's dtypes, but all have bytes.
        return batch.reshape(len(batch), -1).contiguous().view(torch.uint8).numpy()
    return batch.numpy().astype("<i8")
