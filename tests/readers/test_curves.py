"""Console logs, and how a path is recognised."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
from reader_files import file

from converge_harness.errors import EvidenceError
from converge_harness.readers import read_curves
from converge_harness.readers.foreign import registry
from converge_harness.readers.foreign.format import Format
from converge_harness.readers.foreign.rows import RowCollector
from converge_harness.readers.lines import line_of, read_text

PREFIX = "[titan] 2026-11-01 10:00:00,000 - root - INFO - "
CONSOLE = (
    f"{PREFIX}Training starts at step 1\n"
    f"{PREFIX}\x1b[31mstep:  1  \x1b[32mloss:  8.07350  \x1b[38;2;180;60;0mgrad_norm:  0.8412  "
    "\x1b[38;2;54;234;195mmemory:  0.88GiB(1.11%)  \x1b[34mtps: 1,234  \x1b[36mtflops: 0.09  "
    "\x1b[35mmfu: 0.03%\x1b[39m\n"
    f"{PREFIX}\x1b[33mvalidate step:  1  \x1b[32mloss:  8.1000  memory:  0.88GiB(1.11%)  tps: 9\n"
    f"{PREFIX}step: 10  loss:  7.93000  grad_norm:     nan  memory:  0.88GiB(1.11%)  tps: 1,234\n"
)

# ------------------------------------------------------------------ console


def test_torchtitans_console_log(tmp_path):
    evidence = read_curves(file(tmp_path, "stdout.log", CONSOLE))
    assert evidence.steps.tolist() == [1, 10]
    assert evidence.signals["loss"] == (8.0735, 7.93)
    assert evidence.signals["grad_norm"][0] == 0.8412
    assert math.isnan(evidence.signals["grad_norm"][1])
    assert evidence.rounding == pytest.approx({"loss": 5e-6, "grad_norm": 5e-5})
    assert evidence.source == str(tmp_path / "stdout.log")


def test_a_console_log_of_one_rank(tmp_path):
    text = "[rank0]:step:  1  loss:  8.07350  grad_norm: 1,234.5000  memory: 1\n"
    evidence = read_curves(file(tmp_path, "a.log", text))
    assert evidence.signals["grad_norm"] == (1234.5,)


def test_a_console_log_of_before_there_was_a_grad_norm(tmp_path):
    text = f"{PREFIX}step: 10  loss:  4.4120  memory:  0.49GiB(0.52%)  wps: 115,926  mfu: 1.35%\n"
    evidence = read_curves(file(tmp_path, "a.log", text))
    assert evidence.signals == {"loss": (4.412,)}
    assert evidence.rounding == pytest.approx({"loss": 5e-5})


def test_a_console_log_of_mixed_ranks_is_refused(tmp_path):
    line = "[rank{}]:step:  1  loss:  8.07350  grad_norm:  0.8412  memory: 1\n"
    text = line.format(0) + line.format(1)
    with pytest.raises(EvidenceError, match=r"several ranks \(0, 1\) are mixed"):
        read_curves(file(tmp_path, "a.log", text))


def test_the_log_of_a_rank_without_the_last_pipeline_stage_is_refused(tmp_path):
    line = "step: {:2}  loss: -1.00000  grad_norm:  0.8412  memory: 1\n"
    with pytest.raises(EvidenceError, match=r"every loss is -1\.0, which a rank without the last"):
        read_curves(file(tmp_path, "a.log", line.format(1) + line.format(2)))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("step:  2  loss:  7.9", r"a\.log:5: a step without its loss and grad norm"),
        ("step:  2  loss:  7.9x  grad_norm: 1.0", r"a\.log:5: loss is '7.9x'"),
        (f"step:  {10**20}  loss:  7.9  grad_norm: 1.0", r"a\.log:5: step is '10+', which is no"),
    ],
)
def test_a_torn_console_line_is_named(tmp_path, line, words):
    with pytest.raises(EvidenceError, match=words):
        read_curves(file(tmp_path, "a.log", CONSOLE + line))


# ---------------------------------------------------------------- detection


def test_a_path_that_does_not_exist_suggests_the_nearest(tmp_path):
    file(tmp_path, "curve.csv", "")
    with pytest.raises(EvidenceError, match=r"does not exist; did you mean .*curve\.csv"):
        read_curves(tmp_path / "curv.csv")
    with pytest.raises(EvidenceError, match=r"does not exist$"):
        read_curves(tmp_path / "main.csv")  # of which more than half is in curve.csv
    with pytest.raises(EvidenceError, match=r"does not exist$"):
        read_curves(tmp_path / "nowhere" / "else")


def test_a_name_that_no_file_system_takes(tmp_path):
    with pytest.raises(EvidenceError, match="File name too long"):
        read_curves(tmp_path / ("x" * 300))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"\x00\xff\xfe binary \x80", "is not UTF-8 text"),
        ("Lorem ipsum dolor\nsit amet\n", "is not a curve; readable are run folders"),
        (f"{PREFIX}Training starts, at step 1\n", "is not a curve; readable are run folders"),
    ],
)
def test_what_is_no_curve_is_refused(tmp_path, content, words):
    with pytest.raises(EvidenceError, match=words):
        read_curves(file(tmp_path, "thing", content))


def test_a_pipe_and_a_device_are_refused_without_reading_them(tmp_path):
    """Else a device without an end, and a pipe that nobody writes to, would never be read."""
    pipe = tmp_path / "curve.csv"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(EvidenceError, match=rf"{path}: is a pipe or a device.* write"):
            read_curves(path)


def test_a_table_is_recognised_by_the_names_in_its_first_line(tmp_path):
    path = file(tmp_path, "curve", 'it;"loss"\n1;8.0\n')
    with pytest.raises(EvidenceError, match="no step among 'it', 'loss'; known names of it are"):
        read_curves(path)
    assert read_curves(path, {"step": "it"}).signals["loss"] == (8.0,)


def test_a_folder_without_evidence_is_refused(tmp_path):
    with pytest.raises(EvidenceError, match="has no run; readable are run folders, "):
        read_curves(tmp_path)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(EvidenceError, match="cannot be read: Is a directory"):
        read_text(tmp_path)
    (tmp_path / "a.csv").mkdir()
    with pytest.raises(EvidenceError, match=r"a\.csv: has no run"):
        read_curves(tmp_path / "a.csv")


def test_the_same_curve_in_every_format_is_the_same_curve(tmp_path):
    steps = range(1, 6)
    values = [(step, f"{8 / step:.5f}", f"{1 / step:.4f}") for step in steps]
    forms = {
        "a.csv": "step,loss,grad_norm\n" + "".join("{},{},{}\n".format(*row) for row in values),
        "a.txt": "# step loss grad_norm\n" + "".join("{} {} {}\n".format(*row) for row in values),
        "a.log": "".join(
            "step: {}  loss: {}  grad_norm: {}  memory: 1\n".format(*row) for row in values
        ),
        "a.jsonl": "".join(
            '{{"step": {}, "loss": {}, "grad_norm": {}}}\n'.format(*row) for row in values
        ),
        "state": '{"log_history": ['
        + ", ".join('{{"step": {}, "loss": {}, "grad_norm": {}}}'.format(*row) for row in values)
        + "]}",
    }
    curves = [read_curves(file(tmp_path, name, text)) for name, text in forms.items()]
    for curve in curves:
        assert curve.steps.tolist() == list(steps)
        for signal in ("loss", "grad_norm"):
            np.testing.assert_array_equal(
                curve.signals[signal].values, curves[0].signals[signal].values
            )


def test_a_further_format_is_one_entry_of_the_registry(tmp_path, monkeypatch):
    def read_pairs(source):
        rows = RowCollector(str(source.path), line_of(source.path), source.columns)
        for line, text in enumerate(source.text.splitlines()[1:], start=2):
            step, loss = text.split("=")
            rows.add(line, {"step": int(step), "loss": float(loss)})
        return rows.evidence(source.path.stem)

    pairs = Format("pairs", read_pairs, has_content=lambda source: source.text[:5] == "PAIRS")
    monkeypatch.setattr(registry, "FORMATS", (pairs, *registry.FORMATS))
    evidence = read_curves(file(tmp_path, "curve", "PAIRS\n1=8.0\n2=7.5\n"))
    assert (evidence.steps.tolist(), evidence.signals["loss"]) == ([1, 2], (8.0, 7.5))
