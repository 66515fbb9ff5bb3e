"""Goldens in the stages of a matrix: read, checked against the control, and put in its place."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from harness.errors import ConfigError, Problem, StoreError
from harness.model import GOLDENS, Experiment, Job, Plan, Role, RunRecord, Surroundings
from harness.plan import identity_facts, judged_by
from harness.references import (
    StoredCalibration,
    StoredGolden,
    default_folder,
    misfits,
    not_there,
    read_golden,
)
from harness.store import read_record

SHOWN = 6
"""Differences that a message names."""


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
        make = f"make it: {blessing(experiment.path, folder)}"
        raise ConfigError(Problem(place, not_there(folder), make))
    try:
        return read_golden(folder)
    except StoreError as error:
        raise ConfigError(Problem(place, str(error))) from error


def blessing(experiment: Path, folder: Path) -> str:
    """The command that blesses the control of an experiment."""
    words = ["converge", "bless", str(experiment), "--name", folder.name]
    words += ["--out", str(folder.parent), "--author", "WHO", "--reason", "WHY"]
    return shlex.join(words)


def stand_in(plan: Plan, stored: StoredGolden, surroundings: Surroundings) -> Plan:
    """The plan with the golden in its control's place.

    Raises ConfigError when the golden is another training than the control that the file
    describes, or of another hardware class or data type that the file does not name.
    """
    experiment, golden = plan.experiment, stored.golden
    (control,) = (job for job in plan.jobs if job.role is Role.CONTROL)
    found = misfits(golden.facts, identity_facts(control, surroundings), experiment.baseline_across)
    if found.refused:
        shown = [*found.refused[:SHOWN]]
        if len(found.refused) > SHOWN:
            shown.append(f"and {len(found.refused) - SHOWN} more")
        words = ", ".join(f'"{each}"' for each in sorted(found.across))
        excuse = f"if meant, baseline_across = [{words}]; " if found.across else ""
        renew = blessing(experiment.path, golden.folder)
        raise ConfigError(
            Problem(
                f"{experiment.path}: baseline",
                f"{golden.words}: it is not the control {control.name!r} of this file on this "
                f"machine: {'; '.join(shown)}",
                f"{excuse}bless the control as it is now: {renew}",
            )
        )
    return judged_by(plan, golden, found.named)


def golden_record(job: Job) -> RunRecord:
    """The record of a golden's run, by the name of now."""
    if job.golden is None:
        raise ValueError(f"{job.name} is no golden")
    return replace(read_record(job.golden), name=job.name, reused=True)


def golden_learnt(plan: Plan) -> dict[str, StoredCalibration] | None:
    """What repeats of the golden taught, by the control's name; None without a golden."""
    found = {}
    for job in plan.jobs:
        if job.golden is not None and job.role is Role.CONTROL:
            learnt = read_golden(job.golden).learnt
            calibration = replace(learnt.calibration, control=job.name)
            found[job.name] = replace(learnt, calibration=calibration)
    return found or None
