"""A plan with a baseline in place of the control, which is then neither run nor repeated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from converge_harness.model import Baseline, Experiment, Job, Plan, Precision, Role
from converge_harness.plan.sizes import precision_of
from converge_harness.trainers import trainer_of


def judged_by(plan: Plan, baseline: Baseline, accepted: Sequence[str] = ()) -> Plan:
    """The plan with its control replaced; jobs that only the control needed are left out.

    ``accepted`` are clauses on accepted differences of the baseline; they are shown like waived
    rules.
    """
    jobs = [_stand_in(baseline, job) for job in plan.jobs]
    needed = {job.needs for job in jobs}
    return replace(
        plan,
        jobs=tuple(job for job in jobs if job.role is not Role.SEED or job.identity in needed),
        waived=(
            *plan.waived,
            *(
                f"baseline_across: {baseline.name} is judged against although {clause}"
                for clause in accepted
            ),
        ),
    )


def measured_by(experiment: Experiment, baseline: Baseline) -> Experiment:
    """The experiment, without references if the baseline cannot be compared with them.

    The baseline must have as many frozen steps as the experiment. In low precision it must contain
    its own reference, because a float32 run of another release is not comparable.
    """
    (control, *_) = experiment.controls
    needs = precision_of(control) is not Precision.FP32
    measured = baseline.frozen == experiment.frozen and not (needs and baseline.reference is None)
    return experiment if measured else replace(experiment, reference=False)


def _stand_in(baseline: Baseline, job: Job) -> Job:
    """The baseline in place of a job, if it contains that job."""
    if job.role is Role.CONTROL:
        return _standing_for(baseline, job)
    if job.role is Role.REFERENCE and baseline.reference is not None:
        folder, identity = baseline.reference
        return replace(job, identity=identity, needs=None, starts_from=None, baseline=folder)
    return job


def _standing_for(baseline: Baseline, control: Job) -> Job:
    """The baseline as the control's job in the plan: its own settings under the current name."""
    now = control.toolchain
    trainer = trainer_of(control.spec)
    same = trainer.release(baseline.toolchain) == trainer.release(now)
    # Two releases have other config keys: the judge compares only those that both have.
    name = now.name if same else f"{baseline.toolchain.name} of {baseline.name}"
    spec = replace(
        baseline.spec,
        name=control.name,
        toolchain=name,
        train_config=replace(baseline.spec.train_config, data=control.spec.train_config.data),
        tolerances=control.spec.tolerances,
        waive=control.spec.waive,
        note=baseline.text,
    )
    return replace(
        control,
        spec=spec,
        toolchain=replace(baseline.toolchain, name=name),
        precision=baseline.precision,
        identity=baseline.identity,
        needs=None,
        starts_from=None,
        baseline=baseline.folder,
    )
