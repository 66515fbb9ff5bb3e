"""`load` and `compare`: reports and comparisons as pandas frames."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from stored_samples import copied

import converge_harness
from converge_harness import notebook
from converge_harness.cli import main
from converge_harness.errors import EvidenceError, StoreError
from converge_harness.judge.compare.tensors import compare_tensors
from converge_harness.readers import read_run
from converge_harness.report.renderers.npz_tables import FILE

PAGE = Path(__file__).parents[1] / "docs" / "notebook.md"
FRAMES = tuple(notebook.COLUMNS)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with reports of this version, and the runs that they are of."""
    folder = tmp_path_factory.mktemp("notebook")
    report = copied("schema1", folder) / "report"
    main(["report", str(report)])
    return report


@pytest.fixture(scope="module")
def report(written):
    return notebook.load(written)


def run_of(report, name):
    (source,) = report.runs.loc[report.runs["run"] == name, "source"]
    return read_run(Path(source).absolute())


# ------------------------------------------------------------------------ load


def test_a_difference_is_over_the_smaller_magnitude_as_documented(report):
    meaning = notebook.COLUMNS["differences"]["difference"].meaning
    assert "min(|test|, |control|)" in meaning
    differences = report.differences.query("signal == 'loss'")
    losses = report.curves.set_index(["run", "step"])["loss"]
    assert len(differences)
    for row in differences.itertuples():
        control = report.verdicts.set_index("set")["control"][row.set]
        test, of_control = losses[row.set, row.step], losses[control, row.step]
        wanted = (test - of_control) / min(abs(test), abs(of_control))
        assert row.difference == pytest.approx(wanted, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("name", FRAMES)
def test_every_frame_has_the_columns_that_are_documented(report, name):
    frame = getattr(report, name)
    columns = notebook.COLUMNS[name]
    assert list(frame.columns) == list(columns)
    assert len(frame)
    assert frame.attrs["columns"]["set" if "set" in columns else "run"]["meaning"]
    told = report.columns.query(f"frame == '{name}'")
    assert told["column"].tolist() == list(columns)
    assert told["meaning"].str.len().min() > 5
    assert f"| `{name}` |" in PAGE.read_text()


def test_numbers_have_a_unit(report):
    for name in FRAMES:
        numbers = getattr(report, name).select_dtypes("number").columns
        assert [column for column in numbers if not notebook.COLUMNS[name][column].unit] == []


def test_verdicts_and_checks_are_those_of_the_report(report, written):
    document = json.loads((written / "report.json").read_text())
    assert report.document == document
    assert report.verdict == document["verdict"] == "FAIL"
    verdicts = report.verdicts.set_index("set")
    assert {test["name"]: test["verdict"] for test in document["tests"]} == dict(
        verdicts["verdict"]
    )
    assert verdicts.loc["doubled", "cause_class"] == "gradient scale"
    assert verdicts.loc["doubled", "onset_step"] == 1
    assert pd.isna(verdicts.loc["ddp2", "onset_step"])
    checks = report.checks
    assert len(checks) == sum(len(test["checks"]) for test in document["tests"])
    failed = checks.query("outcome == 'FAIL'")
    assert set(failed["set"]) == {"doubled"}
    assert (failed["measured"] > failed["limit"]).any()
    roles = report.runs.set_index("run")["role"]
    assert roles["fsdp2"] == "control"
    assert (roles == "repeat").sum() == 2
    assert document["headline"] in repr(report)
    assert "<table" in report._repr_html_()


def test_curves_and_differences_are_those_of_the_runs(report):
    control, test = run_of(report, "fsdp2"), run_of(report, "doubled")
    for run in (control, test):
        rows = report.curves[report.curves["run"] == run.name]
        assert rows["step"].tolist() == run.steps.tolist()
        for signal in ("loss", "grad_norm", "loss_recomputed", "grad_norm_recomputed"):
            assert rows[signal].tolist() == run.signals[signal].values.tolist()  # noqa: PD011
    rows = report.differences.query("set == 'doubled' and signal == 'grad_norm'")
    ours, theirs = (run.signals["grad_norm"].values for run in (test, control))  # noqa: PD011
    assert rows["ratio"].tolist() == (ours / theirs).tolist()
    apart = (ours - theirs) / np.minimum(ours, theirs)
    assert rows["difference"].tolist() == pytest.approx(apart.tolist(), rel=1e-12)
    assert (rows["difference"] > rows["limit"]).all()


def test_parameters_are_compared_as_the_judge_compares_them(report):
    found = compare_tensors(run_of(report, "doubled"), run_of(report, "fsdp2"), None)
    rows = report.parameters.query("set == 'doubled'")
    assert len(rows) == sum(len(each.names) for each in found)
    for each in found:
        mine = rows[rows["step"] == each.step]
        assert mine["parameter"].tolist() == list(each.names)
        for column, kind in (
            ("weights", each.initial),
            ("gradient", each.gradients),
            ("update", each.updates),
        ):
            if kind is None:
                assert mine[column].isna().all()
            else:
                assert mine[column].tolist() == kind.difference.tolist()
    first = rows[rows["step"] == 1]
    assert (first["gradient_norm"] / first["control_gradient_norm"]).tolist() == pytest.approx(
        [2.0] * len(first)
    )
    assert (first["gradient"] > first["gradient_limit"]).all()


def test_a_signal_to_leave_out_must_be_there():
    losses = [4 / step for step in range(1, 33)]
    both = {"step": list(range(1, 33)), "loss": losses, "grad_norm": losses}
    one = {key: both[key] for key in ("step", "loss")}
    assert notebook.compare(both, one).verdicts["verdict"].tolist() == ["INVALID"]
    report = notebook.compare(both, one, without=["grad_norm"])
    assert report.verdicts["verdict"].tolist() == ["PASS"]
    with pytest.raises(EvidenceError, match=r"no curve has 'gradnorm'.*grad_norm"):
        notebook.compare(both, dict(both), without=["gradnorm"])


def test_a_folder_without_a_report_is_named(tmp_path, written):
    shutil.copytree(written, tmp_path / "reports" / "smoke")
    with pytest.raises(StoreError) as caught:
        notebook.load(tmp_path / "reports" / "smok")
    said = str(caught.value)
    assert said.startswith(f"{tmp_path / 'reports' / 'smok'}: does not exist")
    assert f"did you mean '{tmp_path / 'reports' / 'smoke'}'?" in said
    assert "converge run EXPERIMENT.toml --out" in said
    with pytest.raises(StoreError, match=r"has no report\.json, .*valid: .*smoke"):
        notebook.load(tmp_path / "reports")


def test_a_folder_of_an_earlier_version_has_verdicts_and_says_how_to_get_the_rest(tmp_path):
    folder = copied("schema1", tmp_path) / "report"
    report = notebook.load(str(folder))
    assert len(report.verdicts) == 4
    for frame in ("curves", "differences", "parameters"):
        with pytest.raises(EvidenceError, match=rf"has no {FILE}.*: converge report {folder}"):
            getattr(report, frame)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("report.json", b"{", "cannot be read: "),
        ("report.json", b"[]", "is no report of this version"),
        ("report.json", b'{"schema_version": 2, "tests": []}', r"schema 2, not 1"),
        (FILE, b"PK", "cannot be read: "),
        (FILE, b"", "cannot be read: "),
    ],
)
def test_damaged_files_are_errors(tmp_path, written, name, content, words):
    folder = tmp_path / "report"
    shutil.copytree(written, folder)
    (folder / name).write_bytes(content)
    with pytest.raises(StoreError, match=rf"{name}: .*{words}"):
        notebook.load(folder)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("schema", np.array(2), "another version"),
        ("curves.loss", None, "has no curves.loss"),
        ("curves.loss", np.zeros(3), "columns of curves are of different lengths"),
        ("limits.set", np.array([99]), "has an index outside of names"),
    ],
)
def test_arrays_that_do_not_fit_are_errors(tmp_path, written, name, value, words):
    folder = tmp_path / "report"
    shutil.copytree(written, folder)
    with np.load(folder / FILE) as stored:
        arrays = {key: stored[key] for key in stored.files}
    arrays[name] = value
    np.savez(folder / FILE, **{key: each for key, each in arrays.items() if each is not None})
    with pytest.raises(StoreError, match=words):
        notebook.load(folder)


# --------------------------------------------------------------------- compare

STEPS = np.arange(1, 301)


def losses(seed, factor=1.0):
    noise = np.random.default_rng(seed).normal(0, 0.002, STEPS.size)
    return factor * (2 + 3 * np.exp(-STEPS / 60)) + noise


def frame(seed, factor=1.0):
    return pd.DataFrame({"step": STEPS, "loss": losses(seed, factor)})


REPEATS = [frame(3), frame(4), frame(5)]


def test_files_frames_and_columns_are_judged_alike(tmp_path):
    paths = []
    for seed, factor in ((0, 1.0), (1, 1.0), (2, 1.02), (3, 1.0), (4, 1.0), (5, 1.0)):
        paths.append(tmp_path / f"run{seed}.csv")
        frame(seed, factor).to_csv(paths[-1], index=False)
    control, *tests = paths[:3]
    by_path = notebook.compare(control, [str(each) for each in tests], repeats=paths[3:])
    by_frame = notebook.compare(frame(0), [frame(1), frame(2, 1.02)], repeats=REPEATS)
    columns = [
        {"train loss": losses(seed, factor).tolist(), "it": STEPS.tolist()}
        for seed, factor in ((0, 1.0), (1, 1.0), (2, 1.02))
    ]
    by_columns = notebook.compare(
        columns[0],
        {"right": columns[1], "wrong": columns[2]},
        repeats=[each.rename(columns={"loss": "train loss", "step": "it"}) for each in REPEATS],
        columns={"loss": "train loss", "step": "it"},
    )
    for report in (by_path, by_frame, by_columns):
        assert report.verdicts["verdict"].tolist() == ["PASS", "FAIL"]
        shown = ["difference", "limit"]
        pd.testing.assert_frame_equal(report.differences[shown], by_path.differences[shown])
        assert report.checks["measured"].tolist() == pytest.approx(
            by_path.checks["measured"].tolist(), nan_ok=True
        )
    assert by_path.verdicts["set"].tolist() == ["run1", "run2"]
    assert by_frame.verdicts["set"].tolist() == ["test", "test 2"]
    assert by_columns.verdicts["set"].tolist() == ["right", "wrong"]
    assert by_path.verdicts["next_command"][1].startswith("converge ")
    assert by_frame.verdicts["next_command"][1] == ""
    assert by_frame.parameters.empty
    repeats = [f"--repeat={each}" for each in paths[3:]]
    assert main(["compare", str(control), str(tests[0]), *repeats]) == 0


def test_a_frame_may_have_its_steps_in_its_index():
    named = frame(1).set_index("step")
    assert notebook.compare(frame(0), named, repeats=REPEATS).verdict == "PASS"
    with pytest.raises(EvidenceError, match="test: no step among 'loss'"):
        notebook.compare(frame(0), frame(1)[["loss"]])


def test_nan_is_a_value_and_none_is_a_hole():
    diverged, holed = frame(1), frame(1).astype({"loss": object})
    diverged.loc[200:, "loss"] = np.nan
    holed.loc[200, "loss"] = pd.NA
    report = notebook.compare(frame(0), {"nan": diverged, "na": holed}, repeats=REPEATS)
    verdicts = report.verdicts.set_index("set")["verdict"]
    assert verdicts["nan"] == "FAIL"
    outcomes = report.checks.query("set == 'na'").set_index("check")["outcome"]
    assert "FAIL" not in set(outcomes)
    at = report.differences.query("set == 'na' and step == 201")["difference"]
    assert not np.isfinite(at).any() or at.empty


def test_a_margin_a_tolerance_and_a_first_step_are_used():
    wide = notebook.compare(frame(0), frame(2, 1.02), margin=0.05, tolerances={"loss": 0.1})
    assert wide.verdict == "PASS"
    late = notebook.compare(frame(0), frame(1), repeats=REPEATS, since=101)
    assert late.curves["step"].min() == 101
    worse = notebook.compare(frame(0), frame(2, 1.02), repeats=REPEATS, ask="no worse")
    assert worse.verdicts["ask"].tolist() == ["no worse"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss": [1.0, 2.0]}, "have different lengths: step 3, loss 2"),
        ({"step": [1, 2.5, 3]}, "row 1: step is 2.5, not a step"),
        ({"step": [1, -2, 3]}, "row 1: step is -2, not a step"),
        ({"step": [1, None, 3]}, "row 1: step is None, not a step"),
        ({"loss": [1.0, "7", 2.0]}, "row 1: loss is '7', which is not a number"),
        ({"loss": [1.0, True, 2.0]}, "row 1: loss is True, which is not a number"),
        ({"loss": [1.0, [], 2.0]}, r"row 1: loss is \[\], which is not a number"),
        ({"step": [], "loss": []}, "has no row"),
    ],
)
def test_columns_that_are_no_curve_are_errors(change, words):
    curve = {"step": [1, 2, 3], "loss": [1.0, 2.0, 3.0]}
    with pytest.raises(EvidenceError, match=rf"^test: .*{words}"):
        notebook.compare(curve, {**curve, **change})


def test_steps_that_are_there_twice_are_no_clean_evidence():
    twice = pd.concat([frame(1), frame(2).iloc[99:]], ignore_index=True)
    report = notebook.compare(frame(0), twice, repeats=REPEATS)
    assert report.verdict == "INVALID"
    assert "step 100" in report.verdicts["cause"][0]


def test_a_repeat_is_none_of_what_it_judges(tmp_path):
    control, test = frame(0), frame(1)
    with pytest.raises(EvidenceError, match=r"repeats\[1\]: is the control or a test set itself"):
        notebook.compare(control, test, repeats=[frame(3), control])
    again = frame(3)
    with pytest.raises(EvidenceError, match=r"repeats\[1\]: is given twice"):
        notebook.compare(control, test, repeats=[again, again])
    path = tmp_path / "a.csv"
    control.to_csv(path, index=False)
    with pytest.raises(EvidenceError, match=r"repeats\[0\]: is the control"):
        notebook.compare(path, test, repeats=[str(path)])
    with pytest.raises(EvidenceError, match="no signal 'los'; did you mean 'loss'"):
        notebook.compare(control, test, tolerances={"los": 1})


# ------------------------------------------------------------------- the page


def test_the_code_of_the_page_runs(written, tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(written, tmp_path / "reports" / "smoke")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)  # noqa: S102 (what a reader would do with it)
    assert names["judged"].verdicts["verdict"].tolist() == ["PASS", "FAIL"]
    assert (tmp_path / "notebook.png").stat().st_size > 10_000


def test_the_interface_is_imported_only_when_it_is_asked_for():
    code = (
        "import sys; before = set(sys.modules); import converge_harness; "
        "print(*sorted(set(sys.modules) - before)); converge_harness.load"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [converge_harness.__name__]
    assert converge_harness.load is notebook.load
    assert converge_harness.compare is notebook.compare
    with pytest.raises(ImportError, match="cannot import name 'lod'"):
        from converge_harness import lod  # noqa: F401


@pytest.mark.parametrize("since", [None, 50])
def test_a_frame_that_counts_from_0_is_no_other_run(tmp_path, since):
    control = frame(0)
    from_0, wrong = (
        frame(seed, factor).assign(step=STEPS - STEPS[0]) for seed, factor in ((0, 1.0), (0, 1.2))
    )
    if since is None:
        assert notebook.compare(control, from_0).verdicts["verdict"].tolist() == ["INVALID"]
    counted = notebook.compare(control, [from_0, wrong], count_from_1=True, since=since)
    assert counted.verdicts["verdict"].tolist() == ["PASS", "FAIL"]
    path = tmp_path / "from_0.csv"
    from_0.to_csv(path, index=False)
    read = notebook.compare(control, path, count_from_1=True, since=since)
    assert read.verdicts["verdict"].tolist() == ["PASS"]
