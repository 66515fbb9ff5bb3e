"""Which samples make up which global batch: the same for every data-parallel degree.

The corpus is one flat stream of token ids, ``[bos] ... [eos]`` per document, cut into samples of
``seq_len`` tokens and one more for the last target. Sample number ``c`` of training (counted over
all ranks from step 1) is entry ``c mod n`` of a pseudo-random order of the corpus's ``n`` samples,
a new order every epoch. The global batch of a step is a run of consecutive numbers, and each
data-parallel rank takes its contiguous part: nothing but the seed, the step and the position in
the global batch decides what is read.

``repeat = "permute"`` assigns the samples of each global batch to ranks and microbatches in another
order: gradients are summed in another order, and the mathematics is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from converge_harness.rank.recorder.cross_entropy import IGNORE_INDEX
from converge_harness.run_folder.corpus import TOKENS, read_corpus

_MASK = (1 << 64) - 1


class Sample(NamedTuple):
    """int64 tensors of shape (seq_len,), or (batch, seq_len) for several."""

    inputs: torch.Tensor
    positions: torch.Tensor
    """Place within the document; starts again at 0 at every bos and at the sample's start."""
    labels: torch.Tensor
    """Next tokens; IGNORE_INDEX where the next token is the bos of another document."""


@dataclass(frozen=True)
class Corpus:
    """A token stream on disk, memory-mapped."""

    tokens: np.ndarray
    """int32, flat."""
    bos_id: int
    vocab_size: int

    def count(self, seq_len: int) -> int:
        """How many samples of this length the corpus holds."""
        return (len(self.tokens) - 1) // seq_len

    def sample(self, index: int, seq_len: int) -> Sample:
        return sample_of(self.window(index, seq_len), self.bos_id)

    def window(self, index: int, seq_len: int) -> np.ndarray:
        """The tokens of a sample, and one more for the last target."""
        start = index * seq_len
        return self.tokens[start : start + seq_len + 1]


def sample_of(window: np.ndarray, bos_id: int) -> Sample:
    """A sample from ``seq_len + 1`` tokens that follow each other in the stream."""
    tokens = np.asarray(window, dtype=np.int64)
    inputs, targets = tokens[:-1], tokens[1:]
    return Sample(
        torch.from_numpy(inputs.copy()),
        torch.from_numpy(positions(inputs, bos_id)),
        torch.from_numpy(np.where(targets == bos_id, IGNORE_INDEX, targets)),
    )


def open_corpus(folder: Path) -> Corpus:
    """The corpus in a data folder (``corpus.json``, ``tokens.npy``).

    Raises ValueError if ``corpus.json`` is not of this schema, OSError when a file is missing.
    """
    facts = read_corpus(folder)
    tokens = np.load(folder / TOKENS, mmap_mode="r")
    return Corpus(tokens, facts["bos_id"], facts["vocab_size"])


def positions(inputs: np.ndarray, bos_id: int) -> np.ndarray:
    """Distance of every token from the latest bos at or before it, or from the start."""
    here = np.arange(len(inputs), dtype=np.int64)
    starts = np.where(inputs == bos_id, here, 0)
    return here - np.maximum.accumulate(starts)


def place_in_order(number: int, count: int, seed: int) -> int:
    """Which of ``count`` samples is number ``number`` of training.

    A keyed permutation evaluated at one point (a four-round Feistel network on the smallest even
    number of bits that holds ``count``, walked until it lands inside; Black and Rogaway,
    "Ciphers with arbitrary finite domains"). It needs no table and, unlike a library's shuffle,
    is the same in every version of every library.
    """
    epoch, index = divmod(number, count)
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            left, right = right, left ^ (_mix(seed, epoch, turn, right) & mask)
        index = left << half | right
        if index < count:
            return index


def place_in_batch(place: int, size: int, step: int, seed: int, order_seed: int) -> int:
    """The sample of a global batch of ``size`` at a position, when the batch is permuted.

    Decided by the step (counted from 0) and the two seeds: the same on all ranks, for every
    data-parallel degree, and after a resume.
    """
    return place_in_order(place, size, _mix(seed, order_seed, step))


def _mix(*values: int) -> int:
    """64 well-mixed bits of some numbers (SplitMix64's finaliser, chained)."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


@dataclass(slots=True)
class SampleStream:
    """One data-parallel rank's endless stream of batches; its state is one number."""

    corpus: Corpus
    seq_len: int
    seed: int
    global_batch_size: int
    batch_size: int
    """Samples per batch: a local batch, or a pipeline microbatch."""
    dp_rank: int
    dp_degree: int
    order_seed: int | None = None
    """Seed for the order of samples in each global batch; None: the usual order."""
    consumed: int = 0
    """Samples that all ranks together have been given: the same on every rank."""

    def __post_init__(self) -> None:
        share = self.global_batch_size // self.dp_degree
        if share * self.dp_degree != self.global_batch_size or share % self.batch_size:
            raise ValueError(
                f"a global batch of {self.global_batch_size} does not divide into "
                f"{self.dp_degree} data-parallel parts of whole batches of {self.batch_size}"
            )
        if self.corpus.count(self.seq_len) < 1:
            raise ValueError(
                f"the corpus has {len(self.corpus.tokens)} tokens, too few for one sample of "
                f"seq_len {self.seq_len}"
            )

    def __iter__(self) -> Iterator[Sample]:
        """Batches of shape (batch_size, seq_len), in the order that a step takes them."""
        share = self.global_batch_size // self.dp_degree
        count = self.corpus.count(self.seq_len)
        while True:
            step_start = self.consumed
            for first in range(0, share, self.batch_size):
                places = range(
                    self.dp_rank * share + first, self.dp_rank * share + first + self.batch_size
                )
                numbers = [step_start + self._dealt(place, step_start) for place in places]
                if first + self.batch_size == share:
                    # Before the yield: code that asks for the state after a step's last batch
                    # must get one in which the step's samples are used.
                    self.consumed = step_start + self.global_batch_size
                samples = [
                    self.corpus.sample(place_in_order(n, count, self.seed), self.seq_len)
                    for n in numbers
                ]
                yield Sample(*(torch.stack(column) for column in zip(*samples, strict=True)))

    def _dealt(self, place: int, step_start: int) -> int:
        """Position, in its global batch, of the sample that a place of it gets."""
        if self.order_seed is None:
            return place
        step = step_start // self.global_batch_size
        return place_in_batch(place, self.global_batch_size, step, self.seed, self.order_seed)
