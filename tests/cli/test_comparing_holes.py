"""A curve that lacks steps never passes, in whatever format it comes."""

import json
import math

import pytest

from converge_harness.cli import main

EVERY = range(1, 61)


def loss(step: int) -> float:
    return round(2.0 + 5.0 * math.exp(-step / 10), 5)


def csv(steps):
    return "step,loss\n" + "".join(f"{step},{loss(step)}\n" for step in steps)


def trainer_state(steps):
    history = [{"step": step, "loss": loss(step)} for step in steps]
    return json.dumps({"log_history": history}, indent=1)


def console(steps):
    return "".join(
        f"step: {step}  loss: {loss(step):8.5f}  grad_norm:  1.{step:04d}  memory:  0.88GiB\n"
        for step in steps
    )


def golden(steps):
    values = {str(step): loss(step) for step in dict.fromkeys(steps)}
    entry = {"start_step": 1, "end_step": 60, "step_interval": 1, "values": values}
    return json.dumps({"lm loss": entry})


def jsonl(steps):
    return "".join(f'{{"step": {step}, "loss": {loss(step)}}}\n' for step in steps)


FORMATS = {
    "curve.csv": csv,
    "trainer_state.json": trainer_state,
    "train.log": console,
    "golden_values.json": golden,
    "curve.jsonl": jsonl,
}

HOLES = {
    "middle third": ([*range(1, 21), *range(41, 61)], "lacks steps 21 to 40"),
    "32 in a row": ([*range(1, 15), *range(47, 61)], "lacks steps 15 to 46"),
    "one twice": ([*range(1, 30), 29, *range(31, 61)], "lacks step 30"),
}


def compared(folder, name, steps):
    paths = [folder / side / name for side in ("control", "test")]
    for path, each in zip(paths, (EVERY, steps), strict=True):
        path.parent.mkdir()
        path.write_text(FORMATS[name](each))
    return main(["compare", *map(str, paths)])


@pytest.mark.parametrize("name", FORMATS)
def test_a_whole_curve_passes(tmp_path, name):
    assert compared(tmp_path, name, EVERY) == 0


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", HOLES)
def test_a_curve_with_a_hole_is_undecided_and_the_steps_are_named(tmp_path, capsys, name, case):
    steps, words = HOLES[case]
    assert compared(tmp_path, name, steps) == 3
    assert words in " ".join(capsys.readouterr().out.split())


GRIDS = {
    "every tenth": ([1, *range(10, 61, 10)], 0),
    "three points": ([1, 30, 59], 0),
    "powers of two": ([1, 2, 4, 8, 16, 32], 3),
}


@pytest.mark.parametrize("case", GRIDS)
def test_a_control_that_logs_every_step_demands_every_step(tmp_path, capsys, case):
    """The other way round every step of the control is judged, if it goes on to the end."""
    steps, of_rare_control = GRIDS[case]
    for name, each in (("every", EVERY), ("rare", steps)):
        (tmp_path / f"{name}.csv").write_text(FORMATS["curve.csv"](each))
    every, rare = str(tmp_path / "every.csv"), str(tmp_path / "rare.csv")
    assert main(["compare", every, rare]) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert f"rare has no step between {steps[0]} and" in out or "rare has no step between 2" in out
    assert main(["compare", rare, every]) == of_rare_control


def second_pass(folder, *, off=0.0):
    """A run of 60 steps, and one that was resumed after its 30th."""
    paths = [folder / name for name in ("whole.json", "resumed_2nd.json")]
    for path, began in zip(paths, (1, 31), strict=True):
        document = json.loads(golden(EVERY))
        values = document["lm loss"]["values"]
        values |= {step: "nan" for step in values if int(step) < began}
        if began > 1:
            values |= {step: value + off for step, value in values.items() if value != "nan"}
        path.write_text(json.dumps(document))
    return paths


def test_a_resumed_run_is_compared_from_its_resume_on(tmp_path, capsys):
    whole, resumed = map(str, second_pass(tmp_path))
    for order in ((whole, resumed), (resumed, whole)):
        assert main(["compare", *order]) == 3
        out = " ".join(capsys.readouterr().out.split())
        assert "--from 31 compares these alone" in out
        assert "blew up" not in out
        assert main(["compare", *order, "--from", "31"]) == 0
    (tmp_path / "off").mkdir()
    off = map(str, second_pass(tmp_path / "off", off=1.0))
    assert main(["compare", *off, "--from", "31"]) == 1


@pytest.mark.parametrize(
    ("since", "words"), [("61", "its last step is 60"), ("soon", "not a step")]
)
def test_a_step_that_leaves_nothing_is_refused(tmp_path, capsys, since, words):
    paths = map(str, second_pass(tmp_path))
    try:
        code = main(["compare", *paths, "--from", since])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_golden_file_that_ends_before_its_header_is_undecided(tmp_path, capsys):
    assert compared(tmp_path, "golden_values.json", range(1, 51)) == 3
    assert "end_step of 'lm loss' is 60" in " ".join(capsys.readouterr().out.split())
