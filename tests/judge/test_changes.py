"""What kind of change lies between a baseline and the control of now."""

from dataclasses import replace

import numpy as np
import pytest
from judge_examples import run, samples, with_signals

from converge_harness.judge import calibrate, classify
from converge_harness.model import Sameness

BASELINE = run()
REPEATS = [
    with_signals(
        run(f"ulp.{sign}"),
        loss_recomputed=lambda step, x, s=sign: x * (1 + s * 1e-8 * step**0.5),
        loss=lambda step, x, s=sign: x * (1 + s * 1e-8 * step**0.5),
    )
    for sign in (-1, 1)
]
TAUGHT = calibrate(BASELINE, REPEATS)


def change(after):
    return classify(after, BASELINE, TAUGHT)


def test_the_same_bits_are_no_change():
    found = change(run("now"))
    assert (found.sameness, found.onset, found.signals) == (Sameness.BITWISE, None, ())


def test_one_ulp_of_one_step_is_not_bitwise():
    found = change(with_signals(run(), loss=lambda step, x: np.nextafter(x, 9) if step == 7 else x))
    assert found.sameness is Sameness.ROUNDING
    (signal,) = found.signals
    assert (signal.signal, signal.first, signal.onset) == ("loss", 7, None)


def test_what_only_sketches_show_is_not_bitwise():
    moved = samples(gradient=lambda step, name, values: values * (1 + 1e-9))
    found = change(run(samples=moved))
    assert found.sameness is Sameness.ROUNDING
    assert "sampled gradients" in found.sentence


def test_what_repeats_do_is_rounding_like_with_its_growth():
    found = change(with_signals(run(), loss_recomputed=lambda step, x: x * (1 + 1e-8 * step**0.5)))
    assert found.sameness is Sameness.ROUNDING
    (signal,) = found.signals
    assert signal.growth.startswith("step^0.")
    assert signal.difference < signal.limit


def test_another_training_is_different_from_its_onset_on():
    found = change(
        with_signals(
            run(),
            **{
                name: lambda step, x: x * (1.01 if step >= 9 else 1)
                for name in ("loss", "loss_recomputed")
            },
        )
    )
    assert (found.sameness, found.onset) == (Sameness.DIFFERENT, 9)
    assert {each.onset for each in found.signals} == {9}


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (run(batch_digests=tuple("0" * 16 for _ in range(20))), "other samples"),
        (run(samples=samples(initial=lambda name, x: x + 1)), "starts from other weights"),
        (with_signals(run(), lr=lambda step, x: x * 2), "lr is"),
        (with_signals(run(), loss=lambda step, x: float("nan")), "nan"),
    ],
)
def test_what_cannot_be_compared_is_never_called_harmless(after, words):
    found = change(after)
    assert found.sameness is Sameness.DIFFERENT
    assert words in found.sentence


def test_without_repeats_the_floors_of_the_arithmetic_decide():
    near = with_signals(run(), loss_recomputed=lambda step, x: x * (1 + 1e-8))
    found = classify(near, BASELINE, None)
    assert found.sameness is Sameness.ROUNDING
    assert "floors of the arithmetic" in found.sentence
    far = with_signals(run(), loss_recomputed=lambda step, x: x * (1 + 1e-4))
    assert classify(far, BASELINE, None).sameness is Sameness.DIFFERENT


def test_a_control_that_lost_its_samples_is_different():
    assert change(replace(run(), samples=())).sameness is Sameness.DIFFERENT
