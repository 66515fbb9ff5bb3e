"""``pytest --converge``, run by pytest itself on experiments of a small program."""

from pathlib import Path

import pytest
from curve_program import EXPERIMENT, PROGRAM, WRONG

pytest_plugins = ("pytester",)
OPTIONS = ("-p", "no:xdist", "--converge")  # the plugin is found by its entry point


@pytest.fixture
def repository(pytester, monkeypatch):
    """A repository with a program and its experiment."""
    source = Path(__file__).parents[1] / "src"
    monkeypatch.setenv("PYTHONPATH", str(source))
    monkeypatch.setenv("CONVERGE_STORE", str(pytester.path / "store"))
    monkeypatch.setenv("CONVERGE_HISTORY", str(pytester.path / "history.sqlite"))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makefile(".py", program=PROGRAM)
    pytester.makefile(".toml", mine=EXPERIMENT + WRONG, pyproject='[project]\nname = "other"\n')
    return pytester


def run(repository, *words):
    return repository.runpytest_subprocess(*OPTIONS, *words)


def test_each_set_is_a_test_with_the_cause_as_its_message(repository):
    result = run(repository, "-v")  # pyproject.toml lies beside it
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["mine.toml::again PASSED*", "mine.toml::doubled FAILED*", "FAIL: *", "report: *.html"]
    )
    assert (repository.path / "reports" / "mine" / "report.html").is_file()


def test_a_file_in_a_folder_has_its_report_in_one_of_that_name(repository):
    (repository.path / "gates").mkdir()
    for name in ("mine.toml", "program.py"):
        (repository.path / name).rename(repository.path / "gates" / name)
    run(repository, "gates", "-k", "again").assert_outcomes(passed=1, deselected=1)
    assert (repository.path / "reports" / "gates" / "mine" / "report.html").is_file()


def test_an_experiment_that_extends_another_is_found(repository):
    repository.makefile(".toml", longer='extends = "mine.toml"\nseed = 7\n')
    result = run(repository, "--collect-only", "-q")
    result.stdout.fnmatch_lines(["longer.toml::again", "mine.toml::again"])


def test_what_is_chosen_is_all_that_runs(repository):
    run(repository, "-k", "again").assert_outcomes(passed=1, deselected=1)
    runs = [path.name for path in (repository.path / "store" / "runs").iterdir()]
    assert not [name for name in runs if name.startswith("doubled")]


def test_a_set_that_the_program_cannot_run_fails_and_the_others_run(repository):
    resized = """
[[test]]
kind = "elastic"
name = "resized"
segments = [{ until = 4, dp_replicate = 2 }, { until = 12, dp_replicate = 1 }]
"""
    (repository.path / "mine.toml").write_text(EXPERIMENT + resized)
    result = run(repository, "mine.toml")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["resized is left out: 'elastic' needs checkpoints, and nothing*"])


def test_a_mistake_in_the_file_is_an_error_that_names_it(repository):
    (repository.path / "mine.toml").write_text(EXPERIMENT.replace("repeats", "repeat"))
    result = run(repository, "mine.toml")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*mine.toml: repeat*"])
    result.stdout.no_fnmatch_line("*Traceback*")


def test_what_cannot_be_launched_fails_in_the_words_of_the_command(repository):
    result = run(repository, "mine.toml", "--converge-arg=--no-such-option")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        ["converge run ended with 2: *", "*unrecognized arguments: --no-such-option"]
    )
    result.stdout.no_fnmatch_line("*another exception*")


def test_a_report_of_an_earlier_run_is_no_verdict(repository):
    (repository.path / "mine.toml").write_text(EXPERIMENT)
    run(repository, "mine.toml").assert_outcomes(passed=1)
    # The store cannot be made, so the run ends before a report is written.
    (repository.path / "store").rename(repository.path / "elsewhere")
    (repository.path / "store").write_text("")
    run(repository, "mine.toml").assert_outcomes(failed=1)


def test_without_the_option_no_file_is_collected(repository):
    words = [word for word in OPTIONS if word != "--converge"]
    assert repository.runpytest_subprocess(*words).ret == pytest.ExitCode.NO_TESTS_COLLECTED
