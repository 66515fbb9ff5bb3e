"""An order-independent fingerprint of a global batch, and its tokens.

Every sample is hashed to 64 bits and the hashes are **summed** modulo 2**64. A sum, unlike the
cheaper XOR, notices a sample that two ranks both read: XOR would cancel it out.

Batches on a CUDA device are copied to the host without waiting for them, and hashed once the step
has ended: a transfer that waits, in every microbatch, would keep the host from running ahead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from converge_harness.rank.recorder.cross_entropy import IGNORE_INDEX

_MODULUS = 1 << 64
_HALF = 1 << 32


class _Batch(NamedTuple):
    """What came from the loader, in the memory of the host."""

    inputs: torch.Tensor
    labels: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(slots=True)
class BatchDigest:
    """The samples and tokens of one step that one rank has seen so far."""

    total: int = 0
    """Of the samples that are hashed by now: after ``finish`` all of them."""
    samples: int = 0
    tokens: int = 0
    """Labels that count, as ``total``. Without labels all tokens of integer inputs, and of other
    inputs every sample."""
    _coming: list[_Batch] = field(default_factory=list)
    """Batches whose copy to the host may be under way, on ``_devices``."""
    _devices: set[torch.device] = field(default_factory=set)

    def add(
        self,
        inputs: torch.Tensor,
        labels: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Count a batch of tensors of shape (batch, …), labels and mask too.

        Integers count by their values, other numbers by their bits. Entries whose mask is zero are
        padding and count nothing: the mask has the leading dimensions of what it pads; labels of
        another shape are not padded.
        """
        self.samples += len(inputs)
        given = (inputs, labels, mask)
        devices = {each.device for each in given if each is not None and each.is_cuda}
        batch = _Batch(*(_on_host(each, at_once=not devices) for each in given))
        if devices:
            self._devices |= devices
            self._coming.append(batch)
        else:
            self._count(batch)

    def finish(self) -> None:
        """Count the batches that were copied from a device. Waits for the devices."""
        for device in self._devices:
            torch.cuda.synchronize(device)
        self._devices.clear()
        for batch in self._coming:
            self._count(batch)
        self._coming.clear()

    def _count(self, batch: _Batch) -> None:
        inputs, labels, mask = batch
        if labels is not None:
            self.tokens += int((labels != IGNORE_INDEX).sum())
        elif inputs.is_floating_point() or inputs.is_complex():
            self.tokens += len(inputs)
        else:
            self.tokens += inputs.numel() if mask is None else int(mask.count_nonzero())
        columns = [_samples(inputs, mask)]
        if labels is not None:
            padded = mask is not None and labels.shape[: mask.ndim] == mask.shape
            columns.append(_samples(labels, mask if padded else None))
        for sample in zip(*columns, strict=True):
            self.total = (self.total + sample_hash(*sample)) % _MODULUS

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


def _on_host(tensor: torch.Tensor | None, *, at_once: bool) -> torch.Tensor | None:
    """The tensor in the memory of the host; else a copy that is there when its device is done.

    What is looked at later is copied wherever it is: a loop may fill the same tensor again.
    """
    if tensor is None:
        return None
    plain = tensor.detach()
    return plain.cpu() if at_once else plain.to("cpu", non_blocking=True, copy=True)


def _samples(batch: torch.Tensor, mask: torch.Tensor | None) -> Iterable[np.ndarray]:
    """Per sample its entries, without padding: little-endian int64, or bytes of other numbers."""
    if mask is None:
        return _little_endian(batch)
    kept = mask != 0
    return [_little_endian(row[where].unsqueeze(0)) for row, where in zip(batch, kept, strict=True)]


def _little_endian(batch: torch.Tensor) -> np.ndarray:
    if batch.is_floating_point() or batch.is_complex():
        # Not every dtype of torch is one of NumPy's; all have bytes.
        return batch.reshape(len(batch), -1).contiguous().view(torch.uint8).numpy()
    return batch.numpy().astype("<i8")
