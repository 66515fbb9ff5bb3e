"""The job's model shape and data, handed to torchtitan through its registry of train specs."""

from __future__ import annotations

import dataclasses
from typing import Any

from harness.run_folder.job import Job


def register(job: Job, config: Any) -> Any:
    """Register the config's model with the job's shape and loader; return its train spec.

    A registered spec goes before torchtitan's own of the same name, so the config keeps naming a
    model and a flavor that torchtitan knows. ``[converge.model]`` replaces fields of that flavor's
    arguments; a job with data gets the loader that it names, one without keeps torchtitan's.
    """
    from torchtitan.protocols import train_spec

    spec = train_spec.get_train_spec(config.model.name)
    flavor = config.model.flavor
    shaped = dataclasses.replace(spec.model_args[flavor], **job.train_config.model)
    spec = dataclasses.replace(spec, model_args={**spec.model_args, flavor: shaped})
    if job.data_folder is not None and job.train_config.loader == "torchtitan":
        from harness.rank.documents import register_documents

        register_documents(job.run_folder)
    elif job.data_folder is not None:
        from harness.rank.titan_0_2.data import loader_builder

        loader = loader_builder(job.data_folder, job.order_seed)
        spec = dataclasses.replace(spec, build_dataloader_fn=loader)
    train_spec.register_train_spec(config.model.name, spec)
    return spec
