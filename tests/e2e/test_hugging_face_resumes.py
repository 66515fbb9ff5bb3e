"""docs/resumes.md by real runs: transformers.Trainer resumed on other ranks, and killed."""

from functools import partial

import pytest
from cut_down import need, outcomes, run_whole

STATE = "optimizer state (exp_avg, exp_avg_sq) and the learning rate lost at the resume"
DATA = "data order is lost at the resume: "
LOST = {
    "data_not_skipped": (5, DATA, "so the data started over from the beginning"),
    "model_alone": (5, STATE),
    "schedule_not_kept": (5, STATE),
    "accumulation_kept": (5, DATA, "global_batch_size 8 is named, 4 is in force (pass 2)"),
    "schedule_by_ranks": (7, "learning-rate schedule: lr is 0.00180952 at step 6"),
    "dropout_resized": (5, "the random numbers (RNG) start over at step 5: ", "before step 1"),
    "uneven_epoch": (6, DATA),
    "stream_read_twice": (9, DATA, "those of step 1, so the data started over from the beginning"),
}
"""The onset, and words of its cause. A wrong rate of step 6 is first off in the loss of step 7."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """What report.json says of each set of an experiment; both share their controls."""
    need("transformers-5.23.0")
    return partial(run_whole, tmp_path_factory.mktemp("hugging_face_resumes"))


def test_it_is_the_same_resized_and_killed(judged):
    tests = judged("hf_resume")
    assert {name: test["verdict"] for name, test in tests.items()} == dict.fromkeys(
        ("resized", "streamed", "killed", "killed_in_place"), "PASS"
    ), {name: test["cause"] for name, test in tests.items()}
    for name, test in tests.items():
        found = outcomes(test)
        for check in ("passes-continuous", "state-restored", "data-resumed"):
            assert found[check] == "PASS", (name, check)
    degrees = [each["degrees"] for each in tests["resized"]["passes"]]
    assert degrees == ["DDP 2", "one rank", "DDP 4"]
    loaded = {name: [each["loaded_step"] for each in tests[name]["passes"]] for name in tests}
    assert loaded["resized"] == [0, 4, 8]  # an epoch has 6 steps
    assert loaded["killed"] == [0, 0, 8]
    for name in ("killed", "killed_in_place"):
        assert outcomes(tests[name])["replays-agree"] == "PASS"
    assert outcomes(tests["killed_in_place"])["random-numbers-go-on"] == "PASS"  # with dropout


def test_what_is_lost_fails_by_its_cause(judged):
    tests = judged("hf_resume_mistakes")
    causes = {name: test["cause"] for name, test in tests.items()}
    assert {name: test["verdict"] for name, test in tests.items()} == dict.fromkeys(LOST, "FAIL"), (
        causes
    )
    for name, (step, *words) in LOST.items():
        assert tests[name]["onset_step"] == step, name
        for each in (*words, "pass 2"):  # and where it was lost
            assert each in causes[name], name
