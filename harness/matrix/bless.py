"""Makes a control the baseline: whether that is possible, and what has changed since the last."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from converge_harness.baselines import (
    Change,
    StoredBaseline,
    misfits,
    read_baseline,
    write_baseline,
)
from converge_harness.calibrations import StoredCalibration
from converge_harness.errors import ConfigError, Problem, StoreError
from converge_harness.judge import RunChange, classify, judge
from converge_harness.matrix.calibrate import learn, store_calibrations, timestamp
from converge_harness.matrix.judge import read_evidence
from converge_harness.model import (
    Blessing,
    Evidence,
    Experiment,
    Job,
    Judgement,
    Outcome,
    Plan,
    Role,
    RunRecord,
    RunStatus,
    Sameness,
)
from converge_harness.plan import select_controls
from converge_harness.readers import read_run
from converge_harness.store import Store

_USABLE = (Judgement.PASS, Judgement.INCONCLUSIVE)
"""Checks that a control must pass against itself; a short run cannot be tested for equivalence."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A finished control that is to be blessed."""

    job: Job
    record: RunRecord
    control: Evidence
    learnt: StoredCalibration
    """The limits learnt from its repeats."""
    reference: RunRecord | None
    """Its run in float32, if its own precision is lower."""

    @property
    def flaws(self) -> tuple[str, ...]:
        """Why it cannot be a baseline, in clauses."""
        reference = self.reference
        found = [*_flaws(self.job, self.control), *self.learnt.calibration.problems]
        if reference is not None and reference.status is not RunStatus.FINISHED:
            found.append(f"its reference {reference.name} {reference.status.value}")
        return tuple(found)


def control_alone(whole: Experiment, control: str | None) -> Experiment:
    """The experiment's control alone (None: the first), its repeats and its reference.

    Raises ConfigError for a control that does not exist or cannot be blessed.
    """
    wanted = control or whole.controls[0].name
    chosen = select_controls(whole, (wanted,), references=True)
    if not all(spec.trainer.can.baselines for spec in chosen.controls):
        raise ConfigError(
            Problem(
                f"{whole.path}: trainer.kind",
                f"is {chosen.controls[0].trainer.kind}, whose control cannot be blessed: not all "
                "files and packages of its program are known",
                f"judge against it in every run: converge run {shlex.quote(str(whole.path))}",
            )
        )
    if any(spec.resumes for spec in chosen.controls):
        raise ConfigError(
            Problem(
                f"{whole.path}: checkpoint_every",
                "lets the control leave its evidence in passes, which a baseline cannot hold",
                "bless from a copy of the file without this key",
            )
        )
    return chosen


def baseline_there(folder: Path) -> StoredBaseline | None:
    """The baseline to be replaced; None when there is none yet.

    Raises ConfigError when the folder has something else, or a damaged baseline.
    """
    if not folder.exists():
        return None
    try:
        return read_baseline(folder)
    except StoreError as error:
        raise ConfigError(
            Problem(str(folder), str(error), "move the folder away, or choose another --name")
        ) from error


def folders_of(plan: Plan, store: Store) -> tuple[Path, ...]:
    """The run folders that a baseline is made from: the control's, and its reference's."""
    blessed = (Role.CONTROL, Role.REFERENCE)
    jobs = (job for job in plan.jobs if job.role in blessed)
    return tuple(store.run_folder(job.name, job.identity) for job in jobs)


def candidate(plan: Plan, records: Sequence[RunRecord], store: Store) -> Candidate:
    """The control of a plan that has run; its calibration is written to the store."""
    evidences = read_evidence(plan, records)
    learnt = learn(plan, evidences)
    store_calibrations(store, learnt.values())
    (job,) = (each for each in plan.jobs if each.role is Role.CONTROL)
    (record,) = (each for each in records if each.identity == job.identity)
    references = {each.identity for each in plan.jobs if each.role is Role.REFERENCE}
    reference = next((each for each in records if each.identity in references), None)
    return Candidate(job, record, evidences[job.name], learnt[job.name], reference)


def change_since(before: StoredBaseline, now: Candidate) -> RunChange:
    """How the current control differs from a baseline; with different settings it is different."""
    baseline = before.baseline
    found = misfits(baseline.facts, now.learnt.facts)
    change = classify(
        now.control,
        read_run(baseline.folder),
        before.learnt.calibration,
        spec=now.job.spec,
        before_spec=baseline.spec,
    )
    if not found.refused or change.sameness is Sameness.BITWISE:
        return change
    return RunChange(
        Sameness.DIFFERENT,
        f"the control has different settings: {'; '.join(found.refused)}",
        change.onset,
        change.signals,
    )


def bless(
    folder: Path, now: Candidate, author: str, reason: str, change: RunChange | None = None
) -> None:
    """Store a control as a baseline, with what has changed since the existing one (if any)."""
    blessing = Blessing(author.strip(), reason.strip(), timestamp())
    stored = None if change is None else _as_stored(change)
    write_baseline(
        folder, now.record, now.learnt, now.job.toolchain, blessing, stored, now.reference
    )


def _flaws(job: Job, control: Evidence) -> Iterator[str]:
    if not any(sample.step == 0 for sample in control.samples):
        yield (
            "it has no sample of step 0 (probe.cadence), with which a later run is checked to "
            "start from the same weights"
        )
    verdict, _ = judge(control, control, spec=job.spec, control_spec=job.spec)
    if verdict.judgement not in _USABLE:
        wrong = [each for each in verdict.checks if each.outcome in (Outcome.INVALID, Outcome.FAIL)]
        yield wrong[0].detail if wrong else verdict.cause


def _as_stored(found: RunChange) -> Change:
    return Change(
        kind=found.sameness.value,
        sentence=found.sentence,
        onset=found.onset,
        growth={each.signal: each.growth for each in found.signals if each.growth},
    )
