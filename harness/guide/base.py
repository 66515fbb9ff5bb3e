"""The control of proposed sets: 1D FSDP, with its base config and batch sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from converge_harness.errors import ConfigError, Problem
from converge_harness.guide.factor import DATA, DDP, DEFAULT_SCHEDULE, Factor, ordered
from converge_harness.model import (
    GLOBAL_BATCH,
    LOCAL_BATCH,
    Experiment,
    Job,
    Kind,
    Parallelism,
    Role,
    SetSpec,
    Setting,
    Technique,
    Toolchain,
    TrainConfig,
)
from converge_harness.plan import precision_of
from converge_harness.plan.rules import RULES, PlannedJob
from converge_harness.trainers import DEFAULT_TRAINER, features_of, trainer_of_kind

PIPELINE_RULES = ("pp-microbatches", "pp-microbatches-fit", "batch-divisible")
"""Rules that the choice of the local batch can satisfy."""
MOST_RAISED = 64
"""The token budget is raised to at most this many times one local batch per rank."""
MOST_LOCAL = 65_536
"""Largest local batch."""
FUSING_MICROBATCH = 2
"""torchtitan 0.2.2 on torch 2.13: the all-gathers of a pipeline stage fuse for async TP only when
a microbatch holds several samples (``experiments/four_d.toml``)."""


@dataclass(frozen=True, slots=True)
class Base:
    """The control of proposed sets, in an experiment of its own."""

    experiment: Experiment
    control: Job
    sizes_known: bool = True
    """False for a nominal one, whose batch and sequence are large enough for everything."""

    @property
    def dp(self) -> int:
        return self.control.spec.parallelism.dp

    @property
    def microbatch_key(self) -> str:
        """The trainer's key for the samples of a pipeline microbatch."""
        return self.control.spec.trainer.keys.pipeline_microbatch_size

    def spec(self, factors: Iterable[Factor], name: str = "proposed") -> SetSpec:
        """The test set with these factors; ``overrides`` are the control's and its own."""
        factors = ordered(factors)
        by_slot = {factor.slot: factor for factor in factors}
        axes = {slot: by_slot[slot].degree for slot in ("tp", "cp", "pp", "ep") if slot in by_slot}
        pipeline, ring = by_slot.get("pp"), by_slot.get("cp")
        control = self.control.spec
        own = tuple(factor.own for factor in factors if factor.own)
        overrides = dict(control.overrides)
        for technique in own:
            overrides |= technique.overrides
        spec = replace(
            control,
            name=name,
            parallelism=Parallelism(**_data_degrees(by_slot.get(DATA), self.dp), **axes),
            techniques=tuple(each for factor in factors if (each := factor.technique)),
            own_techniques=own,
            overrides=overrides,
            pipeline_schedule=(pipeline.variant or DEFAULT_SCHEDULE) if pipeline else None,
            cp_rotation=(ring.variant or None) if ring else None,
            control=control.name,
            tolerances={},
            margin=None,
            waive=(),
            inject=None,
            without_fixes=(),
            note="",
            kind=Kind.PARALLEL,
        )
        return self._sized(spec)

    def job(self, spec: SetSpec) -> Job:
        """A set as a job for the rules. It is never launched and has no identity."""
        local = spec.setting(LOCAL_BATCH)
        return replace(
            self.control,
            name=spec.name,
            role=Role.TEST,
            spec=spec,
            local_batch_size=local if isinstance(local, int) else self.control.local_batch_size,
            identity="",
        )

    def case(self, spec: SetSpec) -> PlannedJob:
        """A set with its control."""
        return PlannedJob(self.experiment, self.control, self.job(spec), on_cpu=False)

    def _sized(self, spec: SetSpec) -> SetSpec:
        """The set with a local batch that its pipeline accepts; unchanged if there is none."""
        if spec.parallelism.pp == 1:
            return spec
        overrides = dict(spec.overrides)
        if self._fuses_in_twos(spec):
            overrides[self.microbatch_key] = FUSING_MICROBATCH
        for local in self._locals():
            other = local != self.control.local_batch_size
            tried = replace(spec, overrides=overrides | ({LOCAL_BATCH: local} if other else {}))
            case = self.case(tried)
            if not any(list(RULES[name].check(case)) for name in PIPELINE_RULES):
                return tried
        return spec

    def _fuses_in_twos(self, spec: SetSpec) -> bool:
        return (
            Technique.ASYNC_TP in spec.techniques
            and features_of(self.control).fuses_in_twos
            and spec.setting(self.microbatch_key) is None
        )

    def _locals(self) -> Iterator[int]:
        """Local batches that keep the global one: the control's, then larger, then smaller."""
        per_rank, own = self.control.global_batch_size // self.dp, self.control.local_batch_size
        divisors = _divisors(per_rank)
        yield own
        yield from (each for each in divisors if each > own)
        yield from (each for each in reversed(divisors) if each < own)


def control_of(job: Job, experiment: Experiment) -> Base:
    """A planned control as a base."""
    return Base(experiment, job)


def nominal_base(dp: int, toolchain: Toolchain, factors: Iterable[Factor]) -> Base:
    """A base without a config; its batch and sequence never prevent a set from being proposed."""
    factors = tuple(factors)
    degrees = math.prod({factor.degree for factor in factors})
    # Two stages per rank, in microbatches of two.
    per_rank = 4 * math.lcm(*(factor.degree for factor in factors if factor.slot == "pp"))
    config = TrainConfig(path="any base config", settings={})
    sizes = {"steps": 1, "seq_len": 256 * degrees**2, "local_batch_size": per_rank}
    return replace(_base(config, toolchain, dp, sizes, per_rank * dp, {}), sizes_known=False)


def sized_base(
    config: TrainConfig, toolchain: Toolchain, dp: int, factors: Iterable[Factor]
) -> Base:
    """A 1D FSDP control of a config, with a token budget that suits every pipeline in ``factors``.

    The budget is the config's own if it can be divided over ``dp`` ranks and into enough
    microbatches, else the smallest multiple of one local batch per rank that can.

    Raises:
        ConfigError: a size is not stated, or no budget of a sensible size works.
    """
    sizes = _stated(config)
    factors = tuple(factors)
    pipelines = [factor for factor in factors if factor.slot == "pp"]
    beside = [factor for factor in factors if not factor.is_parallelism or factor.slot == "tp"]
    local, written = sizes["local_batch_size"], config.setting(GLOBAL_BATCH)
    budgets = [local * dp * times for times in range(1, MOST_RAISED + 1)]
    if isinstance(written, int) and written > 0 and written % dp == 0:
        budgets.insert(0, written)
    for budget in budgets:
        held = max(each for each in _divisors(budget // dp) if each <= local)
        overrides: dict[str, Setting] = {}
        if held != local:
            overrides[LOCAL_BATCH] = held
        if budget != (written if written not in (None, -1) else held * dp):
            overrides[GLOBAL_BATCH] = budget
        base = _base(config, toolchain, dp, sizes | {"local_batch_size": held}, budget, overrides)
        if all(_takes(base, {pipeline, *beside}) for pipeline in pipelines):
            return base
    raise ConfigError(
        Problem(
            f"--technique {', '.join(map(str, pipelines))}",
            f"no local batch up to {MOST_RAISED} x {local} makes the microbatches that the "
            "pipeline needs",
            f"state a larger training.local_batch_size in {config.path}",
        )
    )


def _takes(base: Base, factors: Iterable[Factor]) -> bool:
    case = base.case(base.spec(factors))
    return not any(list(RULES[name].check(case)) for name in PIPELINE_RULES)


def _stated(config: TrainConfig) -> dict[str, int]:
    """Sizes without which no plan can be made."""
    problems, sizes = [], {}
    for name in ("steps", "local_batch_size", "seq_len"):
        value: Any = config.setting(f"training.{name}")
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            sizes[name] = value
        else:
            said = "is not set" if value is None else f"must be a positive integer, not {value!r}"
            problems.append(Problem(f"{config.path}: training.{name}", said))
    if problems:
        raise ConfigError(problems)
    return sizes


def _base(
    config: TrainConfig,
    toolchain: Toolchain,
    dp: int,
    sizes: dict[str, int],
    budget: int,
    overrides: dict[str, Setting],
) -> Base:
    control = SetSpec(
        name=f"fsdp{dp}",
        parallelism=Parallelism(dp_shard=dp),
        train_config=config,
        toolchain=toolchain.name,
        overrides=overrides,
        trainer=trainer_of_kind(DEFAULT_TRAINER).default_spec(),
    )
    experiment = Experiment(name="", path=Path(config.path), controls=(control,), tests=())
    job = Job(
        name=control.name,
        role=Role.CONTROL,
        spec=control,
        toolchain=toolchain,
        seed=experiment.seed,
        steps=sizes["steps"],
        local_batch_size=sizes["local_batch_size"],
        global_batch_size=budget,
        seq_len=sizes["seq_len"],
        precision=precision_of(control),
        identity="",
    )
    return Base(experiment, job)


def _data_degrees(factor: Factor | None, dp: int) -> dict[str, int]:
    """FSDP unless a factor says otherwise; the product is always ``dp``."""
    if factor is None:
        return {"dp_shard": dp}
    if factor.variant == DDP:
        return {"dp_replicate": dp}
    # At least one shard: that a degree does not divide dp is said by
    # ``converge_harness.guide.fit``.
    return {"dp_replicate": factor.degree, "dp_shard": max(1, dp // factor.degree)}


@cache
def _divisors(number: int) -> tuple[int, ...]:
    """Divisors that can be a local batch, ascending."""
    return tuple(n for n in range(1, min(number, MOST_LOCAL) + 1) if number % n == 0)
