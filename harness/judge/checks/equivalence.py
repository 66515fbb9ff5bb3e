"""Tier 3: whether the loss of a whole run is close enough to the control's.

The earlier tiers ask whether a difference is more than rounding. This one asks by two one-sided
tests (:mod:`converge_harness.judge.compare.tost`) whether it is small against a margin that
somebody cares about.

* **Window**: the second half of the run. The first half includes warm-up, where the loss falls so
  fast that a run a fraction of a step behind looks far off, and where all runs are still alike.
* **Repeats**: in chaotic training, or in coarse arithmetic, correct runs differ for longer than any
  window, which no standard error from within one window can show. So a difference that is usual
  among the repeats of the control is no failure: the limit is how far *their* means are from the
  control's, times the factor of :mod:`converge_harness.judge.compare.limits`.
* **Short runs**: a difference that is usual among these repeats shows nothing in a run of fewer
  than ``LONG`` common steps, so the question is asked there only if the difference looks larger
  than the margin and than what is usual, or if somebody set a margin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from converge_harness.judge.checks.question import CheckResult, Question, check, invalid, skipped
from converge_harness.judge.compare.curves import (
    CurvePair,
    pair,
    rounding_share,
    second_half,
    signed_difference,
)
from converge_harness.judge.compare.envelopes import Envelope
from converge_harness.judge.compare.floors import SPREAD_CEILING, WIDEST
from converge_harness.judge.compare.limits import (
    FEWEST_REPEATS,
    USUAL,
    mean_multiple,
    usual_multiple,
)
from converge_harness.judge.compare.tost import ALPHA, FEWEST, Answer, Equivalence, equivalence
from converge_harness.model import (
    LONG,
    Calibration,
    Evidence,
    Integers,
    Limit,
    Outcome,
    SignalScale,
    Tier,
)

SAME_REGIME, COARSER_REGIME = 1e-3, 1e-2
"""Margins where none is set: for two runs of one precision, and where one is coarser (bf16 or
Float8 against fp32: without any bug 1e-3 to 2e-3 by step 20 of the smoke matrix)."""


@check(Tier.EQUIVALENCE)
def loss_equivalent(
    test: Evidence,
    control: Evidence,
    calibration: Calibration | None,
    margin: float | None,
    envelopes: Mapping[str, Envelope],
    level: float,
) -> CheckResult:
    """The loss is equivalent to the control's over the second half of the run.

    The mean difference, or the level that it drifts to, is larger than the margin: the model does
    not learn the same, however small the difference at a single step.
    """
    limit = margin_of(test, control, margin)
    signal, curves = loss_of(test, control)
    count = int(curves.steps.size)
    window = second_half(curves)
    printed = float(np.mean(rounding_share(test, control, signal, window))) if count else 0.0
    if not printed < limit.value:
        return printed_too_coarsely(printed, limit, window.steps)
    if count < 2 * FEWEST:
        return _too_short(count, margin)
    difference = signed_difference(window)
    finite = np.isfinite(difference)
    if not finite.all():
        step = int(window.steps[int(np.argmin(finite))])
        return invalid(f"{signal} cannot be compared at step {step}", step)
    found = equivalence(difference, limit.value, level, rounding=printed)
    known = _of_repeats(signal, test, control, calibration)
    repeats = calibration.taught_by if calibration else 0
    ordinary = _ordinary(found, signal, known, repeats)
    first, last = int(window.steps[0]), int(window.steps[-1])
    ordinary = ordinary or _unasked(found, margin, limit, envelopes.get(signal))
    outcome = Outcome.INCONCLUSIVE if ordinary else OUTCOMES[found.outcome]
    detail = (
        f"mean difference of the {signal.replace('_', ' ')} {found.mean:+.2g} ± "
        f"{found.half_width:.1g} over steps {first} to {last}, {found.end:+.2g} ± "
        f"{found.end_half_width:.1g} at their end"
    )
    if level != ALPHA:
        detail += f" (one of several looks: at a level of {level:.2g})"
    why = ordinary or outlook(found, window, limit)
    if outcome is Outcome.INCONCLUSIVE and count < LONG and margin is None:
        if max(abs(found.mean), abs(found.end)) <= limit.value:
            return skipped(f"too short to tell: {detail}{why}")
        most = usual(signal, known, repeats)
        if most.covers(found, limit.value):
            return skipped(
                f"too short to tell: {detail}: by the control's own repeats 1 correct run in "
                f"{1 / USUAL:.0f} is off by more than {most.mean:.2g}, at the end {most.end:.2g}"
            )
    return CheckResult(
        outcome,
        detail + why,
        measured=found.bound,
        limit=limit,
        unit="relative",
        steps=(first, last),
        # No onset: a mean over a window does not know at which step a difference began.
    )


CHECKS: tuple[Question, ...] = (loss_equivalent,)

OUTCOMES: Mapping[Answer, Outcome] = {
    Answer.EQUIVALENT: Outcome.PASS,
    Answer.DIFFERENT: Outcome.FAIL,
    Answer.INCONCLUSIVE: Outcome.INCONCLUSIVE,
}
"""The check's outcome for an answer."""


def _too_short(count: int, margin: float | None) -> CheckResult:
    """Skipped, or INCONCLUSIVE if a margin is set."""
    text = f"{count} steps in common, at least {2 * FEWEST} are needed"
    if margin is None:
        return skipped(f"too short for a test of equivalence: {text}")
    return CheckResult(
        Outcome.INCONCLUSIVE,
        f"it is open whether the mean loss is within the margin of {margin:g}: {text}",
        limit=Limit(margin, "margin set in the file"),
        unit="relative",
    )


def printed_too_coarsely(printed: float, limit: Limit, steps: Integers) -> CheckResult:
    """INCONCLUSIVE, however short the run: equal digits are no evidence of equal values."""
    share = f"{printed:.2g} of" if np.isfinite(printed) else "all there is of"
    return CheckResult(
        Outcome.INCONCLUSIVE,
        f"the loss is printed too coarsely: the rounding is {share} it on average, and the "
        f"margin is {limit.value:g}; log it with more digits",
        limit=limit,
        unit="relative",
        steps=(int(steps[0]), int(steps[-1])),
    )


def margin_of(test: Evidence, control: Evidence, margin: float | None) -> Limit:
    """The margin that is set, else the default.

    A tolerance does not widen it: a difference may be acceptable at one step and not on average.
    """
    if margin is not None:
        return Limit(margin, "margin set in the file")
    alike = test.precision is control.precision
    default = SAME_REGIME if alike else COARSER_REGIME
    return Limit(default, f"margin for {test.precision.value} against {control.precision.value}")


def loss_of(test: Evidence, control: Evidence) -> tuple[str, CurvePair]:
    """The recomputed loss where both runs have it: a wrong metric does not affect it."""
    recomputed = pair(test, control, "loss_recomputed")
    if recomputed.steps.size:
        return "loss_recomputed", recomputed
    return "loss", pair(test, control, "loss")


class Usual(NamedTuple):
    """How much correct runs differ now and then; relative differences."""

    mean: float
    end: float
    """The same of the level at the end of the window."""

    def covers(self, found: Equivalence, margin: float) -> bool:
        """Whether each level is within this, or within the margin anyway."""
        mean, end = max(self.mean, margin), max(self.end, margin)
        return abs(found.mean) <= mean and abs(found.end) <= end


def usual(signal: str, known: SignalScale | None, repeats: int, level: float = USUAL) -> Usual:
    """What a correct run exceeds with a probability of ``level``, estimated from ``repeats``.

    0 where they are too few to say, and never more than repeats themselves may differ by.
    """
    if known is None or repeats < FEWEST_REPEATS:
        return Usual(0.0, 0.0)
    times = usual_multiple(repeats, level)
    mean, end = (
        min(times * (size or 0.0), SPREAD_CEILING[signal]) for size in (known.lasting, known.ending)
    )
    return Usual(mean, end)


def _of_repeats(
    signal: str, test: Evidence, control: Evidence, calibration: Calibration | None
) -> SignalScale | None:
    """What repeats of the control show for a run of its own precision."""
    if calibration is None or test.precision is not control.precision:
        return None
    return calibration.signals.get(signal)


def _ordinary(found: Equivalence, signal: str, known: SignalScale | None, repeats: int) -> str:
    """Why a run that differs may still be correct, in a clause; empty if not."""
    if known is None or known.lasting is None:
        return ""
    most = min(mean_multiple(repeats) * known.lasting, WIDEST[signal])
    if found.outcome is not Answer.DIFFERENT or max(abs(found.mean), abs(found.end)) > most:
        return ""
    return (
        f": different, but means of the control's own repeats are off by {known.lasting:.1g}, so "
        f"up to {most:.1g} may be chance"
    )


def _unasked(
    found: Equivalence, margin: float | None, limit: Limit, envelope: Envelope | None
) -> str:
    """Why curves that differ may be correct, where nobody set a margin; empty if not."""
    if envelope is None or not envelope.unmeasured or margin is not None:
        return ""
    if found.outcome is not Answer.DIFFERENT:
        return ""
    return (
        f": more than {limit.value:g}, but nobody set a margin, and {envelope.unmeasured}; "
        f"--margin {1.05 * found.bound:.2g} would accept it"
    )


def outlook(found: Equivalence, window: CurvePair, limit: Limit) -> str:
    """What would settle it, in steps of the run, of which the window is the second half."""
    if found.outcome is not Answer.INCONCLUSIVE:
        return ""
    if found.further_steps is None:
        margin = f"the margin of {limit.value:g}"
        return f": too near {margin} to say how many further steps would settle it"
    spacing = float(np.median(np.diff(window.steps)))
    further = math.ceil(2 * found.further_steps * spacing)
    return f": about {further:,} further steps would settle it"
