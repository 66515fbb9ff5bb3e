"""A synthetic matrix with every kind of verdict, built from the values that stages pass on."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensor_samples import NAMES, replicas, tensor_samples

from converge_harness.judge import calibrate, compare_runs, curve_differences
from converge_harness.judge.checks.tensors import (
    gradients_first_steps,
    replicas_agree,
    updates_first_steps,
)
from converge_harness.model import (
    Calibration,
    CauseClass,
    Check,
    Deviation,
    Disagreement,
    Evidence,
    Experiment,
    InForce,
    Job,
    Judgement,
    Limit,
    Outcome,
    Parallelism,
    Plan,
    Precision,
    RankError,
    Repeat,
    RepeatKind,
    Role,
    RunRecord,
    RunStatus,
    SetSpec,
    Technique,
    Tier,
    Toolchain,
    TrainConfig,
    Verdict,
)
from converge_harness.readers.run_folder.documents import in_force_of
from converge_harness.report import build_view as build_view_of
from converge_harness.report.view.report_view import ReportView
from converge_harness.trainers.torchtitan import TORCHTITAN

FLOOR = 3.71
TOOLCHAIN = Toolchain(
    "torchtitan-0.3.0",
    Path("/toolchains/torchtitan-0.3.0/bin/python"),
    "titan_0_3",
    {"torch": "2.13.0+cpu", "torchtitan": "0.3.0"},
)
CONFIG = TrainConfig("train_configs/llama3_debug.toml", {})
HOSTILE = (
    """</script><script>window.pwned=1</script><img src=x onerror="window.pwned=1">'"|`$x$`[a](b)"""
)


def spec(name: str, note: str = "", **options) -> SetSpec:
    degrees = {
        key: options.pop(key)
        for key in list(options)
        if key in ("dp_replicate", "dp_shard", "tp", "cp", "pp")
    }
    return SetSpec(
        name,
        Parallelism(**degrees),
        CONFIG,
        TOOLCHAIN.name,
        control="fsdp2",
        note=note,
        trainer=TORCHTITAN,
        **options,
    )


SPECS = (
    spec("fsdp2_tp2", dp_shard=2, tp=2),
    spec(
        "ddp2",
        dp_replicate=2,
        note="Gradients divided by the replicate degree: torchtitan issue 2318.",
    ),
    spec(
        "fsdp2_pp2_1f1b", dp_shard=2, pp=2, pipeline_schedule="1F1B", note="torchtitan issue 2972."
    ),
    spec("fsdp2_pp2_interleaved", dp_shard=2, pp=2, pipeline_schedule="Interleaved1F1B"),
    spec("fsdp2_cp2_alltoall", dp_shard=2, cp=2, cp_rotation="alltoall"),
    spec("accumulation", dp_shard=2),
    spec("fsdp2_float8", dp_shard=2, techniques=(Technique.FLOAT8,)),
    spec("fsdp2_tp2_compile", dp_shard=2, tp=2, techniques=(Technique.COMPILE,)),
    spec("fsdp2_bf16", dp_shard=2, techniques=(Technique.BF16,)),
    spec(
        "float8_async_tp",
        dp_shard=2,
        tp=2,
        techniques=(Technique.FLOAT8, Technique.COMPILE, Technique.ASYNC_TP),
    ),
    spec("tp2_pp2_fsdp2", dp_shard=2, tp=2, pp=2, pipeline_schedule="1F1B"),
    spec("short_run", dp_shard=2),
)
VERDICTS = {
    "ddp2": (
        Judgement.FAIL,
        (
            "Gradients are half of the control's at every step while the losses agree: "
            "they are divided by the data-parallel degree (2) once too often."
        ),
        1,
    ),
    "fsdp2_pp2_1f1b": (
        Judgement.FAIL,
        (
            "Gradients are 1024 times the control's, the number of valid tokens of a step: "
            "they are not divided by it."
        ),
        1,
    ),
    "float8_async_tp": (
        Judgement.FAIL,
        (
            "Loss and grad norm leave the envelope at step 2 and drift away: "
            "the backward pass is wrong under async TP with Float8."
        ),
        2,
    ),
    "fsdp2_cp2_alltoall": (
        Judgement.INVALID,
        "CP rotation 'alltoall' is named but 'allgather' is in force.",
        None,
    ),
    "tp2_pp2_fsdp2": (
        Judgement.ERROR,
        (
            "Rank 5 crashed before the first step: RuntimeError: "
            "Could not resolve the process group registered under the name 7."
        ),
        None,
    ),
    "short_run": (
        Judgement.INCONCLUSIVE,
        "Too few common steps to tell; 40 more would settle it.",
        None,
    ),
}
CAUSE_CLASSES = {
    "ddp2": CauseClass.GRADIENT_SCALE,
    "fsdp2_pp2_1f1b": CauseClass.GRADIENT_SCALE,
    "float8_async_tp": CauseClass.GRADIENT_DIRECTION,
}
LOOK_AT = {
    "ddp2": "where gradients are averaged over dp_replicate: the divisor of the all-reduce.",
    "float8_async_tp": "attention.wq, wk and wv: the fused matmul and reduce-scatter.",
}
REPEATS = (
    Repeat(RepeatKind.RERUN),
    Repeat(RepeatKind.ULP),
    Repeat(RepeatKind.ULP, 2),
    Repeat(RepeatKind.PERMUTE),
)
TRACEBACK = "\n".join(
    ["\x1b[31mTraceback (most recent call last):\x1b[0m"]
    + [
        f'  File "torch/distributed/pipelining/stage.py", line {n}, in forward_one_chunk'
        for n in range(400, 412)
    ]
    + ["RuntimeError: Could not resolve the process group registered under the name 7"]
)


def losses(steps: int, seed: int = 0) -> list[float]:
    noise = random.Random(seed)
    return [
        FLOOR + 2.6 * math.exp(-step / (steps / 3)) + 0.03 * noise.gauss(0, 1)
        for step in range(1, steps + 1)
    ]


def norms(steps: int, seed: int = 1) -> list[float]:
    noise = random.Random(seed)
    return [
        1.6 * math.exp(-step / steps) + 0.08 * abs(noise.gauss(0, 1))
        for step in range(1, steps + 1)
    ]


def evidence(
    name: str,
    steps: int,
    *,
    grow: float = 0.0,
    jitter: float = 0.0,
    scale: float = 1.0,
    onset: int = 1,
    **more,
) -> Evidence:
    """The control's curves, moved by ``jitter`` at random and by ``grow`` from ``onset`` on."""
    noise = random.Random(name)
    loss, norm = losses(steps), norms(steps)
    for index in range(onset - 1, steps):
        away = (
            jitter * noise.gauss(0, 1) * (index / steps + 0.1) + grow * (index - onset + 2) / steps
        )
        loss[index] *= 1 + away
        norm[index] *= scale * (1 + 3 * away)
    return Evidence(
        name,
        f"runs/{name}/metrics.jsonl",
        tuple(range(1, steps + 1)),
        {
            "loss": tuple(loss),
            "grad_norm": tuple(norm),
            "loss_recomputed": tuple(loss),
            "grad_norm_recomputed": tuple(value * (1 + 1e-9) for value in norm),
        },
        **more,
    )


TENSORS = {
    "ddp2": {"scale": 0.5},
    "fsdp2_pp2_1f1b": {"scale": 1024.0},
    "float8_async_tp": {"turned": lambda name: ".attention.w" in name and "wo" not in name},
}
DISAGREEMENTS = {
    "float8_async_tp": (
        Disagreement("parameter", "layers.0.attention_norm.weight", ("tp",), ((0, 2), (1, 3))),
    ),
}
SHAPES = {
    "fsdp2_tp2": {"jitter": 1e-7},
    "ddp2": {"jitter": 5e-8, "scale": 0.5},
    "fsdp2_pp2_1f1b": {"jitter": 6e-8, "scale": 1024.0},
    "fsdp2_pp2_interleaved": {"jitter": 6e-8},
    "fsdp2_cp2_alltoall": {"jitter": 9e-8},
    "accumulation": {"jitter": 4e-8},
    "fsdp2_float8": {"jitter": 8e-4, "precision": Precision.FLOAT8},
    "fsdp2_tp2_compile": {"jitter": 1e-7},
    "fsdp2_bf16": {"jitter": 3e-4, "precision": Precision.BF16},
    "float8_async_tp": {"grow": 0.06, "jitter": 1e-3, "onset": 2, "precision": Precision.FLOAT8},
    "short_run": {"jitter": 1e-7},
}


def in_force(one: SetSpec) -> InForce:
    degrees = one.parallelism
    document: Any = {
        "degrees": {
            "dp_replicate": degrees.dp_replicate,
            "dp_shard": degrees.dp_shard,
            "tp": degrees.tp,
            "cp": degrees.cp,
            "pp": degrees.pp,
            "ep": 1,
        },
        "pipeline_schedule": f"Schedule{one.pipeline_schedule}" if one.pipeline_schedule else None,
        "pipeline_microbatches": 4 if one.pipeline_schedule else None,
        "param_dtype": "bfloat16" if Technique.BF16 in one.techniques else "float32",
        "float8": {"modules": 28, "recipe": "tensorwise", "emulated": True, "tp_styles": 0}
        if Technique.FLOAT8 in one.techniques
        else None,
        "compile": {"regions": 4, "graphs": 5} if Technique.COMPILE in one.techniques else None,
        "async_tp": {
            "fused_nodes": {"fused_all_gather_matmul": 8, "fused_matmul_reduce_scatter": 8}
        }
        if Technique.ASYNC_TP in one.techniques
        else None,
        "attention": "DenseFlexAttention",
        "cp_rotation": "allgather" if degrees.cp > 1 else None,
        "config": {
            "training.seq_len": 256,
            "training.steps": 20,
            "parallelism.tensor_parallel_degree": degrees.tp,
            "parallelism.pipeline_parallel_degree": degrees.pp,
            **({"debug.deterministic": True} if one.name == "short_run" else {}),
        },
        "declared": ["parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree"],
    }
    return in_force_of(document)


def build_view(
    *,
    verdicts: Sequence[Verdict],
    evidences: Iterable[Evidence] = (),
    subject: Plan | Experiment | None = None,
    calibrations: Mapping[str, Calibration] | None = None,
    limited: bool = False,
    **more: Any,
) -> ReportView:
    """A view of verdicts that nobody judged, with what judging these runs would have compared.

    ``limited``: with the limits of single steps.
    """
    read = {each.name: each for each in evidences}
    specs = {each.name: each.spec for each in subject.jobs} if isinstance(subject, Plan) else {}
    learnt = calibrations or {}
    comparisons = {
        each.name: compare_runs(
            read[each.name],
            read[each.control],
            learnt.get(each.control, learnt.get(each.name)),
            spec=specs.get(each.name),
            control_spec=specs.get(each.control),
        )
        for each in verdicts
        if each.name in read and each.control in read
    }
    made = [
        (each.name, each.spec.name)
        for each in (subject.jobs if isinstance(subject, Plan) else ())
        if each.role is Role.REPEAT
    ]
    taught = [(name, control) for control, each in learnt.items() for name in each.repeats]
    return build_view_of(
        repeats={
            name: curve_differences(read[name], read[control])
            for name, control in (*made, *taught)
            if name in read and control in read
        },
        verdicts=verdicts,
        evidences=read.values(),
        subject=subject,
        calibrations=calibrations,
        comparisons=comparisons,
        without_limits=() if limited else tuple(comparisons),
        **more,
    )


def tensor_checks(test: Evidence, control: Evidence, calibration: Calibration) -> tuple[Check, ...]:
    """What the judge says of the per-tensor evidence."""
    case = compare_runs(test, control, calibration)
    questions = (gradients_first_steps, updates_first_steps, replicas_agree)
    return tuple(question(case) for question in questions)


def checks(name: str, judgement: Judgement, steps: int) -> tuple[Check, ...]:
    """A believable set of checks for a verdict, without those of tensors."""
    if judgement is Judgement.ERROR:
        return ()
    floor = Limit(1e-6, "floor of fp32 arithmetic")
    envelope = Limit(2.3e-6, "3 x the spread of 2 repeats")
    bad_norm = name in ("ddp2", "fsdp2_pp2_1f1b")
    drift = name == "float8_async_tp"
    norm = Check(
        "first-step-grad-norm",
        "The grad norm of the first step is the control's.",
        Tier.FIRST_STEP,
        Outcome.PASS,
        2.1e-9,
        floor,
        "relative",
        (1, 1),
    )
    if bad_norm:
        norm = Check(
            "first-step-grad-norm",
            norm.title,
            Tier.FIRST_STEP,
            Outcome.FAIL,
            1.0 if name == "ddp2" else 1023.0,
            floor,
            "relative",
            (1, 1),
            1,
            "grad norm 0.42 where the control has 0.84",
        )
    loss = Check(
        "loss-envelope",
        "The loss stays inside the envelope of the control's repeats.",
        Tier.ENVELOPE,
        Outcome.FAIL if drift else Outcome.PASS,
        5.9e-2 if drift else 3.1e-7,
        envelope,
        "relative",
        (1, steps),
        2 if drift else None,
        "outside at 19 of 20 steps" if drift else "",
    )
    audit = Check(
        "techniques-in-force",
        "Every technique that the test set names really ran.",
        Tier.INTEGRITY,
        Outcome.INVALID if judgement is Judgement.INVALID else Outcome.PASS,
        detail="CP rotation: named alltoall, in force allgather"
        if judgement is Judgement.INVALID
        else "",
    )
    unsure = judgement is Judgement.INCONCLUSIVE
    equivalent = Check(
        "loss-equivalent",
        "The loss of the second half is equivalent to the control's.",
        Tier.EQUIVALENCE,
        Outcome.FAIL if drift else Outcome.INCONCLUSIVE if unsure else Outcome.PASS,
        4.1e-2 if drift else 9.2e-4 if unsure else 2.0e-7,
        Limit(1e-3, "margin between runs of the same precision"),
        "relative",
        (steps // 2 + 1, steps),
        detail="between -0.02% and +0.18%: about 40 further steps would settle it"
        if unsure
        else "",
    )
    return (
        Check(
            "complete",
            "The run has every step that was planned.",
            Tier.INTEGRITY,
            Outcome.PASS,
            float(steps),
            None,
            "steps",
            (1, steps),
        ),
        audit,
        Check(
            "same-batches",
            "Control and test saw the same samples.",
            Tier.INTEGRITY,
            Outcome.SKIPPED,
            detail="the source has no batch digests",
        ),
        norm,
        loss,
        Check(
            "grad-norm-envelope",
            "The grad norm stays inside the envelope of the control's repeats.",
            Tier.ENVELOPE,
            Outcome.FAIL if drift or bad_norm else Outcome.PASS,
            1.0 if bad_norm else 1.2e-1 if drift else 1.8e-7,
            envelope,
            "relative",
            (1, steps),
            1 if bad_norm else 2 if drift else None,
        ),
        equivalent,
    )


def job(
    one: SetSpec, role: Role, steps: int, *, name: str = "", repeat: Repeat | None = None
) -> Job:
    return Job(
        name or one.name,
        role,
        one,
        TOOLCHAIN,
        42,
        steps,
        4,
        8,
        256,
        Precision.FP32,
        identity=(name or one.name) * 2,
        repeat=repeat,
    )


def record(one: Job, wall_s: float, **more) -> RunRecord:
    argv = (
        "torchrun",
        "--nproc-per-node",
        str(one.world_size),
        "--max-restarts",
        "0",
        "-m",
        "converge_harness.rank",
        f"runs/{one.name}/job.json",
    )
    return RunRecord(
        one.name,
        one.identity,
        Path("runs") / one.name,
        more.pop("status", RunStatus.FINISHED),
        wall_s,
        argv,
        **more,
    )


def sample_view(
    steps: int = 20, specs: tuple[SetSpec, ...] = SPECS, title: str = "smoke"
) -> ReportView:
    """Twelve test sets: 3 FAIL, 1 ERROR, 1 INVALID, 1 INCONCLUSIVE, 6 PASS."""
    control = SetSpec("fsdp2", Parallelism(dp_shard=2), CONFIG, TOOLCHAIN.name, trainer=TORCHTITAN)
    jobs = [job(control, Role.CONTROL, steps)]
    jobs += [
        job(control, Role.REPEAT, steps, name=f"fsdp2-{repeat}", repeat=repeat)
        for repeat in REPEATS
    ]
    jobs += [job(one, Role.TEST, steps) for one in specs]
    error = RankError(
        5,
        "RuntimeError: Could not resolve the process group registered under the name 7",
        TRACEBACK,
    )
    records = [
        record(one, 11.0 + 3.7 * one.world_size, status=RunStatus.CRASHED, error=error)
        if one.name == "tp2_pp2_fsdp2"
        else record(one, 11.0 + 3.7 * one.world_size, reused=one.role is Role.CONTROL)
        for one in jobs
    ]
    base = evidence("fsdp2", steps, in_force=in_force(control), samples=tensor_samples("fsdp2"))
    rerun, *others = (f"fsdp2-{repeat}" for repeat in REPEATS)
    repeats = [evidence(rerun, steps, samples=tensor_samples("fsdp2"))] + [
        evidence(name, steps, jitter=2e-7, samples=tensor_samples(name, noise=2e-7))
        for name in others
    ]
    learnt = calibrate(base, repeats)
    tests = [
        evidence(
            one.name,
            steps,
            in_force=in_force(one),
            samples=tensor_samples(one.name, noise=2e-7, **TENSORS.get(one.name, {})),
            replicas=replicas(*DISAGREEMENTS.get(one.name, ())),
            **SHAPES.get(one.name, {"jitter": 1e-7}),
        )
        for one in specs
        if one.name != "tp2_pp2_fsdp2"
    ]
    about_tensors = {one.name: tensor_checks(one, base, learnt) for one in tests}
    verdicts = []
    for one in specs:
        judgement, cause, onset = VERDICTS.get(one.name, (Judgement.PASS, "", None))
        verdicts.append(
            Verdict(
                one.name,
                "fsdp2",
                judgement,
                cause,
                CAUSE_CLASSES.get(one.name),
                LOOK_AT.get(one.name, ""),
                onset,
                (*checks(one.name, judgement, steps), *about_tensors.get(one.name, ())),
                f"converge run experiments/smoke.toml --only {one.name} --fresh" if cause else "",
            )
        )
    return build_view(
        title=title,
        verdicts=verdicts,
        evidences=[base, *repeats, *tests],
        subject=Plan(
            Experiment(title, Path("experiments/smoke.toml"), (control,), specs),
            tuple(jobs),
            ("accumulation: rule 'same token budget' is waived",),
        ),
        records=records,
        versions={"converge-harness": "0.1.0", **TOOLCHAIN.versions},
        calibrations={"fsdp2": learnt},
        limited=True,
        entropy_floor=FLOOR,
        generated="2026-11-21 12:00 UTC",
        wall_s=431.0,
    )


def hostile_view() -> ReportView:
    """Names, causes and messages that try to get out of every format."""
    one = spec(HOSTILE, note=HOSTILE, dp_shard=2)
    control = f"_{HOSTILE}"
    hostile_names = tuple(f"{HOSTILE}{index:02}" for index in range(len(NAMES)))
    return build_view(
        title=HOSTILE,
        verdicts=[
            Verdict(
                HOSTILE,
                control,
                Judgement.FAIL,
                f"cause {HOSTILE}\x00\x1b[31m\u202e",
                CauseClass.UNKNOWN,
                HOSTILE,
                1,
                (
                    Check(
                        "c",
                        HOSTILE,
                        Tier.ENVELOPE,
                        Outcome.FAIL,
                        math.nan,
                        Limit(1e-3, HOSTILE),
                        HOSTILE,
                        (1, 2),
                        1,
                        HOSTILE,
                        (Deviation(HOSTILE, 1, math.inf, 1e-3),),
                    ),
                ),
                HOSTILE,
            )
        ],
        evidences=[
            evidence(
                HOSTILE,
                8,
                jitter=1e-3,
                samples=tensor_samples(HOSTILE, scale=2.0, names=hostile_names),
                replicas=replicas(Disagreement(HOSTILE, HOSTILE, (HOSTILE,), ((0,), (1,)))),
            ),
            evidence(control, 8, samples=tensor_samples(control, names=hostile_names)),
        ],
        calibrations={
            control: Calibration(control, None, Precision.FP32, (HOSTILE,), 1, problems=(HOSTILE,))
        },
        subject=Plan(
            Experiment(HOSTILE, Path(HOSTILE), (), (one,)), (job(one, Role.TEST, 8),), (HOSTILE,)
        ),
        records=[
            record(
                job(one, Role.TEST, 8),
                1.0,
                status=RunStatus.CRASHED,
                error=RankError(0, HOSTILE, f"```\n{HOSTILE}\x00"),
            )
        ],
        versions={HOSTILE: HOSTILE},
    )


def foreign_view() -> ReportView:
    """Two CSV files compared: no plan, no records, steps that do not start at 1."""
    steps = tuple(range(10, 200, 10))
    control = Evidence("base.csv", "base.csv", steps, {"loss": tuple(losses(len(steps)))})
    test = Evidence(
        "new.csv", "new.csv", steps, {"loss": tuple(value * 1.001 for value in losses(len(steps)))}
    )
    return build_view(
        title="new.csv against base.csv",
        verdicts=[Verdict("new.csv", "base.csv", Judgement.PASS)],
        evidences=[control, test],
    )
