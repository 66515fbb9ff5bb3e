"""The job's model shape and data, handed to torchtitan 0.2 through its registry of train specs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader

from converge_harness.rank.data_order import SampleStream, open_corpus
from converge_harness.run_folder.job import RankJob


def register(job: RankJob, config: Any, watch: Callable[[Any], Any] = lambda spec: spec) -> Any:
    """Register the config's model with the job's shape and loader; return its train spec.

    A registered spec goes before torchtitan's own of the same name, so the config keeps naming a
    model and a flavor that torchtitan knows. ``[converge.model]`` replaces fields of that flavor's
    arguments; a job with data gets the loader that it names, one without keeps torchtitan's.
    ``watch`` takes the spec and returns the one to register.
    """
    from torchtitan.protocols import train_spec

    spec = train_spec.get_train_spec(config.model.name)
    flavor = config.model.flavor
    shaped = dataclasses.replace(spec.model_args[flavor], **job.train_config.model)
    spec = dataclasses.replace(spec, model_args={**spec.model_args, flavor: shaped})
    if job.data_folder is not None and job.train_config.loader == "torchtitan":
        from converge_harness.rank.titan.common.documents import register_documents

        register_documents(job.run_folder)
    elif job.data_folder is not None:
        from converge_harness.rank.titan.v0_2.train_spec import loader_builder

        loader = loader_builder(job.data_folder, job.order_seed)
        spec = dataclasses.replace(spec, build_dataloader_fn=loader)
    train_spec.register_train_spec(config.model.name, watch(spec))  # once per name
    return spec


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
