"""``Experiment`` to ``Plan``: sets become jobs with sizes, identities and seed checkpoints.

Here a job also gets what its set did not specify: the SPMD backend of torchtitan 0.3, and the steps
at which it writes per-tensor evidence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count, takewhile

from converge_harness.errors import ConfigError, Problem
from converge_harness.model import (
    CADENCE_OFF,
    GLOBAL_BATCH,
    POWERS_OF_TWO,
    SPMD_BACKEND,
    Cadence,
    Experiment,
    Job,
    Kind,
    Parallelism,
    Plan,
    Precision,
    Repeat,
    RepeatKind,
    Role,
    SetSpec,
    Surroundings,
    Toolchain,
)
from converge_harness.model.plan import other_seed_name
from converge_harness.plan.identity import (
    OF_THE_PROGRAM,
    job_identity,
    model_overrides,
    seed_identity,
)
from converge_harness.plan.references import References, references_of
from converge_harness.plan.rules import PlannedJob, apply_rules
from converge_harness.plan.sizes import positive, precision_of, size, size_problems
from converge_harness.trainers import trainer_of

SHORT = (Role.REFERENCE, Role.MATCHED)
"""Roles of runs that are derived from other jobs of the plan; rules are not applied to them."""
ONE_PASS = (Kind.PARALLEL, Kind.SPACE_TIME)
"""Kinds of sets that are trained with other seeds too; the others must equal an unbroken run."""
CPU_PREFIX = "cpu"
"""Prefix of the hardware class of a CPU."""


def make_plan(
    experiment: Experiment, toolchains: Mapping[str, Toolchain], surroundings: Surroundings
) -> Plan:
    """All jobs of an experiment: seed checkpoints, anchor, controls, their repeats, tests.

    A repeat has its control's ``spec``, and a name such as ``CONTROL.rerun`` or ``CONTROL.ulp.2``;
    with a calibration there are none. Seed checkpoints are named ``seed``, or ``seed.1 seed.2 …``
    when there are several.

    Args:
        experiment: as loaded. toolchains: by name, every one that the experiment names.
        surroundings: what outside the file can change numbers, with the digest of every corpus,
        injected file and checkpoint that the experiment uses.

    Raises:
        ConfigError: all rules broken by all sets, or missing batch sizes.
    """
    problems: list[Problem] = []
    jobs: dict[str, Job] = {}
    references = references_of(experiment)
    for spec, role in (*_sets(experiment), *references.extra):
        if spec.name in jobs:
            where, why = (
                f"{experiment.path}: {spec.name!r}",
                "is the name of a run that converge makes for a control",
            )
            raise ConfigError(Problem(where, f"{why}: give the set another name"))
        if problems and role in SHORT:
            continue  # its mistakes are its control's, and reported there
        found = list(size_problems(experiment, spec))
        problems += found
        if spec.starts_from_control and spec.control not in jobs:
            continue  # the control's mistakes are reported
        if not found:
            toolchain = toolchains[spec.toolchain]
            spec = with_backend(spec, toolchain)  # noqa: PLW2901 - as it is run
            needs = (
                jobs[spec.control or ""].needs
                if spec.starts_from_control
                else _needs(experiment, spec, toolchain, surroundings)
            )
            jobs[spec.name] = _job(
                experiment, spec, role, toolchain, surroundings, references, needs
            )
    ruling = apply_rules(
        [
            PlannedJob(
                experiment=experiment,
                control=jobs[against],
                job=job,
                on_cpu=surroundings.hardware.startswith(CPU_PREFIX),
            )
            for job in jobs.values()
            if job.role not in SHORT
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
    short = [jobs[spec.name] for spec, _ in references.extra]
    tests = [jobs[spec.name] for spec in experiment.tests]
    others = [
        _by_other_seed(job, seed, surroundings, jobs[_maker_of_weights(job)])
        for job in (*controls, *tests)
        if job.spec.kind in ONE_PASS
        for seed in experiment.other_seeds
    ]
    seeds = _seed_jobs([*anchors, *controls, *tests, *others])
    made = (*seeds, *anchors, *controls, *repeats, *short, *tests, *others)
    return Plan(experiment, made, ruling.waived, surroundings)


def _sets(experiment: Experiment) -> Iterator[tuple[SetSpec, Role]]:
    yield from ((spec, Role.CONTROL) for spec in experiment.controls)
    if experiment.anchor is not None:
        yield experiment.anchor, Role.ANCHOR
    yield from ((spec, Role.TEST) for spec in experiment.tests)


def _beside(experiment: Experiment, job: Job) -> str:
    """Name of the control with which the rules compare a job; for a control, its own."""
    if job.role is Role.ANCHOR:
        return experiment.controls[0].name
    return job.spec.control or job.name


def _repeats_of(experiment: Experiment, control: Job) -> tuple[Repeat, ...]:
    """The repeats of a control that are possible.

    Only converge's own loader can distribute a batch to the ranks in another order, and that must
    not change the objective. A file that explicitly asks for an impossible repeat was refused on
    loading.
    """
    if experiment.calibration is not None or experiment.baseline is not None:
        return ()
    wanted = experiment.repeats
    if control.precision is not Precision.FP32 and control.spec.trainer.can.rounds_otherwise:
        wanted = tuple(dict.fromkeys(repeat.in_low_precision for repeat in wanted))
    spec = control.spec
    deals = spec.train_config.own_loader and trainer_of(spec).of_microbatch(spec) is None
    return tuple(repeat for repeat in wanted if deals or repeat.kind is not RepeatKind.PERMUTE)


def _job(
    experiment: Experiment,
    spec: SetSpec,
    role: Role,
    toolchain: Toolchain,
    surroundings: Surroundings,
    references: References,
    needs: str | None,
) -> Job:
    """``needs`` is the identity of its seed-checkpoint job."""
    seed, steps = experiment.seed, size(spec, "steps")
    sampled = sample_steps(experiment.cadence, steps) if spec.trainer.can.probed else ()
    local = size(spec, "local_batch_size")
    if spec.segments:
        local = spec.segments[0].local_batch_size  # the set's degrees are also the first segment's
    written = positive(spec.setting(GLOBAL_BATCH))
    # Only our own loader can be rewound to its first batch.
    frozen = experiment.frozen if spec.train_config.own_loader else 0
    frozen = frozen if spec.name in references.frozen_sets else 0
    measure = references.measures.get(spec.name)
    return Job(
        name=spec.name,
        role=role,
        spec=spec,
        toolchain=toolchain,
        seed=seed,
        steps=steps,
        local_batch_size=local,
        global_batch_size=written or local * spec.parallelism.dp,
        seq_len=size(spec, "seq_len"),
        precision=precision_of(spec),
        identity=job_identity(
            spec,
            toolchain,
            seed,
            surroundings,
            starts_from=_start(spec, needs, surroundings),
            sample_steps=sampled,
            frozen=frozen,
        ),
        sample_steps=sampled,
        frozen=frozen,
        matched=measure.matched if measure else None,
        reference=measure.reference if measure else None,
        needs=needs,
        starts_from=experiment.seed_checkpoint,
    )


def _needs(
    experiment: Experiment, spec: SetSpec, toolchain: Toolchain, surroundings: Surroundings
) -> str | None:
    """Identity of the seed-checkpoint job of a set; None if no job makes its weights."""
    if not spec.trainer.can.shares_initial_weights or experiment.seed_checkpoint is not None:
        return None
    return seed_identity(spec, toolchain, experiment.seed, surroundings)


def _start(spec: SetSpec, needs: str | None, surroundings: Surroundings) -> str:
    """The part of an identity for the initial weights: a seed job, a given checkpoint, the program.

    Raises KeyError if the surroundings lack the digest of a given checkpoint.
    """
    if not spec.trainer.can.shares_initial_weights:
        return OF_THE_PROGRAM
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
        starts_from=_start(control.spec, control.needs, surroundings),
        sample_steps=control.sample_steps,
        repeat=repeat,
    )
    return replace(
        control,
        name=f"{control.name}.{repeat}",
        role=Role.REPEAT,
        frozen=0,
        matched=None,
        reference=None,
        repeat=repeat,
        identity=identity,
    )


def _maker_of_weights(job: Job) -> str:
    """Name of the job whose trainer makes the initial weights: its own, or its control's."""
    return (job.spec.control if job.spec.starts_from_control else None) or job.name


def _by_other_seed(job: Job, seed: int, surroundings: Surroundings, maker: Job) -> Job:
    """A control or test set with another seed; without frozen steps, which would add nothing.

    ``maker`` is the job whose trainer makes its initial weights.
    """
    needs = seed_identity(maker.spec, maker.toolchain, seed, surroundings) if job.needs else None
    return replace(
        job,
        name=other_seed_name(job.name, seed),
        role=Role.OTHER_SEED,
        seed=seed,
        frozen=0,
        matched=None,
        reference=None,
        needs=needs,
        identity=job_identity(
            job.spec,
            job.toolchain,
            seed,
            surroundings,
            starts_from=_start(job.spec, needs, surroundings),
            sample_steps=job.sample_steps,
        ),
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
    """A job on one rank that only initialises the model of ``user`` and saves it."""
    spec = SetSpec(
        name=name,
        parallelism=Parallelism(),
        train_config=user.spec.train_config,
        toolchain=user.spec.toolchain,
        overrides=model_overrides(user.spec),
        spmd_backend=trainer_of(user.spec).features(user.toolchain).default_spmd_backend,
        trainer=user.spec.trainer,
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


def with_backend(spec: SetSpec, toolchain: Toolchain) -> SetSpec:
    """The set with its SPMD backend: its own, else its train config's, else the toolchain's."""
    features = trainer_of(spec).features(toolchain)
    if spec.spmd_backend is not None or not features.spmd_backends:
        return spec
    written = spec.setting(SPMD_BACKEND)
    backend = written if isinstance(written, str) else features.default_spmd_backend
    return replace(spec, spmd_backend=backend)


def sample_steps(cadence: Cadence, steps: int) -> tuple[int, ...]:
    """The sampled steps of a job of ``steps`` steps, in order; 0 is before training.

    Steps 1 and 2 distinguish a wrong gradient from a right one with rounding errors; later samples
    show how a difference develops, so they may be rarer.

    Raises:
        ValueError: the cadence is an unknown word.
    """
    if isinstance(cadence, tuple):
        # Without the initial weights the first update cannot be compared.
        return tuple(step for step in sorted({0, *cadence}) if step <= steps)
    if cadence == CADENCE_OFF:
        return ()
    if cadence == POWERS_OF_TWO:
        rare: Iterator[int] = (2**power for power in count())
    elif isinstance(cadence, int):
        rare = count(cadence, cadence)
    else:
        raise ValueError(f"{cadence!r} is not a cadence")
    later = takewhile(lambda step: step <= steps, rare)
    first = (step for step in (0, 1, 2) if step <= steps)
    return tuple(sorted({*first, *later}))
