"""The stages of a matrix, in order: load, prepare, run, read, judge, write."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from harness import corpus
from harness.cli.goldens import golden_of, stand_in
from harness.errors import ConfigError, Problem
from harness.experiment import load_experiment
from harness.model import (
    Ask,
    Calibration,
    Cluster,
    Evidence,
    Experiment,
    Job,
    Judgement,
    Launcher,
    Outcome,
    Plan,
    Precision,
    Role,
    RunRecord,
    RunStatus,
    SeedRuns,
    Surroundings,
    SyntheticData,
    Toolchain,
    TrainerSpec,
    Verdict,
)
from harness.plan import make_plan, measured_by, select
from harness.readers import read_run
from harness.store import Store
from harness.surroundings import read_surroundings
from harness.trainers import find_toolchain

if TYPE_CHECKING:
    from harness.report import ReportView


MENDED_BY_TRAINING = frozenset(
    {
        *("control-sound", "repeats-sound", "complete"),
        *("steps-increase", "values-present", "samples-whole"),
    }
)
"""Checks that a run whose evidence is damaged, or one bad repeat, makes INVALID."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A matrix after judging: everything that a report needs."""

    verdicts: tuple[Verdict, ...]
    view: ReportView


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
    ``load``.
    """
    experiment = load(path, launcher, cluster)
    if calibration is not None:
        experiment = replace(experiment, calibration=calibration)
    if only:  # before anything is looked for: a part needs only its own toolchains
        experiment = select(experiment, only)
    return plan_experiment(experiment, on_gpu=on_gpu, slots=slots, find=find)


def load(
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
    surroundings = surroundings_of(experiment, on_gpu=on_gpu)
    trainer = experiment.controls[0].trainer  # one per file
    toolchains = {name: find(name, trainer=trainer) for name in toolchain_names(experiment)}
    stored = golden_of(experiment)
    if stored is None:
        return make_plan(experiment, toolchains, surroundings)
    experiment = measured_by(experiment, stored.golden)
    for spec in experiment.controls:  # what only the control needs may be gone
        toolchains.setdefault(spec.toolchain, stored.golden.toolchain)
    return stand_in(make_plan(experiment, toolchains, surroundings), stored, surroundings)


def surroundings_of(experiment: Experiment, *, on_gpu: bool) -> Surroundings:
    """What lies outside the experiment file and changes numbers."""
    return read_surroundings(experiment, corpus.digest, on_gpu=on_gpu)


def toolchain_names(experiment: Experiment) -> tuple[str, ...]:
    """Names of the toolchains that an experiment uses, in order of first use.

    A golden needs none.
    """
    anchors = (experiment.anchor,) if experiment.anchor else ()
    controls = experiment.controls if experiment.baseline is None else ()
    specs = (*controls, *anchors, *experiment.tests)
    return tuple(dict.fromkeys(spec.toolchain for spec in specs))


def prepare_data(plan: Plan, store: Store) -> dict[SyntheticData, corpus.PreparedData]:
    """Generate every corpus that the plan's jobs read, unless it is there."""
    used = dict.fromkeys(job.spec.train_config.data for job in plan.jobs)
    return {data: corpus.prepare(data, store.root / "data") for data in used if data is not None}


def read_evidence(plan: Plan, records: Sequence[RunRecord]) -> dict[str, Evidence]:
    """What the anchor and every control, repeat and test left, by job name."""
    return {
        job.name: _evidence(job, record)
        for job, record in zip(plan.jobs, records, strict=True)
        if job.role is not Role.SEED
    }


def _evidence(job: Job, record: RunRecord) -> Evidence:
    if record.status is RunStatus.SKIPPED:
        return Evidence(
            name=job.name,
            source=str(record.folder),
            steps=np.empty(0, dtype=np.int64),
            signals={},
            identity=job.identity,
            complete=False,
            expected_steps=job.steps,
            error=record.error,
            status=record.status,
            precision=job.precision,
        )
    # A reused run may have been made under another name: only its identity counts.
    return replace(read_run(record.folder), name=job.name, precision=job.precision)


def calibrate_controls(plan: Plan, evidences: Mapping[str, Evidence]) -> dict[str, Calibration]:
    """What the repeats of every control teach, by the control's name."""
    from harness.judge import calibrate  # noqa: PLC0415 - as in judge_matrix

    return {
        job.name: calibrate(
            evidences[job.name], [evidences[repeat.name] for repeat in repeats_of(plan, job)]
        )
        for job in plan.jobs
        if job.role is Role.CONTROL
    }


def repeats_of(plan: Plan, control: Job) -> tuple[Job, ...]:
    """The jobs that repeat a control, in the plan's order."""
    return tuple(
        job for job in plan.jobs if job.role is Role.REPEAT and job.spec.name == control.name
    )


def may_be_rounding(job: Job, verdict: Verdict) -> bool:
    """Whether a verdict is a failure that the same set in float32 would tell more of."""
    low = job.precision is not Precision.FP32 and job.spec.ask is Ask.SAME
    return low and job.spec.trainer.can.references and verdict.judgement is Judgement.FAIL


def next_command(plan: Plan, job: Job, verdict: Verdict) -> str:
    """What to type after a verdict on a set of a plan, with why as a comment of the shell.

    Not a command that judges the same evidence again: it would say the same.
    """
    if verdict.judgement is Judgement.FAIL:
        if may_be_rounding(job, verdict):
            return _run_again(plan, job, "--explain")
        return f"{_run_again(plan, job)}  # after a change: what it does not touch is reused"
    if verdict.judgement is Judgement.INCONCLUSIVE:
        more = "or with [seeds]" if not plan.experiment.other_seeds else "or more seeds"
        return f"{_run_again(plan, job)}  # with more steps, {more}"
    if verdict.judgement is Judgement.INVALID:
        invalid = [each.name for each in verdict.checks if each.outcome is Outcome.INVALID]
        if MENDED_BY_TRAINING.issuperset(invalid[:1]):
            return f"{_run_again(plan, job, '--fresh')}  # trains it and its control again"
        return f"{_run_again(plan, job)}  # after a change of what is named above"
    return verdict.next_command


def _run_again(plan: Plan, job: Job, *options: str) -> str:
    launcher = plan.experiment.launcher
    where = () if launcher is Launcher.LOCAL else ("--launcher", launcher.value)
    path = str(plan.experiment.path)
    return shlex.join(("converge", "run", path, "--only", job.name, *where, *options))


class Pair(NamedTuple):
    """What is judged, against what, and by the repeats of which control."""

    test: Job
    control: Job
    calibrated: str
    matched: str | None
    """Name of the run by whose errors those of the test are judged, if any …"""
    reference: str | None
    """… and of the one in float32 from which they are measured."""


def pairs_of(plan: Plan) -> Iterator[Pair]:
    """Every comparison of a plan: the control that an anchor challenges, then the test sets.

    The anchor is not repeated: the spread of the control's own repeats tells how far right runs of
    that regime lie apart.

    Raises ValueError for a test set without a control, which no experiment file gives.
    """
    anchor = next((job for job in plan.jobs if job.role is Role.ANCHOR), None)
    if anchor is not None:
        challenged = plan.job(plan.experiment.controls[0].name)
        yield Pair(challenged, anchor, challenged.name, challenged.matched, challenged.reference)
    for job in plan.jobs:
        if job.role is Role.TEST:
            if job.spec.control is None:
                raise ValueError(f"test set {job.name!r} names no control")
            control = plan.job(job.spec.control)
            yield Pair(job, control, control.name, job.matched, job.reference)


def seed_runs(plan: Plan, pair: Pair, evidences: Mapping[str, Evidence]) -> SeedRuns | None:
    """What control and test set of a comparison left, seed by seed; None where there is one."""
    control, test = (
        tuple(
            evidences[each.name]
            for each in plan.jobs
            if each.name == job.name
            or (each.role is Role.OTHER_SEED and each.spec.name == job.spec.name)
        )
        for job in (pair.control, pair.test)
    )
    return SeedRuns(control, test, paired=True) if min(len(control), len(test)) > 1 else None


def judge_matrix(
    plan: Plan,
    records: Iterable[RunRecord],
    evidences: Mapping[str, Evidence],
    calibrations: Mapping[str, Calibration],
    *,
    versions: Mapping[str, str],
    entropy_floor: float | None,
    wall_s: float | None = None,
) -> Judged:
    """Judge every test set of a plan, and its first control where there is an anchor.

    ``evidences`` are by job name, ``calibrations`` by the name of the control.
    """
    # A plan judges and draws nothing, and need not pay for scipy and the plots.
    from harness.judge import Measure, judge, limits  # noqa: PLC0415
    from harness.report import build_view  # noqa: PLC0415

    verdicts = []
    envelopes = {}
    seeds = {}
    for pair in pairs_of(plan):
        job, against, calibrated, matched, reference = pair
        test, control = evidences[job.name], evidences[against.name]
        calibration = calibrations[calibrated]
        if runs := seed_runs(plan, pair, evidences):
            seeds[job.name] = runs
        verdict = judge(
            test,
            control,
            calibration,
            spec=job.spec,
            control_spec=against.spec,
            own_start=job.needs != against.needs or against.golden is not None,
            measure=Measure(evidences[matched], evidences[reference])
            if matched and reference
            else None,
            seeds=runs,
        )
        verdicts.append(replace(verdict, next_command=next_command(plan, job, verdict)))
        envelopes[job.name] = limits(test, control, calibration, job.spec.tolerances)
    view = build_view(
        title=plan.experiment.name,
        verdicts=verdicts,
        evidences=evidences.values(),
        subject=plan,
        records=records,
        versions=versions,
        envelopes=envelopes,
        calibrations=calibrations,
        entropy_floor=entropy_floor,
        generated=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        wall_s=wall_s,
        here=Path.cwd(),
        seeds=seeds,
    )
    return Judged(tuple(verdicts), view)


def versions_of(plan: Plan) -> dict[str, str]:
    """Versions by distribution; several toolchains are told apart by their torchtitan."""
    toolchains = {job.toolchain.name: job.toolchain for job in plan.jobs}
    found: dict[str, list[str]] = {}
    for toolchain in toolchains.values():
        for distribution, version in toolchain.versions.items():
            found.setdefault(distribution, [])
            if version not in found[distribution]:
                found[distribution].append(version)
    return {distribution: ", ".join(versions) for distribution, versions in found.items()}
