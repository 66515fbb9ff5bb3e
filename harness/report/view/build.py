"""Makes the view model from the values of earlier stages; pure."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from converge_harness.judge import CurveDifference, RunComparison, series
from converge_harness.model import (
    Calibration,
    Evidence,
    Experiment,
    Job,
    Kind,
    Outcome,
    Plan,
    Role,
    RunRecord,
    SeedRuns,
    SetSpec,
    Verdict,
)
from converge_harness.report.check_subjects import subjects
from converge_harness.report.sanitize import from_here, plain, plain_error, plain_verdict
from converge_harness.report.text import anchors
from converge_harness.report.view.counterfactual import counterfactual
from converge_harness.report.view.curves import Comparison, signal_curve
from converge_harness.report.view.gradient_map import gradient_map
from converge_harness.report.view.in_force import config_changes, named_and_in_force, techniques_of
from converge_harness.report.view.module_tree import module_tree
from converge_harness.report.view.program_notes import program_notes
from converge_harness.report.view.report_view import (
    SIGNAL_TITLES,
    BesideView,
    RepeatView,
    ReportView,
    RunView,
    TestView,
)
from converge_harness.report.view.resumed_run import (
    degrees_of,
    degrees_seen,
    kind_seen,
    passes_view,
)
from converge_harness.report.view.tensor_tables import first_step_tensors, replica_view
from converge_harness.report.view.tolerances import CalibrationView, calibration_view, notes
from converge_harness.wording import control_called

BESIDES = (Role.REFERENCE, Role.MATCHED, Role.OTHER_SEED)
"""Roles of runs that have no verdict and from which no limit is learnt."""


def build_view(
    *,
    title: str,
    verdicts: Sequence[Verdict],
    evidences: Iterable[Evidence] = (),
    subject: Plan | Experiment | None = None,
    records: Iterable[RunRecord] = (),
    versions: Mapping[str, str] | None = None,
    comparisons: Mapping[str, RunComparison] | None = None,
    repeats: Mapping[str, Mapping[str, CurveDifference]] | None = None,
    without_limits: Collection[str] = (),
    calibrations: Mapping[str, Calibration] | None = None,
    entropy_floor: float | None = None,
    generated: str = "",
    wall_s: float | None = None,
    here: Path | None = None,
    seeds: Mapping[str, SeedRuns] | None = None,
) -> ReportView:
    """All that a report shows, from whatever is given.

    Only ``verdicts`` are needed; evidence is found by its ``name``, records by a job's identity.
    ``comparisons`` are by name of the test set, as :func:`converge_harness.judge.judge` returns
    them beside the verdicts: without one, a test set is not shown beside its control.
    ``repeats`` are by name of the repeat what :func:`converge_harness.judge.curve_differences`
    finds of it and its control. ``without_limits`` names the test sets that were not compared step
    by step.
    ``subject`` adds degrees, techniques, notes and waived rules; imported curves have none.
    ``calibrations`` are by name of the control, and those that the verdicts were judged with.
    ``seeds`` are by name of the test set: the runs of several seeds that it was judged over.
    ``here`` is the folder in which commands are run: paths below it are relative to it.
    """
    plan = subject if isinstance(subject, Plan) else None
    experiment = plan.experiment if plan else subject if isinstance(subject, Experiment) else None
    jobs = {job.name: job for job in plan.jobs} if plan else {}
    every_evidence = {evidence.name: evidence for evidence in evidences}
    further = _further(verdicts, seeds or {})
    compared = comparisons or {}
    learnt = calibrations or {}
    runs = _Runs(jobs, every_evidence, tuple(records), learnt, repeats or {}, experiment, here)

    anchor = next((job.name for job in jobs.values() if job.role is Role.ANCHOR), None)
    # A control with an anchor has a verdict itself.
    controls = tuple(dict.fromkeys(v.name if v.control == anchor else v.control for v in verdicts))
    judged_against = (*controls, anchor) if anchor else controls
    repeat_jobs = [job for job in jobs.values() if job.role is Role.REPEAT]
    besides = [
        *(
            (job.name, job.role, job.spec.name if job.role is Role.OTHER_SEED else "")
            for job in jobs.values()
            if job.role in BESIDES
        ),
        *((name, Role.OTHER_SEED, of) for name, of in further.items() if name not in jobs),
    ]
    others = [*(job.name for job in repeat_jobs), *(name for name, *_ in besides)]
    fragments = iter(anchors([*judged_against, *(v.name for v in verdicts), *others]))
    control_views = {name: runs.view(name, next(fragments)) for name in judged_against}
    tests = tuple(
        replace(
            runs.test(
                verdict,
                next(fragments),
                compared.get(verdict.name),
                limited=verdict.name not in without_limits,
            ),
            challenged=verdict.control == anchor,
        )
        for verdict in verdicts
    )
    by_steps = [verdict for verdict in verdicts if "loss-envelope" not in verdict.not_asked]
    return ReportView(
        title=plain(title),
        source=plain(str(experiment.path)) if experiment else "",
        generated=generated,
        seed=experiment.seed if experiment else None,
        steps=max((job.steps for job in jobs.values()), default=None),
        versions={plain(name): plain(text) for name, text in (versions or {}).items()},
        controls=tuple(control_views[name] for name in controls),
        anchor=control_views[anchor] if anchor else None,
        calibrations=tuple(
            runs.calibration(name)
            for name in controls
            if any(name in (v.control, v.name) for v in by_steps)
        ),
        repeats=tuple(
            runs.repeat(job, fragment, control_views[job.spec.name])
            for job, fragment in zip(repeat_jobs, fragments, strict=False)
            if job.spec.name in control_views
        ),
        besides=tuple(
            BesideView(runs.view(name, fragment), role.value, plain(of))
            for (name, role, of), fragment in zip(besides, fragments, strict=True)
        ),
        tests=tests,
        waived=tuple(plain(sentence) for sentence in plan.waived) if plan else (),
        notes=(
            *_where(experiment),
            *map(plain, _left_out(experiment)),
            *_kernels(jobs.values()),
            *_not_asked(verdicts),
            *_unread(every_evidence.values()),
            *_overlooked(every_evidence.values()),
            *_renumbered(every_evidence.values()),
            *map(plain, _answers(verdicts)),
            *map(plain, _settled(compared)),
            *map(plain, _ended_with_sets(jobs.values(), every_evidence)),
            *notes(
                by_steps,
                every_evidence,
                {v.name: runs.calibration_of(v) for v in verdicts},
                compared,
            ),
            *map(plain, program_notes(verdicts, every_evidence, jobs, compared)),
        ),
        entropy_floor=entropy_floor,
        wall_s=wall_s,
    )


def _left_out(experiment: Experiment | None) -> Iterator[str]:
    """Generated sets that were not run, by why; of others, their verdict says it."""
    by_reason: dict[str, list[str]] = {}
    for name, each in (experiment.left_out if experiment else {}).items():
        if not each.was_asked_for:
            by_reason.setdefault(each.why, []).append(name)
    for why, names in by_reason.items():
        yield f"Left out: {', '.join(names)}: {why}."


def _unread(evidences: Iterable[Evidence]) -> Iterator[str]:
    """Signals of curves that the user asked to leave out."""
    by_signal: dict[str, list[str]] = {}
    for each in evidences:
        for signal in each.unread:
            by_signal.setdefault(signal, []).append(plain(each.name))
    for signal, names in by_signal.items():
        yield (
            f"The {signal.replace('_', ' ')} of {', '.join(names)} was left out as asked "
            "(without): the verdicts say nothing about it."
        )


_MOST_OVERLOOKED = 3
"""Names to list: some programs log a norm of every parameter."""


def _overlooked(evidences: Iterable[Evidence]) -> Iterator[str]:
    """Columns of curves that look like a judged signal, and were not read."""
    by_columns: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for each in evidences:
        for signal, columns in each.overlooked.items():
            by_columns.setdefault((signal, columns), []).append(plain(each.name))
    for (signal, columns), names in by_columns.items():
        more = len(columns) - _MOST_OVERLOOKED
        listed = ", ".join(map(plain, columns[:_MOST_OVERLOOKED]))
        listed += f" and {more} more" if more > 0 else ""
        option = shlex.quote(f"{signal}={columns[0]}")
        yield (
            f"Not read in {', '.join(names)}: {listed}; --columns {plain(option)} reads "
            f"{plain(columns[0])} as the {signal.replace('_', ' ')}."
        )


def _renumbered(evidences: Iterable[Evidence]) -> Iterator[str]:
    """Curves whose steps were numbered otherwise than in their source."""
    names = [plain(each.name) for each in evidences if each.counted_from_1]
    if names:
        yield f"Steps of {', '.join(names)} count from 0, and 1 was added to each as asked."


def _settled(comparisons: Mapping[str, RunComparison]) -> Iterator[str]:
    """Which test sets ended before their last step although they pass."""
    for name, compared in comparisons.items():
        planned = compared.test.settled_of
        if planned is not None:
            yield (
                f"{name} was stopped after step {compared.test.steps[-1]:,} of {planned:,}: by "
                'then it was settled that its loss is equivalent (stop = "settled"). What later '
                "steps would have done is not known."
            )


def _ended_with_sets(jobs: Iterable[Job], evidences: Mapping[str, Evidence]) -> Iterator[str]:
    """Which controls and repeats ended before their last step, and why."""
    jobs = tuple(jobs)
    for control in jobs:
        run = evidences.get(control.name)
        if control.role is not Role.CONTROL or run is None or run.settled_of is None:
            continue
        count = sum(job.role is Role.REPEAT and job.spec.name == control.name for job in jobs)
        repeats = f" and its repeats ({count})" if count else ""
        yield (
            f"Of the {control_called(control.name)}{repeats} the first {run.steps[-1]:,} of "
            f"{run.settled_of:,} steps are used: every set that is judged by them had been stopped "
            "by then, so they were stopped, too. A set that needs further steps trains them on."
        )


def _further(verdicts: Sequence[Verdict], seeds: Mapping[str, SeedRuns]) -> dict[str, str]:
    """The set of each run that is not the first of its set's seeds, by name of the run."""
    found: dict[str, str] = {}
    for verdict in verdicts:
        runs = seeds.get(verdict.name)
        for side, name in (
            ((runs.control, verdict.control), (runs.test, verdict.name)) if runs else ()
        ):
            for evidence in side[1:]:
                found.setdefault(evidence.name, name)
    return found


def _not_asked(verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    """A sentence for each list of subjects that were not asked, which a PASS does not cover."""
    names: dict[tuple[str, ...], list[str]] = {}
    for verdict in verdicts:
        if verdict.not_asked:
            names.setdefault(subjects(verdict.not_asked), []).append(plain(verdict.name))
    sentences = []
    for checks, sets in names.items():
        whose = "" if len(sets) == len(verdicts) else f" of {', '.join(sets)}"
        sentences.append(f"Not asked{whose}: {', '.join(checks)}.")
    return tuple(sentences)


_OF_GROUPS = ("loss-same-over-seeds", "loss-no-worse", "target-no-later", "rcp-no-later")


def _answers(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """How much two groups differ in a PASS; in any other verdict the cause says it."""
    for verdict in verdicts:
        for check in verdict.checks:
            if check.name in _OF_GROUPS and check.outcome is Outcome.PASS and check.limit:
                yield (
                    f"{verdict.name}, within the margin of {check.limit.value:g}: {check.detail}."
                )
            if check.name == "rcp-not-faster" and check.outcome is Outcome.PASS:
                yield f"{verdict.name}, by MLPerf's rule: {check.detail}."


def _kernels(jobs: Iterable[Job]) -> tuple[str, ...]:
    """Which kernels ran, where it does not go without saying."""
    if all(job.spec.deterministic for job in jobs):
        return ()
    sentence = (
        "deterministic = false: torch chose its kernels as in production. Where they add in no "
        "fixed order, two runs of one set differ by themselves."
    )
    return (sentence,)


def _where(experiment: Experiment | None) -> tuple[str, ...]:
    """Who ran the jobs, where it was not this machine."""
    if experiment is None or experiment.cluster is None:
        return ()
    cluster = experiment.cluster
    hardware = cluster.hardware or cluster.partition
    clauses = [
        f"Run by {experiment.launcher.value}",
        f"on {hardware}" if hardware else "",
        f"({cluster.device}), {cluster.ranks_per_node} ranks a node",
    ]
    return (plain(" ".join(filter(None, clauses)) + "."),)


class _Runs:
    """Finds everything about a run by its name."""

    def __init__(
        self,
        jobs: Mapping[str, Job],
        evidences: Mapping[str, Evidence],
        records: tuple[RunRecord, ...],
        calibrations: Mapping[str, Calibration],
        repeats: Mapping[str, Mapping[str, CurveDifference]],
        experiment: Experiment | None,
        here: Path | None,
    ) -> None:
        self.jobs = jobs
        self.left_out = experiment.left_out if experiment else {}
        self.evidences = evidences
        self.calibrations = calibrations
        self.source = experiment.path if experiment else None
        self.here = here
        self.repeats = repeats
        self.by_identity = {record.identity: record for record in records if record.identity}
        self.by_name = {record.name: record for record in records}

    def _control_of(self, job: Job) -> SetSpec | None:
        control = self.jobs.get(job.spec.control or "")
        return control.spec if control else None

    def view(self, name: str, anchor: str) -> RunView:
        job, evidence = self.jobs.get(name), self.evidences.get(name)
        record = self.by_identity.get(job.identity) if job else self.by_name.get(name)
        view = RunView(name=plain(name), anchor=anchor)
        if job:
            view = replace(
                view,
                degrees=degrees_of(job),
                world_size=job.world_size,
                techniques=techniques_of(job.spec, self._control_of(job)),
                own_techniques={own.name: plain(own.what) for own in job.spec.own_techniques},
                inject=plain(job.spec.injected.partition(" ")[2]),
                toolchain=plain(job.toolchain.name),
                # Of another trainer's program nobody knows which kernels it allows.
                deterministic=job.spec.deterministic if job.spec.trainer.can.techniques else None,
                note=plain(job.spec.note),
                repeat=str(job.repeat) if job.repeat else "",
                tokens_per_step=_tokens_per_step(job, evidence),
            )
        if record:
            in_passes = bool(evidence and evidence.passes)
            command = _command(record, job, self.source, in_passes=in_passes)
            view = replace(
                view,
                wall_s=record.wall_s,
                reused=record.reused,
                requeues=record.requeues,
                command=from_here(shlex.join(command), self.here),
                error=plain_error(record.error),
            )
        if evidence and not job:
            view = replace(view, degrees=degrees_seen(evidence))
        if evidence:
            again = len(evidence.passes) - 1 if evidence.interrupted else 0
            view = replace(
                view,
                source=from_here(evidence.source, self.here),
                wall_s=evidence.wall_s if view.wall_s is None else view.wall_s,
                error=view.error or plain_error(evidence.error),
                # A job that starts over leaves no passes to count.
                requeues=max(view.requeues, again),
                signals={name: signal_curve(evidence, name) for name in SIGNAL_TITLES},
            )
        return view

    def test(
        self, verdict: Verdict, anchor: str, compared: RunComparison | None, *, limited: bool
    ) -> TestView:
        run = self.view(verdict.name, anchor)
        # Curves of other seeds have nothing in common at a step.
        paired = "same-data" not in verdict.not_asked
        comparisons = _comparisons(compared, limited=limited) if paired else {}
        evidence = self.evidences.get(verdict.name)
        job, their_job = self.jobs.get(verdict.name), self.jobs.get(verdict.control)
        calibration = self.calibration_of(verdict)
        tensors = compared.tensors if compared and paired else ()
        plainly = plain_verdict(verdict, self.here)
        return TestView(
            run=run,
            verdict=plainly,
            comparisons=comparisons,
            loss_only=compared.loss_only if compared and paired else None,
            in_force=named_and_in_force(job.spec if job else None, evidence),
            config=config_changes(compared, job, their_job, here=self.here),
            compared=tensors,
            tensors=first_step_tensors(tensors),
            gradients=gradient_map(tensors),
            modules=module_tree(
                compared.modules if compared and paired else None,
                verdict.module,
                failed=bool(verdict.first_wrong),
            ),
            would_change=counterfactual(plainly, calibration),
            replicas=replica_view(evidence.replicas) if evidence else None,
            kind=self._kind(verdict.name),
            resumed=passes_view(
                evidence,
                job.spec if job else None,
                compared.superseded_curves if compared and paired else {},
            ),
        )

    def _kind(self, name: str) -> Kind:
        """The kind of a test set; without a plan, as far as its passes show."""
        if name in self.jobs:
            return self.jobs[name].spec.kind
        left_out = self.left_out.get(name)
        return left_out.kind if left_out else kind_seen(self.evidences.get(name))

    def calibration_of(self, verdict: Verdict) -> Calibration | None:
        """The calibration of a verdict; a control against its anchor uses its own."""
        return self.calibrations.get(verdict.control, self.calibrations.get(verdict.name))

    def calibration(self, control: str) -> CalibrationView:
        kinds = {name: str(job.repeat) for name, job in self.jobs.items() if job.repeat}
        known = self.calibrations.get(control)
        if known:
            return calibration_view(control, known, self.repeats, kinds)
        evidence = self.evidences.get(control)
        return CalibrationView(plain(control), evidence.precision.value if evidence else "")

    def repeat(self, job: Job, anchor: str, control: RunView) -> RepeatView:
        found = self.repeats.get(job.name, {})
        comparisons = {
            name: Comparison.of(found[name]) if name in found else Comparison()
            for name in SIGNAL_TITLES
        }
        run = self.view(job.name, anchor)
        return RepeatView(run=run, control=control.name, comparisons=comparisons)


def _command(
    record: RunRecord, job: Job | None, source: Path | None, *, in_passes: bool
) -> tuple[str, ...]:
    """The command that repeats a run; empty when it is not known.

    The launcher's command is that of one pass. In a run's own folder it would resume from what is
    there, and the faults of a script strike once. A user's program needs more than its argv: a
    folder to write to, variables, and the folder that it is started in.
    """
    resumes = in_passes or (job is not None and job.spec.resumes)
    if job is None or (job.spec.trainer.can.repeatable_argv and not resumes):
        return record.argv
    return ("converge", "run", str(source), "--only", job.name, "--fresh") if source else ()


def _comparisons(compared: RunComparison | None, *, limited: bool) -> dict[str, Comparison]:
    """Every signal of a judged pair, with the limits that it was judged by."""
    if compared is None:
        return {name: Comparison() for name in SIGNAL_TITLES}
    limits = compared.limits if limited else {}
    return {name: Comparison.of(compared.curves[name], limits.get(name)) for name in SIGNAL_TITLES}


def _tokens_per_step(job: Job, evidence: Evidence | None) -> int | None:
    """The token budget of one step; None where it is not known.

    Only a command trainer itself knows how long its samples are: the count of its probe is shown,
    else that of its config. Where inputs are no integers, the probe counts samples, not tokens.
    """
    if job.spec.trainer.can.counts_tokens:
        return job.tokens_per_step
    counted = series(evidence, "tokens").values if evidence else np.zeros(0)
    if counted.size:
        count = round(float(np.median(counted)))
        return None if job.seq_len == 1 and count == job.global_batch_size else count
    return job.tokens_per_step if job.seq_len > 1 else None
