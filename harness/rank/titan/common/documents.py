"""The corpus's documents as a dataset of torchtitan's own text loader, in either release.

Nothing of that loader is changed: it splits the documents by data-parallel rank, tokenizes and
packs them on the way, and keeps a state of its own per rank.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from converge_harness.run_folder import layout

NAME = "converge"
"""What ``dataloader.dataset`` (0.2: ``training.dataset``) calls it."""


def register_documents(run_folder: Path) -> None:
    """Add the dataset ``NAME`` to those that torchtitan knows; its path is a file of documents."""
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    DATASETS[NAME] = DatasetConfig(
        path="",
        # Of the run alone, and not in the user's home.
        loader=partial(_load, cache_dir=run_folder / layout.DATASETS),
        sample_processor=_text,
    )


def _load(path: str, cache_dir: Path) -> Any:
    """As torchtitan loads its own small dataset, c4_test: whole, not streamed."""
    from datasets import load_dataset

    return load_dataset("json", data_files=path, split="train", cache_dir=str(cache_dir))


def _text(sample: dict[str, Any]) -> str:
    return sample["text"]
