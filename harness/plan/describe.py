"""A plan as rows for people: what each set is, what it costs, and what the guide wants it for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from converge_harness.model import (
    GLOBAL_BATCH,
    LOCAL_BATCH,
    Ask,
    Job,
    Kind,
    Parallelism,
    Plan,
    Recovery,
    Role,
    Segment,
    SetSpec,
    Technique,
)
from converge_harness.trainers import trainer_of
from converge_harness.wording import counted


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One anchor, control or test set of a plan."""

    name: str
    role: Role
    control: str | None
    parallelism: Parallelism
    techniques: tuple[str, ...]
    """Techniques, then pipeline schedule, CP rotation and what is injected, if any."""
    world_size: int
    """Ranks; on GPUs also the number of GPUs."""
    local_batch_size: int
    global_batch_size: int
    gradient_accumulation_steps: int
    seq_len: int
    tokens_per_step: int
    steps: int
    toolchain: str
    serves: str
    """What the converging guide wants the set for."""
    waives: tuple[str, ...]
    note: str
    identity: str
    kind: Kind = Kind.PARALLEL
    segments: tuple[Segment, ...] = ()
    """Of an elastic set; the degrees and batch sizes above are those of its first segment."""
    recovery: Recovery | None = None
    """For a fault set, and for any other whose interrupted run continues from a checkpoint."""
    trainer: str = ""
    """For other trainers than torchtitan: the trainer, and what evidence it writes."""
    spmd_backend: str = ""
    """Empty where there is no choice."""
    own_techniques: Mapping[str, str] = field(default_factory=dict)
    """By name, what each of the experiment file's own techniques is, as a sentence."""
    deterministic: bool = True
    """Whether torch uses deterministic algorithms only."""
    probed: bool = True
    """False: faults strike at their step or after it, because nothing holds the program there."""
    passes: int = 1
    """How many passes the run has if everything goes as planned."""


def describe(plan: Plan) -> tuple[PlanRow, ...]:
    """One row per anchor, control and test set, in the plan's order."""
    controls = {job.name: job for job in plan.jobs if job.role is Role.CONTROL}
    return tuple(
        _row(job, controls.get(job.spec.control or job.name, job))
        for job in plan.jobs
        if job.role in (Role.ANCHOR, Role.CONTROL, Role.TEST)
    )


def _row(job: Job, control: Job) -> PlanRow:
    spec = job.spec
    extras = (spec.pipeline_schedule, spec.cp_rotation, spec.injected)
    return PlanRow(
        name=job.name,
        role=job.role,
        control=spec.control,
        parallelism=spec.parallelism,
        techniques=(*spec.technique_names, *(extra for extra in extras if extra)),
        own_techniques={each.name: each.what for each in spec.own_techniques},
        world_size=job.world_size,
        local_batch_size=job.local_batch_size,
        global_batch_size=job.global_batch_size,
        gradient_accumulation_steps=job.gradient_accumulation_steps,
        seq_len=job.seq_len,
        tokens_per_step=job.tokens_per_step,
        steps=job.steps,
        toolchain=spec.toolchain,
        serves=serves(job, control),
        waives=spec.waive,
        note=spec.note,
        identity=job.identity,
        kind=spec.kind,
        segments=spec.segments,
        recovery=spec.recovery,
        trainer=trainer_of(spec).describe(spec),
        spmd_backend=spec.spmd_backend or "",
        deterministic=spec.deterministic,
        probed=spec.trainer.can.probed,
        passes=_passes(spec),
    )


def _passes(spec: SetSpec) -> int:
    faults = spec.recovery.faults if spec.recovery else ()
    return max(1, len(spec.segments)) + len(faults)


def serves(job: Job, control: Job) -> str:
    """What the converging guide wants a set for.

    The guide is not about other trainers: for those, how the set differs from the control.
    """
    if not job.spec.trainer.can.guided:
        return _serves_unguided(job, control)
    if job.role is Role.CONTROL:
        return _serves_as_control(job)
    if job.role is Role.ANCHOR:
        return f"anchor: the control is itself judged against {_names(job.spec.parallelism)}"
    if job.spec.ask is Ask.NO_WORSE:
        return "an intended change: its loss may be no worse than the control's"
    return _serves_kind(job) or _serves_parallel(job, control)


def _serves_parallel(job: Job, control: Job) -> str:
    ours, theirs = job.spec.spmd_backend, control.spec.spmd_backend
    if ours and ours != theirs and job.spec.parallelism == control.spec.parallelism:
        return f"SPMD backend {ours} against {theirs or 'none'}: {_names(job.spec.parallelism)}"
    theirs_too = control.spec.technique_names
    new = [each for each in job.spec.technique_names if each not in theirs_too]
    if new:
        return _serves_technique(job, new)
    axes = _axes(job.spec.parallelism)
    if len(axes) > 1:
        return f"N-D test set: {_names(job.spec.parallelism)}"
    if axes:
        return f"minimal test set of {axes[0]}: 2D, {_names(job.spec.parallelism)}"
    return _serves_data_parallelism(job, control)


def _serves_kind(job: Job) -> str:
    """What a set of another kind than ``parallel`` tests; empty for a parallel one."""
    spec = job.spec
    if spec.segments:
        degrees = ", ".join(str(segment.parallelism) for segment in spec.segments)
        return f"elastic determinism: {degrees} as one curve"
    if spec.kind is Kind.FAULT and spec.recovery is not None:
        kinds = dict.fromkeys(fault.kind.value for fault in spec.recovery.faults)
        return f"recovery from {', '.join(kinds)}"
    if spec.kind is Kind.SPACE_TIME:
        accumulated = job.gradient_accumulation_steps
        return f"space-time equivalence: {spec.parallelism}, {accumulated} x accumulated"
    return ""


def _serves_as_control(job: Job) -> str:
    degrees = job.spec.parallelism
    plain = degrees == Parallelism(dp_shard=degrees.dp_shard) and not job.spec.technique_names
    kind = "1D FSDP" if plain else "another verified set-up"
    return f"control: {kind} on {job.world_size} ranks"


def _serves_data_parallelism(job: Job, control: Job) -> str:
    ours, theirs = job.spec.parallelism, control.spec.parallelism
    if ours != theirs:
        return f"{ours} against {theirs}: FSDP verified by comparing it with other data parallelism"
    if job.gradient_accumulation_steps != control.gradient_accumulation_steps:
        return "same token budget by gradient accumulation"
    return "the control's parallelism and techniques, with other settings"


def _serves_technique(job: Job, new: list[str]) -> str:
    degrees = job.spec.parallelism
    others = [each for each in new if each != Technique.COMPILE]
    if len(_axes(degrees)) > 1 and len(new) > 1:
        return f"maximal composability: {_names(degrees)} with {', '.join(new)}"
    tested = others or new
    base = [_names(degrees), *(each for each in job.spec.technique_names if each not in tested)]
    return f"technique {' and '.join(tested)} on top of {' + '.join(base)}"


def _axes(degrees: Parallelism) -> list[str]:
    """Model-parallel dimensions in use: those that the guide tests on dp x p ranks."""
    return [name.upper() for name in ("tp", "cp", "pp", "ep") if getattr(degrees, name) > 1]


def _names(degrees: Parallelism) -> str:
    if degrees.dp_replicate > 1:
        data = ["HSDP" if degrees.dp_shard > 1 else "DDP"]
    else:
        data = ["FSDP"] if degrees.dp_shard > 1 else []
    return " + ".join([*data, *_axes(degrees)]) or "one rank"


def _serves_unguided(job: Job, control: Job) -> str:
    """How a set differs from the control that it is judged against."""
    on = f"{job.spec.parallelism} on {counted(job.world_size, 'rank')}"
    if job.role is Role.CONTROL:
        return f"control: {on}"
    if job.role is Role.ANCHOR:
        return f"anchor: the control is itself judged against {on}"
    return ", ".join(_differences(job, control)) or f"the control's own settings, {on}"


def _differences(job: Job, control: Job) -> Iterator[str]:
    ours, theirs = job.spec, control.spec
    if ours.parallelism != theirs.parallelism:
        yield f"{ours.parallelism} against {theirs.parallelism}"
    accumulated = (job.gradient_accumulation_steps, control.gradient_accumulation_steps)
    if accumulated[0] != accumulated[1]:
        yield f"{accumulated[0]} x accumulated against {accumulated[1]} x"
    if job.local_batch_size != control.local_batch_size:
        yield f"local batch {job.local_batch_size} against {control.local_batch_size}"
    if ours.train_config.path != theirs.train_config.path:
        yield f"{ours.train_config.path} against {theirs.train_config.path}"
    for key in sorted(ours.overrides.keys() | theirs.overrides.keys()):
        if key in (LOCAL_BATCH, GLOBAL_BATCH):  # named above
            continue
        value, other = ours.setting(key), theirs.setting(key)
        if value != other:
            yield f"{key} {_shown(value)} against {_shown(other)}"
    if ours.toolchain != theirs.toolchain:
        yield f"{ours.toolchain} against {theirs.toolchain}"


def _shown(value: object) -> str:
    """A setting as it stands; an empty text as two quotes, since it would not be seen."""
    return "''" if value == "" else f"{value}"
