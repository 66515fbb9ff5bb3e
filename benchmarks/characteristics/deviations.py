"""How much correct test sets of a real matrix deviate, in units of the repeats' scale.

The judge allows a test set ``IMPLEMENTATION_FACTOR`` times the scale of the repeats, and the
simulations assume such factors; both can be checked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from converge_harness.judge import calibrate
from converge_harness.judge.compare.curves import pair, relative_difference
from converge_harness.judge.compare.sketches import gradient_difference, shared_samples
from converge_harness.model import Calibration, Evidence, Floats


@dataclass(frozen=True, slots=True)
class Deviation:
    """One test set: root mean square and largest multiple of the repeats' scale."""

    name: str
    loss: tuple[float, float]
    """Of the recomputed signal, over all steps."""
    grad_norm: tuple[float, float]
    """Of the recomputed signal, over all steps."""
    gradients: tuple[float, float]
    """Over all parameters and all samples."""


def deviations(runs: Sequence[Evidence]) -> list[Deviation]:
    """Compare the test sets of a matrix with its control, whose name is a prefix of its repeats'.

    ``fsdp2.ulp`` is a repeat of ``fsdp2``. Runs in another precision than the control's compute
    something else, and are left out. Raises ValueError without repeats or test sets.
    """
    control = _control(runs)
    repeats = [run for run in runs if run.name.startswith(f"{control.name}.")]
    calibration = calibrate(control, repeats)
    tests = [
        run
        for run in runs
        if run is not control and run not in repeats and run.precision is control.precision
    ]
    if not tests:
        raise ValueError(f"no test set of {control.name} in its precision among the runs")
    return [
        Deviation(
            test.name,
            _signal("loss_recomputed", test, control, calibration),
            _signal("grad_norm_recomputed", test, control, calibration),
            _gradients(test, control, calibration),
        )
        for test in tests
    ]


def _control(runs: Sequence[Evidence]) -> Evidence:
    for run in runs:
        if any(other.name.startswith(f"{run.name}.") for other in runs):
            return run
    raise ValueError("none of the runs has repeats")


def _signal(
    name: str, test: Evidence, control: Evidence, calibration: Calibration
) -> tuple[float, float]:
    curves = pair(test, control, name)
    difference = relative_difference(curves.test, curves.control)
    return _size(difference / calibration.signals[name].scale)


def _gradients(test: Evidence, control: Evidence, calibration: Calibration) -> tuple[float, float]:
    multiples = []
    for ours, theirs in shared_samples(test, control):
        known = calibration.tensors.get(theirs.step)
        difference = gradient_difference(ours, theirs)
        if known is not None and known.gradient is not None and difference is not None:
            multiples.append(difference / known.gradient)
    return _size(np.concatenate(multiples))


def _size(multiples: Floats) -> tuple[float, float]:
    return float(np.sqrt(np.mean(multiples**2))), float(multiples.max())
