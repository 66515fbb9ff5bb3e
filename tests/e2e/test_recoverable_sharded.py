"""docs/resumes.md by real runs: FSDP 2 with distributed checkpoints, right and wrong."""

import pytest
from cut_down import outcomes, run_whole
from warm_toolchains import warm_torch

RIGHT = (
    *("resized", "killed", "torn", "killed_while_saving"),
    *("disk_full", "killed_with_async_save"),
)
WRONG = {
    "optimizer_not_saved": "optimizer state (exp_avg, exp_avg_sq) and the learning rate lost at",
    "half_taken": "no recovery in time: no step ended after the fault ckpt_torn at step 8",
    "one_random_state": "and ranks that train on other samples now draw the same; step 5 is part",
}
ACCUMULATED = {
    "not_divided": "scaled by 2, which equals gradient accumulation steps (2)",
    "last_alone": "every gradient is off, that of the output projection too, so it begins at the ",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """What report.json says of each set."""
    folder = tmp_path_factory.mktemp("sharded")
    return run_whole(folder, "recoverable_sharded", toolchains=warm_torch())


def test_sharded_checkpoints_are_loaded_by_other_ranks_and_after_faults(judged):
    tests = {name: judged[name] for name in RIGHT}
    causes = {name: test["cause"] for name, test in tests.items()}
    assert {test["verdict"] for test in tests.values()} == {"PASS"}, causes
    for name, test in tests.items():
        found = outcomes(test)
        for check in ("passes-continuous", "state-restored", "data-resumed"):
            assert found[check] == "PASS", (name, check)
    degrees = [each["degrees"] for each in tests["resized"]["passes"]]
    assert degrees == ["FSDP 2", "one rank", "FSDP 4"]
    loaded = {name: [each["loaded_step"] for each in tests[name]["passes"]] for name in RIGHT}
    assert loaded["resized"] == [0, 4, 8]
    assert loaded["killed"] == [0, 0, 4]
    for name in ("torn", "killed_while_saving", "disk_full"):
        assert loaded[name] == [0, 4], name
    # Step 8 was still being written, or not any more; step 4 was complete before that began.
    assert loaded["killed_with_async_save"] in ([0, 4], [0, 8])
    for check in ("random-numbers-go-on", "ranks-draw-apart"):
        assert outcomes(tests["killed"])[check] == "PASS", check  # with dropout


def test_no_set_is_left_out(judged):
    assert judged.keys() == {*RIGHT, *WRONG}


@pytest.mark.parametrize("name", WRONG)
def test_what_people_forget_of_sharded_checkpoints_fails_by_its_cause(judged, name):
    assert judged[name]["verdict"] == "FAIL", judged[name]["cause"]
    assert WRONG[name] in judged[name]["cause"]


def test_ranks_are_traded_for_accumulation_and_for_shards(tmp_path):
    right = {"st_fsdp2_acc2": "FSDP 2", "st_hsdp2x2": "HSDP 2x2", "st_fsdp4_zero2": "FSDP 4"}
    names = (*right, *ACCUMULATED)
    tests = run_whole(tmp_path, "recoverable_sharded_space_time", *names, toolchains=warm_torch())
    causes = {name: test["cause"] for name, test in tests.items()}
    for name in right:
        assert tests[name]["verdict"] == "PASS", causes[name]
        for check in ("same-data", "gradients-first-steps", "updates-first-steps"):
            assert outcomes(tests[name])[check] == "PASS", (name, check)
    for name, words in ACCUMULATED.items():
        assert tests[name]["verdict"] == "FAIL", causes[name]
        assert words in causes[name], name
