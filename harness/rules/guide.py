"""Rules of torchtitan's converging guide (its ``docs/converging.md``): a set may waive them."""

from __future__ import annotations

from collections.abc import Iterator

from harness.model import Kind, Parallelism, Role
from harness.rules.rule import Case, Finding, guide_rule, of_titan
from harness.rules.stages import count_microbatches, pipeline_stages


@guide_rule
@of_titan
def control_is_1d_fsdp(case: Case) -> Iterator[Finding]:
    """The control is a 1D FSDP job without techniques, which the guide takes to be right."""
    if case.job.role is not Role.CONTROL:
        return
    spec = case.job.spec
    if case.degrees != Parallelism(dp_shard=case.degrees.dp_shard):
        yield Finding("parallelism", f"the control is {case.degrees}, not 1D FSDP")
    if spec.techniques:
        yield Finding("techniques", f"the control uses {', '.join(spec.techniques)}")
    if spec.inject:
        yield Finding("inject", "the control is changed on purpose")
    if spec.without_fixes:
        yield Finding("without_fixes", "the control shows an upstream bug on purpose")


@guide_rule
def control_is_repeated(case: Case) -> Iterator[Finding]:
    """A control is run more than once: without an A/A repeat no tolerance is learnt from it."""
    known = case.experiment.repeats or case.experiment.calibration is not None
    if case.job.role is Role.CONTROL and not known:
        yield Finding("repeats", "there is no A/A repeat of the control")


@guide_rule
@of_titan
def same_dp_degree(case: Case) -> Iterator[Finding]:
    """A test set keeps its control's data-parallel degree, so that both read the same samples."""
    spec = case.job.spec
    # With our loader the samples of a step depend on no degree. Kinds that are about changing
    # degrees rest on that; a parallel set keeps the degree, so that it tests one thing.
    if spec.train_config.own_loader and (
        case.job.role is Role.ANCHOR or spec.kind is not Kind.PARALLEL
    ):
        return
    ours, theirs = case.degrees.dp, case.control.spec.parallelism.dp
    if ours != theirs:
        yield Finding(
            "parallelism",
            f"its data-parallel degree is {ours}, that of {case.control.name!r} is {theirs}",
        )


@guide_rule
def same_token_budget(case: Case) -> Iterator[Finding]:
    """A test set (and an anchor) has its control's tokens per optimizer step."""
    ours, theirs = case.job, case.control
    if ours.tokens_per_step != theirs.tokens_per_step:
        yield Finding(
            "set.training.global_batch_size",
            f"{ours.global_batch_size} x {ours.seq_len} = {ours.tokens_per_step} tokens a step; "
            f"{theirs.name!r} has {theirs.tokens_per_step}",
            f"{theirs.global_batch_size} x {theirs.seq_len} there",
        )


@guide_rule
def same_steps(case: Case) -> Iterator[Finding]:
    """A test set trains as many steps as its control, because steps shape the lr schedule."""
    if case.job.steps != case.control.steps:
        yield Finding(
            "set.training.steps",
            f"{case.job.steps} steps; {case.control.name!r} has {case.control.steps}",
        )


@guide_rule
@of_titan
def same_initial_weights(case: Case) -> Iterator[Finding]:
    """A test set and its control start from one seed checkpoint."""
    if case.job.needs != case.control.needs:
        yield Finding(
            "train_config",
            f"its initial weights are not those of {case.control.name!r}: another toolchain, "
            "train config or model",
        )


@guide_rule
@of_titan
def pp_microbatches(case: Case) -> Iterator[Finding]:
    """Pipeline parallelism has at least as many microbatches as stages."""
    if case.degrees.pp == 1:
        return
    microbatches, stages = count_microbatches(case.job), pipeline_stages(case.job)
    if microbatches < stages:
        yield Finding(
            "set.training.local_batch_size",
            f"{microbatches} microbatches for {stages} stages of {case.job.spec.pipeline_schedule}",
            f"the local batch size is {case.job.local_batch_size}",
        )
