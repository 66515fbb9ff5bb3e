"""The corpus's documents for the stock text loader of torchtitan's main branch, which is Grain's.

As with 0.3's (``converge_harness.rank.titan.common.documents``), nothing of the loader is changed:
it splits the documents by data-parallel rank, tokenizes and packs them on the way, and keeps a
state of its own per rank. A pack is a whole microbatch: documents run on from one of its sequences
into the next, at positions that begin again after ``training.seq_len``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from converge_harness.run_folder import layout


def grain_config(documents: Path, run_folder: Path) -> Any:
    """A config of the loader, for a file of documents (``{"text": ...}`` a line)."""
    from torchtitan.components.data import (
        ConcatThenSplitPackingConfig,
        GrainDataLoader,
        HuggingFaceRandomAccessSource,
        SingleDatasetConfig,
    )
    from torchtitan.hf_datasets.text_datasets import TextProcessor

    source = HuggingFaceRandomAccessSource.Config(
        path="json",
        split="train",
        load_dataset_kwargs={
            "data_files": str(documents),
            # Of the run alone, and not in the user's home.
            "cache_dir": str(run_folder / layout.DATASETS),
        },
    )
    dataset = SingleDatasetConfig(
        source=source, processor=TextProcessor.Config(), post_filters=(_has_tokens,)
    )
    return GrainDataLoader.Config(
        dataset=ConcatThenSplitPackingConfig(dataset=dataset), shuffle=False
    )


def _has_tokens(sample: Any) -> bool:
    """Whether a document has two tokens or more: the processor returns None for others."""
    return sample is not None
