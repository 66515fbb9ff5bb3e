"""What would change a verdict: the nearest limit of a PASS, what a FAIL lacks, unseen evidence."""

from converge_harness.model import (
    Calibration,
    Check,
    Judgement,
    Limit,
    Outcome,
    Precision,
    Tier,
    Verdict,
)
from converge_harness.report.view.counterfactual import counterfactual

TAUGHT = Calibration("c", None, Precision.FP32, ("c-ulp", "c-permute"), taught_by=2)


def check(name, outcome=Outcome.PASS, measured=None, limit=None, detail=""):
    allowed = None if limit is None else Limit(limit, "floor of fp32 arithmetic")
    return Check(name, f"{name}.", Tier.ENVELOPE, outcome, measured, allowed, detail=detail)


def words(judgement, *checks, calibration=TAUGHT):
    return counterfactual(Verdict("a", "c", judgement, checks=checks), calibration)


def test_a_pass_names_the_limit_that_it_came_nearest_to():
    found = words(
        Judgement.PASS,
        check("far", measured=1e-9, limit=1e-6),
        check("near", measured=5e-7, limit=1e-6),
    )
    (sentence,) = found
    assert "near reached 5e-7 of its limit 1e-6; more than 2x that" in sentence


def test_a_bit_identical_pass_came_near_no_limit():
    (found,) = words(Judgement.PASS, check("loss", measured=0.0, limit=1e-6))
    assert found.startswith("Nothing came near a limit")


def test_a_fail_says_how_far_it_is_from_passing_and_that_a_floor_was_not_learnt():
    found = words(
        Judgement.FAIL, check("loss", Outcome.FAIL, 1e-3, 1e-6), check("other"), calibration=None
    )
    assert found[0] == "It would PASS if loss did: every other check holds."
    assert "1,000x its limit of 1e-6 (floor of fp32 arithmetic)" in found[1]
    assert found[2].startswith(
        "These limits are fixed floors, not learnt from repeats of the control"
    )
    assert len(words(Judgement.FAIL, check("loss", Outcome.FAIL, 1e-3, 1e-6))) == 2


def test_a_fail_without_all_evidence_does_not_say_that_the_rest_holds():
    stopped = check("complete", Outcome.INVALID)
    found = words(Judgement.FAIL, check("loss", Outcome.FAIL, 1e-3, 1e-6), stopped)
    assert found[0] == "It would PASS only if loss and complete did."


def test_every_failed_check_would_have_to_hold():
    failed = [check(f"c{number}", Outcome.FAIL, 2.0, 1.0) for number in range(5)]
    found = words(Judgement.FAIL, *failed)
    assert found[0] == "It would PASS only if all 5 failed checks did."
    assert len(found) == 4


def test_an_unsettled_check_says_what_it_lacks():
    lacking = check("loss-equivalent", Outcome.INCONCLUSIVE, detail="40 more steps would settle it")
    assert words(Judgement.INCONCLUSIVE, lacking) == (
        "loss-equivalent must be settled: 40 more steps would settle it.",
    )


def test_checks_without_evidence_are_named_whatever_the_verdict():
    unseen = check("same-batches", Outcome.SKIPPED)
    for judgement in Judgement:
        assert "same-batches" in words(judgement, unseen)[-1]
