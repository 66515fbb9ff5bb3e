"""Tier 2: every step inside the growth envelope; the first one outside is the onset.

One step outside is enough for a FAIL: limits are such that a right run leaves them at any step with
a probability fixed beforehand (:mod:`harness.judge.chance`), and a curve that left and came back
(one step x100, say) was wrong all the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from harness.judge.check import Finding, Question, check, skipped
from harness.judge.envelope import Envelope
from harness.judge.open_curves import open_curve
from harness.model import Outcome, Tier

Envelopes = Mapping[str, Envelope]


@check(Tier.ENVELOPE)
def loss_envelope(envelopes: Envelopes) -> Finding:
    """The loss stays inside the growth envelope at every step.

    The curve leaves what rounding explains: training is not the control's any more.
    """
    return _envelope("loss", envelopes)


@check(Tier.ENVELOPE)
def grad_norm_envelope(envelopes: Envelopes) -> Finding:
    """The grad norm stays inside the growth envelope at every step.

    Gradients, or the norm that the trainer reports of them, differ from the control's.
    """
    return _envelope("grad_norm", envelopes)


@check(Tier.ENVELOPE)
def loss_recomputed_envelope(envelopes: Envelopes) -> Finding:
    """The recomputed loss stays inside the growth envelope at every step.

    The training itself differs, whatever the trainer reports.
    """
    return _envelope("loss_recomputed", envelopes)


@check(Tier.ENVELOPE)
def grad_norm_recomputed_envelope(envelopes: Envelopes) -> Finding:
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


def _envelope(signal: str, envelopes: Envelopes) -> Finding:
    envelope = envelopes.get(signal)
    if envelope is None:
        return skipped(f"no {signal} on one side")
    if envelope.open:
        return open_curve(envelope)
    count = envelope.steps.size
    if not envelope.outside.size and envelope.unprinted > count / 2:
        return Finding(
            Outcome.INCONCLUSIVE,
            f"nothing of the {signal.replace('_', ' ')} was printed at {envelope.unprinted} of "
            f"{count} steps, where it is smaller than the last digit: log more digits",
        )
    worst, outside = envelope.worst, envelope.outside
    step = int(envelope.steps[worst])
    return Finding(
        Outcome.FAIL if outside.size else Outcome.PASS,
        f"{outside.size} of {count} steps outside, the worst is step {step}: "
        f"{envelope.test[worst]:.8g} for {envelope.control[worst]:.8g}"
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
        f"the first {judged} steps (from step {first} on repeats of the control are so far apart "
        "that nothing can be told)"
    )
