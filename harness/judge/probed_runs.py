"""What the probe saw of training loops that are not ours: pure questions about runs.

A program without the probe leaves only a curve. One with the probe leaves the evidence that our
ranks leave, except what only its loop knows: where gradients were taken, whether the probe got its
logits, and a grad norm of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from converge_harness.judge.compare.curves import has
from converge_harness.judge.degrees import ranks
from converge_harness.model import (
    DATA_TYPES,
    GLOBAL_BATCH,
    JUDGED_SIGNALS,
    LOCAL_BATCH,
    SEQ_LEN,
    Evidence,
    InForce,
    Precision,
    Probing,
    SetSpec,
)


def is_curve(spec: SetSpec | None) -> bool:
    """Whether a set is a program without the probe, which leaves only a curve."""
    return spec is not None and not spec.trainer.can.probed


def probing(evidence: Evidence) -> Probing:
    """How a run was probed; without a record of it, as our ranks probe theirs."""
    return (evidence.in_force or InForce()).probing


def required(test: Evidence, control: Evidence) -> tuple[str, ...]:
    """Signals of a probed program without which there is no verdict.

    Not every loop computes a norm or gives the probe its logits; both sides must have the same.
    """
    optional = {
        "grad_norm": has(test, "grad_norm") or has(control, "grad_norm"),
        "loss_recomputed": probing(test).recomputes_loss and probing(control).recomputes_loss,
    }
    return tuple(signal for signal in JUDGED_SIGNALS if optional.get(signal, True))


def differently_probed(test: Evidence, control: Evidence) -> Iterator[str]:
    """One clause per reason why the evidence of two runs is not comparable."""
    ours, theirs = probing(test), probing(control)
    if ours.late != theirs.late:
        taken, base = (each.gradients for each in (ours, theirs))
        yield (
            f"gradients were taken {taken} in {test.name}, {base} in {control.name}: call "
            "probe.gradients() in both, before anything is clipped"
        )
    if ours.recomputes_loss != theirs.recomputes_loss:
        with_it, without = (test, control) if ours.recomputes_loss else (control, test)
        yield (
            f"the loss was recomputed in {with_it.name} and not in {without.name}: call "
            "probe.logits(logits, labels) in both or in neither"
        )


def not_as_called(spec: SetSpec, ran: InForce) -> Iterator[str]:
    """One clause per degree or size that a program was called with and did not run with.

    A value that could not be seen from outside the program (null) is not judged.
    """
    for dimension, degree in asdict(spec.parallelism).items():
        yield from _unlike(dimension, degree, ran.degrees.get(dimension))
    if ran.world_size not in (None, spec.parallelism.world_size):
        named = ranks(spec.parallelism.world_size)
        yield f"a world of {named} is named, {ran.world_size} were started"
    local, whole = spec.setting(LOCAL_BATCH), spec.setting(GLOBAL_BATCH, -1)
    dp = spec.parallelism.dp
    if isinstance(local, int) and isinstance(whole, int):
        whole = local * dp if whole == -1 else whole
        yield from _unlike("local_batch_size", local, ran.local_batch_size)
        yield from _unlike("global_batch_size", whole, ran.global_batch_size)
        accumulated, seen = whole // (local * dp), ran.gradient_accumulation_steps
        yield from _unlike("gradient_accumulation_steps", accumulated, seen)
    yield from _unlike(SEQ_LEN, spec.setting(SEQ_LEN), ran.seq_len)
    dtype, stored = spec.setting("training.dtype"), ran.param_dtype
    if stored is not None and not _is_of(dtype, stored.split("+")):
        named_as = f"{dtype} is named" if dtype is not None else "is not named, which means float32"
        yield (
            f"training.dtype {named_as}, {stored} is in force (it is that of parameters; "
            "training.mixed_precision_param is that of coarser arithmetic)"
        )


def _is_of(named: object, seen: Sequence[str]) -> bool:
    """Whether parameters of these data types are of the named one, or some of a finer.

    Where none is named, of float32 or finer: a coarser type has wider limits, which nobody asked
    for. An unknown type counts as the coarsest.
    """
    order = list(Precision)
    coarsest = max((DATA_TYPES.get(each, order[-1]) for each in seen), key=order.index)
    if named is None:
        return coarsest is Precision.FP32
    return named in seen and DATA_TYPES.get(str(named)) is coarsest


def _unlike(what: str, named: object, seen: object) -> Iterator[str]:
    if named is not None and seen is not None and named != seen:
        yield f"{what} {named} is named, {seen} is in force"
