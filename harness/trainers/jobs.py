"""Functions of a job or toolchain that call its trainer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from converge_harness.errors import ToolchainError
from converge_harness.model import Job, Toolchain, TrainerSpec
from converge_harness.run_folder.job import JobDocument
from converge_harness.toolchains.find import require_same_converge
from converge_harness.toolchains.recipes import purpose
from converge_harness.toolchains.user_python import before
from converge_harness.trainers.base import RANK_MODULE, CallOptions, Features
from converge_harness.trainers.calls import Call, NodeCommand, Rendezvous
from converge_harness.trainers.environment import Resources, pinned_environment
from converge_harness.trainers.registry import kinds, trainer_of, trainer_of_kind
from converge_harness.trainers.table import DEFAULT_TRAINER

PATH_VARIABLE = "PYTHONPATH"


def job_payload(
    job: Job, folder: Path, *, data: Path | None, seed_checkpoint: Path | None, device: str
) -> JobDocument:
    """The content of ``job.json`` (``docs/architecture.md``), without its schema version.

    ``data`` is the folder of the job's corpus, named after its digest.
    """
    return trainer_of(job.spec).job_payload(
        job, folder, data=data, seed_checkpoint=seed_checkpoint, device=device
    )


def argv(
    job: Job,
    folder: Path,
    rank_module: str = RANK_MODULE,
    call: Call | None = None,
    meeting: Rendezvous | None = None,
    *,
    devices: tuple[int, ...] | None = (),
    data: Path | None = None,
) -> tuple[str, ...]:
    """A call of a job, as a user would type it; None: the first.

    ``devices`` are the ids of its GPUs, ``data`` is the folder of its corpus; only programs other
    than torchtitan get them as arguments.
    """
    options = CallOptions(rank_module, call, meeting, devices, data)
    return trainer_of(job.spec).argv(job, folder, options)


def agent_argv(
    job: Job,
    folder: Path,
    *,
    logs: Path,
    python: Path | None = None,
    rank_module: str = RANK_MODULE,
    call: Call | None = None,
    meeting: Rendezvous | None = None,
    devices: tuple[int, ...] | None = (),
    data: Path | None = None,
) -> tuple[str, ...]:
    """The command that converge itself starts for one agent of a call.

    Under torchrun it is our own agent if the environment has this package; the agent records how
    each rank failed. Otherwise it is torchrun started by a file of ours, which also keeps it on
    loopback. ``python`` replaces the toolchain's (warm start only).
    """
    options = CallOptions(rank_module, call, meeting, devices, data, logs, python)
    return trainer_of(job.spec).agent_argv(job, folder, options)


def node_command(job: Job, folder: Path, options: CallOptions) -> NodeCommand:
    """What srun starts for one call of a scheduler's job."""
    return trainer_of(job.spec).node_command(job, folder, options)


def work_folder(job: Job, folder: Path) -> Path:
    """The working directory of a job's processes: its run folder, or the user's program's."""
    return trainer_of(job.spec).work_folder(job, folder)


def environment(
    base: Mapping[str, str],
    resources: Resources,
    folder: Path | None = None,
    job: Job | None = None,
    *,
    meeting: Rendezvous | None = None,
    data: Path | None = None,
    call: Call | None = None,
) -> dict[str, str]:
    """The environment of a job's processes: ``base``, with what can change numbers pinned.

    ``folder`` is the run folder; it and the job are None for a process that serves several jobs. An
    empty ``base`` gives only the pinned variables. ``meeting``, ``data`` and ``call`` as for
    ``argv``.
    """
    if job is None:
        return pinned_environment(base, resources, folder)
    trainer = trainer_of(job.spec)
    made = pinned_environment(base, resources, folder, job, offline=trainer.is_offline(job))
    made = searching(job.toolchain, made)
    if folder is None:
        return made
    return trainer.environment(made, resources, job, folder, meeting, data, call)


def searching(toolchain: Toolchain, variables: Mapping[str, str]) -> dict[str, str]:
    """Variables with which the Python of a toolchain searches the toolchain's folders first."""
    if not toolchain.paths:
        return dict(variables)
    return {**variables, PATH_VARIABLE: before(toolchain.paths, variables.get(PATH_VARIABLE))}


def printable_command(
    job: Job, folder: Path, ranks_per_node: int | None = None, data: Path | None = None
) -> str:
    """The call as one shell line; for torchtitan, to be run on every node.

    For a run in several segments, their calls one after another.
    Raises ValueError when the ranks do not fill nodes of that size.

    It needs the run folder's ``job.json``, so it repeats a run that was started before. Its
    environment is in ``record.json``.
    """
    return trainer_of(job.spec).printable(job, folder, ranks_per_node, data)


def needs_port(job: Job) -> bool:
    """Whether converge has to choose a free port for the job's ranks."""
    return trainer_of(job.spec).needs_port(job)


def curves_of(job: Job, folder: Path, call: Call | None = None) -> Path | None:
    """The curve file of a program without the probe, in a call (None: the first).

    None for a probed program.
    """
    trainer = trainer_of(job.spec)
    return trainer.curve_of_call(job, folder, call) if call else trainer.curve(job, folder)


def is_complete(job: Job, folder: Path) -> bool:
    """Whether a job that ended without error left complete results."""
    return trainer_of(job.spec).is_complete(job, folder)


def features_of(job: Job) -> Features:
    """The features of the release that trains a job."""
    return trainer_of(job.spec).features(job.toolchain)


def pipeline_stages(job: Job) -> int:
    """How many pipeline stages the model of a job is cut into."""
    return trainer_of(job.spec).pipeline_stages(job)


def find_toolchain(
    name: str, root: Path | None = None, trainer: TrainerSpec | None = None
) -> Toolchain:
    """A toolchain by name, with the versions of relevant packages.

    ``trainer`` is the one that uses it; None: the default one.

    Raises:
        ToolchainError: it does not exist, does not start, lacks what the trainer needs, or has
        another converge in it.
    """
    trainer = trainer or trainer_of_kind(DEFAULT_TRAINER).default_spec()
    found = trainer_of_kind(trainer.kind).find_toolchain(name, root, trainer)
    require_same_converge(name, root)
    return found


class TrainersOfToolchain(NamedTuple):
    """Which trainers can use a toolchain, by kind."""

    able: dict[str, Toolchain]
    """The toolchain as it is driven."""
    unable: dict[str, str]
    """Why not."""


def trainers_in(name: str, root: Path | None = None) -> TrainersOfToolchain:
    """Ask every trainer whether it can use a toolchain; command trainers for a probed program.

    Raises ToolchainError if none can, or if one cannot that the toolchain's recipe is for.
    """
    meant_for = {*purpose(name)}
    found = TrainersOfToolchain({}, {})
    for kind in kinds():
        trainer = trainer_of_kind(kind)
        try:
            found.able[kind] = find_toolchain(name, root, trainer.default_spec())
        except ToolchainError as error:
            if trainer.imports and meant_for.issuperset(trainer.imports):
                raise
            found.unable[kind] = str(error)
    if found.able:
        return found
    if len(set(found.unable.values())) == 1:
        raise ToolchainError(next(iter(found.unable.values())))
    reasons = "; ".join(f"{kind}: {why}" for kind, why in found.unable.items())
    but = ", but programs with trainer.probe = false can" if _without_probe(name, root) else ""
    raise ToolchainError(f"no trainer can use toolchain {name!r}{but}: {reasons}")


def _without_probe(name: str, root: Path | None) -> bool:
    """Whether a toolchain is enough for a program that takes no evidence of its own."""
    for trainer in map(trainer_of_kind, kinds()):
        spec = trainer.default_spec()
        with suppress(ToolchainError):
            unprobed = replace(spec, can=replace(spec.can, probed=False))
            find_toolchain(name, root, unprobed)
            return True
    return False


def assume_toolchain(
    name: str, root: Path | None = None, trainer: TrainerSpec | None = None
) -> Toolchain:
    """A toolchain as it will be once built, for plans that launch nothing."""
    trainer = trainer or trainer_of_kind(DEFAULT_TRAINER).default_spec()
    return trainer_of_kind(trainer.kind).assume_toolchain(name, root, trainer)
