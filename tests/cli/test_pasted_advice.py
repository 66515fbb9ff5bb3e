"""What a comparison of curves advises to type next works as it stands there."""

import json
import math
import re
import shlex

import pytest

from converge_harness.cli import main

STEPS = range(1, 61)


def loss(step, off=0.0):
    return 2 + 5 * math.exp(-step / 10) * (1 + off * math.sin(step))


def console(values):
    return "".join(
        f"step: {step}  loss: {value:8.5f}  grad_norm:  1.{step:04d}  memory:  0.88GiB\n"
        for step, value in values
    )


def csv(values):
    return "step,loss\n" + "".join(f"{step},{value!r}\n" for step, value in values)


def other_columns(values):
    return csv(values).replace("step,loss", "it,my loss")


def jsonl(values):
    return "".join(json.dumps({"step": step, "loss": value}) + "\n" for step, value in values)


FORMATS = {
    "a run/train.log": (console, ()),
    "-curve.csv": (csv, ()),
    "other.csv": (other_columns, ("--columns", "step=it", "loss=my loss")),
    "curve.jsonl": (jsonl, ("--from", "3", "--tolerance", "grad_norm=1")),
}


def write(folder, name, values):
    write_as, options = FORMATS[name]
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(write_as(list(values)))
    return options


def advised(capsys):
    out = " ".join(capsys.readouterr().out.split())
    found = re.search(r"next: converge (compare .*?) (?:Of 1 test set|1 test set)", out)
    assert found, out
    return shlex.split(found[1])


@pytest.mark.parametrize("name", FORMATS)
def test_more_repeats_settle_it(tmp_path, monkeypatch, capsys, name):
    monkeypatch.setenv("COLUMNS", "1000")
    for number, side in enumerate(("control", "test", "r1", "r2", "r3")):
        values = ((step, loss(step, 1e-3 * math.sin(9 * number))) for step in STEPS)
        options = write(tmp_path / side, name, values)
    monkeypatch.chdir(tmp_path / "control")
    given = f"./{name}" if name.startswith("-") else name
    assert main(["compare", given, str(tmp_path / "test" / name), *options]) == 3
    words = advised(capsys)
    assert not set(options) - set(words)
    repeats = {f"RUN_{number}": str(tmp_path / f"r{number}" / name) for number in (1, 2, 3)}
    assert main([repeats.get(word, word) for word in words]) == 0, capsys.readouterr()


@pytest.mark.parametrize("name", ["other.csv", "a run/train.log"])
def test_a_later_start_is_compared_with_the_same_repeats(tmp_path, monkeypatch, capsys, name):
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.chdir(tmp_path)
    repeats = []
    for number, side in enumerate(("control", "r1", "r2", "r3", "test")):
        values = [(step, loss(step, 1e-3 * math.sin(9 * number))) for step in STEPS]
        options = write(tmp_path / side, name, values[30:] if side == "test" else values)
        repeats += ["--repeat", f"{side}/{name}"] if side.startswith("r") else []
    assert main(["compare", f"control/{name}", f"test/{name}", *repeats, *options]) == 3
    words = advised(capsys)
    assert words[-2:] == ["--from", "31"] or "--columns" in words
    assert main(words) == 0, capsys.readouterr()


@pytest.mark.parametrize("of_control", [False, True])
def test_what_is_nan_before_a_resume_is_cut(tmp_path, monkeypatch, capsys, of_control):
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.chdir(tmp_path)
    whole = [(step, loss(step)) for step in STEPS]
    (tmp_path / "whole.csv").write_text(csv(whole))
    resumed = [(step, math.nan if step <= 20 else value) for step, value in whole]
    (tmp_path / "resumed.csv").write_text(csv(resumed))
    files = ["resumed.csv", "whole.csv"] if of_control else ["whole.csv", "resumed.csv"]
    assert main(["compare", *files]) == 3
    words = advised(capsys)
    assert words == ["compare", *files, "--from", "21"]
    assert main(words) == 0
    blown = [(step, math.nan if step > 40 else value) for step, value in whole]
    (tmp_path / "blown.csv").write_text(csv(blown))
    assert main(["compare", "whole.csv", "blown.csv"]) == 1


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("of_control", [False, True])
def test_steps_that_count_from_0_are_counted_from_1(
    tmp_path, monkeypatch, capsys, repeated, of_control
):
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.chdir(tmp_path)
    repeats = []
    for number, side in enumerate(("one", "r1", "r2", "r3", "zero")):
        noise = 1e-3 * math.sin(9 * number) if repeated else 0.0
        values = [(step, loss(step, noise)) for step in STEPS]
        from_0 = side == "zero" or (side == "r1" and not of_control)
        text = csv((step - from_0, value) for step, value in values)
        (tmp_path / f"{side}.csv").write_text(text)
        repeats += ["--repeat", f"{side}.csv"] if side.startswith("r") else []
    (tmp_path / "wrong.csv").write_text(csv((step - 1, 1.5 * loss(step)) for step in STEPS))
    files = ["zero.csv", "one.csv"] if of_control else ["one.csv", "zero.csv"]
    given = ["compare", *files, *(repeats if repeated else [])]
    assert main(given) == 3
    words = advised(capsys)
    assert words == [*given, "--count-from-1"]
    assert main(words) == 0
    assert "Steps of zero count from 0, and 1 was added to each" in capsys.readouterr().out
    assert main(["compare", "one.csv", "wrong.csv", "--count-from-1"]) == 1


def test_a_row_before_the_first_step_is_no_other_count(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.chdir(tmp_path)
    for name, steps in (("whole", STEPS), ("before", range(len(STEPS) + 1))):
        (tmp_path / f"{name}.csv").write_text(csv((step, loss(step)) for step in steps))
    assert main(["compare", "whole.csv", "before.csv"]) == 3
    words = advised(capsys)
    assert words == ["compare", "whole.csv", "before.csv", "--from", "1"]
    assert main(words) == 0


def test_what_a_restart_logged_again_is_cut(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    whole = [(step, loss(step)) for step in STEPS]
    again = [*whole[:10], *((step, value + 0.1) for step, value in whole[4:10]), *whole[10:]]
    (tmp_path / "whole.csv").write_text(csv(whole))
    (tmp_path / "again.csv").write_text(csv(again))
    assert main(["compare", "whole.csv", "again.csv"]) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "again has steps twice, with other values, step 5" in said
    assert "either two runs are in one file (give each its own), or a replay after a" in said
    assert main(["compare", "whole.csv", "again.csv", "--from", "11"]) == 0
    assert main(["compare", "again.csv", "whole.csv", "--from", "11"]) == 0
    assert main(["compare", "whole.csv", "again.csv", "--from", "10"]) == 3


def test_more_seeds_are_no_advice_where_digits_are_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, factor in (("a", 1.0), ("b", 1.001)):
        values = [(step, round(loss(step) * factor, 1)) for step in STEPS]
        (tmp_path / f"{name}.csv").write_text(csv(values))
    assert main(["compare", "a.csv", "b.csv", "--ask", "no worse", "--margin", "0.01"]) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert "log it with more digits" in out
    assert "next:" not in out


@pytest.mark.parametrize("spelling", ["{:.0f}", "{:.0e}"])
def test_whole_numbers_are_no_evidence_of_equal_losses(tmp_path, monkeypatch, capsys, spelling):
    """The means of 2.6 and 3.4 differ by a quarter, and both are printed as 3."""
    monkeypatch.chdir(tmp_path)
    for name, factor in (("a", 0.95), ("b", 1.05)):
        rows = "".join(f"{step},{spelling.format(3 * factor)}\n" for step in STEPS[1:])
        (tmp_path / f"{name}.csv").write_text(f"step,loss\n1,{spelling.format(7)}\n{rows}")
    for more in ((), ("--margin", "0.001")):
        assert main(["compare", "a.csv", "b.csv", *more]) == 3
        assert "coarse" in " ".join(capsys.readouterr().out.split())


def test_a_margin_says_what_it_does_not_ask(tmp_path, monkeypatch, capsys):
    """Every other step is 20% off, and the mean is right."""
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.chdir(tmp_path)
    values = [(step, loss(step)) for step in range(1, 201)]
    off = [(step, value * (1 + 0.2 * (-1) ** step)) for step, value in values]
    (tmp_path / "a.csv").write_text(csv(values))
    (tmp_path / "b.csv").write_text(csv(off))
    main(["compare", "a.csv", "b.csv", "--margin", "0.1"])
    out = " ".join(capsys.readouterr().out.split())
    assert "PASS" in out
    assert "Single steps of b are off, the loss by up to 0.25, by more than rounding" in out
    (tmp_path / "b.csv").write_text(csv([(step, value * (1 + 1e-8)) for step, value in values]))
    main(["compare", "a.csv", "b.csv", "--margin", "0.1"])
    assert "Single steps" not in capsys.readouterr().out
