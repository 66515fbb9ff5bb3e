"""Judges a test set while it trains: whether its verdict is known, so that it need not train on.

* A FAIL is certain by what no later step can take back: a first step, frozen steps or replicas that
  are wrong, or a NaN. That a curve left its envelope may still be an accident of the steps so far.
* That the loss is equivalent is settled at planned looks, each at a level of its own.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from converge_harness.launch.options import Look, LookError, Training
from converge_harness.launch.stopping import looks
from converge_harness.matrix.calibrate import calibration_for
from converge_harness.matrix.judge import (
    SETTLED_BY,
    PlannedPair,
    ended_at,
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
    """A function that judges a running test set of a plan, as of the step of a planned look.

    The runs that it is judged by must have come as far, or have finished. What is read of those
    that have finished is kept.
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

    def look(
        job: Job, records: Mapping[str, RunRecord], training: Mapping[str, Training]
    ) -> str | None:
        if count[job.identity] > 1:
            return ""  # it is also another set's run, which may need all steps
        pair, here = pairs[job.identity], training[job.identity]
        planned = looks(job, plan.experiment)
        step = max((each for each in planned if each <= here.step), default=0)
        judged_by = plan.judged_by(job)
        unfinished = [each for each in judged_by if each.identity not in records]
        if not all(_has_come(each, step, training) for each in unfinished):
            return None
        until = _judged_until(step, [training[each.identity] for each in unfinished])
        try:
            known = {
                each.name: evidence(each, records[each.identity])
                for each in judged_by
                if each.identity in records
            }
            if unfinished:  # then all of them up to one step
                known = {name: _cut(run, until) for name, run in known.items()}
            for each in unfinished:
                so_far = _so_far(each, training[each.identity].folder, until)
                known[each.name] = ended_at(so_far, until)
            known[job.name] = _so_far(job, here.folder, step)
            name = pair.control.name
            calibration = calibrations.get(name) or calibration_for(plan, pair.control, known)
            if not unfinished:
                calibrations[name] = calibration
            return _why_known(pair, known, calibration)
        except Exception as error:
            # Whatever it is: a look is optional, and other runs depend on its caller.
            raise LookError(f"{error}" or type(error).__name__) from error

    return look


def _has_come(job: Job, step: int, training: Mapping[str, Training]) -> bool:
    """Whether a run that has not finished has ended a step, and trains on after it."""
    here = training.get(job.identity)
    return here is not None and step <= here.step and step < job.steps


def _judged_until(step: int, unfinished: Sequence[Training]) -> int:
    """The step up to which to read what a set is judged by at a look after ``step``.

    If all of it was stopped, that is all that there will be: ``ended_with_sets`` reads as much.
    """
    if unfinished and all(each.stopped for each in unfinished):
        return min(each.step for each in unfinished)
    return step


def _cut(run: Evidence, step: int) -> Evidence:
    """A run up to a step, if it finished later; one that broke stays broken."""
    later = run.status is RunStatus.FINISHED and run.steps.max(initial=0) > step
    return ended_at(run, step) if later else run


def _so_far(job: Job, folder: Path, step: int) -> Evidence:
    """The evidence of a running job up to a step that has ended; ValueError if it is not there."""
    read = read_run(folder)
    if read.in_force is None or step not in read.steps:
        raise ValueError(f"{folder} has no evidence of step {step} yet")
    # The arrays of a step are written before its line, which may tell of problems with them.
    return replace(
        read.up_to(step),
        name=job.name,
        precision=job.precision,
        status=RunStatus.STOPPED,
        expected_steps=read.expected_steps,
    )


def _why_known(
    pair: PlannedPair, evidences: Mapping[str, Evidence], calibration: Calibration
) -> str:
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
