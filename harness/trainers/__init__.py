"""How a trainer runs a job, and where its evidence is. Pure: values in, argv and JSON out.

::

    titan.py    job.json, argv and environment of torchtitan under torchrun
    calls.py    the torchrun calls of a run
    passes.py   the files of a run in several passes
"""

from harness.trainers.calls import (
    Call,
    Rendezvous,
    comes_in_passes,
    first_call,
    most_nodes,
    part_of,
)
from harness.trainers.passes import (
    CHECKPOINTS,
    checkpoint_of,
    has_metadata,
    last_step,
    pass_files,
    pass_folders,
)
from harness.trainers.titan import (
    RANK_MODULE,
    Resources,
    argv,
    environment,
    is_complete,
    job_payload,
    metrics_files,
    node_arguments,
    printable_command,
    seed_checkpoint_of,
    torchrun_arguments,
)

__all__ = [
    "CHECKPOINTS",
    "RANK_MODULE",
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
    "node_arguments",
    "part_of",
    "pass_files",
    "pass_folders",
    "printable_command",
    "seed_checkpoint_of",
    "torchrun_arguments",
]
