"""Which of torchtitan's dataloaders reads the corpus, by the loader's name in the job.

``SampleLoader`` is ours: the project's data order
(``converge_harness.rank.data_order``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from converge_harness.rank.data_order import SampleStream, open_corpus
from converge_harness.rank.settings import KeyProblem, SettingError
from converge_harness.rank.titan.common.documents import NAME, register_documents
from converge_harness.rank.titan.v0_3.series import SERIES, BaseDataLoader, as_batch, loader_sizes
from converge_harness.rank.titan.v0_3.streaming_package import TOOLCHAIN, is_installed
from converge_harness.run_folder.corpus import documents_of
from converge_harness.run_folder.job import RankJob
from converge_harness.run_folder.layout import DATASETS, STREAMING


def loader_config(job: RankJob, data_folder: Path) -> Any:
    """A config of the job's loader; a seed checkpoint reads nothing, so it gets our own."""
    return LOADERS["converge" if job.makes_seed_checkpoint else job.train_config.loader](
        job, data_folder
    )


def _ours(job: RankJob, data_folder: Path) -> Any:
    folder = str(data_folder)
    return SampleLoader.Config(
        dataset=NAME,
        dataset_path=folder,
        folder=folder,
        seed=job.seed,
        global_batch_size=-1,  # known when all settings are applied
        order_seed=job.order_seed,
    )


def _stock(job: RankJob, data_folder: Path) -> Any:
    if SERIES.grain:
        return _grain(documents_of(data_folder), job.run_folder)
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

    register_documents(job.run_folder)
    return HuggingFaceTextDataLoader.Config(
        dataset=NAME, dataset_path=str(documents_of(data_folder))
    )


def _grain(documents: Path, run_folder: Path) -> Any:
    """A config of the stock text loader of torchtitan's main branch, which is Grain's.

    As with 0.3's, nothing of the loader is changed: it splits the documents (``{"text": ...}`` a
    line) by data-parallel rank, tokenizes and packs them on the way, and keeps a state of its own
    per rank. A pack is a whole microbatch: documents run on from one of its sequences into the
    next, at positions that begin again after ``training.seq_len``.
    """
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
            "cache_dir": str(run_folder / DATASETS),
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


def _streaming(job: RankJob, data_folder: Path) -> Any:
    """Raises SettingError when the package is not in this toolchain."""
    if not is_installed():
        raise SettingError(
            KeyProblem(
                "converge.data.loader",
                f"'streaming' needs mosaicml-streaming, which this toolchain has not: set "
                f"toolchain = {TOOLCHAIN!r}",
            )
        )
    from converge_harness.rank.titan.v0_3.streaming_data import StreamingLoader

    folder = str(data_folder)
    return StreamingLoader.Config(
        dataset=NAME, dataset_path=folder, folder=folder, locks=str(job.run_folder / STREAMING)
    )


LOADERS: dict[str, Callable[[RankJob, Path], Any]] = {
    "converge": _ours,
    "torchtitan": _stock,
    "streaming": _streaming,
}


class SampleLoader(BaseDataLoader):  # type: ignore[misc]  # of a module that the series names
    """Batches whose samples do not depend on the data-parallel degree.

    torchtitan's own loader splits the dataset by rank: other degrees read other samples from the
    first step on.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """Where the corpus is, and what decides the order of its samples."""

        dataset: str = NAME
        dataset_path: str | None = None
        """With ``dataset`` what the base class of 0.3 has, and that of main has not."""
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
        **more: Any,
    ) -> None:
        sizes = loader_sizes(more)
        global_batch_size = config.global_batch_size
        if global_batch_size < 0:  # torchtitan's way to say: no gradient accumulation
            global_batch_size = sizes.batch_size * dp_world_size
        self._stream = SampleStream(
            open_corpus(Path(config.folder)),
            seq_len=sizes.seq_len,
            seed=config.seed,
            global_batch_size=global_batch_size,
            batch_size=sizes.batch_size,
            dp_rank=dp_rank,
            dp_degree=dp_world_size,
            order_seed=config.order_seed,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for sample in self._stream:
            inputs, positions, labels = as_batch(*sample)
            yield {"input": inputs, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": torch.tensor(self._stream.consumed)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self._stream.consumed = int(state_dict["consumed"])
