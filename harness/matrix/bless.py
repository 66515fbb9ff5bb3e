"""A control that somebody takes for right becomes golden: may it, and what has changed since."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from converge_harness.errors import ConfigError, Problem, StoreError
from converge_harness.judge import ChangeKind, RunChange, classify, judge
from converge_harness.matrix.calibrate import keep, learn, timestamp
from converge_harness.matrix.judge import read_evidence
from converge_harness.model import (
    DEFAULT_TRAINER,
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
)
from converge_harness.plan import select_controls
from converge_harness.readers import read_run
from converge_harness.references import (
    Change,
    StoredCalibration,
    StoredGolden,
    misfits,
    read_golden,
    write_golden,
)
from converge_harness.store import Store

_USABLE = (Judgement.PASS, Judgement.INCONCLUSIVE)
"""Of a control against itself; a short run cannot be tested for equivalence."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A control that has run, to be blessed."""

    job: Job
    record: RunRecord
    control: Evidence
    learnt: StoredCalibration
    """What its repeats taught."""
    reference: RunRecord | None
    """Its run in float32, where it computes in less."""

    @property
    def flaws(self) -> tuple[str, ...]:
        """Why it cannot stand for right training, in clauses."""
        reference = self.reference
        found = [*_flaws(self.job, self.control), *self.learnt.calibration.problems]
        if reference is not None and reference.status is not RunStatus.FINISHED:
            found.append(f"its reference {reference.name} {reference.status.value}")
        return tuple(found)


def control_alone(whole: Experiment, control: str | None) -> Experiment:
    """The experiment's control alone (None: the first), its repeats and its reference.

    Raises ConfigError for a control that cannot be blessed, or that is not there.
    """
    wanted = control or whole.controls[0].name
    chosen = select_controls(whole, (wanted,), references=True)
    if not all(spec.trainer.can.goldens for spec in chosen.controls):
        raise ConfigError(
            Problem(
                f"{whole.path}: trainer.kind",
                f"is {chosen.controls[0].trainer.kind}, and only a control that "
                f"{DEFAULT_TRAINER} trains "
                "can be blessed: the files and packages that make up another program are not all "
                "known",
                f"judge against it in every run: converge run {shlex.quote(str(whole.path))}",
            )
        )
    return chosen


def golden_there(folder: Path) -> StoredGolden | None:
    """The golden that is to be replaced; None when there is none yet.

    Raises ConfigError when the folder holds something else, or a damaged golden.
    """
    if not folder.exists():
        return None
    try:
        return read_golden(folder)
    except StoreError as error:
        raise ConfigError(
            Problem(str(folder), str(error), "move the folder away, or choose another --name")
        ) from error


def candidate(plan: Plan, records: Sequence[RunRecord], store: Store) -> Candidate:
    """The control of a plan that has run; what its repeats taught is kept in the store."""
    evidences = read_evidence(plan, records)
    learnt = learn(plan, evidences)
    keep(store, learnt.values())
    (job,) = (each for each in plan.jobs if each.role is Role.CONTROL)
    (record,) = (each for each in records if each.identity == job.identity)
    references = {each.identity for each in plan.jobs if each.role is Role.REFERENCE}
    reference = next((each for each in records if each.identity in references), None)
    return Candidate(job, record, evidences[job.name], learnt[job.name], reference)


def change_since(before: StoredGolden, now: Candidate) -> RunChange:
    """What lies between a golden and the control of now; another training is semantic."""
    golden = before.golden
    found = misfits(golden.facts, now.learnt.facts)
    change = classify(
        now.control,
        read_run(golden.folder),
        before.learnt.calibration,
        spec=now.job.spec,
        before_spec=golden.spec,
    )
    if not found.refused or change.kind is ChangeKind.BITWISE:
        return change
    return RunChange(
        ChangeKind.SEMANTIC,
        f"the control is told to be something else: {'; '.join(found.refused)}",
        change.onset,
        change.signals,
    )


def bless(
    folder: Path, now: Candidate, author: str, reason: str, change: RunChange | None = None
) -> None:
    """Store a control as golden, with what has changed since the one that is there (if any)."""
    blessing = Blessing(author.strip(), reason.strip(), timestamp())
    stored = None if change is None else _as_stored(change)
    write_golden(folder, now.record, now.learnt, now.job.toolchain, blessing, stored, now.reference)


def _flaws(job: Job, control: Evidence) -> Iterator[str]:
    if not any(sample.step == 0 for sample in control.samples):
        yield (
            "it left no sample of step 0 (probe.cadence), by which a later run proves that it "
            "starts from the same weights"
        )
    verdict, _ = judge(control, control, spec=job.spec, control_spec=job.spec)
    if verdict.judgement not in _USABLE:
        wrong = [each for each in verdict.checks if each.outcome in (Outcome.INVALID, Outcome.FAIL)]
        yield wrong[0].detail if wrong else verdict.cause


def _as_stored(found: RunChange) -> Change:
    return Change(
        kind=found.kind.value,
        sentence=found.sentence,
        onset=found.onset,
        growth={each.signal: each.growth for each in found.signals if each.growth},
    )
