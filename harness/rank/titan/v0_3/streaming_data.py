"""MosaicML Streaming's ``StreamingDataset`` as a torchtitan dataloader, and its shards.

The order of samples, where each rank reads, and the state of a resume are the package's own, as
its documentation prescribes: ``StreamingDataLoader`` counts the samples and makes the state.
https://docs.mosaicml.com/projects/streaming/en/stable/dataset_configuration/elastic_determinism.html

The corpus becomes MDS shards, the package's format, by its own writer.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from converge_harness.rank.data_order import Corpus, Sample, open_corpus, sample_of
from converge_harness.rank.titan.common.documents import NAME
from converge_harness.rank.titan.v0_3.series import BaseDataLoader, as_batch, loader_sizes
from converge_harness.rank.titan.v0_3.streaming_package import (
    find_place,
    import_streaming,
    seen_from,
)

_CONSUMED = "consumed"


class StreamingLoader(BaseDataLoader):  # type: ignore[misc]  # of a module that the series names
    """Batches of a ``StreamingDataset``, epoch after epoch; a rank's incomplete ones are dropped.

    Each rank takes its samples in the order in which the dataset gives them to it, and so gets
    every W-th of W ranks: the global batch of a step is a run of consecutive samples of the
    dataset's order, whatever W is.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """Arguments of ``StreamingDataset`` by their own names, and some of ours."""

        dataset: str = NAME
        dataset_path: str | None = None
        folder: str
        """Ours: folder with ``corpus.json`` and ``tokens.npy``."""
        locks: str
        """Ours: folder for lock files."""
        ranks_per_node: int | None = None
        """Ours: simulate nodes of so many data-parallel ranks; None: the nodes that there are."""
        num_canonical_nodes: int = 4
        """It must divide the number of nodes, or be a multiple of it; 0: the package chooses."""
        shuffle: bool = True
        shuffle_algo: str = "py1e"
        shuffle_seed: int = 9176
        shuffle_block_size: int | None = None
        partition_algo: str = "relaxed"
        sampling_method: str = "balanced"
        batching_method: str = "random"
        epoch_size: int | None = None
        """Samples of an epoch; None: all of the corpus."""
        batch_size: int | None = None
        """Samples per batch of a rank; None: the local batch size, as the package demands."""
        predownload: int | None = None

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        **more: Any,
    ) -> None:
        sizes = loader_sizes(more)
        corpus = open_corpus(Path(config.folder))
        shards = prepare_shards(Path(config.folder), corpus, sizes.seq_len)
        streaming = import_streaming()
        with seen_from(
            find_place(dp_rank, dp_world_size, config.ranks_per_node), Path(config.locks)
        ):
            dataset = streaming.StreamingDataset(
                local=str(shards),
                num_canonical_nodes=config.num_canonical_nodes,
                shuffle=config.shuffle,
                shuffle_algo=config.shuffle_algo,
                shuffle_seed=config.shuffle_seed,
                shuffle_block_size=config.shuffle_block_size,
                partition_algo=config.partition_algo,
                sampling_method=config.sampling_method,
                batching_method=config.batching_method,
                epoch_size=config.epoch_size,
                batch_size=config.batch_size or sizes.batch_size,
                predownload=config.predownload,
            )
        self.dataset = dataset
        """For ``inject``: nothing else reaches in."""
        self._batches = streaming.StreamingDataLoader(
            dataset,
            batch_size=sizes.batch_size,
            drop_last=True,
            collate_fn=partial(_collate, bos_id=corpus.bos_id),
        )
        self._samples_per_batch = sizes.batch_size * dp_world_size
        self._consumed = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Raises ValueError when a whole epoch has no batch for this rank."""
        whole_epoch = False  # the first may be what is left of a resumed one
        while True:
            before = self._consumed
            for batch in self._batches:
                self._consumed += self._samples_per_batch
                inputs, positions, labels = as_batch(
                    *(batch[each] for each in ("input", "positions", "labels"))
                )
                yield {"input": inputs, "positions": positions}, labels
            if whole_epoch and self._consumed == before:
                raise ValueError(
                    f"an epoch of {self.dataset.epoch_size} samples has no whole batch for each "
                    "of the data-parallel ranks: set a larger dataloader.epoch_size"
                )
            whole_epoch = True

    def state_dict(self) -> dict[str, Any]:
        return {**self._batches.state_dict(), _CONSUMED: self._consumed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Collective over the world, if there is one."""
        if not state_dict:
            return
        state = dict(state_dict)
        self._consumed = int(state.pop(_CONSUMED))
        if dist.is_initialized():
            # state_dict() of the ranks of a node reads the memory into which this loads: a slower
            # rank would read a half-written state (JSONDecodeError, seen).
            dist.barrier()
        self._batches.load_state_dict(state)


def _collate(items: list[dict[str, np.ndarray]], bos_id: int) -> dict[str, torch.Tensor]:
    """A dict of tensors (batch, seq_len): the package counts samples by the first of them."""
    samples = [sample_of(item[COLUMN], bos_id) for item in items]
    batch = Sample(*(torch.stack(column) for column in zip(*samples, strict=True)))
    return {"input": batch.inputs, "positions": batch.positions, "labels": batch.labels}


COLUMN = "tokens"
SHARD_BYTES = 1 << 16
"""Small, so that a small corpus has shards enough for shuffles that know of shards."""


def prepare_shards(data_folder: Path, corpus: Corpus, seq_len: int) -> Path:
    """The folder of the corpus's shards for a sequence length, written unless it is there.

    One sample is the ``seq_len`` tokens of our own loader's sample of that number and one more for
    the last target. Collective over the world, if there is one; several jobs may do this at once:
    each writes a folder of its own, the first to finish names it.
    """
    # A file names all that its bytes depend on: shuffles look at the sizes of shards.
    kind = f"seq_len-{seq_len}-shard-{SHARD_BYTES}-streaming-{version('mosaicml-streaming')}"
    folder = data_folder / "mds" / kind
    if os.environ.get("LOCAL_RANK", "0") == "0":  # hosts may share the folder or not
        _write_once(folder, corpus, seq_len)
    if dist.is_initialized():
        dist.barrier()
    return folder


def _write_once(folder: Path, corpus: Corpus, seq_len: int) -> None:
    if folder.is_dir():
        return
    folder.parent.mkdir(exist_ok=True)
    unfinished = folder.with_name(f".{uuid.uuid4().hex}")
    try:
        _write(unfinished, corpus, seq_len)
        unfinished.rename(folder)
    except OSError:
        # A rename fails when another job was first: its folder holds the same bytes.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write(folder: Path, corpus: Corpus, seq_len: int) -> None:
    writer = import_streaming().MDSWriter(
        out=str(folder), columns={COLUMN: f"ndarray:int32:{seq_len + 1}"}, size_limit=SHARD_BYTES
    )
    with writer:
        for index in range(corpus.count(seq_len)):
            writer.write({COLUMN: np.asarray(corpus.window(index, seq_len), dtype=np.int32)})
