"""The project's loader, in the form that torchtitan 0.2 asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader

from harness.rank.samples import SampleStream, open_corpus


class StreamLoader(BaseDataLoader):
    """Batches of a sample stream; its state is one number, the same on every rank."""

    def __init__(self, stream: SampleStream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for sample in self.stream:
            # Positions stay behind: torchtitan 0.2 counts them through the whole sequence, and
            # with plain causal attention a document sees those before it.
            yield {"input": sample.inputs}, sample.labels

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": self.stream.consumed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.stream.consumed = state_dict["consumed"]


def loader_builder(folder: Path, order_seed: int | None) -> Callable[..., StreamLoader]:
    """A ``build_dataloader_fn`` that reads the corpus in a data folder.

    ``order_seed`` is that of ``SampleStream``.
    """

    def build(*, dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> StreamLoader:
        del tokenizer  # the corpus is tokens already
        training = job_config.training
        local_batch_size = training.local_batch_size
        global_batch_size = training.global_batch_size
        if global_batch_size < 0:  # torchtitan's way to say: no gradient accumulation
            global_batch_size = local_batch_size * dp_world_size
        return StreamLoader(
            SampleStream(
                corpus=open_corpus(folder),
                seq_len=training.seq_len,
                seed=job_config.debug.seed,
                global_batch_size=global_batch_size,
                batch_size=local_batch_size,
                dp_rank=dp_rank,
                dp_degree=dp_world_size,
                order_seed=order_seed,
            )
        )

    return build
