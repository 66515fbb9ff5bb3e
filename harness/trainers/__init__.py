"""How a trainer runs a job, and where its evidence is. Pure: values in, argv and JSON out.

::

    titan.py    job.json, argv and environment of torchtitan under torchrun
    calls.py    the torchrun calls of a run
    passes.py   the files of a run in several passes
"""

from harness.trainers.calls import Call, Rendezvous, comes_in_passes, first_call, most_nodes
from harness.trainers.passes import (
    CHECKPOINTS,
    checkpoint_of,
    has_metadata,
    last_step,
    pass_files,
    pass_folders,
)
from harness.trainers.titan import (
    Resources,
    argv,
    environment,
    is_complete,
    job_payload,
    metrics_files,
    printable_command,
    seed_checkpoint_of,
    torchrun_arguments,
)

__all__ = [
    "CHECKPOINTS",
    "Call",
    "Rendezvous",
    "Resources",
    "argv",
    "checkpoint_of",
    "comes_in_passes",
    "environment",
    "first_call",
    "has_metadata",
    "is_complete",
    "job_payload",
    "last_step",
    "metrics_files",
    "most_nodes",
    "pass_files",
    "pass_folders",
    "printable_command",
    "seed_checkpoint_of",
    "torchrun_arguments",
]
