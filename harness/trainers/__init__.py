"""Trainers, behind one interface (``base.py``), found by ``[trainer] kind``.

::

    base.py          the interface: ``Trainer``, whose methods have defaults where possible
    registry.py      finds the ``Trainer`` of a kind; ``register`` adds one
    jobs.py          functions of a job, for other packages: each finds the job's trainer and calls
                     it (argv, environment, ``job.json``, stages); also finds its toolchains
    table.py         the keys of ``[trainer]`` that all trainers share
    environment.py   the variables that every job's environment gets
    calls.py         a run as one or several calls (starts): which part each trains, how ranks meet
    failure.py       why a run under torchrun failed, from its logs
    mapping.py       the file that names the parameters in another trainer's checkpoint
    config_audit.py  what of a set was not in force, for trainers whose whole config is recorded
    torchrun.py      what torchtitan and Megatron-Core share: converge's rank code under torchrun
    torchtitan/      torchtitan
    megatron/        Megatron-Core
    command/         a program of the user's, started by the command that ``[trainer]`` gives
"""

from converge_harness.run_folder.launcher_variables import is_of_launcher
from converge_harness.trainers.base import (
    RANK_MODULE,
    CallOptions,
    CurveFile,
    DifferenceNotPassed,
    Features,
    SourceFile,
    Trainer,
    curve_outside,
    normal_path,
)
from converge_harness.trainers.calls import (
    FOUND_CHECKPOINT,
    MEETING_PLACE,
    MEETING_PORT,
    Call,
    NodeCommand,
    Rendezvous,
    calls_of_segments,
    comes_in_passes,
    first_call,
    left_passes,
    most_nodes,
    part_of,
)
from converge_harness.trainers.environment import Resources
from converge_harness.trainers.jobs import (
    PATH_VARIABLE,
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
    node_command,
    pipeline_stages,
    printable_command,
    searching,
    trainers_in,
    work_folder,
)
from converge_harness.trainers.registry import (
    kinds,
    read_trainer,
    register,
    trainer_of,
    trainer_of_document,
    trainer_of_kind,
)
from converge_harness.trainers.table import (
    DEFAULT_TRAINER,
    FOR_ALL_SETS,
    InlineTable,
    TrainerOfFile,
    TrainerTable,
    environment_of,
)

__all__ = [
    "DEFAULT_TRAINER",
    "FOR_ALL_SETS",
    "FOUND_CHECKPOINT",
    "MEETING_PLACE",
    "MEETING_PORT",
    "PATH_VARIABLE",
    "RANK_MODULE",
    "Call",
    "CallOptions",
    "CurveFile",
    "DifferenceNotPassed",
    "Features",
    "InlineTable",
    "NodeCommand",
    "Rendezvous",
    "Resources",
    "SourceFile",
    "Trainer",
    "TrainerOfFile",
    "TrainerTable",
    "agent_argv",
    "argv",
    "assume_toolchain",
    "calls_of_segments",
    "comes_in_passes",
    "curve_outside",
    "curves_of",
    "environment",
    "environment_of",
    "features_of",
    "find_toolchain",
    "first_call",
    "is_complete",
    "is_of_launcher",
    "job_payload",
    "kinds",
    "left_passes",
    "most_nodes",
    "needs_port",
    "node_command",
    "normal_path",
    "part_of",
    "pipeline_stages",
    "printable_command",
    "read_trainer",
    "register",
    "searching",
    "trainer_of",
    "trainer_of_document",
    "trainer_of_kind",
    "trainers_in",
    "work_folder",
]
