"""What nothing was known of is said by subject, and no check is left out."""

from converge_harness.judge import CHECKS
from converge_harness.model import Tier
from converge_harness.report.check_subjects import subjects


def test_every_check_that_may_be_skipped_has_a_subject():
    always = {
        "control-sound",
        "complete",
        "steps-increase",
        "values-present",
        "finite",
        "something-trained",
        "same-steps",
        "loss-first-step",
        "loss-envelope",
    }
    for question in CHECKS:
        asked = question.tier not in (Tier.EQUIVALENCE, Tier.RESUME)
        if asked and question.name not in always:
            assert subjects([question.name]) != (question.name,), question.name


def test_subjects_stand_once_and_unknown_names_as_they_are():
    names = ["same-tokens", "buffers-envelope", "new-check", "buffers-first-steps"]
    assert subjects(names) == ("token counts", "buffers", "new-check")


def test_without_logits_only_losses_were_not_recomputed():
    assert subjects(["loss-recomputed-envelope", "reported-loss-is-recomputed"]) == (
        "recomputed losses",
    )
    assert subjects(["grad-norm-recomputed-envelope", "reported-grad-norm-is-recomputed"]) == (
        "recomputed grad norms",
    )
