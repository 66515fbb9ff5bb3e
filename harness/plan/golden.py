"""A plan with a golden in place of the control, which is then neither run nor repeated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from converge_harness.model import Experiment, Golden, Job, Plan, Precision, Role
from converge_harness.plan.sizes import precision_of
from converge_harness.trainers import trainer_of


def judged_by(plan: Plan, golden: Golden, accepted: Sequence[str] = ()) -> Plan:
    """The plan with its control replaced; jobs that only the control needed are left out.

    ``accepted`` are clauses on accepted differences of the golden; they are shown like waived
    rules.
    """
    jobs = [_stand_in(golden, job) for job in plan.jobs]
    needed = {job.needs for job in jobs}
    return replace(
        plan,
        jobs=tuple(job for job in jobs if job.role is not Role.SEED or job.identity in needed),
        waived=(
            *plan.waived,
            *(
                f"baseline_across: {golden.name} is judged against although {clause}"
                for clause in accepted
            ),
        ),
    )


def measured_by(experiment: Experiment, golden: Golden) -> Experiment:
    """The experiment, without references if the golden cannot be compared with them.

    The golden must have as many frozen steps as the experiment. In low precision it must contain
    its own reference, because a float32 run of another release is not comparable.
    """
    (control, *_) = experiment.controls
    needs = precision_of(control) is not Precision.FP32
    measured = golden.frozen == experiment.frozen and not (needs and golden.reference is None)
    return experiment if measured else replace(experiment, reference=False)


def _stand_in(golden: Golden, job: Job) -> Job:
    """The golden in place of a job, if it contains that job."""
    if job.role is Role.CONTROL:
        return _standing_for(golden, job)
    if job.role is Role.REFERENCE and golden.reference is not None:
        folder, identity = golden.reference
        return replace(job, identity=identity, needs=None, starts_from=None, golden=folder)
    return job


def _standing_for(golden: Golden, control: Job) -> Job:
    """The golden as the control's job in the plan: its own settings under the current name."""
    now = control.toolchain
    trainer = trainer_of(control.spec)
    same = trainer.release(golden.toolchain) == trainer.release(now)
    # Two releases have other config keys: the judge compares only those that both have.
    name = now.name if same else f"{golden.toolchain.name} of {golden.name}"
    spec = replace(
        golden.spec,
        name=control.name,
        toolchain=name,
        train_config=replace(golden.spec.train_config, data=control.spec.train_config.data),
        tolerances=control.spec.tolerances,
        waive=control.spec.waive,
        note=golden.text,
    )
    return replace(
        control,
        spec=spec,
        toolchain=replace(golden.toolchain, name=name),
        precision=golden.precision,
        identity=golden.identity,
        needs=None,
        starts_from=None,
        golden=golden.folder,
    )
