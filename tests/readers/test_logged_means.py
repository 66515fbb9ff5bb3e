"""Logs of means, as Hugging Face's Trainer and Megatron-LM write them: which steps a loss is of."""

from pathlib import Path

import pytest

from converge_harness.judge import calibrate, judge
from converge_harness.model import Judgement
from converge_harness.readers import read_curves

SAMPLES = Path(__file__).parents[1] / "samples" / "trainer_state"


def sample(name):
    return read_curves(SAMPLES / f"{name}.json", {})


@pytest.mark.parametrize("name", ["every_step", "every_fifth", "first_and_fifth"])
def test_trainer_logs_the_mean_since_its_last_row(name):
    every, found = sample("every_step"), sample(name)
    assert found.mean_over == 0
    losses, begin = every.signals["loss"].values, 0
    for end, loss in zip(found.steps.tolist(), found.signals["loss"].values, strict=True):
        assert loss == pytest.approx(losses[begin:end].mean(), rel=1e-6)
        begin = end


def test_logs_of_other_intervals_are_refused():
    fifth = sample("every_fifth")
    for name in ("every_step", "first_and_fifth"):
        verdict = judge(fifth, sample(name)).verdict
        assert verdict.judgement is Judgement.INVALID, name
    verdict = judge(fifth, sample("every_step")).verdict
    assert verdict.judgement is Judgement.INVALID
    assert "the mean loss of the last 5 steps, its control that of that step" in verdict.cause
    calibration = calibrate(fifth, [fifth])
    verdict = judge(sample("every_fifth"), fifth, calibration).verdict
    assert verdict.judgement is Judgement.PASS, verdict.cause


def line(step):
    return (
        f" iteration {step:8d}/     200 | learning rate: 1.0E-05 | lm loss: {9 - step / 99:.6E} | "
        "grad norm: 4.1 | number of skipped iterations: 0 | number of nan iterations: 0 |\n"
    )


@pytest.mark.parametrize(
    ("steps", "over"),
    [((1, 2, 3), 1), ((10, 20, 30), 10), ((1, 10, 20), 10), ((110, 120), 10), ((10, 20, 25), 0)],
)
def test_megatron_logs_the_mean_of_its_interval(tmp_path, steps, over):
    path = tmp_path / "log.txt"
    path.write_text("".join(map(line, steps)))
    found = read_curves(path, {})
    assert (found.mean_over, found.steps.tolist()) == (over, list(steps))
