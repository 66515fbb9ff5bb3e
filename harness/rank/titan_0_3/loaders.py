"""Which of torchtitan 0.3's dataloaders reads the corpus, by the job's word for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

from harness.rank.documents import NAME, documents_of, register_documents
from harness.rank.settings import KeyProblem, SettingError
from harness.rank.titan_0_3.data import SampleLoader
from harness.rank.titan_0_3.streaming_package import TOOLCHAIN, is_installed
from harness.run_folder.job import Job
from harness.run_folder.layout import STREAMING


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


def _streaming(job: Job, data_folder: Path) -> Any:
    """Raises SettingError when the package is not in this toolchain."""
    if not is_installed():
        raise SettingError(
            KeyProblem(
                "converge.data.loader",
                f"'streaming' needs mosaicml-streaming, which this toolchain has not: set "
                f"toolchain = {TOOLCHAIN!r}",
            )
        )
    from harness.rank.titan_0_3.streaming_data import StreamingLoader

    folder = str(data_folder)
    return StreamingLoader.Config(
        dataset=NAME, dataset_path=folder, folder=folder, locks=str(job.run_folder / STREAMING)
    )


LOADERS: dict[str, Callable[[Job, Path], Any]] = {
    "converge": _ours,
    "torchtitan": _stock,
    "streaming": _streaming,
}
