"""`converge compare` on curves from anywhere: the gates of today pass some of these."""

import json
import math
import random
from pathlib import Path

import pytest

from converge_harness.cli import main

STEPS = 50


def loss(step: int) -> float:
    return 2.0 + 5.0 * math.exp(-step / 10)


def write(path: Path, losses: dict[int, object]) -> Path:
    lines = [json.dumps({"step": step, "loss": value}) for step, value in losses.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def control(tmp_path):
    return write(tmp_path / "control.jsonl", {step: loss(step) for step in range(1, STEPS + 1)})


def judged(control: Path, test: Path, *more: str) -> int:
    return main(["compare", str(control), str(test), "--tolerance", "loss=0.01", *more])


def test_the_same_curve_passes(control, tmp_path):
    same = write(tmp_path / "t.jsonl", {step: loss(step) for step in range(1, STEPS + 1)})
    assert judged(control, same) == 0


@pytest.mark.parametrize(
    "broken",
    [
        {step: 1.049 * loss(step) for step in range(1, STEPS + 1)},
        {step: loss(step) * (100 if step == 30 else 1) for step in range(1, STEPS + 1)},
        dict.fromkeys(range(1, STEPS + 1), "nan"),
        {step: loss(step) if step < STEPS else "nan" for step in range(1, STEPS + 1)},
    ],
    ids=["+4.9%", "one step x100", "all NaN", "NaN last step"],
)
def test_what_other_gates_pass_fails(control, tmp_path, broken):
    assert judged(control, write(tmp_path / "t.jsonl", broken)) == 1


def test_a_run_cut_short_is_undecided(control, tmp_path):
    cut = write(tmp_path / "t.jsonl", {step: loss(step) for step in range(1, STEPS)})
    assert judged(control, cut) == 3


@pytest.mark.parametrize("link", ["", "symlink_to", "hardlink_to"])
def test_a_curve_compared_with_itself_is_no_comparison(control, tmp_path, capsys, link):
    test = control
    if link:
        test = tmp_path / "link.jsonl"
        getattr(test, link)(control)
    assert judged(control, test) == 3
    assert "are one and the same path" in " ".join(capsys.readouterr().out.split())


def test_a_folder_and_the_file_in_it_are_one_path(tmp_path, capsys):
    history = [{"step": step, "loss": loss(step)} for step in range(1, STEPS + 1)]
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({"log_history": history}))
    assert judged(tmp_path, state) == 3
    assert "are one and the same path" in " ".join(capsys.readouterr().out.split())


def test_a_run_that_stands_still_is_no_comparison(tmp_path):
    tests = [write(tmp_path / f"{name}.jsonl", dict.fromkeys(range(1, 51), 0.0)) for name in "ab"]
    assert judged(*tests) == 3


def test_a_repeat_that_is_what_it_judges_is_refused(control, tmp_path, capsys):
    test = write(tmp_path / "t.jsonl", {step: 1.004 * loss(step) for step in range(1, STEPS + 1)})
    for repeat, what in ((test, "TEST"), (control, "CONTROL")):
        assert main(["compare", str(control), str(test), "--repeat", str(repeat)]) == 2
        assert f"is also {what}" in " ".join(capsys.readouterr().err.split())
    repeat = str(write(tmp_path / "r.jsonl", {step: loss(step) for step in range(1, STEPS + 1)}))
    assert main(["compare", str(control), str(test), "--repeat", repeat, "--repeat", repeat]) == 2
    assert "is given twice" in " ".join(capsys.readouterr().err.split())


def test_a_test_set_that_is_given_twice_is_refused(control, tmp_path, capsys):
    test = write(tmp_path / "t.jsonl", {step: loss(step) for step in range(1, STEPS + 1)})
    (tmp_path / "link.jsonl").symlink_to(test)
    other = write(tmp_path / "u.jsonl", {step: loss(step) for step in range(1, STEPS + 1)})
    assert main(["compare", str(control), str(test), str(tmp_path / "link.jsonl")]) == 2
    assert "is given twice" in " ".join(capsys.readouterr().err.split())
    assert main(["compare", str(control), str(test), str(other)]) == 0


def test_reports_are_written_where_asked(control, tmp_path, capsys):
    test = write(tmp_path / "bad.jsonl", {step: 1.2 * loss(step) for step in range(1, STEPS + 1)})
    folder = tmp_path / "rëports with spaces"
    assert judged(control, test, "--out", str(folder)) == 1
    names = {path.name for path in folder.iterdir()}
    assert {"report.html", "report.md", "report.json", "junit.xml", "plots"} <= names
    report = json.loads((folder / "report.json").read_text())
    assert [test["verdict"] for test in report["tests"]] == ["FAIL"]
    assert "FAIL" in capsys.readouterr().out


@pytest.mark.parametrize("tolerance", ["loss", "loss=nan", "loss=-1", "los=0.1"])
def test_an_invalid_tolerance_is_refused(control, capsys, tolerance):
    assert main(["compare", str(control), str(control), "--tolerance", tolerance]) == 2
    assert tolerance in capsys.readouterr().err


def noisy(path: Path, seed: int) -> Path:
    """The curve with rounding-like noise: a repeat of it."""
    noise = random.Random(seed)
    return write(
        path, {step: loss(step) * (1 + 1e-6 * noise.gauss(0, 1)) for step in range(1, STEPS + 1)}
    )


@pytest.mark.parametrize("value", [0.0, 1e-320, 1e300, -1e308, "inf"])
@pytest.mark.parametrize("signal", ["loss", "grad_norm"])
@pytest.mark.parametrize("places", [None, 5])
def test_a_control_with_a_value_beyond_all_others_passes_nothing(
    tmp_path, capsys, value, signal, places
):
    """Also where its repeats and the test set agree; and numpy has nothing to say of it."""

    def curve(name, seed, **instead):
        noise = random.Random(seed)
        rows = []
        for step in range(1, STEPS + 1):
            row = {each: loss(step) * (1 + 1e-6 * noise.random()) for each in ("loss", "grad_norm")}
            if places:
                row = {each: round(number, places) for each, number in row.items()}
            rows.append({"step": step, **row, **(instead if step == 30 else {})})
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return str(path)

    control = curve("control", 0, **{signal: value})
    repeats = [word for seed in (1, 2, 3) for word in ("--repeat", curve(f"r{seed}", seed))]
    test = curve("test", 4)
    assert main(["compare", control, test]) in (1, 3)
    assert main(["compare", test, control]) in (1, 3)
    assert main(["compare", control, test, *repeats]) in (1, 3)
    assert "bug in converge" not in capsys.readouterr().err  # what warnings are in the tests


def test_repeats_teach_and_what_they_teach_is_kept_for_later(control, tmp_path, capsys):
    repeats = [noisy(tmp_path / f"r{seed}.jsonl", seed) for seed in range(4)]
    near = noisy(tmp_path / "near.jsonl", 9)
    far = write(tmp_path / "far.jsonl", {s: loss(s) * 1.01 for s in range(1, STEPS + 1)})
    folder = tmp_path / "out"
    given = [word for path in repeats for word in ("--repeat", str(path))]
    command = ["compare", str(control), str(near), str(far)]
    assert main([*command, *given, "--out", str(folder)]) == 1
    report = json.loads((folder / "report.json").read_text())
    assert [test["verdict"] for test in report["tests"]] == ["PASS", "FAIL"]
    learnt = str(folder / "calibration.json")
    assert main([*command, "--calibration", learnt]) == 1
    assert "cannot be checked" in capsys.readouterr().out
    assert main([*command, *given, "--calibration", learnt]) == 2
    assert "both say where the limits are from" in capsys.readouterr().err


def test_a_calibration_that_is_not_there_is_refused(control, capsys):
    assert judged(control, control, "--calibration", "nowhere.json") == 2
    assert "--calibration nowhere.json: there is no such file" in capsys.readouterr().err


def test_columns_are_found_by_the_names_that_the_user_gives(tmp_path, capsys):
    table = "it,main objective\n" + "".join(f"{s},{loss(s)}\n" for s in range(1, STEPS + 1))
    paths = [tmp_path / f"{name}.csv" for name in "ab"]
    for path in paths:
        path.write_text(table)
    assert judged(*paths) == 2
    columns = ("--columns", "step=it", "loss=main objective")
    assert judged(*paths, *columns) == 0
    capsys.readouterr()
    for wrong, word in (
        ("loss", "SIGNAL=COLUMN"),
        ("loss=", "SIGNAL=COLUMN"),
        ("los=x", "not a signal"),
        ("loss=nope", "nope"),
    ):
        assert judged(*paths, "--columns", "step=it", wrong) == 2
        assert word in capsys.readouterr().err
    assert judged(*paths, "--columns", "step=it", "step=it") == 2
    assert "given twice" in capsys.readouterr().err


@pytest.mark.parametrize("margin", ["0", "-1", "5", "nan"])
def test_an_invalid_margin_is_refused(control, capsys, margin):
    assert judged(control, control, "--margin", margin) == 2
    assert "is not a relative difference" in capsys.readouterr().err


def test_a_margin_that_a_short_curve_cannot_answer_leaves_it_open(tmp_path, capsys):
    paths = [
        write(tmp_path / f"{factor}.jsonl", {s: factor * loss(s) for s in range(1, 11)})
        for factor in (1, 1.02)
    ]
    command = ["compare", *map(str, paths), "--tolerance", "loss=0.2", "--margin", "0.001"]
    assert main(command) == 3
    assert "10 steps in common, at least 16" in " ".join(capsys.readouterr().out.split())


def test_a_tolerance_alone_excuses_no_lasting_difference(control, tmp_path):
    test = write(tmp_path / "t.jsonl", {s: 1.02 * loss(s) for s in range(1, STEPS + 1)})
    assert main(["compare", str(control), str(test), "--tolerance", "loss=0.2"]) != 0


def told(capsys) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_what_helps_next_is_not_the_same_command_again(control, tmp_path, capsys, monkeypatch):
    # Paths below the working directory are shown from there.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    steps = range(1, STEPS + 1)
    # Longer than a line of a terminal, in which it must not be broken.
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    near = write(folder / "near.jsonl", {step: 1.01 * loss(step) for step in steps})
    far = write(tmp_path / "far.jsonl", {step: 2 * loss(step) for step in steps})
    assert main(["compare", str(control), str(near)]) == 3
    again = "--repeat RUN_1 --repeat RUN_2 --repeat RUN_3"
    assert f"next: converge compare {control} {near} {again}" in told(capsys)
    assert main(["compare", str(control), str(far)]) == 1
    assert "next: converge run EXPERIMENT.toml # both runs with the probe" in told(capsys)
    assert main(["compare", str(control), str(control)]) == 3
    assert "next:" not in told(capsys)


def test_what_had_no_evidence_is_said_in_one_sentence(control, tmp_path, capsys):
    same = write(tmp_path / "t.jsonl", {step: loss(step) for step in range(1, STEPS + 1)})
    assert judged(control, same) == 0
    out = told(capsys)
    assert (
        "No evidence of: repeats of the control, samples, token counts, learning rates, "
        "configuration, recomputed losses, recomputed grad norms, grad norm, gradients, "
        "initial weights, updates, clipping, optimizer state, buffers, replicas, random numbers, "
        "dropout masks." in out
    )
    assert "-envelope" not in out


def test_curves_of_one_name_are_told_apart(control, tmp_path):
    (tmp_path / "other").mkdir()
    same = {step: loss(step) for step in range(1, STEPS + 1)}
    (tmp_path / "third").mkdir()
    tests = [write(tmp_path / each / "t.jsonl", same) for each in (".", "other", "third")]
    folder = tmp_path / "out"
    arguments = [*map(str, tests), "--tolerance", "loss=0.01", "--out", str(folder)]
    assert main(["compare", str(control), *arguments]) == 0
    report = json.loads((folder / "report.json").read_text())
    assert len({test["name"] for test in report["tests"]}) == 3


STATES = Path(__file__).parents[1] / "samples" / "trainer_state"


@pytest.mark.parametrize(
    ("places", "names"),
    [
        (("a/out/trainer_state.json", "b/out/trainer_state.json"), ["a", "b"]),
        (("a/checkpoint-20/trainer_state.json", "a/checkpoint-30/trainer_state.json"), None),
        (("a/loss.json", "b/x/loss.json"), ["a", "b/x"]),
    ],
)
def test_curves_of_one_name_are_called_by_the_folders_that_differ(tmp_path, places, names):
    paths = [tmp_path / place for place in places]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((STATES / "every_step.json").read_bytes())
    out = tmp_path / "report"
    assert main(["compare", *map(str, paths), "--out", str(out)]) == 0
    report = json.loads((out / "report.json").read_text())
    named = [report["controls"][0]["name"], report["tests"][0]["name"]]
    assert named == (names or ["checkpoint-20", "checkpoint-30"])


def test_output_folders_of_hugging_face_are_called_by_their_own_names(tmp_path, capsys):
    for folder in ("old", "new"):
        (tmp_path / folder / "checkpoint-20").mkdir(parents=True)
        state = tmp_path / folder / "checkpoint-20" / "trainer_state.json"
        state.write_bytes((STATES / "every_step.json").read_bytes())
    assert main(["compare", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    assert "old and new" in capsys.readouterr().out


def test_what_only_one_curve_has_may_be_left_out_and_is_named_then(control, tmp_path, capsys):
    rows = [{"step": each, "loss": loss(each), "grad_norm": 1 / each} for each in (1, 2, 3)]
    both, one = (
        tmp_path / "both.jsonl",
        write(tmp_path / "one.jsonl", {each: loss(each) for each in (1, 2, 3)}),
    )
    both.write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert main(["compare", str(both), str(one)]) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "one has no grad_norm; --without grad_norm compares the loss alone" in said
    assert f"next: converge compare {both} {one} --without grad_norm" in said
    assert main(["compare", str(both), str(one), "--without", "grad_norm"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The grad norm of both was left out as asked (without)" in said
    with pytest.raises(SystemExit):
        main(["compare", str(both), str(one), "--without", "loss"])
    both_given = ["--without", "grad_norm", "--tolerance", "grad_norm=1e-3"]
    assert main(["compare", str(both), str(one), *both_given]) == 2
    assert "has no effect beside --without grad_norm" in " ".join(capsys.readouterr().err.split())
    ask = ["--ask", "no worse", "--without", "grad_norm"]
    assert main(["compare", str(both), str(one), *ask]) == 2
    assert "--without: has no effect" in " ".join(capsys.readouterr().err.split())
