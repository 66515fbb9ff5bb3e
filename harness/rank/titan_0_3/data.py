"""The project's data order (``harness.rank.samples``) as a torchtitan dataloader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader

from harness.rank.samples import SampleStream, open_corpus


class SampleLoader(BaseDataLoader):
    """Batches whose samples do not depend on the data-parallel degree.

    torchtitan's own loader splits the dataset by rank: other degrees read other samples from the
    first step on.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Where the corpus is, and what decides the order of its samples."""

        folder: str
        """Folder with ``corpus.json`` and ``tokens.npy``."""
        seed: int
        global_batch_size: int
        order_seed: int | None = None
        """As in ``SampleStream``."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        global_batch_size = config.global_batch_size
        if global_batch_size < 0:  # torchtitan's way to say: no gradient accumulation
            global_batch_size = local_batch_size * dp_world_size
        self._stream = SampleStream(
            open_corpus(Path(config.folder)),
            seq_len=seq_len,
            seed=config.seed,
            global_batch_size=global_batch_size,
            batch_size=local_batch_size,
            dp_rank=dp_rank,
            dp_degree=dp_world_size,
            order_seed=config.order_seed,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for sample in self._stream:
            yield {"input": sample.inputs, "positions": sample.positions}, sample.labels

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": torch.tensor(self._stream.consumed)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self._stream.consumed = int(state_dict["consumed"])
