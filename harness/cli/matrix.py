"""The stages of a matrix, in order: load, prepare, run, read, judge, write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from harness import corpus
from harness.experiment import load_experiment
from harness.judge import judge, limits
from harness.model import (
    Evidence,
    Experiment,
    Job,
    Plan,
    Role,
    RunRecord,
    RunStatus,
    SyntheticData,
    Toolchain,
    Verdict,
)
from harness.plan import make_plan, select
from harness.readers import read_run
from harness.report import ReportView, build_view
from harness.store import Store
from harness.surroundings import read_surroundings
from harness.toolchain import find_toolchain


@dataclass(frozen=True, slots=True)
class Judged:
    """A matrix after judging: everything that a report needs."""

    verdicts: tuple[Verdict, ...]
    view: ReportView


def load_plan(
    path: Path,
    only: Sequence[str],
    *,
    on_gpu: bool,
    slots: int | None = None,
    find: Callable[[str], Toolchain] = find_toolchain,
) -> Plan:
    """Experiment file to plan; everything wrong with it in one ConfigError.

    ``slots`` replaces the file's ``cpu_ranks``: a set with more ranks is refused.
    """
    experiment = load_experiment(path)
    if slots is not None:
        experiment = replace(experiment, cpu_ranks=slots)
    if only:  # before anything is looked for: a part needs only its own toolchains
        experiment = select(experiment, only)
    toolchains = {name: find(name) for name in toolchain_names(experiment)}
    return make_plan(
        experiment, toolchains, read_surroundings(experiment, corpus.digest, on_gpu=on_gpu)
    )


def toolchain_names(experiment: Experiment) -> tuple[str, ...]:
    """Names of the toolchains that an experiment uses, in order of first use."""
    anchors = (experiment.anchor,) if experiment.anchor else ()
    specs = (*experiment.controls, *anchors, *experiment.tests)
    return tuple(dict.fromkeys(spec.toolchain for spec in specs))


def prepare_data(plan: Plan, store: Store) -> dict[SyntheticData, corpus.PreparedData]:
    """Generate every corpus that the plan's jobs read, unless it is there."""
    used = dict.fromkeys(job.spec.train_config.data for job in plan.jobs)
    return {data: corpus.prepare(data, store.root / "data") for data in used if data is not None}


def read_evidence(plan: Plan, records: Mapping[str, RunRecord]) -> dict[str, Evidence]:
    """What every control, repeat and test left, by job name."""
    return {
        job.name: _evidence(job, records[job.name])
        for job in plan.jobs
        if job.role is not Role.SEED
    }


def _evidence(job: Job, record: RunRecord) -> Evidence:
    if record.status is RunStatus.SKIPPED:
        return Evidence(
            name=job.name,
            source=str(record.folder),
            steps=np.empty(0, dtype=np.int64),
            signals={},
            complete=False,
            expected_steps=job.steps,
            error=record.error,
            status=record.status,
            precision=job.precision,
        )
    # A reused run may have been made under another name: only its identity counts.
    return replace(read_run(record.folder), name=job.name, precision=job.precision)


def judge_matrix(
    plan: Plan,
    records: Iterable[RunRecord],
    *,
    versions: Mapping[str, str],
    entropy_floor: float | None,
    wall_s: float | None = None,
) -> Judged:
    """Judge every test set of a plan whose jobs all have a record."""
    by_name = dict(zip((job.name for job in plan.jobs), records, strict=True))
    evidences = read_evidence(plan, by_name)
    verdicts = []
    envelopes = {}
    for job in plan.jobs:
        if job.role is not Role.TEST:
            continue
        if job.spec.control is None:
            raise ValueError(f"test set {job.name!r} names no control")
        test, control = evidences[job.name], evidences[job.spec.control]
        repeats = [
            evidences[other.name]
            for other in plan.jobs
            if other.role is Role.REPEAT and other.spec.name == job.spec.control
        ]
        verdicts.append(
            judge(
                test,
                control,
                repeats,
                spec=job.spec,
                control_spec=plan.job(job.spec.control).spec,
            )
        )
        envelopes[job.name] = limits(test, control, repeats, job.spec.tolerances)
    view = build_view(
        title=plan.experiment.name,
        verdicts=verdicts,
        evidences=evidences.values(),
        subject=plan,
        records=by_name.values(),
        versions=versions,
        envelopes=envelopes,
        entropy_floor=entropy_floor,
        generated=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        wall_s=wall_s,
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
