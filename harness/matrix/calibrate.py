"""The calibration by which a control is judged: learnt from its repeats, or read and checked."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from converge_harness.baselines import read_baseline
from converge_harness.calibrations import (
    StoredCalibration,
    find_calibration,
    read_calibrations,
    what_changed,
    write_calibrations,
)
from converge_harness.errors import ConfigError, Problem, StoreError
from converge_harness.model import Calibration, Evidence, Job, Plan, Role, Surroundings
from converge_harness.plan import identity_facts
from converge_harness.store import Store

SHOWN_CHANGES = 6


def learn(plan: Plan, evidences: Mapping[str, Evidence]) -> dict[str, StoredCalibration]:
    """Calibrations from the repeats of every control of a plan, by its name."""
    now = timestamp()
    return {
        name: StoredCalibration(
            calibration=calibration,
            repeats={job.name: job.identity for job in plan.repeats_of(plan.job(name))},
            facts=identity_facts(plan.job(name), plan.surroundings),
            learnt=now,
        )
        for name, calibration in calibrate_controls(plan, evidences).items()
    }


def calibrate_controls(plan: Plan, evidences: Mapping[str, Evidence]) -> dict[str, Calibration]:
    """The calibrations learnt from the repeats of every control, by its name."""
    return {
        job.name: calibrate_control(plan, job, evidences)
        for job in plan.jobs
        if job.role is Role.CONTROL
    }


def calibrate_control(plan: Plan, control: Job, evidences: Mapping[str, Evidence]) -> Calibration:
    """The calibration learnt from the repeats of one control."""
    from converge_harness.judge import calibrate  # noqa: PLC0415 - a plan does not need scipy

    repeats = [evidences[repeat.name] for repeat in plan.repeats_of(control)]
    return calibrate(evidences[control.name], repeats)


def calibration_for(plan: Plan, control: Job, evidences: Mapping[str, Evidence]) -> Calibration:
    """The calibration given for one control, else the one learnt from its repeats."""
    if given := read_given(plan):
        return given[control.name].calibration
    return calibrate_control(plan, control, evidences)


def store_calibrations(store: Store, learnt: Iterable[StoredCalibration]) -> list[Path]:
    """Write each sound calibration to the store; return their paths."""
    paths = []
    for each in learnt:
        calibration = each.calibration
        # A calibration with a problem lets nothing PASS, so it must not replace a sound one.
        if calibration.identity is not None and calibration.repeats and not calibration.problems:
            paths.append(store.calibration_file(calibration.identity))
            write_calibrations(paths[-1], [each])
    return paths


def timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# ------------------------------------------------------------------ for a matrix


def read_given(plan: Plan) -> dict[str, StoredCalibration] | None:
    """The calibration of every control from the file that the experiment or the user names.

    With a baseline, its own calibration. None when no file is named: then the repeats are used.

    Raises:
        ConfigError: the file is missing or damaged, or was learnt from other controls.
    """
    path = plan.experiment.calibration
    taught = baseline_learnt(plan)
    if taught is not None:
        if path is not None:
            raise ConfigError(
                Problem(f"--calibration {path}", "has no effect: the baseline has its own")
            )
        return taught
    if path is None:
        return None
    renew = renewing(plan.experiment.path, path)
    if not path.is_file():
        raise ConfigError(
            Problem(str(path), "there is no such calibration", f"make it with: {renew}")
        )
    known = _read(path)
    given: dict[str, StoredCalibration] = {}
    problems = []
    for job in plan.jobs:
        if job.role is not Role.CONTROL:
            continue
        found = find_calibration(known, job.identity)
        if found is None:
            why = _why_not(job, known, plan.surroundings)
            problems.append(
                Problem(f"{path}: control {job.name!r}", why, f"renew it with: {renew}")
            )
        else:
            calibration = replace(found.calibration, control=job.name)
            given[job.name] = replace(found, calibration=calibration)
    if problems:
        raise ConfigError(problems)
    return given


def baseline_learnt(plan: Plan) -> dict[str, StoredCalibration] | None:
    """The baseline's own calibration, by the control's name; None without a baseline."""
    found = {}
    for job in plan.jobs:
        if job.baseline is not None and job.role is Role.CONTROL:
            learnt = read_baseline(job.baseline).learnt
            calibration = replace(learnt.calibration, control=job.name)
            found[job.name] = replace(learnt, calibration=calibration)
    return found or None


def read_judged_by(plan: Plan, path: Path, identities: Mapping[str, str]) -> dict[str, Calibration]:
    """The calibrations by which a report folder was judged, by the name of the control.

    ``identities`` are those of the runs that it judges, by job name.

    Raises StoreError when the file is missing, damaged, or lacks a control.
    """
    learnt = read_calibrations(path)
    controls = [job for job in plan.jobs if job.role is Role.CONTROL]
    found = {job.name: find_calibration(learnt, identities[job.name]) for job in controls}
    if missing := [name for name, each in found.items() if each is None]:
        raise StoreError(
            f"{path} has no calibration of {', '.join(map(repr, missing))} as it was run; "
            f"run it again with: converge run {shlex.quote(str(plan.experiment.path))}"
        )
    return {name: each.calibration for name, each in found.items() if each is not None}


def renewing(experiment: Path, path: Path) -> str:
    """The command that makes a calibration file anew."""
    return shlex.join(["converge", "calibrate", str(experiment), "--out", str(path)])


def _read(path: Path) -> tuple[StoredCalibration, ...]:
    try:
        return read_calibrations(path)
    except StoreError as error:
        # Nothing has been launched yet: one kind of error for everything.
        raise ConfigError(Problem(str(path), str(error).removeprefix(f"{path}: "))) from error


def _why_not(job: Job, known: Sequence[StoredCalibration], surroundings: Surroundings) -> str:
    """Why a file has no calibration of a control, as far as known."""
    named = [each for each in known if each.calibration.control == job.name]
    if not named:
        names = ", ".join(repr(each.calibration.control) for each in known)
        return f"is not in it; the file was learnt from {names}"
    changes = what_changed(named[0].facts, identity_facts(job, surroundings))
    shown = [*changes[:SHOWN_CHANGES]]
    if len(changes) > SHOWN_CHANGES:
        shown.append(f"and {len(changes) - SHOWN_CHANGES} more")
    what = "; ".join(shown) or "what it starts from has changed"
    return f"its calibration of {named[0].learnt} is stale: {what}"


# -------------------------------------------------------------------- for curves


def read_for_curves(path: Path, control: Evidence) -> tuple[Calibration, str]:
    """Read a control's calibration by path; also a note on what cannot be checked.

    Raises:
        ConfigError: the file is missing or damaged, or was learnt from another control.
    """
    place = f"--calibration {path}"
    if not path.is_file():
        raise ConfigError(Problem(place, "there is no such file"))
    known = _read(path)
    found = find_calibration(known, control.identity)
    if found is None:
        held = ", ".join(_described(each) for each in known)
        what = "a run of converge" if control.identity else "curves from elsewhere"
        raise ConfigError(
            Problem(
                place,
                f"holds limits of {held}, not of {control.source} ({what})",
                "learn from its own repeats with --repeat, or converge calibrate EXPERIMENT",
            )
        )
    calibration = found.calibration
    if control.identity:
        return calibration, ""
    if calibration.precision is not control.precision:
        raise ConfigError(
            Problem(
                place,
                f"was learnt in {calibration.precision}, and {control.source} ran in "
                f"{control.precision}: limits of one precision do not hold for another",
            )
        )
    note = f"{path} was learnt from repeats of {calibration.control!r}"
    return calibration, f"{note}; whether {control.name!r} is such a run cannot be checked"


def _described(learnt: StoredCalibration) -> str:
    identity = learnt.calibration.identity
    what = f"run {identity[:12]}" if identity else "curves from elsewhere"
    return f"{learnt.calibration.control!r} ({what})"
