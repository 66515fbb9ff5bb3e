"""A plan whose control is a golden: it stands for the control, and nobody repeats it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from converge_harness.model import Experiment, Golden, Job, Plan, Precision, Role
from converge_harness.plan.sizes import precision_of


def judged_by(plan: Plan, golden: Golden, accepted: Sequence[str] = ()) -> Plan:
    """The plan with its control replaced; what only the control needed is left out.

    ``accepted`` says in clauses what the golden differs in and may; it is told like a waived rule.
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
    """The experiment, without references where the golden cannot be compared with them.

    Its frozen steps have to be as many as the experiment's; in low precision it has to hold its
    reference, for what float32 would be is not known from another release.
    """
    (control, *_) = experiment.controls
    needs = precision_of(control) is not Precision.FP32
    measured = golden.frozen == experiment.frozen and not (needs and golden.reference is None)
    return experiment if measured else replace(experiment, reference=False)


def _stand_in(golden: Golden, job: Job) -> Job:
    """The golden in place of a job, where it holds that."""
    if job.role is Role.CONTROL:
        return _standing_for(golden, job)
    if job.role is Role.REFERENCE and golden.reference is not None:
        folder, identity = golden.reference
        return replace(job, identity=identity, needs=None, starts_from=None, golden=folder)
    return job


def _standing_for(golden: Golden, control: Job) -> Job:
    """The golden as the plan's job of that control: what it was told, by the name of now."""
    now = control.toolchain
    same = golden.toolchain.versions.get("torchtitan") == now.versions.get("torchtitan")
    # Two releases have other config keys: the judge compares only those that both have.
    name = now.name if same else f"{golden.toolchain.name} of {golden.name}"
    spec = replace(
        golden.spec,
        name=control.name,
        toolchain=name,
        train_config=replace(golden.spec.train_config, data=control.spec.train_config.data),
        tolerances=control.spec.tolerances,
        waive=control.spec.waive,
        note=golden.words,
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
