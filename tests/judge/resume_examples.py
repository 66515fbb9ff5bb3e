"""Runs in several passes: a right elastic one, a right broken one, and ways to break them."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from judge_examples import FSDP2, PARAMETERS, STEPS, in_force, rows, run, spec, tensor

from converge_harness.model import (
    Column,
    Evidence,
    Fault,
    FaultKind,
    InForce,
    Kind,
    Parallelism,
    Pass,
    Recovery,
    Segment,
    SetSpec,
    StateSample,
    Struck,
    TensorRows,
)

ONE = Parallelism()
RUN = run()
STATES = ("exp_avg", "exp_avg_sq")
BATCH = 8
"""Samples of a step, of every pass."""
WITHIN = 60.0


def state(step: int, **changes: Any) -> StateSample:
    """All that a checkpoint of a step holds."""
    kept = [rows({name: tensor(name, step, what) for name in PARAMETERS}) for what in STATES]
    sample = StateSample(
        step=step,
        names=tuple(PARAMETERS),
        sizes=np.array(list(PARAMETERS.values())),
        parameters=rows({name: tensor(name, step, "weight") for name in PARAMETERS}),
        states=STATES,
        state_norm=np.stack([each.norm for each in kept], axis=1),
        state_sketch=np.stack([each.sketch for each in kept], axis=1),
        state_steps=np.full(len(PARAMETERS), float(step)),
        lr=1e-3,
        trainer_step=step,
        tokens_seen=1000 * step,
        samples_consumed=BATCH * step,
        schedule_steps=step,
    )
    return replace(sample, **changes)


def ran(parallelism: Parallelism) -> InForce:
    """What was in force in a pass: the global batch is held by accumulation."""
    accumulation = BATCH // (4 * parallelism.dp)
    base = in_force(parallelism, global_batch_size=BATCH, gradient_accumulation_steps=accumulation)
    config = {**base.config, "training.local_batch_size": 4}
    return replace(base, config=config, declared=("training.local_batch_size",))


def a_pass(
    number: int,
    loaded: int,
    last: int,
    parallelism: Parallelism = FSDP2,
    saves: Iterable[int] = (),
    **changes: Any,
) -> Pass:
    """A pass from a checkpoint to a step; it starts at 1000 seconds times its number."""
    steps = np.arange(loaded + 1, last + 1)
    started = 1000.0 * number
    signals = {name: column[loaded:last] for name, column in RUN.signals.items()}
    found = Pass(
        number=number,
        segment=None,
        world_size=parallelism.world_size,
        loaded_step=loaded,
        started=started,
        steps=steps,
        signals={**signals, "at": Column.of(started + (steps - loaded).astype(float))},
        batch_digests=RUN.batch_digests[loaded:last],
        ended=False,
        in_force=ran(parallelism) if last > loaded else None,
        loaded=state(loaded) if loaded else None,
        saved=tuple(state(step) for step in saves),
        whole=tuple(saves),
    )
    return replace(found, **changes)


def resumed(*passes: Pass, **changes: Any) -> Evidence:
    """The one curve of the passes: that of an undisturbed run, unless a change says otherwise."""
    counts = np.unique(np.concatenate([each.steps for each in passes]), return_counts=True)
    repeated = tuple(counts[0][counts[1] > 1].tolist())
    return replace(
        run("resumed"),
        in_force=passes[0].in_force,
        passes=passes,
        replayed=repeated,
        **changes,
    )


SEGMENTS = (Segment(8, FSDP2, 4), Segment(14, ONE, 4), Segment(STEPS, FSDP2, 4))
ELASTIC_PASSES = (
    a_pass(1, 0, 8, saves=[8], segment=0, ended=True),
    a_pass(2, 8, 14, ONE, saves=[14], segment=1, ended=True),
    a_pass(3, 14, STEPS, saves=[STEPS], segment=2, ended=True),
)
ELASTIC = resumed(*ELASTIC_PASSES)
ELASTIC_SPEC = spec("resumed", FSDP2, kind=Kind.ELASTIC, segments=SEGMENTS)

FAULTS = (Fault(FaultKind.KILL, 10, rank=1), Fault(FaultKind.CKPT_TORN, 16))
"""Killed in step 10, after the checkpoint of step 8; dead again while that of step 16 is written,
so that steps 9 and 13 to 16 are replayed."""
BROKEN_PASSES = (
    a_pass(1, 0, 9, saves=[4, 8]),
    a_pass(2, 8, 16, saves=[12, 16]),
    a_pass(3, 12, STEPS, saves=[16, STEPS], ended=True),
)
STRUCK = (
    Struck(0, "kill", 10, 1990.0, number=1),
    Struck(1, "ckpt_torn", 16, 2980.0, number=2, torn=True),
)
BROKEN = resumed(*BROKEN_PASSES, struck=STRUCK)


def fault_spec(**changes: Any) -> SetSpec:
    recovery = Recovery(FAULTS, checkpoint_every=4, within_s=WITHIN)
    return spec("resumed", FSDP2, kind=Kind.FAULT, recovery=replace(recovery, **changes))


def rows_of(values: TensorRows, which: slice) -> TensorRows:
    """Some rows of what was measured of every parameter."""
    return TensorRows(
        values.sketch[which], values.norm[which], values.zeros[which], values.not_finite[which]
    )


def with_pass(evidence: Evidence, number: int, **changes: Any) -> Evidence:
    """The run with other evidence of one of its passes."""
    passes = tuple(
        replace(each, **changes) if each.number == number else each for each in evidence.passes
    )
    return replace(evidence, passes=passes)


def with_loaded(evidence: Evidence, number: int, **changes: Any) -> Evidence:
    """The run with other state right after the load of one of its passes."""
    loaded = evidence.passes[number - 1].loaded
    assert loaded is not None
    return with_pass(evidence, number, loaded=replace(loaded, **changes))


def with_signal(
    evidence: Evidence, number: int, signal: str, change: Callable[[int, float], float | None]
) -> Evidence:
    """The run with another curve in one of its passes."""
    each = evidence.passes[number - 1]
    column = each.signals[signal]
    values = [
        change(step, value) for step, value in zip(each.steps.tolist(), column.values, strict=True)
    ]
    return with_pass(evidence, number, signals={**each.signals, signal: Column.of(values)})


def with_digests(evidence: Evidence, number: int, digests: Iterable[str | None]) -> Evidence:
    """The run with other samples in one of its passes, and in the curve."""
    each = evidence.passes[number - 1]
    others = tuple(digests)
    merged = dict(zip(evidence.steps.tolist(), evidence.batch_digests, strict=True))
    merged |= dict(zip(each.steps.tolist(), others, strict=True))
    changed = with_pass(evidence, number, batch_digests=others)
    return replace(changed, batch_digests=tuple(merged.values()))


def nulled(array: np.ndarray, index: Any) -> np.ndarray:
    """A copy with zeros at an index."""
    copy = array.copy()
    copy[index] = 0
    return copy
