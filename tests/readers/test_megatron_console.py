"""Megatron-LM's console log: intervals, what is left out of a line, and lines that are cut."""

import math

import pytest
from reader_files import file

from converge_harness.errors import EvidenceError
from converge_harness.readers import read_curves

# The layout of ``training_log`` in Megatron-LM's megatron/training/training.py, with its formats.
TIMED = " [2026-03-04 09:00:{second:02}.250000]"


def line(step, loss=2.5, norm=1.25, *, skipped=0, nans=0, start=TIMED, others=()):
    text = start.format(second=step % 60)
    text += f" iteration {step:8d}/{200:8d} | consumed samples: {step * 32:12d} |"
    text += f" elapsed time per iteration (ms): {412.34:.1f} |"
    text += f" throughput per GPU (TFLOP/s/GPU): {98.7:.1f} | learning rate: {step * 1.5e-6:.6E} |"
    text += f" global batch size: {32:5d} |"
    losses = {"lm loss": loss, **dict(others)}
    text += "".join(f" {name}: {mean:.6E} |" for name, mean in losses.items() if mean is not None)
    text += f" loss scale: {1.0:.1f} |"
    text += "" if norm is None else f" grad norm: {norm:.3f} |"
    text += f" number of skipped iterations: {skipped:3d} |"
    return text + f" number of nan iterations: {nans:3d} |"


def log(*lines):
    before = "using world size: 8, data-parallel size: 2\n[before the start of training step]"
    after = " validation loss at iteration 200 | lm loss value: 2.4E+00 | lm loss PPL: 1.1E+01 |"
    return "\n".join((before, *lines, after, ""))


def test_a_line_is_an_interval(tmp_path):
    lines = line(10, 10.67915, 4.112), line(20, 9.5, 3.0, others={"mtp_1 loss": 9.9}.items())
    evidence = read_curves(file(tmp_path, "stdout.log", log(*lines)))
    assert evidence.steps.tolist() == [10, 20]
    assert evidence.signals["loss"] == (10.67915, 9.5)
    assert evidence.signals["grad_norm"] == (4.112, 3.0)
    assert evidence.signals["lr"] == (1.5e-5, 3e-5)
    assert evidence.rounding["grad_norm"] == pytest.approx(5e-4)
    assert evidence.significant["loss"] == 7  # so 10.67915 may be off by 5e-6


@pytest.mark.parametrize("start", ["", "7: [2026-03-04 09:00:01]", "[default7]: [2026-03-04]"])
def test_older_lines_and_those_of_launchers_are_read(tmp_path, start):
    text = log(line(1, start=start), line(2, 2.25, start=start))
    assert read_curves(file(tmp_path, "a.log", text)).signals["loss"] == (2.5, 2.25)


def test_a_loss_that_is_left_out_was_nan(tmp_path):
    text = log(line(1), line(2, None, math.nan))
    loss = read_curves(file(tmp_path, "a.log", text)).signals["loss"]
    assert loss[0] == 2.5
    assert math.isnan(loss[1])


def test_an_interval_with_a_nan_is_nan_although_its_mean_leaves_it_out(tmp_path):
    text = log(line(10), line(20, 2.25, skipped=1, nans=1), line(30, 2.0, skipped=1))
    loss = read_curves(file(tmp_path, "a.log", text)).signals["loss"]
    assert (loss[0], loss[2]) == (2.5, 2.0)
    assert math.isnan(loss[1])


def test_the_zero_of_an_interval_without_updates_is_no_loss(tmp_path):
    text = log(line(1, 0.0, None, skipped=1), line(2, 2.5), line(3, 2.25))
    evidence = read_curves(file(tmp_path, "a.log", text))
    assert evidence.steps.tolist() == [2, 3]
    really = log(line(1, 0.0), line(2, 2.5))
    assert read_curves(file(tmp_path, "b.log", really)).signals["loss"] == (0.0, 2.5)


def test_another_loss_is_mapped(tmp_path):
    others = {"mtp_1 loss": 9.875}.items()
    path = file(tmp_path, "a.log", log(line(1, others=others), line(2, others=others)))
    evidence = read_curves(path, {"loss": "mtp_1 loss"})
    assert evidence.signals["loss"] == (9.875, 9.875)


WHOLE = line(2, 2.25)


@pytest.mark.parametrize(
    ("torn", "words"),
    [
        (WHOLE[: WHOLE.index("lm loss") + 14], "a line that is cut, or mixed with another one"),
        (WHOLE[: WHOLE.index("number of nan")], "a line that is cut, or mixed with another one"),
        (WHOLE[: WHOLE.index("| lm")] + line(3), "a line that is cut|'consumed samples' twice"),
        (WHOLE.replace("2.250000E+00", ""), "'lm loss' without a value: the line is cut"),
        (WHOLE.replace("2.250000E+00", "2.25x"), "lm loss is '2.25x', which is not a number"),
        (WHOLE.replace("grad norm: 1.250", "grad norm: 1_250"), "grad norm is '1_250'"),
        (WHOLE.replace("skipped iterations:   0", "skipped iterations: a"), "is 'a', which is not"),
        (WHOLE.replace("       2/", f" {10**20}/"), r"step is '10+', which is not a step number"),
        (WHOLE.replace("lm loss", "loss scale"), "'loss scale' twice: the line is cut"),
    ],
)
def test_a_torn_line_is_named(tmp_path, torn, words):
    good = file(tmp_path, "good.log", log(line(1), WHOLE))
    assert read_curves(good).steps.tolist() == [1, 2]
    with pytest.raises(EvidenceError, match=rf"a\.log:4: .*({words})"):
        read_curves(file(tmp_path, "a.log", log(line(1), torn)))


def test_a_log_without_a_loss_is_refused(tmp_path):
    with pytest.raises(EvidenceError, match=r"a\.log: no loss among .*'grad norm'"):
        read_curves(file(tmp_path, "a.log", log(line(1, None), line(2, None))))


def test_every_cut_of_a_log_is_read_or_refused(tmp_path):
    text = log(line(1), line(2, 2.25, skipped=1), line(3, 2.0))
    outcomes = set()
    for end in range(0, len(text), 7):
        path = file(tmp_path, "a.log", text[:end])
        try:
            outcomes.add(tuple(read_curves(path).signals["loss"].values))
        except EvidenceError:
            outcomes.add("refused")
    assert outcomes == {"refused", (2.5,), (2.5, 2.25), (2.5, 2.25, 2.0)}
