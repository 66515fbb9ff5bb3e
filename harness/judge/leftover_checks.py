"""Between gradient and weight: how gradients were clipped, what the optimizer keeps, and buffers.

A mistake there hides for long: AdamW forgets the scale of a gradient, and lost moments are made
anew within some steps. As with gradients, the first two steps belong to tier 1, later ones to
tier 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from harness.judge.check import Finding, Question, check, invalid, skipped
from harness.judge.floors import FIRST_STEPS
from harness.judge.leftovers import (
    Clipping,
    Leftover,
    buffers,
    clippings,
    counters,
    states,
    unseen,
)
from harness.judge.programs import wrapping
from harness.judge.tensor_checks import NAMED
from harness.judge.tensors import MOST_DEVIATIONS, Comparisons, TensorComparison
from harness.model import Deviation, Evidence, Limit, Outcome, Tier

_NOTHING = "no such evidence on one side"


@check(Tier.FIRST_STEP)
def clipping_first_steps(tensors: Comparisons, test: Evidence, control: Evidence) -> Finding:
    """Gradients are clipped as in the control at the first two steps, all by one factor.

    Clipping uses another norm, another largest norm, or leaves parameters out.
    """
    early = [each for each in tensors if each.step <= FIRST_STEPS]
    return _clipped(early, test, control)


@check(Tier.ENVELOPE)
def clipping_envelope(tensors: Comparisons, test: Evidence, control: Evidence) -> Finding:
    """Gradients are clipped as in the control at the later samples, all by one factor.

    Clipping is switched off, or begins to use another norm.
    """
    return _clipped([each for each in tensors if each.step > FIRST_STEPS], test, control)


@check(Tier.FIRST_STEP)
def optimizer_steps(tensors: Comparisons) -> Finding:
    """The optimizer has counted as many updates of every parameter as the control's has.

    Its state was lost or made anew, or it skipped an update or made one too many.
    """
    return _inside(
        [("", each) for each in counters(tensors)], "counter", "updates", "counts are exact"
    )


@check(Tier.FIRST_STEP)
def optimizer_state_first_steps(tensors: Comparisons, test: Evidence, control: Evidence) -> Finding:
    """The optimizer's moments have the control's norms at the first two steps.

    The optimizer got other gradients, or averages them otherwise.
    """
    found = [pair for pair in states(tensors, test, control) if pair[1].step <= FIRST_STEPS]
    return _inside(found, "state", "relative", _STATE_LIMIT)


@check(Tier.ENVELOPE)
def optimizer_state_envelope(tensors: Comparisons, test: Evidence, control: Evidence) -> Finding:
    """The optimizer's moments have the control's norms at the later samples.

    Moments were lost, exchanged or never loaded.
    """
    found = [pair for pair in states(tensors, test, control) if pair[1].step > FIRST_STEPS]
    return _inside(found, "state", "relative", _STATE_LIMIT)


@check(Tier.FIRST_STEP)
def buffers_first_steps(tensors: Comparisons, test: Evidence, control: Evidence) -> Finding:
    """Every buffer agrees with the control's at the first two steps.

    A table was made otherwise, or what should be updated (a router's biases) is not.
    """
    found = [each for each in buffers(tensors, test, control) if each.step <= FIRST_STEPS]
    return _inside([("", each) for each in found], "buffer", "relative", _BUFFER_LIMIT)


@check(Tier.ENVELOPE)
def buffers_envelope(tensors: Comparisons, test: Evidence, control: Evidence) -> Finding:
    """Every buffer agrees with the control's at the later samples.

    A buffer was lost, or is not updated any more.
    """
    found = [each for each in buffers(tensors, test, control) if each.step > FIRST_STEPS]
    return _inside([("", each) for each in found], "buffer", "relative", _BUFFER_LIMIT)


_STATE_LIMIT = "some times the gradients' own limit"
_BUFFER_LIMIT = "floor of buffers"

CHECKS: tuple[Question, ...] = (
    clipping_first_steps,
    optimizer_steps,
    optimizer_state_first_steps,
    buffers_first_steps,
    clipping_envelope,
    optimizer_state_envelope,
    buffers_envelope,
)


def _clipped(tensors: Sequence[TensorComparison], test: Evidence, control: Evidence) -> Finding:
    """FAIL at the first step that is clipped wrongly; else PASS with the one nearest its limits.

    INVALID for a run of our own that shows less than its control.
    """
    found = list(clippings(tensors, test, control))
    # A framework of another program may keep its clipped gradients to itself.
    ours = test.in_force is not None and not wrapping(test.in_force)
    gone = unseen(tensors) if ours else ""
    if gone and not any(each.wrong for each in found):
        return invalid(gone)
    if not found:
        return skipped(_NOTHING)
    steps = (found[0].step, found[-1].step)
    wrong = next((each for each in found if each.wrong), None)
    each = wrong or max(found, key=_nearness)
    odd = float(each.apart.max()) / each.alike >= each.off / each.right
    measured = float(each.apart.max()) if odd else each.off
    limit = Limit(each.alike if odd else each.right, "rounding" if odd else "rounding of the norm")
    if wrong is None:
        detail = f"nearest to its limit at step {each.step}"
        return Finding(Outcome.PASS, detail, measured, limit, "relative", steps)
    index = each.odd
    factors = sorted({f"{each.factors[place]:.4g}" for place in index})
    listed = ", ".join(factors[:NAMED]) + (" …" if len(factors) > NAMED else "")
    detail = (
        f"at step {each.step} clipping multiplies {len(index)} of {len(each.names)} gradients by "
        f"{listed} and the others by {each.common:.4g}"
        if index
        else f"at step {each.step} clipping multiplies gradients by {each.common:.6g}, where their "
        f"norm asks for {each.expected:.6g}"
    )
    furthest = sorted(index, key=lambda place: -each.apart[place])[:MOST_DEVIATIONS]
    deviations = tuple(
        Deviation(each.names[place], each.step, float(each.apart[place]), each.alike)
        for place in furthest
    )
    return Finding(Outcome.FAIL, detail, measured, limit, "relative", steps, each.step, deviations)


def _nearness(each: Clipping) -> float:
    return max(float(each.apart.max()) / each.alike, each.off / each.right)


def _inside(found: Iterable[tuple[str, Leftover]], noun: str, unit: str, origin: str) -> Finding:
    """FAIL at the first step with something outside; else PASS with what is nearest its limit."""
    listed = list(found)
    if not listed:
        return skipped(_NOTHING)
    steps = (listed[0][1].step, listed[-1][1].step)
    first = next(((name, each) for name, each in listed if each.outside), None)
    name, each = first or max(listed, key=lambda pair: _excess(pair[1]))
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = np.nan_to_num(each.difference / each.limit, nan=0.0)
    index = each.outside[0] if each.outside else int(np.argmax(excess))
    what = f"{name} of {each.names[index]}" if name else each.names[index]
    measured, limit = float(each.difference[index]), Limit(float(each.limit[index]), origin)
    if first is None:
        detail = f"nearest to its limit is {what} at step {each.step}"
        return Finding(Outcome.PASS, detail, measured, limit, unit, steps)
    count = len(each.outside)
    verb = "differs" if count == 1 else "differ"
    noun = noun + "s" * (count > 1) + (f" {name}" if name else "")
    by = (
        "which is gone, or zero on one side alone"
        if not np.isfinite(measured)
        else f"by {measured:.3g}"
    )
    detail = (
        f"{count} of {len(each.names)} {noun} {verb} at step {each.step}: {each.names[index]} {by}"
    )
    deviations = tuple(
        Deviation(
            each.names[place], each.step, float(each.difference[place]), float(each.limit[place])
        )
        for place in each.outside[:MOST_DEVIATIONS]
    )
    return Finding(Outcome.FAIL, detail, measured, limit, unit, steps, each.step, deviations)


def _excess(each: Leftover) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.nan_to_num(each.difference / each.limit, nan=0.0).max())
