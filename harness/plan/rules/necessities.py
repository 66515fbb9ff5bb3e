"""What must hold for a job to run as the file says: arithmetic, upstream and cluster limits."""

from __future__ import annotations

from collections.abc import Iterator

from converge_harness.model import Job, Launcher, Stop, Technique
from converge_harness.plan.rules.rule import (
    Breach,
    PlannedJob,
    count_microbatches,
    microbatch_size,
    necessity,
    where_guided,
)
from converge_harness.trainers import features_of, pipeline_stages, trainer_of

FULL_PIPELINE_SCHEDULES = frozenset({"1F1B", "DualPipeV"})
"""Schedules that refuse fewer microbatches than stages (torch 2.13)."""
ROUND_SCHEDULES = frozenset({"Interleaved1F1B", "InterleavedZeroBubble"})
"""Schedules that work in rounds of pp microbatches, all of one size."""


@necessity
@where_guided
def pp_microbatches_fit(planned: PlannedJob) -> Iterator[Breach]:
    """The local batch divides into microbatches that the pipeline schedule takes."""
    schedule = planned.job.spec.pipeline_schedule
    if planned.degrees.pp == 1 or schedule is None:
        return
    size, local = microbatch_size(planned.job), planned.job.local_batch_size
    if local % size:
        yield Breach(
            f"set.{planned.job.spec.trainer.keys.pipeline_microbatch_size}",
            f"a local batch of {local} does not divide into microbatches of {size}",
        )
        return
    microbatches, stages = count_microbatches(planned.job), pipeline_stages(planned.job)
    if schedule in FULL_PIPELINE_SCHEDULES and microbatches < stages:
        yield Breach(
            "pipeline_schedule",
            f"{schedule} refuses {microbatches} microbatches for {stages} stages",
        )
    rounds = max(1, microbatches // planned.degrees.pp)
    if schedule in ROUND_SCHEDULES and microbatches % rounds:
        yield Breach(
            "pipeline_schedule",
            f"{schedule} needs its {microbatches} microbatches to divide into {rounds} rounds",
        )


@necessity
def warm_up_is_known(planned: PlannedJob) -> Iterator[Breach]:
    """A set that may end once it is settled says over how many steps its learning rate rises."""
    spec = planned.job.spec
    asked = spec.control and spec.stop is Stop.SETTLED and spec.trainer.can.probed
    if asked and spec.warmup_steps is None:
        key = spec.trainer.keys.warmup_steps
        yield Breach(
            f"set.{key}" if key else "stop",
            'is not set, but stop = "settled" needs it: a set is not stopped before twice the '
            'warm-up; set it (0 for no warm-up), or use stop = "fail"',
        )


@necessity
def batch_divisible(planned: PlannedJob) -> Iterator[Breach]:
    """The global batch is a whole number of local batches on every data-parallel rank."""
    job, dp = planned.job, planned.degrees.dp
    if job.global_batch_size % (job.local_batch_size * dp):
        yield Breach(
            "set.training.global_batch_size",
            f"{job.global_batch_size} is not a multiple of local batch {job.local_batch_size} "
            f"x dp {dp} = {job.local_batch_size * dp}",
        )


@necessity
def same_microbatch(planned: PlannedJob) -> Iterator[Breach]:
    """A set's microbatches are as large as its control's where the objective is of a microbatch."""
    job, control = planned.job, planned.control
    ours, theirs = job.local_batch_size, control.local_batch_size
    parts = (trainer_of(each.spec).of_microbatch(each.spec) for each in (job, control))
    for part in dict.fromkeys(parts):
        if part is not None and ours != theirs:
            yield Breach(
                "set.training.local_batch_size",
                f"{part.name} is computed per microbatch: {ours} samples here, {theirs} in "
                f"{control.name!r}, which is another objective",
                f"write local_batch_size = {theirs}, or {part.instead}",
            )


@necessity
def differences_reach_the_program(planned: PlannedJob) -> Iterator[Breach]:
    """What a set names differently from its control reaches the program that trains it."""
    if planned.job is not planned.control:
        trainer = trainer_of(planned.job.spec)
        for each in trainer.differences_not_passed(planned.job, planned.control):
            yield Breach(*each)


@necessity
@where_guided
def sequence_divisible(planned: PlannedJob) -> Iterator[Breach]:
    """The sequence length divides over sequence-parallel and context-parallel ranks."""
    tp, cp, length = planned.degrees.tp, planned.degrees.cp, planned.job.seq_len
    divisor = tp * (2 * cp if cp > 1 else 1)
    block = features_of(planned.job).sequence_block
    if length % divisor:
        yield Breach(
            "set.training.seq_len",
            f"a sequence of {length} (training.seq_len) is not a multiple of {divisor} "
            f"(TP {tp}, and 2 per rank of CP {cp})",
        )
    elif cp > 1 and block > 1 and length % (cp * block):
        yield Breach(
            "set.training.seq_len",
            f"a sequence of {length} (training.seq_len) is not a multiple of CP {cp} x {block}, "
            "FlexAttention's block",
        )


@necessity
@where_guided
def technique_needs(planned: PlannedJob) -> Iterator[Breach]:
    """A technique has what it needs."""
    spec, degrees = planned.job.spec, planned.degrees
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
            yield Breach("techniques", message)
    if spec.pipeline_schedule and degrees.pp == 1:
        yield Breach("pipeline_schedule", f"{spec.pipeline_schedule} needs parallelism.pp > 1")
    if spec.cp_rotation and degrees.cp == 1:
        yield Breach("cp_rotation", f"{spec.cp_rotation} needs parallelism.cp > 1")
    if spec.cp_rotation and not features_of(planned.job).cp_rotations:
        yield Breach("cp_rotation", f"{_release(planned.job)} has no ring rotation to choose")


def _release(job: Job) -> str:
    """The release of a job's trainer, for messages."""
    trainer, toolchain = trainer_of(job.spec), job.toolchain
    return f"{trainer.kind} {trainer.release(toolchain)} of toolchain {toolchain.name}"


@necessity
@where_guided
def spmd_backend_exists(planned: PlannedJob) -> Iterator[Breach]:
    """The release has the SPMD backend that a set names, and it knows the set's parallelism."""
    spec, features = planned.job.spec, features_of(planned.job)
    if spec.spmd_backend is None:
        return
    who = _release(planned.job)
    if not features.spmd_backends:
        yield Breach(
            "spmd_backend",
            f"{spec.spmd_backend} is named, and {who} has no SPMD backends",
            "leave it out, or name it in a set whose toolchain has a release with SPMD backends",
        )
    elif spec.spmd_backend not in features.spmd_backends:
        yield Breach(
            "spmd_backend",
            f"{spec.spmd_backend} is named, which {who} does not have",
            f"it has {' and '.join(features.spmd_backends)}",
        )
    elif planned.degrees.cp > 1 and spec.spmd_backend not in features.cp_backends:
        yield Breach(
            "spmd_backend",
            f"{spec.spmd_backend} of {who} knows no context parallelism, and the set has CP "
            f"{planned.degrees.cp}",
            f"CP needs {' or '.join(features.cp_backends)} there",
        )


@necessity
@where_guided
def model_divisible(planned: PlannedJob) -> Iterator[Breach]:
    """Attention heads divide over TP, and every pipeline stage gets a layer's worth of model."""
    shape, tp = planned.job.spec.train_config.model, planned.degrees.tp
    for heads in ("n_heads", "n_kv_heads"):
        if shape.get(heads, tp) % tp:
            yield Breach("parallelism.tp", f"{heads} = {shape[heads]} is not a multiple of TP {tp}")
    weight = trainer_of(planned.job.spec).layers_to_cut(planned.job)
    if (
        planned.degrees.pp > 1
        and weight is not None
        and (stages := pipeline_stages(planned.job)) > weight
    ):
        yield Breach(
            "parallelism.pp",
            f"{stages} stages for {shape['n_layers']} layers, embedding and output",
        )


@necessity
@where_guided
def expert_degree_divides(planned: PlannedJob) -> Iterator[Breach]:
    """Expert parallelism borrows whole groups of the dp_shard x cp x tp ranks."""
    degrees = planned.degrees
    dense = degrees.dp_shard * degrees.cp * degrees.tp
    if dense % degrees.ep:
        yield Breach(
            "parallelism.ep", f"EP {degrees.ep} does not divide dp_shard x cp x tp = {dense}"
        )


@necessity
def ranks_fit(planned: PlannedJob) -> Iterator[Breach]:
    """A job's ranks fit into the CPU slots of this machine that the file or --slots allows."""
    slots = planned.experiment.cpu_ranks
    here = planned.experiment.launcher is Launcher.LOCAL
    if here and planned.on_cpu and slots is not None and planned.job.world_size > slots:
        yield Breach(
            "parallelism",
            f"{planned.job.world_size} ranks; trainer.cpu_ranks or --slots allows {slots}",
        )


@necessity
def nodes_filled(planned: PlannedJob) -> Iterator[Breach]:
    """A job's ranks fill whole nodes of a cluster, as many as its launcher starts ranks on."""
    if planned.experiment.cluster is None:
        return
    ranks, per_node = planned.job.world_size, planned.experiment.cluster.ranks_per_node
    if ranks > per_node and ranks % per_node:
        yield Breach(
            "parallelism",
            f"{ranks} ranks do not fill nodes of {per_node}",
            f"cluster.ranks_per_node is {per_node}: up to {per_node} ranks, or a multiple",
        )
    elif ranks > per_node:
        why, hint = trainer_of(planned.job.spec).why_one_node(planned.job.spec)
        if why:
            yield Breach(
                "parallelism", f"{ranks} ranks need {ranks // per_node} nodes, but {why}", hint
            )
