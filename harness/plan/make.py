"""``Experiment`` to ``Plan``: sets become jobs with sizes, identities and seed checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import cast

from harness.errors import ConfigError, Problem
from harness.model import (
    GLOBAL_BATCH,
    Experiment,
    Job,
    Parallelism,
    Plan,
    Precision,
    Repeat,
    RepeatKind,
    Role,
    SetSpec,
    Setting,
    Surroundings,
    Technique,
    Toolchain,
)
from harness.plan.cadence import sample_steps
from harness.plan.identity import job_identity, model_overrides, seed_identity
from harness.rules import Case, apply_rules

CPU_PREFIX = "cpu"
"""How the hardware class of a CPU starts."""


def make_plan(
    experiment: Experiment, toolchains: Mapping[str, Toolchain], surroundings: Surroundings
) -> Plan:
    """All jobs of an experiment: seed checkpoints, anchor, controls, their repeats, tests.

    A repeat's ``spec`` is its control's, and its name ``CONTROL.rerun`` or ``CONTROL.ulp.2``; there
    are none where the experiment brings a calibration. Seed checkpoints are named ``seed``, or
    ``seed.1 seed.2 …`` when there are several.

    Args:
        experiment: as loaded.
        toolchains: by name, every one that the experiment names.
        surroundings: what outside the file changes numbers; with the digest of every corpus,
            injected file and checkpoint that the experiment uses.

    Raises:
        ConfigError: with every rule broken by every set, or batch sizes that are missing.
    """
    problems: list[Problem] = []
    jobs: dict[str, Job] = {}
    for spec, role in _sets(experiment):
        found = list(_size_problems(experiment, spec))
        problems += found
        if not found:
            toolchain = toolchains[spec.toolchain]
            jobs[spec.name] = _job(experiment, spec, role, toolchain, surroundings)
    ruling = apply_rules(
        [
            Case(
                experiment=experiment,
                control=jobs[against],
                job=job,
                on_cpu=surroundings.hardware.startswith(CPU_PREFIX),
            )
            for job in jobs.values()
            if (against := _beside(experiment, job)) in jobs
        ]
    )
    if problems or ruling.problems:
        raise ConfigError([*problems, *ruling.problems])
    controls = [jobs[spec.name] for spec in experiment.controls]
    repeats = [
        _repeat(control, repeat, surroundings)
        for control in controls
        for repeat in _repeats_of(experiment, control)
    ]
    anchors = [job for job in jobs.values() if job.role is Role.ANCHOR]
    tests = [jobs[spec.name] for spec in experiment.tests]
    seeds = _seed_jobs([*anchors, *controls, *tests])
    return Plan(experiment, (*seeds, *anchors, *controls, *repeats, *tests), ruling.waived)


def precision_of(spec: SetSpec) -> Precision:
    """The coarsest arithmetic of a set. torchtitan's own default is bfloat16 mixed precision."""
    if {Technique.FLOAT8, Technique.FLOAT8_ROWWISE} & set(spec.techniques):
        return Precision.FLOAT8
    mixed = spec.setting("training.mixed_precision_param", "bfloat16")
    if Technique.BF16 in spec.techniques or "bfloat16" in (mixed, spec.setting("training.dtype")):
        return Precision.BF16
    return Precision.FP32


def _sets(experiment: Experiment) -> Iterator[tuple[SetSpec, Role]]:
    yield from ((spec, Role.CONTROL) for spec in experiment.controls)
    if experiment.anchor is not None:
        yield experiment.anchor, Role.ANCHOR
    yield from ((spec, Role.TEST) for spec in experiment.tests)


def _beside(experiment: Experiment, job: Job) -> str:
    """Name of the control beside which the rules look at a job; a control stands for itself."""
    if job.role is Role.ANCHOR:
        return experiment.controls[0].name
    return job.spec.control or job.name


def _repeats_of(experiment: Experiment, control: Job) -> tuple[Repeat, ...]:
    """The repeats that are to be made, and can be.

    Only converge's own loader deals a batch out in another order; an experiment file that asks for
    what cannot be made has been refused when it was loaded.
    """
    if experiment.calibration is not None or experiment.baseline is not None:
        return ()
    deals = control.spec.train_config.own_loader
    return tuple(
        repeat for repeat in experiment.repeats if deals or repeat.kind is not RepeatKind.PERMUTE
    )


def _size_problems(experiment: Experiment, spec: SetSpec) -> Iterator[Problem]:
    """Sizes that a plan cannot be made without."""
    for name in ("steps", "local_batch_size", "seq_len"):
        value = spec.setting(f"training.{name}")
        if _positive(value) is None:
            stated = "is not set" if value is None else f"must be a positive integer, not {value!r}"
            yield Problem(
                f"{experiment.path}: {spec.name!r}: training.{name}",
                stated,
                f"in {spec.train_config.path}, or by set",
            )
    written = spec.setting(GLOBAL_BATCH, -1)
    if written != -1 and _positive(written) is None:
        yield Problem(
            f"{experiment.path}: {spec.name!r}: training.global_batch_size",
            f"must be a positive integer, or -1 for local batch x dp, not {written!r}",
        )
    if written == -1 and (spec.segments or _changes_nodes(spec)):
        yield Problem(
            f"{experiment.path}: {spec.name!r}: training.global_batch_size",
            "is not set, and would change with the data-parallel degree",
            f"in {spec.train_config.path}, or by set",
        )
    steps = _positive(spec.setting("training.steps"))
    if isinstance(experiment.cadence, tuple) and steps is not None:
        for step in (step for step in experiment.cadence if step > steps):
            yield Problem(
                f"{experiment.path}: probe.cadence",
                f"step {step} comes after the last step of {spec.name!r}",
                f"training.steps is {steps}",
            )


def _changes_nodes(spec: SetSpec) -> bool:
    return spec.recovery is not None and spec.recovery.nodes[0] < spec.recovery.nodes[1]


def _positive(value: Setting) -> int | None:
    valid = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return cast("int", value) if valid else None


def _size(spec: SetSpec, name: str) -> int:
    """A size that ``_size_problems`` has passed."""
    return cast("int", spec.setting(f"training.{name}"))


def _job(
    experiment: Experiment,
    spec: SetSpec,
    role: Role,
    toolchain: Toolchain,
    surroundings: Surroundings,
) -> Job:
    seed, steps = experiment.seed, _size(spec, "steps")
    sampled = sample_steps(experiment.cadence, steps)
    local = _size(spec, "local_batch_size")
    if spec.segments:
        local = spec.segments[0].local_batch_size  # as the degrees of the set are the first's
    written = _positive(spec.setting(GLOBAL_BATCH))
    made = seed_identity(spec, toolchain, seed, surroundings)
    needs = made if experiment.seed_checkpoint is None else None
    return Job(
        name=spec.name,
        role=role,
        spec=spec,
        toolchain=toolchain,
        seed=seed,
        steps=steps,
        local_batch_size=local,
        global_batch_size=written or local * spec.parallelism.dp,
        seq_len=_size(spec, "seq_len"),
        precision=precision_of(spec),
        identity=job_identity(
            spec,
            toolchain,
            seed,
            surroundings,
            starts_from=_start(needs, surroundings),
            sample_steps=sampled,
        ),
        sample_steps=sampled,
        needs=needs,
        starts_from=experiment.seed_checkpoint,
    )


def _start(needs: str | None, surroundings: Surroundings) -> str:
    """What stands in an identity for the weights: those of a seed job, or of a given checkpoint.

    Raises KeyError when the digest of a given one is not among the surroundings.
    """
    start = surroundings.seed_checkpoint if needs is None else needs
    if start is None:
        raise KeyError("seed_checkpoint")
    return start


def _repeat(control: Job, repeat: Repeat, surroundings: Surroundings) -> Job:
    identity = job_identity(
        control.spec,
        control.toolchain,
        control.seed,
        surroundings,
        starts_from=_start(control.needs, surroundings),
        sample_steps=control.sample_steps,
        repeat=repeat,
    )
    return replace(
        control,
        name=f"{control.name}.{repeat}",
        role=Role.REPEAT,
        repeat=repeat,
        identity=identity,
    )


def _seed_jobs(jobs: list[Job]) -> list[Job]:
    """One seed-checkpoint job per distinct initial weights, in order of first use."""
    first_users: dict[str, Job] = {}
    for job in jobs:
        if job.needs is not None:
            first_users.setdefault(job.needs, job)
    names = (
        ["seed"] if len(first_users) == 1 else [f"seed.{n + 1}" for n in range(len(first_users))]
    )
    return [
        _seed_job(name, identity, job)
        for name, (identity, job) in zip(names, first_users.items(), strict=True)
    ]


def _seed_job(name: str, identity: str, user: Job) -> Job:
    """A one-rank job that only initialises the model of ``user`` and saves it."""
    spec = SetSpec(
        name=name,
        parallelism=Parallelism(),
        train_config=user.spec.train_config,
        toolchain=user.spec.toolchain,
        overrides=model_overrides(user.spec),
    )
    return Job(
        name=name,
        role=Role.SEED,
        spec=spec,
        toolchain=user.toolchain,
        seed=user.seed,
        steps=user.steps,
        local_batch_size=user.local_batch_size,
        global_batch_size=user.local_batch_size,
        seq_len=user.seq_len,
        precision=Precision.FP32,
        identity=identity,
    )
