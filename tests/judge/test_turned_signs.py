"""AdamW's first updates in low precision: signs that rounding turns."""

from dataclasses import replace

import numpy as np
import pytest
from judge_examples import PARAMETERS, judge, run, samples, spec

from converge_harness.judge import calibrate
from converge_harness.model import Outcome, Precision

WQ, *_ = PARAMETERS
FIRST, LATER = "updates-first-steps", "updates-envelope"


def jittered(gradient, update, seed, since=1):
    """A run whose gradients and updates of WQ differ from the control's by about so much."""
    draw = np.random.default_rng(seed)

    def jitter(size):
        def change(step, name, values):
            off = size if name == WQ and step >= since else 1e-4
            return values * (1 + off * draw.standard_normal(values.shape))

        return change

    return replace(run("t"), samples=samples(gradient=jitter(gradient), update=jitter(update)))


def outcome(test, precision, check):
    in_precision = {"precision": precision}
    control = replace(run(), **in_precision)
    repeats = []
    for seed in range(4):
        repeat = jittered(3e-3, 1e-4, seed)
        norms = repeat.signals["grad_norm"].values * (
            1 + 1e-12
        )  # bit-identical curves teach nothing
        repeats.append(
            replace(repeat, signals={**repeat.signals, "grad_norm": norms}, **in_precision)
        )
    verdict = judge(
        replace(test, **in_precision),
        control,
        calibrate(control, repeats),
        spec=spec(),
        control_spec=spec(),
    )
    return next(each.outcome for each in verdict.checks if each.name == check)


@pytest.mark.parametrize(
    ("precision", "gradient", "update", "expected"),
    [
        (Precision.BF16, 4e-3, 0.1, Outcome.PASS),
        (Precision.FLOAT8, 4e-3, 0.1, Outcome.PASS),
        (Precision.BF16, 4e-3, 0.5, Outcome.FAIL),  # more than signs can explain
        (Precision.BF16, 1e-6, 0.1, Outcome.FAIL),  # its gradient is right
        (Precision.FP32, 4e-3, 0.1, Outcome.FAIL),
    ],
)
def test_a_first_update_may_be_off_as_far_as_its_gradients_rounding_turns_signs(
    precision, gradient, update, expected
):
    assert outcome(jittered(gradient, update, seed=9), precision, FIRST) is expected


def test_later_updates_have_no_such_excuse():
    assert outcome(jittered(4e-3, 0.1, 9, since=4), Precision.BF16, LATER) is Outcome.FAIL
