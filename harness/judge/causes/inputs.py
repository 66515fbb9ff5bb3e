"""The most certain causes: NaN and infinities, and runs that got other inputs."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from converge_harness.judge.causes.context import Context, signal_name
from converge_harness.judge.causes.optimizer import counted_otherwise
from converge_harness.judge.causes.resume import of_pass
from converge_harness.judge.causes.signature import EVERY, Basis, Cause, Stage, signature
from converge_harness.judge.compare.activations import BEYOND, FLOORS
from converge_harness.judge.compare.curves import series
from converge_harness.judge.compare.floors import FIRST_STEPS
from converge_harness.model import CauseClass, Evidence, Outcome, Precision
from converge_harness.wording import counted


@signature(Basis.RECORDED, Stage.RUN, asked_of=EVERY)
def not_finite(context: Context) -> Cause | None:
    """Training ended in NaN or infinity, and nothing was wrong at the first steps."""
    step = blown_up_at(context)
    if step is None:
        return None
    before = context.first_failure("finite", "gradients-finite")
    if before is not None and before < step and before <= FIRST_STEPS:
        return None  # an error at the first steps is the cause, and this its consequence
    look_at = (
        "what overflows or divides by zero first: the loss of the step, a kernel's mask, the "
        "optimizer's epsilon, the range of the lower precision"
    )
    if context.outcome("finite") is not Outcome.FAIL:
        sentence = (
            f"gradients are not finite: {context.detail('gradients-finite')}, while the loss is; a "
            "gate or a loss scaler may hide such a step"
        )
        return Cause(sentence, CauseClass.NOT_FINITE, look_at)
    detail = context.detail("finite")
    contradiction = _half_finite(context, step)
    if contradiction:
        sentence = (
            f"{detail}, but {contradiction}: training may be right, and the metric or the probe "
            "wrong"
        )
        return Cause(sentence, CauseClass.NOT_FINITE, "the code that computes and logs the metric")
    sentence = f"training blew up: {detail}"
    if context.failed("gradients-finite"):
        sentence += f"; {context.detail('gradients-finite')}"
    earlier = [curve for curve in context.off() if (curve.onset or 0) < step]
    if earlier:
        sentence += f"; {signal_name(earlier[0])} was already off at step {earlier[0].onset}"
    return Cause(sentence, CauseClass.NOT_FINITE, look_at)


def blown_up_at(context: Context) -> int | None:
    """The first step with a number that is not finite; None when all are."""
    checks = (context.checks[name] for name in ("finite", "gradients-finite"))
    steps = [check.onset or 0 for check in checks if check.outcome is Outcome.FAIL]
    return min(steps, default=None)


_LOADER = (
    "the data loader: which data-parallel rank reads which samples, the shuffling seed, and its "
    "state after a resume"
)
_LABELS = (
    "how labels follow from the tokens: shifted by one once, not twice and not at all (a loss that "
    "shifts them itself wants them unshifted), and which are ignored (-100: padding, prompts)"
)
_INPUTS = (
    ("same-data", "data order", CauseClass.DATA, _LOADER),
    (
        "ranks-see-same-batch",
        "data order",
        CauseClass.DATA,
        (
            "the data-parallel rank that the loader is given: ranks that differ in tp, cp or pp "
            "alone must get the same"
        ),
    ),
    (
        "same-tokens",
        "token budget",
        CauseClass.DATA,
        (
            "batch size, sequence length, gradient accumulation, and how padding and ignored "
            "labels are counted"
        ),
    ),
    (
        "same-lr",
        "learning-rate schedule",
        CauseClass.LEARNING_RATE,
        (
            "the lr scheduler: its configuration (it also depends on training.steps), where it is "
            "stepped, and its state after a resume"
        ),
    ),
)


@signature(Basis.RECORDED, Stage.INPUT, asked_of=EVERY)
def other_input(context: Context) -> Cause | None:
    """C6: different samples, token counts or learning rates, before the runs differ."""
    parted = context.first_failure("loss-equivalent")
    for name, text, kind, look_at in _INPUTS:
        onset = context.checks[name].onset
        invalid = context.outcome(name) is Outcome.INVALID
        if invalid and onset is not None and (parted is None or onset <= parted):
            again = _started_over(context, name, onset) + of_pass(context, onset)
            lost = counted_otherwise(context) if name == "same-lr" and again else None
            if lost is not None and lost.kind is CauseClass.STATE:
                # The optimizer has the rate as well, so both have started over.
                sentence = f"{lost.sentence}; {context.detail(name)}{again}"
                return lost._replace(sentence=sentence, quoted=(name,))
            said = _Said(text, context.detail(name), look_at)
            if name == "same-data" and not again:
                said = _inputs_or_labels(context, onset, said)
            sentence = f"{said.what}: {said.detail}, so the curves cannot agree{again}"
            return Cause(sentence, kind, said.look_at, (name,))
    return None


class _Said(NamedTuple):
    what: str
    detail: str
    look_at: str


def _inputs_or_labels(context: Context, step: int, order: _Said) -> _Said:
    """``order`` if the inputs of a step are others; that its labels differ, if they are the same.

    A digest is of a sample's inputs and labels together. With the same weights modules compute the
    same of the same inputs. They show the first step alone; where they do not tell, it may be
    either.
    """
    modules, test = context.compared.modules, context.compared.test
    either = _Said("the batch or its labels differ", order.detail, f"{_LOADER}; {_LABELS}")
    if modules is None or not modules.forward or context.compared.draws:
        return either
    if step != int(test.steps[0]) or context.outcome(_SAME_WEIGHTS) is not Outcome.PASS:
        return either
    first = modules.forward[0]
    if first.is_off:
        return order
    if not first.distance <= _LOOKED_UP or any(each.is_off for each in modules.forward):
        return either
    furthest = max(modules.forward, key=lambda each: each.distance)
    count = len({each.row.module for each in modules.forward})
    detail = (
        f"{test.name} has other labels than the control at step {step} on the same inputs (the "
        f"outputs of all {count} modules in the first batches agree to {furthest.distance:.1g}, "
        f"rounding: {furthest.noise:.1g})"
    )
    return _Said("labels differ", detail, _LABELS)


_SAME_WEIGHTS = "same-initial-parameters"
_LOOKED_UP = BEYOND * FLOORS[Precision.FP32]
"""A first tensor that is off by less is of the same inputs, in low precision too: looking up the
same tokens rounds nothing, and one other token of N moves the sum by about sqrt(2 / N)."""


def _started_over(context: Context, name: str, step: int) -> str:
    """A clause if the run has at a step what the control had at an earlier one."""
    test, control = context.compared.test, context.compared.control
    if name == "same-data":
        ours = dict(zip(test.steps.tolist(), test.batch_digests, strict=False)).get(step)
        theirs = zip(control.steps.tolist(), control.batch_digests, strict=False)
        seen = [at for at, digest in theirs if digest is not None and digest == ours]
        known = seen[0] if seen else None
    elif name == "same-lr":
        rate, schedule = series(test, "lr").at(step), series(control, "lr")
        first = float(schedule.values[0]) if schedule.values.size else math.nan
        at_first = rate is not None and math.isclose(rate, first, rel_tol=1e-6)
        known = int(schedule.steps[0]) if at_first else None
    else:
        known = None
    if name == "same-lr" and (known is None or known >= step):
        return _lagging(test, control, step)
    if known is None:
        return ""
    what = "these samples are" if name == "same-data" else "this rate is"
    over = ": it seems to have started over" if known <= int(control.steps[0]) < step else ""
    return f"; {what} the control's of step {known}{over}"


def _lagging(test: Evidence, control: Evidence, step: int) -> str:
    """A clause if the schedule is some steps behind from a step on; else empty.

    That happens when a scheduler starts over and the optimizer keeps its rate: the rate stays, and
    falls as many steps late as were trained before.
    """
    ours, theirs = series(test, "lr"), series(control, "lr")
    later = ours.steps >= step
    steps, rates = ours.steps[later], ours.values[later]
    if np.ptp(rates) == 0:  # any lag would fit
        return ""
    for lag in range(1, step):
        at = np.searchsorted(theirs.steps, steps - lag)
        there = (at < theirs.steps.size) & (theirs.steps[at % theirs.steps.size] == steps - lag)
        if there.all() and np.allclose(theirs.values[at], rates, rtol=1e-6, atol=0):
            return (
                f"; from there on it is {counted(lag, 'step')} behind the control's, as a "
                f"schedule that started over after step {lag}"
            )
    return ""


def _half_finite(context: Context, step: int) -> str:
    """A clause on a signal that is finite only as reported or only as recomputed; else empty."""
    test, text = context.compared.test, ""
    for signal in ("loss", "grad_norm"):
        said = series(test, signal).at(step)
        found = series(test, f"{signal}_recomputed").at(step)
        reported = math.nan if said is None else said
        recomputed = reported if found is None else found
        if math.isfinite(reported) != math.isfinite(recomputed):
            text = text or f"reported {reported:.6g}, recomputed {recomputed:.6g}"
        elif not math.isfinite(reported):
            return ""  # non-finite both ways: it really is
    return text
