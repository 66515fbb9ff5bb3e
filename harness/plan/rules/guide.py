"""Rules of torchtitan's converging guide (its ``docs/converging.md``): a set may waive them."""

from __future__ import annotations

from collections.abc import Iterator

from converge_harness.model import Kind, Parallelism, Role
from converge_harness.plan.rules.rule import (
    Breach,
    PlannedJob,
    count_microbatches,
    guide_rule,
    where_guided,
)
from converge_harness.trainers import pipeline_stages


@guide_rule
@where_guided
def control_is_1d_fsdp(planned: PlannedJob) -> Iterator[Breach]:
    """The control is a 1D FSDP job without techniques, which the guide takes to be right."""
    if planned.job.role is not Role.CONTROL:
        return
    spec = planned.job.spec
    if planned.degrees != Parallelism(dp_shard=planned.degrees.dp_shard):
        yield Breach("parallelism", f"the control is {planned.degrees}, not 1D FSDP")
    if spec.technique_names:
        yield Breach("techniques", f"the control uses {', '.join(spec.technique_names)}")
    if spec.inject:
        yield Breach("inject", "the control is changed on purpose")
    if spec.without_fixes:
        yield Breach("without_fixes", "the control shows an upstream bug on purpose")


@guide_rule
def control_is_repeated(planned: PlannedJob) -> Iterator[Breach]:
    """A control is run more than once: without an A/A repeat no limit is learnt from it."""
    known = planned.experiment.repeats or planned.experiment.calibration is not None
    if planned.job.role is Role.CONTROL and not known:
        yield Breach("repeats", "there is no A/A repeat of the control")


@guide_rule
@where_guided
def same_dp_degree(planned: PlannedJob) -> Iterator[Breach]:
    """A test set keeps its control's data-parallel degree, so that both read the same samples."""
    spec = planned.job.spec
    # With our loader the samples of a step do not depend on degrees. Kinds that change degrees rely
    # on that; a parallel set keeps the degree, so that it tests one thing.
    if spec.train_config.own_loader and (
        planned.job.role is Role.ANCHOR or spec.kind is not Kind.PARALLEL
    ):
        return
    ours, theirs = planned.degrees.dp, planned.control.spec.parallelism.dp
    if ours != theirs:
        yield Breach(
            "parallelism",
            f"its data-parallel degree is {ours}, that of {planned.control.name!r} is {theirs}",
        )


@guide_rule
def same_token_budget(planned: PlannedJob) -> Iterator[Breach]:
    """A test set (and an anchor) has its control's tokens per optimizer step."""
    ours, theirs = planned.job, planned.control
    if ours.tokens_per_step != theirs.tokens_per_step:
        yield Breach(
            "set.training.global_batch_size",
            f"{ours.global_batch_size} x {ours.seq_len} = {ours.tokens_per_step} tokens a step; "
            f"{theirs.name!r} has {theirs.tokens_per_step}",
            f"{theirs.global_batch_size} x {theirs.seq_len} there",
        )


@guide_rule
def same_steps(planned: PlannedJob) -> Iterator[Breach]:
    """A test set trains as many steps as its control, because steps shape the lr schedule."""
    if planned.job.steps != planned.control.steps:
        yield Breach(
            "set.training.steps",
            f"{planned.job.steps} steps; {planned.control.name!r} has {planned.control.steps}",
        )


@guide_rule
@where_guided
def same_initial_weights(planned: PlannedJob) -> Iterator[Breach]:
    """A test set and its control start from one seed checkpoint."""
    if planned.job.needs != planned.control.needs:
        yield Breach(
            "train_config",
            f"its initial weights are not those of {planned.control.name!r}: another toolchain, "
            "train config or model",
        )


@guide_rule
@where_guided
def pp_microbatches(planned: PlannedJob) -> Iterator[Breach]:
    """Pipeline parallelism has at least as many microbatches as stages."""
    if planned.degrees.pp == 1:
        return
    microbatches, stages = count_microbatches(planned.job), pipeline_stages(planned.job)
    schedule = planned.job.spec.pipeline_schedule
    if microbatches < stages:
        yield Breach(
            "set.training.local_batch_size",
            f"{microbatches} microbatches for {stages} stages of {schedule}",
            f"the local batch size is {planned.job.local_batch_size}",
        )
