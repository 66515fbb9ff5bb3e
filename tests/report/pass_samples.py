"""A matrix of runs in several passes, built from the values that stages pass on."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
from report_samples import (
    CONFIG,
    FLOOR,
    TOOLCHAIN,
    build_view,
    evidence,
    in_force,
    job,
    record,
    spec,
)

from converge_harness.judge import calibrate
from converge_harness.model import (
    CauseClass,
    Check,
    Column,
    Evidence,
    Experiment,
    Fault,
    FaultKind,
    Judgement,
    Kind,
    Limit,
    Outcome,
    Parallelism,
    Pass,
    Plan,
    Recovery,
    RestartOwner,
    Role,
    Segment,
    SetSpec,
    Struck,
    Tier,
    Torn,
    Verdict,
)
from converge_harness.report.view.report_view import ReportView
from converge_harness.trainers.torchtitan import TORCHTITAN

STEPS = 20
STARTED = 1_790_000_000.0
STEP_S, STARTUP_S = 0.5, 6.25

SPECS = (
    spec(
        "resized",
        "Saved on 2 ranks, resumed on 1, finished on 4.",
        dp_shard=2,
        kind=Kind.ELASTIC,
        segments=(
            Segment(7, Parallelism(dp_shard=2), 4),
            Segment(14, Parallelism(), 8),
            Segment(STEPS, Parallelism(dp_shard=2, pp=2), 4, "1F1B"),
        ),
    ),
    spec(
        "killed",
        dp_shard=2,
        kind=Kind.FAULT,
        recovery=Recovery((Fault(FaultKind.KILL, 7, 1),), 4, RestartOwner.TORCHRUN),
    ),
    spec(
        "battered",
        dp_shard=4,
        kind=Kind.FAULT,
        recovery=Recovery(
            (
                Fault(FaultKind.CKPT_TORN, 4, torn=Torn.DEATH),
                Fault(FaultKind.AGENT_LOSS, 7),
                Fault(FaultKind.NAN_BATCH, 10),
                Fault(FaultKind.JOIN, 17),
            ),
            checkpoint_every=4,
            nodes=(1, 2),
        ),
    ),
    spec("plain", dp_shard=2),
)


def one_pass(
    number: int,
    whole: Evidence,
    steps: range,
    started: float,
    parallelism: Parallelism,
    *,
    moved: float = 0.0,
    **more,
) -> Pass:
    """The life of some ranks over the steps of a curve, each step taking half a second."""
    chosen = np.isin(whole.steps, list(steps))
    signals = {
        name: Column.of(column.values[chosen] * (1 + moved))
        for name, column in whole.signals.items()
    }
    ends = [started + STEP_S * (index + 1) for index in range(len(steps))]
    ran = replace(
        SPECS[0], parallelism=parallelism, pipeline_schedule="1F1B" if parallelism.pp > 1 else None
    )
    return Pass(
        number=number,
        segment=more.pop("segment", None),
        world_size=parallelism.world_size,
        loaded_step=more.pop("loaded_step", steps.start - 1),
        started=started,
        steps=np.array(steps),
        signals={**signals, "at": Column.of(ends)},
        batch_digests=(None,) * len(steps),
        ended=more.pop("ended", True),
        in_force=in_force(ran),
    )


def resized() -> Evidence:
    one, whole = SPECS[0], evidence("resized", STEPS, jitter=1e-7)
    starts = (1, *(segment.until + 1 for segment in one.segments))
    passes = [
        one_pass(
            index + 1,
            whole,
            range(starts[index], segment.until + 1),
            STARTED + 30 * index,
            segment.parallelism,
            segment=index,
        )
        for index, segment in enumerate(one.segments)
    ]
    return replace(whole, passes=tuple(passes), in_force=in_force(one))


def killed() -> Evidence:
    """A rank dies in step 7; torchrun restarts from step 4, and step 5 comes out otherwise."""
    one, whole = SPECS[1], evidence("killed", STEPS, jitter=1e-7)
    first = one_pass(1, whole, range(1, 7), STARTED, one.parallelism, ended=False, moved=2e-3)
    struck = STARTED + 6.2 * STEP_S
    second = one_pass(2, whole, range(5, STEPS + 1), struck + STARTUP_S, one.parallelism)
    return replace(
        whole,
        passes=(first, second),
        struck=(Struck(0, "kill", 7, struck, 1),),
        in_force=in_force(one),
        replayed=(5, 6),
    )


def battered() -> Evidence:
    """Torn in step 4, a node lost at 7, NaN at 10 and no restart for it; the join never came."""
    one, whole = SPECS[2], evidence("battered", STEPS, jitter=1e-7)
    wide, narrow = one.parallelism, Parallelism(dp_shard=2)
    fates = (
        (range(1, 5), wide, False),
        (range(1, 8), wide, False),
        (range(5, 11), narrow, False),
        (range(9, STEPS + 1), narrow, True),
    )
    passes = [
        one_pass(index + 1, whole, steps, STARTED + 20 * index, degrees, ended=ended)
        for index, (steps, degrees, ended) in enumerate(fates)
    ]
    # The third was started, and died before it had loaded anything.
    unborn = Pass(3, None, 2, None, None, np.array([], dtype=int), {}, (), ended=False)
    passes[2:] = [unborn, *(replace(each, number=each.number + 1) for each in passes[2:])]
    return replace(
        whole,
        passes=tuple(passes),
        struck=(
            Struck(0, "ckpt_torn", 4, STARTED + 2.1, 1, torn=True),
            Struck(1, "agent_loss", 7, STARTED + 24.0, 2),
            Struck(2, "nan_batch", 10, STARTED + 43.0, 4),
        ),
        in_force=in_force(one),
    )


def resume_checks(*, late: bool = False) -> tuple[Check, ...]:
    """What the judge may say of a run in passes."""
    return (
        Check(
            "state-through-load",
            "Right after every load, parameters and optimizer state are those saved.",
            Tier.RESUME,
            Outcome.PASS,
            0.0,
            Limit(1e-6, "floor of fp32 arithmetic"),
            "relative",
        ),
        Check(
            "recovers-in-time",
            "The run went on within the stated time after every fault.",
            Tier.RESUME,
            Outcome.FAIL if late else Outcome.PASS,
            16.5 if late else 6.7,
            Limit(10.0 if late else 120.0, "set in the file"),
            "s",
            detail="ckpt_torn at step 4: 18.4 s" if late else "",
        ),
    )


@functools.cache
def resumed_view() -> ReportView:
    """An elastic set and a killed one that pass, a battered one that fails, one without passes."""
    control = SetSpec("fsdp2", Parallelism(dp_shard=2), CONFIG, TOOLCHAIN.name, trainer=TORCHTITAN)
    base = evidence("fsdp2", STEPS, in_force=in_force(control))
    tests = (resized(), killed(), battered(), evidence("plain", STEPS, jitter=1e-7))
    jobs = (
        job(control, Role.CONTROL, STEPS),
        *(job(one, Role.TEST, STEPS) for one in SPECS),
    )
    learnt = calibrate(base, [evidence("fsdp2-ulp", STEPS, jitter=2e-7)])
    late = Verdict(
        "battered",
        "fsdp2",
        Judgement.FAIL,
        "After ckpt_torn at step 4 the next step took 18.4 s, and 10 s are allowed.",
        CauseClass.RECOVERY,
        checks=resume_checks(late=True),
    )
    return build_view(
        title="faults",
        verdicts=[
            Verdict("resized", "fsdp2", Judgement.PASS, checks=resume_checks()),
            Verdict("killed", "fsdp2", Judgement.PASS, checks=resume_checks()),
            late,
            Verdict("plain", "fsdp2", Judgement.PASS),
        ],
        evidences=[base, *tests],
        subject=Plan(
            Experiment("faults", Path("experiments/faults.toml"), (control,), SPECS), jobs
        ),
        records=[record(one, 20.0 + one.world_size) for one in jobs],
        calibrations={"fsdp2": learnt},
        limited=True,
        entropy_floor=FLOOR,
    )
