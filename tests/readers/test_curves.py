"""Foreign curves: what each format gives, and what it refuses."""

import math
import sys

import pytest

from harness.errors import EvidenceError
from harness.judge import judge
from harness.model import Judgement
from harness.readers import read_curves, read_spec
from harness.readers.lines import read_text

PREFIX = "[titan] 2026-11-01 10:00:00,000 - root - INFO - "
CONSOLE = (
    f"{PREFIX}Training starts at step 1\n"
    f"{PREFIX}\x1b[31mstep:  1  \x1b[32mloss:  8.07350  \x1b[38;2;180;60;0mgrad_norm:  0.8412  "
    "\x1b[38;2;54;234;195mmemory:  0.88GiB(1.11%)  \x1b[34mtps: 1,234  \x1b[39m\n"
    f"{PREFIX}validate step:  1  loss:  8.1000  memory: 1\n"
    f"{PREFIX}step: 10  loss:  7.93000  grad_norm:     nan  memory:  0.88GiB\n"
)


def file(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


# -------------------------------------------------------------------- JSONL


def test_jsonl_with_the_names_of_other_tools(tmp_path):
    text = (
        '{"train/loss": 8.0, "train/grad_norm": 0.9, "train/global_step": 1}\n'
        "\n"
        '{"train/loss": NaN, "train/grad_norm": null, "train/global_step": 2}\n'
        '{"eval/loss": 7.9, "train/global_step": 2}\n'
    )
    evidence = read_curves(file(tmp_path, "wandb.jsonl", text))
    assert (evidence.name, evidence.steps) == ("wandb", (1, 2))
    assert math.isnan(evidence.signals["loss"][1])
    assert evidence.signals["grad_norm"] == (0.9, None)
    assert read_spec(tmp_path / "wandb.jsonl") is None


def test_jsonl_is_recognised_by_its_content(tmp_path):
    evidence = read_curves(file(tmp_path, "curve", '{"step": 1, "loss": "inf"}'))
    assert evidence.signals["loss"] == (math.inf,)


def test_repeated_and_shuffled_steps_are_kept_for_the_judge(tmp_path):
    text = "".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in (1, 2, 2, 1))
    evidence = read_curves(file(tmp_path, "a.jsonl", text))
    assert evidence.steps == (1, 2, 2, 1)
    assert judge(evidence, evidence).judgement is Judgement.INVALID


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"step": 1, "loss": 1}\n{"step": 2, "loss"\n', r"a\.jsonl:2: not JSON"),
        ('{"step": 1, "loss": 1}\n3\n', r"a\.jsonl:2: a int, where a JSON object should be"),
        ('{"step": 1e19, "loss": 1}\n', r"a\.jsonl:1: step is 1e\+19, which is no step number"),
        ('{"step": 1, "loss": "low"}\n', r"a\.jsonl:1: loss is 'low', which is no number"),
        ('{"step": 1, "los": 1}\n', "no loss among 'step', 'los'; known names of it are loss"),
        ('{"epoch": 1, "loss": 1}\n', "no step among 'epoch', 'loss'"),
        ('{"step": 1, "loss": 1}\n{"loss": 1}\n', r"a\.jsonl:2: step is None"),
    ],
)
def test_jsonl_that_cannot_be_understood(tmp_path, text, words):
    with pytest.raises(EvidenceError, match=words):
        read_curves(file(tmp_path, "a.jsonl", text))


# ---------------------------------------------------------------------- CSV


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_csv(tmp_path, separator):
    text = "\ufeffstep,loss, lm,grad_norm\n1,8.0,x,nan\n2,,x,-inf\n\n3,7e0,x,0.5\n"
    evidence = read_curves(file(tmp_path, "a.csv", text.replace(",", separator)))
    assert evidence.steps == (1, 2, 3)
    assert evidence.signals["loss"] == (8.0, None, 7.0)
    assert math.isnan(evidence.signals["grad_norm"][0])
    assert evidence.signals["grad_norm"][1:] == (-math.inf, 0.5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("step,loss\n1,8.0\n2,high\n", r"a\.csv:3: loss is 'high'"),
        ("step,loss\n1,8.0\n\nfive,1\n", r"a\.csv:4: step is 'five'"),
        ("step,loss,lr\n1,8.0\n", r"a\.csv:2: 2 cells, where the header has 3"),
        ("step,loss\n1,2\n1,2,3\n", r"a\.csv:3: 3 cells, where the header has 2"),
        ("step,loss\n", "holds no row"),
        ("step,accuracy\n1,2\n", "no loss among"),
        ('step,loss\n1,"8.0\n', r"a\.csv:2: not a table: unexpected end of data"),
    ],
)
def test_csv_that_cannot_be_understood(tmp_path, text, words):
    with pytest.raises(EvidenceError, match=words):
        read_curves(file(tmp_path, "a.csv", text))


# ------------------------------------------------------------------ console


def test_torchtitans_console_log(tmp_path):
    evidence = read_curves(file(tmp_path, "stdout.log", CONSOLE))
    assert evidence.steps == (1, 10)
    assert evidence.signals["loss"] == (8.0735, 7.93)
    assert evidence.signals["grad_norm"][0] == 0.8412
    assert math.isnan(evidence.signals["grad_norm"][1])
    assert evidence.rounding == pytest.approx({"loss": 5e-6, "grad_norm": 5e-5})
    assert "rounded" in evidence.source


def test_a_console_log_of_one_rank(tmp_path):
    text = "[rank0]:step:  1  loss:  8.07350  grad_norm: 1,234.5000  memory: 1\n"
    evidence = read_curves(file(tmp_path, "a.log", text))
    assert evidence.signals["grad_norm"] == (1234.5,)


def test_a_console_log_of_mixed_ranks_is_refused(tmp_path):
    line = "[rank{}]:step:  1  loss:  8.07350  grad_norm:  0.8412  memory: 1\n"
    text = line.format(0) + line.format(1)
    with pytest.raises(EvidenceError, match=r"several ranks \(0, 1\) are mixed"):
        read_curves(file(tmp_path, "a.log", text))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("step:  2  loss:  7.9", r"a\.log:5: a step without its loss and grad norm"),
        ("step:  2  loss:  7.9x  grad_norm: 1.0", r"a\.log:5: loss is '7.9x'"),
    ],
)
def test_a_torn_console_line_is_named(tmp_path, line, words):
    with pytest.raises(EvidenceError, match=words):
        read_curves(file(tmp_path, "a.log", CONSOLE + line))


# -------------------------------------------------------------- TensorBoard


@pytest.fixture
def write_events():
    """Write scalars as TensorBoard stores them: tag to pairs of step and value."""
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    def write(folder, scalars):
        writer = EventFileWriter(str(folder))
        for tag, points in scalars.items():
            for step, value in points:
                summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
                writer.add_event(Event(wall_time=100.0 + step, step=step, summary=summary))
        writer.close()
        return folder

    return write


def test_a_tensorboard_folder_keeps_every_step(tmp_path, write_events):
    count = 12_000  # the accumulator's own default would keep 10,000
    tags = {
        "loss_metrics/global_avg_loss": [(step, 8 / step) for step in range(1, count + 1)],
        "grad_norm": [(step, 0.5) for step in range(1, count + 1)],
        "lr/AdamW": [(1, 1e-3)],
    }
    write_events(tmp_path / "outputs" / "tb" / "20261101-1000", tags)
    evidence = read_curves(tmp_path / "outputs")
    assert evidence.name == "outputs"
    assert evidence.steps == tuple(range(1, count + 1))
    assert evidence.signals["loss"][2] == pytest.approx(8 / 3)
    assert evidence.signals["grad_norm"] == (0.5,) * count
    assert evidence.signals["lr"][:2] == (pytest.approx(1e-3), None)
    assert evidence.signals["seconds"][-1] == count - 1


def test_replayed_steps_are_not_hidden(tmp_path, write_events):
    write_events(tmp_path, {"loss": [(1, 8.0), (2, 7.0), (3, 6.0), (2, 7.5), (3, 6.5)]})
    (event_file,) = tmp_path.iterdir()
    evidence = read_curves(event_file)
    assert evidence.steps == (1, 2, 3, 2, 3)
    assert judge(evidence, evidence).judgement is Judgement.INVALID


def test_several_tensorboard_runs_are_ambiguous(tmp_path, write_events):
    for name in ("a", "b"):
        write_events(tmp_path / name, {"loss": [(1, 8.0)]})
    with pytest.raises(EvidenceError, match=r"2 runs are below it; give one: .*a, .*b"):
        read_curves(tmp_path)


def test_tensorboard_without_a_loss_names_the_tags(tmp_path, write_events):
    write_events(tmp_path, {"accuracy": [(1, 8.0)]})
    with pytest.raises(EvidenceError, match="no loss among 'accuracy'"):
        read_curves(tmp_path)


def test_without_tensorboard_the_message_says_what_to_install(tmp_path, monkeypatch):
    file(tmp_path, "events.out.tfevents.1", b"")
    module = "tensorboard.backend.event_processing.event_accumulator"
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(EvidenceError, match=r"pip install 'converge\[tensorboard\]'"):
        read_curves(tmp_path)


# ---------------------------------------------------------------- detection


def test_a_path_that_does_not_exist_suggests_the_nearest(tmp_path):
    file(tmp_path, "curve.csv", "")
    with pytest.raises(EvidenceError, match=r"does not exist; did you mean .*curve\.csv"):
        read_curves(tmp_path / "curv.csv")
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
        (b"\x00\xff\xfe binary \x80", "is not text in UTF-8"),
        ("Lorem ipsum dolor\nsit amet\n", "is no curve; readable are run folders"),
    ],
)
def test_what_is_no_curve_is_refused(tmp_path, content, words):
    with pytest.raises(EvidenceError, match=words):
        read_curves(file(tmp_path, "thing", content))


def test_a_folder_without_evidence_is_refused(tmp_path):
    with pytest.raises(EvidenceError, match=r"has no job\.json and no event files"):
        read_curves(tmp_path)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(EvidenceError, match="cannot be read: Is a directory"):
        read_text(tmp_path)


def test_the_same_curve_in_every_format_is_the_same_curve(tmp_path, write_events):
    steps = range(1, 6)
    csv = "step,loss,grad_norm\n" + "".join(f"{step},{8 / step:.5f},0.5000\n" for step in steps)
    log = "".join(f"step: {step:2}  loss: {8 / step:8.5f}  grad_norm:  0.5000\n" for step in steps)
    jsonl = "".join(
        f'{{"step": {step}, "loss": {8 / step:.5f}, "grad_norm": 0.5}}\n' for step in steps
    )
    tags = {"loss": [(s, 8 / s) for s in steps], "grad_norm": [(s, 0.5) for s in steps]}
    control = read_curves(file(tmp_path, "a.csv", csv))
    for other in (
        file(tmp_path, "a.log", log),
        file(tmp_path, "a.jsonl", jsonl),
        write_events(tmp_path / "events", tags),
    ):
        verdict = judge(read_curves(other), control)
        assert verdict.judgement is Judgement.PASS, verdict
