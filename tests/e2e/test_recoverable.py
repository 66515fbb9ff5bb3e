"""docs/resumes.md by real runs: a script that is resized and interrupted, right and wrong."""

from functools import partial

import pytest
from cut_down import converge, outcomes, run_whole
from reproducing import expected, require_nobodys, run_script
from warm_toolchains import TOOLCHAINS, warm_torch

WRONG = {
    "optimizer_not_saved": "optimizer state (exp_avg, exp_avg_sq) and the learning rate lost at",
    "schedule_not_saved": "the learning-rate schedule is lost at the resume: steps of the learni",
    "sampler_starts_over": "so the data started over from the beginning",
    "rate_scaled_by_ranks": "learning-rate schedule: lr is ",
    "rank_zero_alone_loads": "optimizer state (exp_avg, exp_avg_sq) lost at the resume: ",
    "random_not_saved": "the random numbers (RNG) start over at step 5: ",
    "written_in_place": "no recovery in time: no step ended after the fault ckpt_torn at step 8",
    "written_by_all_at_once": "no recovery in time: no step ended after the fault ckpt_torn at ste",
    "older_removed_first": "pass 2 starts from the initial weights although step 4 was saved",
    "nan_trained_on": "training blew up: loss is nan at step 6, where the control is finite",
    "batch_of_every_rank": "trained on other samples than the control's; note that global_batch",
    "one_random_state": "and ranks that train on other samples now draw the same; step 5 is part",
    "written_by_every_rank": "and ranks that train on other samples now draw the same; step 5 is ",
    "buffers_not_saved": "buffers lost at the resume: in pass 2, which loads step 4 (DDP 2 -> one",
    "last_batch_dropped": "step 4, right after the resume of pass 2 (one rank -> DDP 2), is train",
}

SEEN_BY_LOSS = {
    *("optimizer_not_saved", "sampler_starts_over", "batch_of_every_rank", "nan_trained_on"),
    "last_batch_dropped",
}
"""Those that a gate on the loss alone would see."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("recoverable")


@pytest.fixture(scope="module")
def judged(folder):
    """What report.json says of each set of an experiment; all share their controls."""
    return partial(run_whole, folder, toolchains=warm_torch())


def test_a_script_that_saves_everything_is_the_same_resized_and_interrupted(judged):
    tests = judged("recoverable")
    assert {name: test["verdict"] for name, test in tests.items()} == dict.fromkeys(
        (
            *("resized", "killed", "killed_in_place", "hung", "torn", "preempted"),
            *("killed_while_saving", "disk_full", "nan_batch", "nodes_leave_and_join"),
            "one_to_four_nodes",
        ),
        "PASS",
    ), {name: test["cause"] for name, test in tests.items()}
    for name, test in tests.items():
        found = outcomes(test)
        for check in ("passes-continuous", "state-restored", "data-resumed"):
            assert found[check] == "PASS", (name, check)
    degrees = [each["degrees"] for each in tests["resized"]["passes"]]
    assert degrees == ["DDP 2", "one rank", "DDP 4"]
    loaded = {name: [each["loaded_step"] for each in tests[name]["passes"]] for name in tests}
    assert loaded["killed"] == [0, 0, 4]
    assert loaded["killed_in_place"] == [0, 4]
    for name in ("hung", "torn", "killed_while_saving", "disk_full", "nan_batch"):
        assert loaded[name] == [0, 4], name
    nodes = [each["degrees"] for each in tests["nodes_leave_and_join"]["passes"]]
    assert nodes == ["DDP 2", "one rank", "DDP 2"]
    assert loaded["nodes_leave_and_join"][:2] == [0, 4]
    nodes = [each["degrees"] for each in tests["one_to_four_nodes"]["passes"]]
    assert nodes == ["DDP 4", "DDP 3", "DDP 2", "one rank", "DDP 2"]
    assert loaded["one_to_four_nodes"][:4] == [0, 4, 4, 4]
    # It ended by itself, after the step in which SIGTERM came, or after the next.
    assert loaded["preempted"] in ([0, 6], [0, 7])
    for name in ("killed_in_place", "preempted"):  # with dropout
        for check in ("random-numbers-go-on", "ranks-draw-apart"):
            assert outcomes(tests[name])[check] == "PASS", (name, check)
    assert loaded["nodes_leave_and_join"][2] in (9, 10)
    replayed = "killed", "killed_in_place", "hung", "torn", "disk_full", "nan_batch"
    for name in (*replayed, "killed_while_saving"):
        assert outcomes(tests[name])["replays-agree"] == "PASS"


def test_what_people_forget_fails_by_its_cause(judged):
    tests = judged("recoverable_mistakes")
    causes = {name: test["cause"] for name, test in tests.items()}
    assert {name: test["verdict"] for name, test in tests.items()} == dict.fromkeys(
        WRONG, "FAIL"
    ), causes
    for name, words in WRONG.items():
        assert words in causes[name], name
        if name not in ("written_in_place", "written_by_all_at_once", "nan_trained_on"):
            assert "pass 2" in causes[name], name  # and where it was lost
    passed = {name for name, test in tests.items() if test["loss_only_gate"]["passes"]}
    assert passed == WRONG.keys() - SEEN_BY_LOSS


def test_masks_name_what_no_state_of_a_generator_shows(judged):
    names = ("killed_with_seeded_masks", "masks_start_over", "masks_of_one_rank")
    right, again, alike = map(judged("recoverable_masks", *names).get, names)
    assert right["verdict"] == "PASS", right["cause"]
    assert outcomes(right)["dropout-masks-differ"] == "PASS"
    assert (again["verdict"], alike["verdict"]) == ("FAIL", "FAIL")
    assert again["cause"].startswith("dropout draws the masks of step 1 again at step 5, on every")
    assert alike["cause"].startswith("ranks drop the same units: at step 5 the dropout masks of")
    for test in (again, alike):
        assert outcomes(test)["dropout-masks-differ"] == "FAIL"
        for check in ("random-numbers-go-on", "ranks-draw-apart"):
            assert outcomes(test)[check] == "PASS", check


def test_a_save_that_is_broken_off_loses_the_only_checkpoint_if_it_was_written_in_place(judged):
    names = ("killed_while_saving", "in_place_while_saving")
    right, wrong = map(judged("recoverable_one_file", *names).get, names)
    assert right["verdict"] == "PASS", right["cause"]
    assert [each["loaded_step"] for each in right["passes"]] == [0, 4]
    assert wrong["verdict"] == "FAIL"
    assert wrong["cause"].endswith(
        "pass 2 starts from the initial weights although step 4 was saved, once ckpt_torn had torn "
        "that of step 8"
    )
    assert "rename" in wrong["look_at"]


def test_ranks_are_traded_for_accumulation(judged):
    names = ("st_ddp1_acc4", "by_ranks_ddp1_acc4", "by_ranks_ddp2_acc2")
    right, wrong, hidden = map(judged("recoverable_space_time", *names).get, names)
    # Of as many microbatches as ranks, the mistake is none.
    assert (right["verdict"], hidden["verdict"]) == ("PASS", "PASS")
    assert wrong["verdict"] == "FAIL"
    assert "scaled by 4, which equals gradient accumulation steps (4)" in wrong["cause"]


def test_without_the_probe_the_curves_of_its_starts_are_judged(judged):
    names = ("resized", "checkpoint_ignored", "killed", "killed_optimizer_not_saved")
    names = (*names, "st_ddp1_acc4")
    right, wrong, killed, lost, traded = map(judged("recoverable_by_curves", *names).get, names)
    assert right["verdict"] == "PASS", right["cause"]
    assert [each["loaded_step"] for each in right["passes"]] == [0, 4, 8]
    found = outcomes(right)
    assert (found["passes-continuous"], found["segments-as-scheduled"]) == ("PASS", "PASS")
    assert (found["state-restored"], found["data-resumed"]) == ("SKIPPED", "SKIPPED")
    assert wrong["verdict"] == "FAIL"
    assert wrong["cause"].startswith(
        "state is lost at the resume: the program does not go on from the checkpoint of step 4: "
        "pass 2 starts from the initial weights although step 4"
    )
    assert killed["verdict"] == "PASS", killed["cause"]
    found = outcomes(killed)
    for check in ("passes-continuous", "replays-agree", "faults-struck", "recovers-in-time"):
        assert found[check] == "PASS", check
    # On a loaded machine it is killed later than at step 6.
    assert [each["loaded_step"] for each in killed["passes"]] in ([0, 4], [0, 8])
    assert lost["verdict"] == "FAIL"
    assert lost["cause"].startswith("a replay differs from the first time: loss of step ")
    assert traded["verdict"] == "PASS", traded["cause"]


def test_without_the_probe_its_checkpoint_is_cut(judged):
    names = ("torn", "torn_optimizer_not_saved", "torn_older_removed_first")
    right, lost, removed = map(judged("recoverable_by_curves", *names).get, names)
    assert right["verdict"] == "PASS", right["cause"]
    found = outcomes(right)
    for check in ("passes-continuous", "replays-agree", "faults-struck", "recovers-in-time"):
        assert found[check] == "PASS", check
    assert [each["loaded_step"] for each in right["passes"]] == [0, 4]
    assert right["passes"][0]["steps"][1] in range(9, 12)
    assert lost["verdict"] == "FAIL"
    assert lost["cause"].startswith("a replay differs from the first time: loss of step ")
    assert (removed["verdict"], removed["loss_only_gate"]["passes"]) == ("FAIL", True)
    assert removed["cause"] == "a checkpoint is missing: pass 1 has left no checkpoint of step 4"


def test_without_the_probe_it_is_asked_to_stop_and_made_to_hang(judged):
    names = ("preempted", "preempted_optimizer_not_saved")
    asked, lost = map(judged("recoverable_by_curves", *names).get, names)
    assert asked["verdict"] == "PASS", asked["cause"]
    first, second = asked["passes"]
    # It saved the step in which SIGTERM came, or the next one, and nothing is made again.
    assert second["loaded_step"] == first["steps"][1] >= 6
    assert "saved no step after SIGTERM" not in str(asked)
    assert lost["verdict"] == "FAIL"
    assert "pass 2" in lost["cause"]
    # SIGSTOP reaches no rank that is a fork of a server, so these start cold.
    hung = judged("recoverable_by_curves", "hung", toolchains=TOOLCHAINS)["hung"]
    assert hung["verdict"] == "PASS", hung["cause"]
    assert hung["passes"][0]["steps"][1] < 12  # the other rank waits
    assert [each["loaded_step"] for each in hung["passes"]] in ([0, 4], [0, 8])
    assert outcomes(hung)["replays-agree"] == "PASS"


def test_a_killed_program_fails_the_same_way_for_others(judged, folder, tmp_path):
    name = "rank_zero_alone_loads"
    judged("recoverable_mistakes", name)
    made = folder / "repro"
    words = ("repro", folder / "recoverable_mistakes", "--set", name, "--out", made)
    done = converge(folder, *words, toolchains=warm_torch())
    assert done.returncode == 0, done.stdout + done.stderr
    assert {str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()} == {
        *("ISSUE.md", "expected.json", "experiment.toml", "requirements.txt", "run.sh"),
        *("train_config.toml", "recoverable/mistakes.py", "recoverable/train.py"),
    }
    require_nobodys(made, folder)
    theirs = run_script(made, tmp_path / "theirs", warm_torch())
    assert theirs.code == 1, theirs.said
    wanted = expected(made)
    assert (theirs.test["verdict"], theirs.test["cause"]) == ("FAIL", wanted["cause"])
    failed = {check["name"] for check in theirs.test["checks"] if check["outcome"] == "FAIL"}
    assert failed == {check["name"] for check in wanted["failed_checks"]}
