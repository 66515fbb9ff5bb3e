"""docs/resumes.md by real runs: Composer with a StreamingDataset, resized and killed."""

from functools import partial

import pytest
from cut_down import need, outcomes, run_whole, verdicts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """What report.json says of some sets of an experiment; both share their controls."""
    need("composer-0.32.1")
    return partial(run_whole, tmp_path_factory.mktemp("composer_resumes"))


def test_sharded_checkpoints_and_the_order_of_samples_survive_a_resize(judged):
    names = ("resized", "unset", "nodes", "killed", "killed_in_place", "torn")
    tests = judged("composer_resume", *names)
    assert verdicts(tests) == dict.fromkeys(names, "PASS")
    for test in tests.values():
        for check in ("passes-continuous", "state-restored", "data-resumed"):
            assert outcomes(test)[check] == "PASS", (test["name"], check)
    for name in ("resized", "unset", "nodes"):  # num_canonical_nodes is set, and not set
        passes = tests[name]["passes"]
        assert [each["degrees"] for each in passes] == ["FSDP 2", "one rank", "FSDP 4"], name
        assert [each["loaded_step"] for each in passes] == [0, 4, 8], name  # an epoch has 6 steps
    # The second one struck in the second epoch; a damaged checkpoint was set aside.
    loaded = {name: [each["loaded_step"] for each in tests[name]["passes"]] for name in names}
    assert (loaded["killed"], loaded["torn"]) == ([0, 0, 8], [0, 4])
    assert outcomes(tests["killed_in_place"])["random-numbers-go-on"] == "PASS"  # with dropout


def test_what_is_lost_fails_by_its_cause(judged):
    lost = {
        # Streaming takes the number of nodes at the start, and keeps it.
        "other_first_nodes": (1, "trained on other samples than the control"),
        "dropout_killed": (5, "the random numbers (RNG) start over at step 5: "),
        "latest_link": (1, "pass 2 starts from the initial weights although step 4 was saved"),
        "uneven_epoch": (6, "step 6, after the resume of pass 2 (FSDP 2 -> FSDP 4), is trained on"),
        "optimizer_not_loaded": (5, "optimizer state (exp_avg, exp_avg_sq) and the learning rate"),
        "data_not_spun": (5, "those of step 1, so the data started over from the beginning"),
        "batch_kept": (5, "note that global_batch_size 8 is named, 4 is in force (pass 2)"),
        "schedule_by_duration": (4, "lr is 0.00155 at step 3, 0.00185 in the control"),
    }
    tests = judged("composer_resume_mistakes", *lost, "weights_alone")
    alone = tests.pop("weights_alone")
    assert alone["verdict"] == "INVALID"
    assert "starts from other weights than the control" in alone["cause"]
    assert verdicts(tests) == dict.fromkeys(lost, "FAIL")
    for name, (step, words) in lost.items():
        assert tests[name]["onset_step"] == step, name
        assert words in tests[name]["cause"], name
