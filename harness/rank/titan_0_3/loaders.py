"""Which of torchtitan 0.3's dataloaders reads the corpus, by the job's word for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

from harness.rank.documents import NAME, documents_of, register_documents
from harness.rank.job import Job
from harness.rank.titan_0_3.data import SampleLoader


def loader_config(job: Job, data_folder: Path) -> Any:
    """A config of the job's loader; a seed checkpoint reads nothing, so it gets our own."""
    return LOADERS["converge" if job.makes_seed_checkpoint else job.train_config.loader](
        job, data_folder
    )


def _ours(job: Job, data_folder: Path) -> Any:
    folder = str(data_folder)
    return SampleLoader.Config(
        dataset=NAME,
        dataset_path=folder,
        folder=folder,
        seed=job.seed,
        global_batch_size=-1,  # known when all settings are applied
        order_seed=job.order_seed,
    )


def _stock(job: Job, data_folder: Path) -> Any:
    register_documents(job.run_folder)
    return HuggingFaceTextDataLoader.Config(
        dataset=NAME, dataset_path=str(documents_of(data_folder))
    )


LOADERS: dict[str, Callable[[Job, Path], Any]] = {"converge": _ours, "torchtitan": _stock}
