"""How a trainer runs a job, and where its evidence is. Pure: values in, argv and JSON out.

::

    jobs.py     what the launcher asks of a job, whichever trainer it has
    titan.py    job.json, argv and environment of torchtitan under torchrun
    command.py  argv and environment of any program under any launcher
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
from harness.trainers.command import curves_of, needs_port, output_of
from harness.trainers.jobs import (
    AGENT_MODULE,
    agent_argv,
    argv,
    environment,
    is_complete,
    job_payload,
    printable_command,
    work_folder,
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
    metrics_files,
    node_arguments,
    seed_checkpoint_of,
    torchrun_arguments,
)

__all__ = [
    "AGENT_MODULE",
    "CHECKPOINTS",
    "RANK_MODULE",
    "Call",
    "Rendezvous",
    "Resources",
    "agent_argv",
    "argv",
    "checkpoint_of",
    "comes_in_passes",
    "curves_of",
    "environment",
    "first_call",
    "has_metadata",
    "is_complete",
    "job_payload",
    "last_step",
    "metrics_files",
    "most_nodes",
    "needs_port",
    "node_arguments",
    "output_of",
    "part_of",
    "pass_files",
    "pass_folders",
    "printable_command",
    "seed_checkpoint_of",
    "torchrun_arguments",
    "work_folder",
]
