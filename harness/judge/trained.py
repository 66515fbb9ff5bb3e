"""Whether there is anything to compare: two runs, each of which learns something.

A file compared with itself, or curves of a model that stands still, agree whatever is wrong with
the code that made them. What compares nothing is INVALID, however equal the numbers are.
"""

from __future__ import annotations

import numpy as np

from harness.judge.alone import curves_alone
from harness.judge.check import Finding, check, invalid, passed
from harness.judge.curves import pair, rounding_of, series
from harness.judge.soundness import began_later
from harness.model import Evidence, Floats, SetSpec, Tier

_STANDS = 8
"""Points at the end that are the same number to the last digit: no training makes them,"""
_FINE = 1e-4
"""if they are printed as finely as that."""
FEWEST_POINTS = 2
"""Of a curve that is all the evidence: one point is the same for every learning rate."""


@check(Tier.INTEGRITY)
def something_trained(
    test: Evidence, control: Evidence, spec: SetSpec | None, *, one_path: bool
) -> Finding:
    """The test set and its control are two runs, and the control learns something.

    One file twice, a single step, a learning rate of zero, or a loss that is the same number at
    every step: such curves agree whatever is wrong. Nor does a log show how a run began that has no
    number there.
    """
    if one_path:
        return invalid(
            f"{test.name} and its control {control.name} are one and the same path "
            f"({control.source}): nothing is compared; give the curve of another run"
        )
    if curves_alone(test, control) and (later := began_later(test)):
        return invalid(f"{test.name} {later}")
    loss = pair(test, control, "loss")
    longest = max(series(each, "loss").steps.size for each in (test, control))
    if spec is None and 0 < longest < FEWEST_POINTS:
        return invalid(
            f"{test.name} and its control {control.name} have the loss of a single step: at least "
            f"{FEWEST_POINTS} make a curve"
        )
    still = _still(control, f"the control {control.name}", loss.control, "that are compared")
    if not still and not series(control, "lr").values.size:
        still = _no_rate(test, test.name)  # else it is compared with the control's
    return invalid(f"nothing was trained: {still}") if still else passed()


@check(Tier.INTEGRITY)
def test_set_trained(test: Evidence) -> Finding:
    """The test set learns something itself.

    Asked where nothing holds its curve against the control's step by step: a loss that stands at 0
    would be no worse than any, and neither would one whose log stopped moving halfway.
    """
    loss = series(test, "loss").values
    still = _still(test, test.name, loss, "of it")
    half = loss[loss.size // 2 :]
    fine = np.all(rounding_of(test, "loss", half) <= _FINE * np.abs(half))
    if not still and half.size >= _STANDS and fine and bool(np.all(half == half[0])):
        still = f"the loss of {test.name} is {half[0]:g} at all of its last {half.size} steps"
    return invalid(f"nothing was trained: {still}") if still else passed()


def _still(run: Evidence, name: str, loss: Floats, which: str) -> str:
    """Why a run says nothing about training, in a clause; empty if it does."""
    if still := _no_rate(run, name):
        return still
    norms = series(run, "grad_norm").values
    if norms.size and not np.any(norms):
        return f"the grad norm of {name} is 0 at every step"
    if loss.size >= FEWEST_POINTS and bool(np.all(loss == loss[0])):
        return f"the loss of {name} is {loss[0]:g} at all {loss.size} steps {which}"
    return ""


def _no_rate(run: Evidence, name: str) -> str:
    rates = series(run, "lr").values
    return (
        f"the learning rate of {name} is 0 at every step"
        if rates.size and not np.any(rates)
        else ""
    )
