"""A plan whose control is a golden: it stands for the control, and nobody repeats it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.model import Golden, Job, Plan, Role


def judged_by(plan: Plan, golden: Golden, accepted: Sequence[str] = ()) -> Plan:
    """The plan with its control replaced; what only the control needed is left out.

    ``accepted`` says in clauses what the golden differs in and may; it is told like a waived rule.
    """
    (control,) = (job for job in plan.jobs if job.role is Role.CONTROL)
    jobs = [_standing_for(golden, job) if job is control else job for job in plan.jobs]
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
