"""Evidence of a plan's runs to verdicts, and the next command after each."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from converge_harness.launch.stopping import read_by, settling_looks
from converge_harness.matrix.pair_files import SHRUNK, why_not_for_others
from converge_harness.model import (
    Ask,
    Calibration,
    Evidence,
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
    Verdict,
)
from converge_harness.readers import read_run
from converge_harness.run_folder.layout import LOGS
from converge_harness.shrink import parts_of, why_not

if TYPE_CHECKING:
    from converge_harness.judge.verdict import JudgedPair
    from converge_harness.report import ReportView

MENDED_BY_TRAINING = frozenset(
    {
        *("control-sound", "repeats-sound", "complete"),
        *("steps-increase", "values-present", "samples-whole"),
    }
)
"""Checks that become INVALID if a run's evidence is damaged, or if one repeat is bad."""

SETTLED_BY = "loss-equivalent"
"""The check that settles a run before its last step."""
INVALID_WHEN_STOPPED = frozenset({"complete", "same-steps"})
"""Checks that are INVALID because a run was stopped, whatever it left."""

NOTHING_KEPT: Mapping[str, Evidence] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Judged:
    """A judged matrix: everything that a report needs."""

    verdicts: tuple[Verdict, ...]
    view: ReportView
    wall_s: float | None = None
    """Seconds since the command began; None if it did not wait for the runs."""


def read_evidence(
    plan: Plan, records: Sequence[RunRecord], kept: Mapping[str, Evidence] = NOTHING_KEPT
) -> dict[str, Evidence]:
    """The evidence of the anchor and of every control, repeat and test, by job name.

    Controls and repeats that ended with the sets that read them are as ``ended_with_sets`` says.
    ``kept`` is evidence that was read before, by identity.
    """
    found = {
        job.name: _as_job(kept[job.identity], job)
        if job.identity in kept
        else evidence_of(job, record)
        for job, record in zip(plan.jobs, records, strict=True)
        if job.role is not Role.SEED
    }
    return ended_with_sets(plan, found)


def ended_with_sets(plan: Plan, evidences: Mapping[str, Evidence]) -> dict[str, Evidence]:
    """The same, with controls and their repeats as if they had ended as planned where they may end.

    They may once every set that reads them was stopped: then all of them up to one step, no earlier
    than the last of any such set, are what there is to judge it by. If that does not hold, for
    example because a set has been added since, a run that was stopped counts as broken off.
    """
    found = dict(evidences)
    readers = read_by(plan)
    for control in plan.jobs:
        if control.role is not Role.CONTROL or control.identity not in readers:
            continue
        family = [evidences[job.name] for job in (control, *plan.repeats_of(control))]
        sets = [evidences[job.name] for job in readers[control.identity]]
        if step := _ended_with(family, sets):
            # One that broke stays broken, and one without that step is incomplete.
            found |= {
                each.name: replace(ended_at(each, step), settled_of=control.steps)
                for each in family
                if each.status in (RunStatus.FINISHED, RunStatus.STOPPED)
            }
    return found


def _ended_with(family: Sequence[Evidence], sets: Sequence[Evidence]) -> int | None:
    """The step with which a control and its repeats ended because their sets were stopped."""
    ended = [each for each in family if each.status in (RunStatus.FINISHED, RunStatus.STOPPED)]
    if all(each.status is RunStatus.FINISHED for each in ended):
        return None
    if any(each.status is not RunStatus.STOPPED for each in sets):
        return None
    if any(np.any(np.diff(each.steps) <= 0) for each in ended):
        return None  # nobody knows what it had done by a step
    step = min(int(each.steps.max(initial=0)) for each in ended)
    return step if step >= max(int(each.steps.max(initial=0)) for each in sets) else None


def evidence_of(job: Job, record: RunRecord) -> Evidence:
    """The evidence of one job's run; empty if it was skipped."""
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
    return _as_job(read_run(record.folder), job)


def _as_job(evidence: Evidence, job: Job) -> Evidence:
    """Evidence under a job's name: a reused run may have another, and only its identity counts."""
    return replace(evidence, name=job.name, precision=job.precision)


def judge_matrix(
    plan: Plan,
    records: Iterable[RunRecord],
    evidences: Mapping[str, Evidence],
    calibrations: Mapping[str, Calibration],
    *,
    versions: Mapping[str, str],
    entropy_floor: float | None,
    report: Path | None = None,
    wall_s: float | None = None,
) -> Judged:
    """Judge every test set of a plan, and its first control if there is an anchor.

    A set that the file asks for and its trainer cannot run is INVALID.
    ``evidences`` are by job name, ``calibrations`` by the name of the control. ``report`` is the
    folder that the next commands may name, if what was judged is saved in one.
    """
    # Imported here: `converge plan` draws nothing and does not need plots.
    from converge_harness.judge import curve_differences  # noqa: PLC0415
    from converge_harness.report import build_view  # noqa: PLC0415

    verdicts = []
    comparisons = {}
    seeds = {}
    for pair in pairs_of(plan):
        job = pair.test
        if runs := seed_runs(plan, pair, evidences):
            seeds[job.name] = runs
        calibration = calibrations[pair.calibrated]
        verdict, comparisons[job.name] = judge_pair(pair, evidences, calibration, runs)
        control = comparisons[job.name].control
        following = next_command(plan, job, verdict, control, report)
        verdicts.append(replace(verdict, next_command=following))
    verdicts += _left_out(plan)
    view = build_view(
        title=plan.experiment.name,
        verdicts=verdicts,
        evidences=evidences.values(),
        subject=plan,
        records=records,
        versions=versions,
        comparisons=comparisons,
        repeats={
            job.name: curve_differences(evidences[job.name], evidences[job.spec.name])
            for job in plan.jobs
            if job.role is Role.REPEAT
        },
        calibrations=calibrations,
        entropy_floor=entropy_floor,
        generated=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        wall_s=wall_s,
        here=Path.cwd(),
        seeds=seeds,
    )
    return Judged(tuple(verdicts), view, wall_s)


def _left_out(plan: Plan) -> Iterator[Verdict]:
    """The verdicts on sets that the file asks for and that have no run."""
    for name, each in plan.experiment.left_out.items():
        if each.was_asked_for:
            yield Verdict(
                name=name,
                control=each.control,
                judgement=Judgement.INVALID,
                cause=f"left out: {each.why}",
                next_command=f"{_run_set_again(plan, name)}  # once it can run",
            )


def judge_pair(
    pair: PlannedPair,
    evidences: Mapping[str, Evidence],
    calibration: Calibration,
    seeds: SeedRuns | None = None,
) -> JudgedPair:
    """Judge one comparison of a plan; ``evidences`` are by job name.

    A run that was stopped because it was settled is judged at the look at which it was.
    """
    test, control = (evidences[job.name] for job in (pair.test, pair.control))
    whole = _judge(pair, test, control, evidences, calibration, seeds)
    if test.status is RunStatus.STOPPED and _wrong_by_stopping_alone(whole.verdict):
        return _at_look(pair, evidences, calibration) or whole
    return whole


def _wrong_by_stopping_alone(verdict: Verdict) -> bool:
    """Whether the only problem of a stopped run is its missing steps.

    So is what its control left, which may have broken after the look.
    """
    return not any(
        check.outcome is Outcome.FAIL
        or (check.outcome is Outcome.INVALID and check.name not in INVALID_WHEN_STOPPED)
        for check in verdict.checks
    )


def _at_look(
    pair: PlannedPair, evidences: Mapping[str, Evidence], calibration: Calibration
) -> JudgedPair | None:
    """The comparison at the newest planned look, if that settles it; None if it does not.

    It does if the loss is equivalent and every other check passes, too. That it is different is
    not settled early: with so few steps and correlated noise the far tail of that test is too heavy
    (``docs/operating-characteristics.md``).
    """
    test, control = (evidences[job.name] for job in (pair.test, pair.control))
    last = int(test.steps.max(initial=0))
    step = max((look for look in pair.looks if look <= last), default=None)
    if step is None:
        return None
    cut = replace(ended_at(test, step), settled_of=pair.test.steps)
    judged = _judge(pair, cut, control.up_to(step), evidences, calibration, None, step)
    equivalent = any(
        check.name == SETTLED_BY and check.outcome is Outcome.PASS
        for check in judged.verdict.checks
    )
    return judged if equivalent and judged.verdict.judgement is Judgement.PASS else None


def ended_at(evidence: Evidence, step: int) -> Evidence:
    """A run as if it had finished with this step."""
    return replace(evidence.up_to(step), status=RunStatus.FINISHED, complete=True, error=None)


def _judge(
    pair: PlannedPair,
    test: Evidence,
    control: Evidence,
    evidences: Mapping[str, Evidence],
    calibration: Calibration,
    seeds: SeedRuns | None,
    look: int | None = None,
) -> JudgedPair:
    """``look`` is the planned step at which it is judged; None: at the end of the run."""
    # Imported here: `converge plan` judges nothing and does not need scipy.
    from converge_harness.judge import PrecisionRuns, judge, level_of_look  # noqa: PLC0415

    measure = None
    if pair.matched and pair.reference:
        measure = PrecisionRuns(evidences[pair.matched], evidences[pair.reference])
    steps = pair.test.steps
    end = steps if look is None else look
    before = max((each for each in pair.looks if each < end), default=0)
    return judge(
        test,
        control,
        calibration,
        spec=pair.test.spec,
        control_spec=pair.control.spec,
        own_start=pair.test.needs != pair.control.needs or pair.control.baseline is not None,
        measure=measure,
        seeds=seeds,
        level=level_of_look(end / steps, before / steps),
    )


def versions_of(plan: Plan) -> dict[str, str]:
    """Versions by distribution; several toolchains are distinguished by their torchtitan."""
    toolchains = {job.toolchain.name: job.toolchain for job in plan.jobs}
    found: dict[str, list[str]] = {}
    for toolchain in toolchains.values():
        for distribution, version in toolchain.versions.items():
            found.setdefault(distribution, [])
            if version not in found[distribution]:
                found[distribution].append(version)
    return {distribution: ", ".join(versions) for distribution, versions in found.items()}


# ------------------------------------------------------------------ what is judged against what


class PlannedPair(NamedTuple):
    """A run, what it is judged against, and the control whose repeats are used."""

    test: Job
    control: Job
    calibrated: str
    matched: str | None
    """Name of the run whose errors are the measure for those of the test, if any …"""
    reference: str | None
    """… and of the one in float32 from which they are measured."""
    looks: tuple[int, ...] = ()
    """The steps, before its last, after which it may be settled that its loss is equivalent."""


def pairs_of(plan: Plan) -> Iterator[PlannedPair]:
    """Every comparison of a plan: the control against its anchor, then the test sets.

    The anchor is not repeated: the spread of the control's own repeats shows how much correct runs
    of that regime differ.

    Raises ValueError for a test set without a control, which no experiment file produces.
    """
    anchor = next((job for job in plan.jobs if job.role is Role.ANCHOR), None)
    if anchor is not None:
        challenged = plan.job(plan.experiment.controls[0].name)
        yield PlannedPair(
            challenged, anchor, challenged.name, challenged.matched, challenged.reference
        )
    for job in plan.jobs:
        if job.role is Role.TEST:
            if job.spec.control is None:
                raise ValueError(f"test set {job.name!r} names no control")
            control = plan.job(job.spec.control)
            looks = settling_looks(job, plan.experiment)
            yield PlannedPair(job, control, control.name, job.matched, job.reference, looks)


def seed_runs(plan: Plan, pair: PlannedPair, evidences: Mapping[str, Evidence]) -> SeedRuns | None:
    """The evidence of control and test set by seed; None if there is only one seed."""
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


# ------------------------------------------------------------------ what to type next


def may_be_rounding(job: Job, verdict: Verdict) -> bool:
    """Whether a verdict is a failure about which a run of the set in float32 would say more."""
    low = job.precision is not Precision.FP32 and job.spec.ask is Ask.SAME
    return low and job.spec.trainer.can.references and verdict.judgement is Judgement.FAIL


_OF_EVERY_STEP = ("-first-step", "-envelope")
"""Ends of the names of checks that are open for want of repeats, a tolerance or printed digits."""


def next_command(
    plan: Plan, job: Job, verdict: Verdict, control: Evidence, report: Path | None
) -> str:
    """The next command after a verdict on a set of a plan, with the reason as a shell comment.

    Never a command that judges the same evidence again, since its result would be the same.
    ``report`` is the folder of the saved matrix; None: it is not saved.
    """
    if verdict.judgement is Judgement.FAIL:
        return _after_fail(plan, job, verdict, report)
    if verdict.judgement is Judgement.INCONCLUSIVE:
        return f"{_run_again(plan, job)}  # {_what_settles(plan, verdict)}"
    if verdict.judgement is Judgement.INVALID:
        invalid = [each.name for each in verdict.checks if each.outcome is Outcome.INVALID]
        if control.status in (RunStatus.CRASHED, RunStatus.HUNG):
            logs = shlex.quote(f"{control.source}/{control.says_why or LOGS}")
            return f"{_run_again(plan, job)}  # once its control runs, whose output is in {logs}"
        if MENDED_BY_TRAINING.issuperset(invalid[:1]):
            return f"{_run_again(plan, job, '--fresh')}  # trains it and its control again"
        return f"{_run_again(plan, job)}  # after fixing what is named above"
    stopped = verdict.judgement is Judgement.ERROR and not verdict.next_command
    return (
        f"{_run_again(plan, job)}  # trains it to its last step"
        if stopped
        else verdict.next_command
    )


def _after_fail(plan: Plan, job: Job, verdict: Verdict, report: Path | None) -> str:
    repro = ""
    local = plan.experiment.launcher is Launcher.LOCAL
    if report is not None and local and why_not_for_others(plan.experiment, job.spec) is None:
        command = shlex.join(("converge", "repro", str(report), "--set", job.name))
        repro = f"{command}  # writes it for others, with a draft of an issue"
    shrunk = (plan.experiment.path.parent / SHRUNK).is_file()
    if repro and shrunk:
        return repro
    if may_be_rounding(job, verdict):
        return _run_again(plan, job, "--explain")
    if may_shrink(plan, job) and not shrunk:
        shrink = ("converge", "shrink", str(plan.experiment.path), "--set", job.name)
        parts = ", ".join(parts_of(job.spec))
        return f"{shlex.join(shrink)}  # which of its parts it needs: {parts}"
    again = f"{_run_again(plan, job)}  # after a change; runs that it does not affect are reused"
    return repro or again


def may_shrink(plan: Plan, job: Job) -> bool:
    """Whether a failed set has parts of which some may not be needed, and can be run without."""
    local = plan.experiment.launcher is Launcher.LOCAL
    return local and len(parts_of(job.spec)) > 1 and not why_not(job.spec)


def _what_settles(plan: Plan, verdict: Verdict) -> str:
    """What has to change before an open set is run again."""
    left = [each.name for each in verdict.checks if each.outcome is Outcome.INCONCLUSIVE]
    if any(name.endswith(_OF_EVERY_STEP) for name in left):
        return "after what is named above; no more steps settle it"
    more = "or with [seeds]" if not plan.experiment.other_seeds else "or more seeds"
    return f"with more steps, {more}"


def _run_again(plan: Plan, job: Job, *options: str) -> str:
    return _run_set_again(plan, job.name, *options)


def _run_set_again(plan: Plan, name: str, *options: str) -> str:
    launcher = plan.experiment.launcher
    where = () if launcher is Launcher.LOCAL else ("--launcher", launcher.value)
    path = str(plan.experiment.path)
    return shlex.join(("converge", "run", path, "--only", name, *where, *options))
