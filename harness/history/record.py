"""A judged matrix as one night of the history; pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from converge_harness.model import (
    CauseClass,
    Check,
    Job,
    Judgement,
    Outcome,
    Plan,
    RunRecord,
    RunStatus,
    Tier,
    Verdict,
)
from converge_harness.run_folder.documents import spell_not_finite


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one check of one test set found."""

    check: str
    """The check's name, such as ``loss-envelope``."""
    tier: Tier
    outcome: Outcome
    measured: float | None
    limit: float | None
    unit: str


@dataclass(frozen=True, slots=True)
class Result:
    """One test set of one night."""

    test_set: str
    control: str
    verdict: Judgement
    cause_class: CauseClass | None
    cause: str
    onset: int | None
    wall_s: float | None
    """Wall time of the run, even if it was reused; None for a run that never began."""
    reused: bool
    definition: str
    """Hex digest of what the experiment file says about the set and its control. It changes if
    somebody changed the file, not if the software changed.
    """
    measurements: tuple[Measurement, ...]
    """Checks that were not skipped."""
    techniques: str = field(default="", repr=False)
    """Names of its techniques, and what is injected; comma-separated. Not in the content of a
    night, which was made without it in older releases.
    """


@dataclass(frozen=True, slots=True)
class Night:
    """One finished matrix."""

    experiment: str
    source: str
    """Absolute path of the experiment file."""
    finished: datetime
    """With its time zone."""
    circumstances: Mapping[str, str]
    """What may explain a change: versions by distribution, ``commit``, ``hardware``, ``driver`` …,
    if known.
    """
    runs: str
    """Hex digest of the judged runs; it changes when a job is run again."""
    wall_s: float | None
    report: str
    """Absolute path of the report folder."""
    results: tuple[Result, ...]

    @property
    def content(self) -> str:
        """Hex digest of what was judged, with which result, under which circumstances.

        It does not depend on the time, nor on whether runs were reused: two nights with the same
        content judged the same runs with the same result.
        """
        results = [replace(result, reused=False) for result in self.results]
        everything = (self.runs, sorted(self.circumstances.items()), results)
        return hashlib.sha256(repr(everything).encode(errors="replace")).hexdigest()


def night_of(
    plan: Plan,
    records: Sequence[RunRecord],
    verdicts: Iterable[Verdict],
    *,
    finished: datetime,
    source: str,
    report: str,
    circumstances: Mapping[str, str],
    wall_s: float | None,
) -> Night:
    """A judged matrix as the history stores it.

    ``records`` are in the plan's order. Raises KeyError for a verdict on a set without a job in the
    plan.
    """
    jobs = {job.name: job for job in plan.jobs}
    ended = {job.name: record for job, record in zip(plan.jobs, records, strict=True)}
    return Night(
        experiment=plan.experiment.name,
        source=source,
        finished=finished,
        circumstances={name: value for name, value in circumstances.items() if value},
        # Two runs of one job never take exactly the same time.
        runs=_digest([[each.identity, each.status.value, each.wall_s] for each in records]),
        wall_s=wall_s,
        report=report,
        results=tuple(
            _left_out(verdict)
            if verdict.name in plan.experiment.left_out
            else _result(verdict, ended[verdict.name], jobs[verdict.name], jobs[verdict.control])
            for verdict in verdicts
        ),
    )


def _result(verdict: Verdict, record: RunRecord, test: Job, control: Job) -> Result:
    skipped = record.status is RunStatus.SKIPPED
    return Result(
        test_set=verdict.name,
        control=verdict.control,
        verdict=verdict.judgement,
        cause_class=verdict.cause_class,
        cause=verdict.cause,
        onset=verdict.onset_step,
        wall_s=None if skipped else record.wall_s,
        reused=record.reused,
        definition=_digest([_meaning(test), _meaning(control)]),
        techniques=", ".join(filter(None, (*test.spec.technique_names, test.spec.injected))),
        measurements=tuple(
            _measurement(check) for check in verdict.checks if check.outcome is not Outcome.SKIPPED
        ),
    )


def _left_out(verdict: Verdict) -> Result:
    """The result of a set that has no run, because its trainer cannot be told to run it."""
    return Result(
        test_set=verdict.name,
        control=verdict.control,
        verdict=verdict.judgement,
        cause_class=None,
        cause=verdict.cause,
        onset=None,
        wall_s=None,
        reused=False,
        definition=_digest(verdict.cause),
        measurements=(),
    )


def _measurement(check: Check) -> Measurement:
    return Measurement(
        check=check.name,
        tier=check.tier,
        outcome=check.outcome,
        measured=check.measured,
        limit=check.limit.value if check.limit else None,
        unit=check.unit,
    )


def _meaning(job: Job) -> dict[str, Any]:
    """What the experiment file says about a job, without versions, machines, names and limits."""
    spec = job.spec
    return {
        "toolchain": spec.toolchain,
        "parallelism": asdict(spec.parallelism),
        "techniques": sorted(spec.techniques),
        **(
            {"own_techniques": [each.meaning for each in spec.own_techniques]}
            if spec.own_techniques
            else {}
        ),
        "schedule": spec.pipeline_schedule,
        "rotation": spec.cp_rotation,
        **({"spmd_backend": spec.spmd_backend} if spec.spmd_backend else {}),
        **({} if spec.deterministic else {"deterministic": False}),
        "train_config": asdict(spec.train_config) | {"path": None},
        "overrides": dict(spec.overrides),
        "inject": spec.inject,
        "without_fixes": sorted(spec.without_fixes),
        "segments": [asdict(segment) for segment in spec.segments],
        "recovery": spec.recovery.facts() if spec.recovery else None,
        "seed": job.seed,
        "steps": job.steps,
        "batch": [job.local_batch_size, job.global_batch_size, job.seq_len],
    }


def _digest(value: Any) -> str:
    text = json.dumps(spell_not_finite(value), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
