"""What must hold for a job to run as named: arithmetic and upstream requirements."""

from __future__ import annotations

from collections.abc import Iterator

from harness.model import Launcher, Technique
from harness.rules.rule import Case, Finding, necessity, of_titan
from harness.rules.stages import (
    count_microbatches,
    effective_layers,
    microbatch_size,
    pipeline_stages,
)
from harness.trainers import features_of, trainer_of

FULL_PIPELINE_SCHEDULES = frozenset({"1F1B", "DualPipeV"})
"""Schedules whose constructors refuse fewer microbatches than stages (torch 2.13)."""
ROUND_SCHEDULES = frozenset({"Interleaved1F1B", "InterleavedZeroBubble"})
"""Schedules that work in rounds of pp microbatches, all of one size."""


@necessity
@of_titan
def pp_microbatches_fit(case: Case) -> Iterator[Finding]:
    """The local batch divides into microbatches that the pipeline schedule takes."""
    schedule = case.job.spec.pipeline_schedule
    if case.degrees.pp == 1 or schedule is None:
        return
    size, local = microbatch_size(case.job), case.job.local_batch_size
    if local % size:
        yield Finding(
            "set.parallelism.pipeline_parallel_microbatch_size",
            f"a local batch of {local} does not divide into microbatches of {size}",
        )
        return
    microbatches, stages = count_microbatches(case.job), pipeline_stages(case.job)
    if schedule in FULL_PIPELINE_SCHEDULES and microbatches < stages:
        yield Finding(
            "pipeline_schedule",
            f"{schedule} refuses {microbatches} microbatches for {stages} stages",
        )
    rounds = max(1, microbatches // case.degrees.pp)
    if schedule in ROUND_SCHEDULES and microbatches % rounds:
        yield Finding(
            "pipeline_schedule",
            f"{schedule} needs its {microbatches} microbatches to divide into {rounds} rounds",
        )


@necessity
def batch_divisible(case: Case) -> Iterator[Finding]:
    """The global batch is a whole number of local batches on every data-parallel rank."""
    job, dp = case.job, case.degrees.dp
    if job.global_batch_size % (job.local_batch_size * dp):
        yield Finding(
            "set.training.global_batch_size",
            f"{job.global_batch_size} is no multiple of local batch {job.local_batch_size} "
            f"x dp {dp} = {job.local_batch_size * dp}",
        )


@necessity
def program_is_told(case: Case) -> Iterator[Finding]:
    """What a set names otherwise than its control reaches the program that trains it."""
    if case.job is not case.control:
        for key, message, hint in trainer_of(case.job.spec).untold(case.job, case.control):
            yield Finding(key, message, hint)


@necessity
@of_titan
def sequence_divisible(case: Case) -> Iterator[Finding]:
    """The sequence length divides over sequence-parallel and context-parallel ranks."""
    tp, cp, length = case.degrees.tp, case.degrees.cp, case.job.seq_len
    divisor = tp * (2 * cp if cp > 1 else 1)
    block = features_of(case.job).sequence_block
    if length % divisor:
        yield Finding(
            "set.training.seq_len",
            f"a sequence of {length} (training.seq_len) is no multiple of {divisor} "
            f"(TP {tp}, and 2 per rank of CP {cp})",
        )
    elif cp > 1 and block > 1 and length % (cp * block):
        yield Finding(
            "set.training.seq_len",
            f"a sequence of {length} (training.seq_len) is no multiple of CP {cp} x {block}, "
            "FlexAttention's block",
        )


@necessity
@of_titan
def technique_needs(case: Case) -> Iterator[Finding]:
    """A technique stands on top of what it needs."""
    spec, degrees = case.job.spec, case.degrees
    used = set(spec.techniques)
    needs = (
        (Technique.ASYNC_TP in used, degrees.tp > 1, "async_tp needs parallelism.tp > 1"),
        (Technique.ASYNC_TP in used, Technique.COMPILE in used, "async_tp needs compile"),
        (Technique.FLOAT8_TP in used, degrees.tp > 1, "float8_tp needs parallelism.tp > 1"),
        (Technique.FLOAT8_TP in used, Technique.FLOAT8 in used, "float8_tp needs float8"),
        (
            Technique.FLOAT8 in used,
            Technique.FLOAT8_ROWWISE not in used,
            "float8 and float8_rowwise are two scalings: name one",
        ),
    )
    for wanted, given, message in needs:
        if wanted and not given:
            yield Finding("techniques", message)
    if spec.pipeline_schedule and degrees.pp == 1:
        yield Finding("pipeline_schedule", f"{spec.pipeline_schedule} needs parallelism.pp > 1")
    if spec.cp_rotation and degrees.cp == 1:
        yield Finding("cp_rotation", f"{spec.cp_rotation} needs parallelism.cp > 1")
    if spec.cp_rotation and not features_of(case.job).cp_rotations:
        yield Finding("cp_rotation", "torchtitan 0.3 has no ring rotation to choose")


@necessity
@of_titan
def spmd_backend_exists(case: Case) -> Iterator[Finding]:
    """Only torchtitan 0.3 has SPMD backends to choose from."""
    spec, toolchain = case.job.spec, case.job.toolchain
    if spec.spmd_backend is not None and not features_of(case.job).spmd_backends:
        yield Finding(
            "spmd_backend",
            f"{spec.spmd_backend} is named, and torchtitan {toolchain.versions.get('torchtitan')} "
            f"of toolchain {toolchain.name} has no SPMD backends",
            "leave it out, or name it where torchtitan 0.3 trains",
        )


@necessity
@of_titan
def model_divisible(case: Case) -> Iterator[Finding]:
    """Attention heads divide over TP, and every pipeline stage gets a layer's worth of model."""
    shape, tp = case.job.spec.train_config.model, case.degrees.tp
    for heads in ("n_heads", "n_kv_heads"):
        if shape.get(heads, tp) % tp:
            yield Finding("parallelism.tp", f"{heads} = {shape[heads]} is no multiple of TP {tp}")
    weight = effective_layers(case.job)
    if (
        case.degrees.pp > 1
        and weight is not None
        and (stages := pipeline_stages(case.job)) > weight
    ):
        yield Finding(
            "parallelism.pp",
            f"{stages} stages for {shape['n_layers']} layers, embedding and output",
        )


@necessity
@of_titan
def expert_degree_divides(case: Case) -> Iterator[Finding]:
    """Expert parallelism borrows whole groups of the dp_shard x cp x tp ranks."""
    degrees = case.degrees
    dense = degrees.dp_shard * degrees.cp * degrees.tp
    if dense % degrees.ep:
        yield Finding(
            "parallelism.ep", f"EP {degrees.ep} does not divide dp_shard x cp x tp = {dense}"
        )


@necessity
def ranks_fit(case: Case) -> Iterator[Finding]:
    """A job's ranks fit into the CPU slots of this machine that the file or --slots allows."""
    slots = case.experiment.cpu_ranks
    here = case.experiment.launcher is Launcher.LOCAL
    if here and case.on_cpu and slots is not None and case.job.world_size > slots:
        yield Finding(
            "parallelism",
            f"{case.job.world_size} ranks; trainer.cpu_ranks or --slots allows {slots}",
        )
