"""How a trainer runs a job, and where its evidence is. Pure: values in, argv and JSON out."""

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
    "Resources",
    "argv",
    "environment",
    "is_complete",
    "job_payload",
    "metrics_files",
    "printable_command",
    "seed_checkpoint_of",
    "torchrun_arguments",
]
