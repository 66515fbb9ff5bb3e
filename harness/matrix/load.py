"""Experiment file to plan, with a baseline in place of its control if the file names one."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from converge_harness import corpus
from converge_harness.baselines import (
    StoredBaseline,
    default_folder,
    misfits,
    not_there,
    read_baseline,
)
from converge_harness.errors import ConfigError, Problem, StoreError
from converge_harness.experiment import load_experiment
from converge_harness.model import (
    BASELINES,
    Cluster,
    Experiment,
    Launcher,
    Plan,
    Role,
    Toolchain,
    TrainerSpec,
)
from converge_harness.plan import identity_facts, judged_by, make_plan, measured_by, select
from converge_harness.surroundings import read_surroundings
from converge_harness.trainers import find_toolchain

SHOWN_MISFITS = 6
"""Most differences between a baseline and a control that a message names."""


class Finder(Protocol):
    """Finds a toolchain by its name and its trainer (None: torchtitan)."""

    def __call__(self, name: str, *, trainer: TrainerSpec | None = None) -> Toolchain: ...


def load_plan(
    path: Path,
    only: Sequence[str],
    *,
    on_gpu: bool,
    slots: int | None = None,
    calibration: Path | None = None,
    launcher: Launcher | None = None,
    cluster: Path | Cluster | None = None,
    find: Finder = find_toolchain,
) -> Plan:
    """Load an experiment file as a plan; raises one ConfigError with all its problems.

    ``slots`` replaces the file's ``cpu_ranks``: a set with more ranks is refused. ``calibration``
    replaces the file's: a plan with one makes no repeats. ``launcher`` and ``cluster`` as in
    ``load_with_cluster``.
    """
    experiment = load_with_cluster(path, launcher, cluster)
    if calibration is not None:
        experiment = replace(experiment, calibration=calibration)
    if only:  # before toolchains are searched: a part needs only its own
        experiment = select(experiment, only)
    return plan_experiment(experiment, on_gpu=on_gpu, slots=slots, find=find)


def load_with_cluster(
    path: Path, launcher: Launcher | None = None, cluster: Path | Cluster | None = None
) -> Experiment:
    """Read an experiment file, and the cluster that its launcher needs.

    ``launcher`` replaces the file's. ``cluster`` is the user's own cluster file (by default the one
    that the environment names, else that of the home folder, if any), or a complete cluster that
    replaces it and ``[cluster]``.

    Raises:
        ConfigError: with every problem of the files.
    """
    experiment = load_experiment(
        path,
        launcher=launcher,
        cluster=own_cluster_file(os.environ) if cluster is None else cluster,
    )
    if isinstance(cluster, Path) and experiment.launcher is Launcher.LOCAL:
        raise ConfigError(
            Problem(
                f"--cluster {cluster}",
                "has no effect: the jobs run on this machine",
                "add --launcher slurm",
            )
        )
    return experiment


def own_cluster_file(environ: Mapping[str, str]) -> Path | None:
    """``$CONVERGE_CLUSTER``, else ``converge/cluster.toml`` among the user's settings if it exists.

    The folder of settings is ``$XDG_CONFIG_HOME`` or ``~/.config`` (XDG Base Directory
    Specification).
    """
    if named := environ.get("CONVERGE_CLUSTER"):
        return Path(named)
    settings = environ.get("XDG_CONFIG_HOME") or "~/.config"
    try:
        path = Path(settings).expanduser() / "converge" / "cluster.toml"
        return path if path.is_file() else None
    except (OSError, RuntimeError):  # a folder without permission, no home folder
        return None


def plan_experiment(
    experiment: Experiment,
    *,
    on_gpu: bool,
    slots: int | None = None,
    find: Finder = find_toolchain,
) -> Plan:
    """Plan a loaded experiment, or a part of one; raises one ConfigError with all problems."""
    if slots is not None:
        experiment = replace(experiment, cpu_ranks=slots)
    surroundings = read_surroundings(experiment, corpus.digest, on_gpu=on_gpu)
    toolchains = {
        name: find(name, trainer=trainer) for name, trainer in _toolchains_of(experiment).items()
    }
    stored = baseline_of(experiment)
    if stored is None:
        return make_plan(experiment, toolchains, surroundings)
    experiment = measured_by(experiment, stored.baseline)
    for spec in experiment.controls:  # files that only the control needs may be gone
        toolchains.setdefault(spec.toolchain, stored.baseline.toolchain)
    return stand_in(make_plan(experiment, toolchains, surroundings), stored)


def toolchain_names(experiment: Experiment) -> tuple[str, ...]:
    """Names of the toolchains that an experiment uses, in order of first use.

    A baseline needs none.
    """
    return tuple(_toolchains_of(experiment))


def _toolchains_of(experiment: Experiment) -> dict[str, TrainerSpec]:
    """By the name of a toolchain, the trainer that uses it: an experiment file has one for each."""
    anchors = (experiment.anchor,) if experiment.anchor else ()
    controls = experiment.controls if experiment.baseline is None else ()
    return {spec.toolchain: spec.trainer for spec in (*controls, *anchors, *experiment.tests)}


# ------------------------------------------------------------------ baselines


def baseline_of(experiment: Experiment) -> StoredBaseline | None:
    """The baseline in place of an experiment's control; None if it names none.

    Raises ConfigError when it does not exist, or has changed since it was blessed.
    """
    folder = experiment.baseline
    if folder is None:
        return None
    place = f"{experiment.path}: baseline"
    if not folder.is_dir():
        if folder.parent == experiment.path.absolute().parent / BASELINES:  # named without a path
            folder = default_folder(experiment.path) / folder.name
        make = f"make it with: {bless_command(experiment.path, folder)}"
        raise ConfigError(Problem(place, not_there(folder), make))
    try:
        return read_baseline(folder)
    except StoreError as error:
        raise ConfigError(Problem(place, str(error))) from error


def bless_command(experiment: Path, folder: Path) -> str:
    """The command that blesses the control of an experiment."""
    command = ["converge", "bless", str(experiment), "--name", folder.name]
    command += ["--out", str(folder.parent), "--author", "WHO", "--reason", "WHY"]
    return shlex.join(command)


def stand_in(plan: Plan, stored: StoredBaseline) -> Plan:
    """The plan with the baseline in place of its control.

    Raises ConfigError when the baseline was trained with other settings than the file's control, or
    with a hardware class or data type that the file does not allow to differ.
    """
    experiment, baseline = plan.experiment, stored.baseline
    (control,) = (job for job in plan.jobs if job.role is Role.CONTROL)
    found = misfits(
        baseline.facts, identity_facts(control, plan.surroundings), experiment.baseline_across
    )
    if found.refused:
        shown = [*found.refused[:SHOWN_MISFITS]]
        if len(found.refused) > SHOWN_MISFITS:
            shown.append(f"and {len(found.refused) - SHOWN_MISFITS} more")
        allowed = ", ".join(f'"{each}"' for each in sorted(found.across))
        excuse = f"if intended, baseline_across = [{allowed}]; " if found.across else ""
        renew = bless_command(experiment.path, baseline.folder)
        raise ConfigError(
            Problem(
                f"{experiment.path}: baseline",
                f"{baseline.text}: it is not the control {control.name!r} of this file on this "
                f"machine: {'; '.join(shown)}",
                f"{excuse}bless the control as it is now: {renew}",
            )
        )
    return judged_by(plan, baseline, found.named)
