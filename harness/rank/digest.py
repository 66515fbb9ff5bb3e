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

    def add(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Count a batch of integer tensors of shape (batch, sequence)."""
        rows = zip(_little_endian(inputs), _little_endian(labels), strict=True)
        for sample_input, sample_labels in rows:
            self.total = (self.total + sample_hash(sample_input, sample_labels)) % _MODULUS
            self.samples += 1

    @property
    def halves(self) -> tuple[int, int]:
        """High and low 32 bits: each fits a float64, and so do sums over 2**21 ranks."""
        return divmod(self.total, _HALF)


def sample_hash(sample_input: np.ndarray, sample_labels: np.ndarray) -> int:
    """64 bits of BLAKE2b over the little-endian int64 bytes of input, then labels."""
    state = hashlib.blake2b(digest_size=8)
    state.update(sample_input.tobytes())
    state.update(sample_labels.tobytes())
    return int.from_bytes(state.digest(), "little")


def combine(parts: Iterable[tuple[int, int, int]]) -> str:
    """16 hex digits for the whole batch from (high half, low half, samples) of each part."""
    total = samples = 0
    for high, low, count in parts:
        total = (total + high * _HALF + low) % _MODULUS
        samples += count
    mixed = total.to_bytes(8, "little") + samples.to_bytes(8, "little")
    return hashlib.blake2b(mixed, digest_size=8).hexdigest()


def _little_endian(batch: torch.Tensor) -> np.ndarray:
    return batch.detach().cpu().numpy().astype("<i8")
