"""Trainers: what each does with a job, behind one interface (``base.py``), found by its kind.

::

    base.py          Trainer: what the harness asks of one, and how most of it is done by default
    registry.py      kind to Trainer; ``register`` adds one; ``[trainer]`` by its kind
    table.py         what ``[trainer]`` holds whatever trains, and what it means
    jobs.py          a job, or a toolchain, asked of its trainer
    environment.py   what is pinned in the environment of every job
    calls.py         the torchrun calls of a run
    failure.py       why a run under torchrun failed
    torchtitan/      torchtitan, by rank code of ours
    command/         any program, by an argv template
"""

from harness.trainers.base import (
    RANK_MODULE,
    Curve,
    Features,
    Source,
    Start,
    Trainer,
    Untold,
)
from harness.trainers.calls import (
    Call,
    Rendezvous,
    comes_in_passes,
    first_call,
    most_nodes,
    part_of,
)
from harness.trainers.environment import Resources
from harness.trainers.jobs import (
    agent_argv,
    argv,
    assume_toolchain,
    curves_of,
    environment,
    features_of,
    find_toolchain,
    is_complete,
    job_payload,
    needs_port,
    node_arguments,
    printable_command,
    work_folder,
)
from harness.trainers.registry import (
    kinds,
    read_trainer,
    register,
    trainer_of,
    trainer_of_document,
    trainer_of_kind,
)
from harness.trainers.table import InlineTable, TrainerOfFile, TrainerTable

__all__ = [
    "RANK_MODULE",
    "Call",
    "Curve",
    "Features",
    "InlineTable",
    "Rendezvous",
    "Resources",
    "Source",
    "Start",
    "Trainer",
    "TrainerOfFile",
    "TrainerTable",
    "Untold",
    "agent_argv",
    "argv",
    "assume_toolchain",
    "comes_in_passes",
    "curves_of",
    "environment",
    "features_of",
    "find_toolchain",
    "first_call",
    "is_complete",
    "job_payload",
    "kinds",
    "most_nodes",
    "needs_port",
    "node_arguments",
    "part_of",
    "printable_command",
    "read_trainer",
    "register",
    "trainer_of",
    "trainer_of_document",
    "trainer_of_kind",
    "work_folder",
]
