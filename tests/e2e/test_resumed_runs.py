"""Cut-down elastic, space-time and fault matrices of real torchtitan, through the command line."""

import re

import pytest
from real_matrices import Matrix, run
from reproducing import expected, require_nobodys
from resumed_matrices import RESUMED, STOCK
from warm_toolchains import warm_toolchains

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    return run(tmp_path_factory.mktemp("resumed"), RESUMED, warm_toolchains())


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    return run(tmp_path_factory.mktemp("stock"), STOCK, warm_toolchains())


def verdicts(matrix: Matrix) -> dict[str, str]:
    return {name: test["verdict"] for name, test in matrix.tests().items()}


def outcomes(matrix: Matrix, name: str) -> dict[str, str]:
    return {check["name"]: check["outcome"] for check in matrix.tests()[name]["checks"]}


def test_verdicts_of_resumed_runs(resumed):
    matrix, result = resumed
    assert result.returncode == 1, result.stdout + result.stderr
    assert verdicts(matrix) == {
        "resized": "PASS",
        "without_optimizer": "FAIL",
        "without_schedule": "FAIL",
        "killed": "PASS",
        "torn": "PASS",
        "too_late": "FAIL",
        "writes_later_weights": "FAIL",
        "st_fsdp2_acc1": "PASS",
        "st_fsdp1_acc2": "PASS",
        "st_ddp2": "PASS",
        "st_fsdp2_zero3": "PASS",
        "st_fsdp2_zero2": "PASS",
    }


def test_every_resume_of_a_resized_run_was_looked_at(resumed):
    matrix, _ = resumed
    asked = (
        "passes-continuous",
        "state-restored",
        "data-resumed",
        "segments-as-scheduled",
        "named-in-force",
        "same-data",
        "optimizer-steps",
    )
    found = outcomes(matrix, "resized")
    assert {name: found[name] for name in asked} == dict.fromkeys(asked, "PASS")
    passes = matrix.tests()["resized"]["passes"]
    assert [(each["world_size"], each["steps"], each["loaded_step"]) for each in passes] == [
        (2, [1, 2], 0),
        (1, [3, 4], 2),
        (4, [5, 6], 4),
    ]


def test_state_that_a_resume_leaves_out_is_named(resumed):
    tests = resumed[0].tests()
    assert tests["without_optimizer"]["cause_class"] == "state lost"
    assert "exp_avg" in tests["without_optimizer"]["cause"]
    assert tests["without_optimizer"]["onset_step"] == 3
    assert tests["without_schedule"]["cause_class"] == "learning rate"
    assert tests["without_schedule"]["onset_step"] == 3
    assert tests["writes_later_weights"]["cause_class"] == "state lost"
    assert "parameters and optimizer state" in tests["writes_later_weights"]["cause"]


def test_recovery_is_timed_and_replays_are_compared(resumed):
    matrix, _ = resumed
    asked = ("faults-struck", "replays-agree", "recovers-in-time", "passes-continuous")
    found = outcomes(matrix, "killed")
    assert {name: found[name] for name in asked} == dict.fromkeys(asked, "PASS")
    assert outcomes(matrix, "torn")["torn-never-loaded"] == "PASS"
    assert [each["loaded_step"] for each in matrix.tests()["torn"]["passes"]] == [0, 2]
    assert matrix.tests()["too_late"]["cause_class"] == "no recovery in time"


def test_the_stock_loader_loses_its_place_on_another_degree_and_keeps_it_on_the_same(stock):
    matrix, result = stock
    assert result.returncode == 1, result.stdout + result.stderr
    tests = matrix.tests()
    assert verdicts(matrix) == {
        "same_degree": "PASS",
        "data_started_over": "FAIL",
        "other_degree": "ERROR",
    }
    assert tests["data_started_over"]["cause_class"] == "data"
    assert tests["data_started_over"]["onset_step"] == 3
    assert outcomes(matrix, "data_started_over")["data-resumed"] == "FAIL"
    assert "resume after step 2" in tests["other_degree"]["cause"]


def test_a_second_run_of_resumed_sets_starts_nothing(resumed):
    matrix, _ = resumed
    again = matrix._replace(out=matrix.out.parent / "again")
    result = again.converge("run", "--only", "resized", "killed")
    assert result.returncode == 0
    assert "started on" not in result.stdout


@pytest.mark.parametrize(
    ("name", "code", "resumes"),
    [
        ("without_optimizer", set(), "is resized: FSDP 2 until step 2, one rank until step 6."),
        (
            "writes_later_weights",
            {"code/injections.py"},
            "saves every 2 steps and is interrupted: kill at step 5; torchrun starts it again.",
        ),
    ],
)
def test_a_failed_set_of_several_passes_is_the_same_for_others(resumed, name, code, resumes):
    matrix, _ = resumed
    folder = matrix.out.parent / f"repro_{name}"
    done = matrix.converge("repro", str(matrix.out), "--set", name, "--out", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == code | {
        *("ISSUE.md", "expected.json", "experiment.toml", "requirements.txt", "run.sh"),
        "train_config.toml",
    }
    require_nobodys(folder, matrix.out.parent)
    issue = (folder / "ISSUE.md").read_text()
    assert re.match(r"# [^()]* lost at the resume \(FSDP 2(, kill at 5,| -> one rank,)", issue)
    assert f"The failing run {resumes}" in issue

    theirs = matrix._replace(experiment=folder / "experiment.toml", out=folder / "report")
    again = theirs.converge("run")
    assert again.returncode == 1, again.stdout + again.stderr
    assert not re.search(r"^\S+: started on", again.stdout, re.MULTILINE)  # the very same runs
    (test,) = theirs.tests().values()
    assert (test["verdict"], test["cause"]) == ("FAIL", expected(folder)["cause"])
