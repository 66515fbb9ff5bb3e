"""Judges a test set while it trains: whether its verdict is known, so that it need not train on.

* A FAIL is certain by what no later step can take back: a first step, frozen steps or replicas that
  are wrong, or a NaN. That a curve left its envelope may still be an accident of the steps so far.
* That the loss is equivalent is settled at planned looks, each at a level of its own.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from converge_harness.launch.options import Look
from converge_harness.matrix.calibrate import calibrate_control, read_given, repeats_of
from converge_harness.matrix.judge import (
    SETTLED_BY,
    PlannedPair,
    evidence_of,
    judge_pair,
    pairs_of,
)
from converge_harness.model import (
    Calibration,
    Check,
    Evidence,
    Job,
    Judgement,
    Outcome,
    Plan,
    RunRecord,
    RunStatus,
    Tier,
)
from converge_harness.readers import read_run

FINITE = "finite"
"""The check, besides those of the first step, whose failure no later step can take back."""


def look_at_running(plan: Plan) -> Look:
    """A function that judges a running test set of a plan by the runs that have finished.

    What it has read of a control and its repeats it keeps.
    """
    importlib.import_module("converge_harness.judge")  # slow, so before ranks start
    pairs = {pair.test.identity: pair for pair in pairs_of(plan)}
    count = Counter(job.identity for job in plan.jobs)
    runs: dict[str, Evidence] = {}
    calibrations: dict[str, Calibration] = {}

    def evidence(job: Job, record: RunRecord) -> Evidence:
        if job.identity not in runs:
            runs[job.identity] = evidence_of(job, record)
        return runs[job.identity]

    def look(job: Job, folder: Path, records: Mapping[str, RunRecord]) -> str | None:
        if count[job.identity] > 1:
            return ""  # it is also another set's run, which may need all steps
        pair = pairs[job.identity]
        judged_by = _judged_by(plan, pair)
        if any(each.identity not in records for each in judged_by):
            return None
        try:
            running = _so_far(job, folder)
            if running is None:
                return ""
            known = {each.name: evidence(each, records[each.identity]) for each in judged_by}
            name = pair.control.name
            if name not in calibrations:
                calibrations[name] = _calibration(plan, pair.control, known)
            return _known(pair, known | {job.name: running}, calibrations[name])
        except Exception:  # noqa: BLE001 - a look is optional, and other runs depend on its caller
            return ""  # the verdict after the last step says what is wrong

    return look


def _so_far(job: Job, folder: Path) -> Evidence | None:
    """The evidence of a running set up to its last whole step; None if too little is there."""
    read = read_run(folder)
    if read.in_force is None or not read.steps.size:
        return None
    # The arrays of a step are written before its line, which may tell of problems with them.
    last = int(read.steps[-1])
    return replace(
        read.up_to(last),
        name=job.name,
        precision=job.precision,
        status=RunStatus.STOPPED,
        expected_steps=read.expected_steps,
    )


def _judged_by(plan: Plan, pair: PlannedPair) -> tuple[Job, ...]:
    """The runs without which a test set cannot be judged."""
    of_precision = (plan.job(name) for name in (pair.matched, pair.reference) if name)
    taught = () if plan.experiment.calibration else repeats_of(plan, pair.control)
    jobs = (pair.control, *taught, *of_precision)
    return tuple({job.identity: job for job in jobs if job.golden is None}.values())


def _calibration(plan: Plan, control: Job, known: Mapping[str, Evidence]) -> Calibration:
    if given := read_given(plan):
        return given[control.name].calibration
    return calibrate_control(plan, control, known)


def _known(pair: PlannedPair, evidences: Mapping[str, Evidence], calibration: Calibration) -> str:
    """Why the verdict of a set is known before its last step, in a clause; empty if it is not."""
    verdict, compared = judge_pair(pair, evidences, calibration)
    if compared.test.settled_of is not None:
        step = int(compared.test.steps[-1])
        return f"it was settled at the look after step {step} ({SETTLED_BY})"
    if verdict.judgement is not Judgement.FAIL:
        return ""
    failed = next(filter(_is_certain, verdict.checks), None)
    return f"its FAIL was certain ({failed.name})" if failed else ""


def _is_certain(check: Check) -> bool:
    first = check.tier is Tier.FIRST_STEP
    return check.outcome is Outcome.FAIL and (first or check.name == FINITE)
