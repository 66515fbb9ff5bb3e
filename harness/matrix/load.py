"""Experiment file to plan, with the golden that stands for its control, if it names one."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from converge_harness import corpus
from converge_harness.errors import ConfigError, Problem, StoreError
from converge_harness.experiment import load_experiment
from converge_harness.model import (
    GOLDENS,
    Cluster,
    Experiment,
    Launcher,
    Plan,
    Role,
    Toolchain,
    TrainerSpec,
)
from converge_harness.plan import identity_facts, judged_by, make_plan, measured_by, select
from converge_harness.references import (
    StoredGolden,
    default_folder,
    misfits,
    not_there,
    read_golden,
)
from converge_harness.surroundings import read_surroundings
from converge_harness.trainers import find_toolchain

SHOWN_MISFITS = 6
"""Differences between a golden and a control that a message names."""


class Finder(Protocol):
    """Finds a toolchain by its name and the trainer that it is for (None: torchtitan)."""

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
    """Experiment file to plan; everything wrong with it in one ConfigError.

    ``slots`` replaces the file's ``cpu_ranks``: a set with more ranks is refused. ``calibration``
    replaces the file's: a plan with one makes no repeats. ``launcher`` and ``cluster`` as in
    ``load_with_cluster``.
    """
    experiment = load_with_cluster(path, launcher, cluster)
    if calibration is not None:
        experiment = replace(experiment, calibration=calibration)
    if only:  # before anything is looked for: a part needs only its own toolchains
        experiment = select(experiment, only)
    return plan_experiment(experiment, on_gpu=on_gpu, slots=slots, find=find)


def load_with_cluster(
    path: Path, launcher: Launcher | None = None, cluster: Path | Cluster | None = None
) -> Experiment:
    """Read an experiment file, and the cluster that its launcher needs.

    ``launcher`` replaces the file's. ``cluster`` is the user's own cluster file (by default the
    one that the environment names, else that of the home folder, where there is one), or a whole
    cluster that replaces it and ``[cluster]``.

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
                "says nothing: the jobs run on this machine",
                "add --launcher slurm",
            )
        )
    return experiment


def own_cluster_file(environ: Mapping[str, str]) -> Path | None:
    """``$CONVERGE_CLUSTER``, else ``converge/cluster.toml`` of the user's settings if it is there.

    The folder of settings is ``$XDG_CONFIG_HOME`` or ``~/.config`` (XDG Base Directory
    Specification).
    """
    if named := environ.get("CONVERGE_CLUSTER"):
        return Path(named)
    settings = environ.get("XDG_CONFIG_HOME") or "~/.config"
    try:
        path = Path(settings).expanduser() / "converge" / "cluster.toml"
        return path if path.is_file() else None
    except (OSError, RuntimeError):  # a folder that may not be searched, no home folder
        return None


def plan_experiment(
    experiment: Experiment,
    *,
    on_gpu: bool,
    slots: int | None = None,
    find: Finder = find_toolchain,
) -> Plan:
    """A loaded experiment, or a part of one, to plan; its problems in one ConfigError."""
    if slots is not None:
        experiment = replace(experiment, cpu_ranks=slots)
    surroundings = read_surroundings(experiment, corpus.digest, on_gpu=on_gpu)
    trainer = experiment.controls[0].trainer  # one per file
    toolchains = {name: find(name, trainer=trainer) for name in toolchain_names(experiment)}
    stored = golden_of(experiment)
    if stored is None:
        return make_plan(experiment, toolchains, surroundings)
    experiment = measured_by(experiment, stored.golden)
    for spec in experiment.controls:  # what only the control needs may be gone
        toolchains.setdefault(spec.toolchain, stored.golden.toolchain)
    return stand_in(make_plan(experiment, toolchains, surroundings), stored)


def toolchain_names(experiment: Experiment) -> tuple[str, ...]:
    """Names of the toolchains that an experiment uses, in order of first use.

    A golden needs none.
    """
    anchors = (experiment.anchor,) if experiment.anchor else ()
    controls = experiment.controls if experiment.baseline is None else ()
    specs = (*controls, *anchors, *experiment.tests)
    return tuple(dict.fromkeys(spec.toolchain for spec in specs))


# ------------------------------------------------------------------ goldens


def golden_of(experiment: Experiment) -> StoredGolden | None:
    """The golden that stands for an experiment's control; None where it names none.

    Raises ConfigError when it is not there, or is not what was blessed.
    """
    folder = experiment.baseline
    if folder is None:
        return None
    place = f"{experiment.path}: baseline"
    if not folder.is_dir():
        if folder.parent == experiment.path.absolute().parent / GOLDENS:  # told by its name alone
            folder = default_folder(experiment.path) / folder.name
        make = f"make it: {bless_command(experiment.path, folder)}"
        raise ConfigError(Problem(place, not_there(folder), make))
    try:
        return read_golden(folder)
    except StoreError as error:
        raise ConfigError(Problem(place, str(error))) from error


def bless_command(experiment: Path, folder: Path) -> str:
    """The command that blesses the control of an experiment."""
    words = ["converge", "bless", str(experiment), "--name", folder.name]
    words += ["--out", str(folder.parent), "--author", "WHO", "--reason", "WHY"]
    return shlex.join(words)


def stand_in(plan: Plan, stored: StoredGolden) -> Plan:
    """The plan with the golden in its control's place.

    Raises ConfigError when the golden is another training than the control that the file
    describes, or of another hardware class or data type that the file does not name.
    """
    experiment, golden = plan.experiment, stored.golden
    (control,) = (job for job in plan.jobs if job.role is Role.CONTROL)
    found = misfits(
        golden.facts, identity_facts(control, plan.surroundings), experiment.baseline_across
    )
    if found.refused:
        shown = [*found.refused[:SHOWN_MISFITS]]
        if len(found.refused) > SHOWN_MISFITS:
            shown.append(f"and {len(found.refused) - SHOWN_MISFITS} more")
        words = ", ".join(f'"{each}"' for each in sorted(found.across))
        excuse = f"if meant, baseline_across = [{words}]; " if found.across else ""
        renew = bless_command(experiment.path, golden.folder)
        raise ConfigError(
            Problem(
                f"{experiment.path}: baseline",
                f"{golden.text}: it is not the control {control.name!r} of this file on this "
                f"machine: {'; '.join(shown)}",
                f"{excuse}bless the control as it is now: {renew}",
            )
        )
    return judged_by(plan, golden, found.named)
