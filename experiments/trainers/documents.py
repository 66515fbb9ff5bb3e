"""The documents of the project's corpus ({data}), one a sample: their lengths are uneven."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

IGNORED = -100


class Documents(torch.utils.data.Dataset):
    """Sample i is document i, cut or filled to ``length`` tokens.

    ``input_ids`` and ``labels`` are the same tokens, (length,) int64; whoever computes a loss
    shifts them. Filling is 0 in the one and ``IGNORED`` in the other.
    """

    def __init__(self, folder: Path, length: int, count: int) -> None:
        """Take the first ``count`` documents of ``folder``, from the start again at their end."""
        corpus = json.loads((folder / "corpus.json").read_text())
        tokens = np.load(folder / "tokens.npy")
        starts = np.flatnonzero(tokens == corpus["bos_id"])
        self.documents = np.split(tokens, starts[1:])
        self.vocabulary: int = corpus["vocab_size"]
        self.length = length
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        document = torch.from_numpy(self.documents[index % len(self.documents)]).long()
        document = document[: self.length]
        inputs = torch.zeros(self.length, dtype=torch.long)
        labels = torch.full((self.length,), IGNORED)
        inputs[: len(document)] = document
        labels[: len(document)] = document
        return {"input_ids": inputs, "labels": labels}


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """What each position of (batch, length) predicts: the token after it; the last one nothing."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
