"""docs/resumes.md by real runs: a program that starts its ranks itself, right and wrong."""

import pytest
from cut_down import outcomes, run_whole
from warm_toolchains import warm_torch

RIGHT = {"resized": [0, 4, 8], "killed": [0, 0, 4], "preempted": [0, 7], "torn": [0, 4]}
"""By set, the steps that its starts load."""
WRONG = {
    "optimizer_not_saved": "optimizer state (exp_avg, exp_avg_sq) and the learning rate lost at",
    "schedule_not_saved": "the learning-rate schedule is lost at the resume: steps of the learni",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """What report.json says of each set."""
    folder = tmp_path_factory.mktemp("spawned")
    return run_whole(folder, "recoverable_spawned", toolchains=warm_torch())


@pytest.mark.parametrize("name", RIGHT)
def test_a_program_without_a_launcher_is_the_same_resized_and_interrupted(judged, name):
    assert judged[name]["verdict"] == "PASS", judged[name]["cause"]
    assert [each["loaded_step"] for each in judged[name]["passes"]] == RIGHT[name]
    found = outcomes(judged[name])
    for check in ("passes-continuous", "state-restored", "data-resumed"):
        assert found[check] == "PASS", check


@pytest.mark.parametrize("name", WRONG)
def test_what_it_forgets_fails_by_its_cause(judged, name):
    assert judged[name]["verdict"] == "FAIL", judged[name]["cause"]
    assert WRONG[name] in judged[name]["cause"]


def test_no_set_is_left_out(judged):
    assert judged.keys() == {*RIGHT, *WRONG}
