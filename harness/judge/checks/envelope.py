"""Tier 2: every step inside the growth envelope; the first one outside is the onset.

One step outside is enough for a FAIL. The limits are such that a correct run exceeds one at any
step with a probability fixed beforehand (:mod:`converge_harness.judge.compare.limits`), and a curve
that left and came back (one step x100, say) was wrong all the same.

Where two curves are the only evidence, nothing shows how much correct runs differ
(:mod:`converge_harness.judge.compare.envelopes`). Then a gross difference is a FAIL; of smaller
ones the margin decides, if somebody set one, and else the answer is open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from converge_harness.judge.checks.question import CheckResult, Question, check, skipped
from converge_harness.judge.compare.envelopes import (
    GROSS,
    Envelope,
    gross_steps,
    lasting_difference,
)
from converge_harness.judge.compare.limits import FEWEST_REPEATS
from converge_harness.model import Limit, Outcome, Tier
from converge_harness.wording import counted, distinct_digits

Envelopes = Mapping[str, Envelope]


@check(Tier.ENVELOPE)
def loss_envelope(envelopes: Envelopes) -> CheckResult:
    """The loss stays inside the growth envelope at every step.

    The curve differs by more than rounding explains: it no longer trains as the control does.
    """
    return _envelope("loss", envelopes)


@check(Tier.ENVELOPE)
def grad_norm_envelope(envelopes: Envelopes) -> CheckResult:
    """The grad norm stays inside the growth envelope at every step, and in a curve its mean does.

    Gradients, or the norm that the trainer reports of them, differ from the control's.
    """
    return _envelope("grad_norm", envelopes)


@check(Tier.ENVELOPE)
def loss_recomputed_envelope(envelopes: Envelopes) -> CheckResult:
    """The recomputed loss stays inside the growth envelope at every step.

    The training itself differs, whatever the trainer reports.
    """
    return _envelope("loss_recomputed", envelopes)


@check(Tier.ENVELOPE)
def grad_norm_recomputed_envelope(envelopes: Envelopes) -> CheckResult:
    """The recomputed grad norm stays inside the growth envelope at every step.

    The gradients themselves differ, whatever norm the trainer reports.
    """
    return _envelope("grad_norm_recomputed", envelopes)


CHECKS: tuple[Question, ...] = (
    loss_envelope,
    grad_norm_envelope,
    loss_recomputed_envelope,
    grad_norm_recomputed_envelope,
)


def _envelope(signal: str, envelopes: Envelopes) -> CheckResult:
    envelope = envelopes.get(signal)
    if envelope is None:
        return skipped(f"no {signal} on one side")
    if envelope.open:
        return open_curve(envelope)
    count = envelope.steps.size
    if not envelope.outside.size and envelope.unprinted > count / 2:
        return CheckResult(
            Outcome.INCONCLUSIVE,
            f"the {signal.replace('_', ' ')} prints as 0 at {envelope.unprinted} of {count} steps, "
            "because it is smaller than the last printed digit: log more digits",
        )
    lasting = envelope.lasting
    if lasting and lasting.is_outside and not envelope.outside.size:
        half = envelope.steps[count // 2 :]
        return CheckResult(
            Outcome.FAIL,
            f"the mean {signal.replace('_', ' ')} is off by {lasting.difference:+.2g} ± "
            f"{lasting.half_width:.1g} over steps {half[0]} to {half[-1]}, and means of "
            f"{counted(lasting.repeats, 'repeat')} by {lasting.of_repeats:.1g}, though no step is "
            "outside",
            measured=abs(lasting.difference),
            limit=lasting.limit,
            unit="relative",
            steps=(int(half[0]), int(half[-1])),
        )
    worst, outside = envelope.worst, envelope.outside
    step = int(envelope.steps[worst])
    return CheckResult(
        Outcome.FAIL if outside.size else Outcome.PASS,
        f"{outside.size} of {count} steps outside, the worst is step {step}: "
        f"{envelope.test[worst]:.8g} (control: {envelope.control[worst]:.8g})"
        if outside.size
        else f"inside at {_steps(envelope)}, nearest to its limit at step {step}",
        measured=float(envelope.difference[worst]),
        limit=envelope.limit_at(worst),
        unit="relative",
        steps=(int(envelope.steps[0]), int(envelope.steps[-1])),
        onset=envelope.onset,
    )


def _steps(envelope: Envelope) -> str:
    judged = int(np.count_nonzero(envelope.judged))
    if judged == envelope.steps.size:
        return f"all {judged} steps"
    first = int(envelope.steps[~envelope.judged][0])
    return (
        f"the first {judged} steps (from step {first} on repeats of the control differ so much "
        "that nothing can be judged)"
    )


STEP_ORIGIN = "beyond it a difference is gross: no rounding makes it"
LASTING_ORIGIN = "beyond it a lasting difference is gross: no rounding makes it"


def open_first_step(envelope: Envelope) -> CheckResult:
    """The first common step of a signal that exceeds its floor there."""
    step = int(envelope.steps[0])
    gross = step in gross_steps(envelope.signal, envelope.curves)
    detail = f"{envelope.test[0]:.8g} (control: {envelope.control[0]:.8g})"
    return CheckResult(
        _outcome(envelope, gross=gross),
        detail if gross else f"{detail}, {_beyond(envelope, 0)}",
        measured=float(envelope.difference[0]),
        limit=Limit(GROSS[envelope.signal].step, STEP_ORIGIN),
        unit="relative",
        steps=(step, step),
        onset=step if gross else None,
    )


def open_curve(envelope: Envelope) -> CheckResult:
    """A whole signal that exceeds its floor somewhere."""
    gross = gross_steps(envelope.signal, envelope.curves)
    lasting = lasting_difference(envelope.curves)
    limits = GROSS[envelope.signal]
    steps = (int(envelope.steps[0]), int(envelope.steps[-1]))
    most = int(np.argmax(envelope.difference))
    at, name = int(envelope.steps[most]), envelope.signal.replace("_", " ")
    if lasting > limits.lasting and not gross.size:
        return CheckResult(
            Outcome.FAIL,
            f"the mean {name} of the second half is off by {lasting:.2g}",
            measured=lasting,
            limit=Limit(limits.lasting, LASTING_ORIGIN),
            unit="relative",
            steps=steps,
        )
    test, control = distinct_digits(float(envelope.test[most]), float(envelope.control[most]))
    first = envelope.index_of(int(envelope.outside[0]))
    return CheckResult(
        _outcome(envelope, gross=bool(gross.size)),
        f"{envelope.outside.size} of {envelope.steps.size} steps differ, most step {at}: {test} "
        f"for {control}; from step {envelope.steps[first]} on {_beyond(envelope, first)}",
        measured=float(envelope.difference[most]),
        limit=Limit(limits.step, STEP_ORIGIN),
        unit="relative",
        steps=steps,
        onset=int(gross[0]) if gross.size else None,
    )


def open_curves(envelopes: Mapping[str, Envelope]) -> list[Envelope]:
    """Curves that exceed their floors, where neither limits nor a margin decide."""
    found = [envelope for envelope in envelopes.values() if envelope.open]
    return [] if any(envelope.by_margin for envelope in found) else found


def what_settles(found: Sequence[Envelope], mean: float | None) -> str:
    """One sentence on :func:`open_curves`, and what would decide.

    ``mean`` is an upper bound of the mean loss's difference, where it is known.
    """
    clauses = []
    for envelope in found:
        most = int(np.argmax(envelope.difference))
        first = envelope.index_of(int(envelope.outside[0]))
        clauses.append(
            f"the {envelope.signal.replace('_', ' ')} is off by {envelope.difference[first]:.2g} "
            f"at step {envelope.steps[first]} and by up to {envelope.difference[most]:.2g} (step "
            f"{envelope.steps[most]})"
        )
    known = mean is not None and np.isfinite(mean)
    bound = f"; the mean loss is off by at most {mean:.2g}" if known else ""
    signals = " ".join(f"{envelope.signal}=…" for envelope in found)
    return (
        f"{', '.join(clauses)}, which is more than rounding in print and in float32, and "
        f"{found[0].unmeasured}{bound}. What settles it: {FEWEST_REPEATS} or more runs "
        "of the control in all, as --repeat (on other hardware or with other kernels, where the "
        "test set has those); or the largest difference of the mean loss that you accept, as "
        f"--margin; or of single steps, as --tolerance {signals}"
    )


def _outcome(envelope: Envelope, *, gross: bool) -> Outcome:
    if gross:
        return Outcome.FAIL
    return Outcome.PASS if envelope.by_margin else Outcome.INCONCLUSIVE


def _beyond(envelope: Envelope, index: int) -> str:
    limit = f"{envelope.limit[index]:.2g} ({envelope.floor_origin})"
    if envelope.by_margin:
        return f"more than {limit}; nothing is gross, and the margin of the mean loss decides"
    return f"more than {limit}, and {envelope.unmeasured}"
