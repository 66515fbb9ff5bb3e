"""The corpus as MDS shards, the format of MosaicML Streaming, written by its own writer."""

from __future__ import annotations

import os
import shutil
import uuid
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch.distributed as dist

from harness.rank.samples import Corpus
from harness.rank.titan_0_3.streaming_package import import_streaming

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
