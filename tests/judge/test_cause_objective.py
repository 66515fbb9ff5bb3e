"""An objective other than the mean cross entropy: in the test set alone, or in both runs."""

from dataclasses import replace

import pytest
from cause_examples import (
    BOTH_LOSSES,
    BOTH_NORMS,
    CONTROL,
    broken,
    changed,
    scaled,
    turned,
    verdict_of,
)
from judge_examples import judge

from converge_harness.model import CauseClass, Judgement, Parallelism, Precision


def everywhere(_name):
    return True


def smoothed(run):
    """Label smoothing: what is reported has a second term, and the probe recomputes the first."""
    return changed(run, lambda step, x: 0.9 * x + 0.7 + 0.001 * step, "loss")


def test_another_mean_of_the_same_logits_is_another_objective():
    test = broken(gradient=turned(everywhere, 1e-2), update=turned(everywhere, 0.1))
    test = changed(test, lambda _, x: x * (1 + 3e-5), "loss")
    test = changed(test, lambda step, x: x * (1 + 1e-3 * (step > 1)), "loss_recomputed")
    test = changed(test, lambda _, x: x * 1.001, *BOTH_NORMS)
    verdict = verdict_of(test)
    assert verdict.cause_class is CauseClass.OBJECTIVE
    assert "the cross entropy of the same logits agrees" in verdict.cause
    assert "how the loss is normalised" in verdict.look_at


def test_wrong_gradients_of_some_tensors_do_not_make_another_objective():
    some = turned(lambda name: "norm" in name)
    test = changed(broken(gradient=some), lambda _, x: x * (1 + 3e-5), "loss")
    assert verdict_of(test).cause_class is CauseClass.GRADIENT_DIRECTION


@pytest.mark.parametrize("factor", [0.5, 2036 / 2048])
def test_a_loss_divided_by_another_count_is_another_objective(factor):
    test = broken(Parallelism(dp_shard=2, cp=2), gradient=scaled(factor))
    gradients_alone = changed(test, lambda _, x: factor * x, *BOTH_NORMS)
    assert verdict_of(gradients_alone).cause_class is CauseClass.GRADIENT_SCALE
    verdict = verdict_of(changed(gradients_alone, lambda _, x: factor * x, "loss"))
    assert verdict.cause_class is CauseClass.OBJECTIVE
    assert "the trainer's loss and all" in verdict.cause
    assert "divided by another count" in verdict.cause
    assert "how the loss is normalised" in verdict.look_at


def test_a_loss_that_is_negated_has_the_other_sign():
    test = changed(broken(gradient=scaled(-1.0)), lambda _, x: -x, "loss")
    verdict = verdict_of(test)
    assert verdict.cause_class is CauseClass.OBJECTIVE
    assert "are -1 times the control's" in verdict.cause
    assert "the loss has the other sign" in verdict.cause
    assert "divided by another count" not in verdict.cause
    assert "where the loss is negated" in verdict.look_at


def test_an_objective_that_the_control_has_too_is_no_wrong_metric():
    control = smoothed(CONTROL)
    assert judge(smoothed(broken()), control).judgement is Judgement.PASS
    test = smoothed(broken(gradient=turned(everywhere, 1e-2)))
    test = changed(test, lambda _, x: x * 1.01, *BOTH_LOSSES)
    assert verdict_of(test, control).cause_class is CauseClass.OBJECTIVE


def test_a_control_that_misreports_its_loss_by_a_fixed_factor_judges_nothing():
    doubled = changed(CONTROL, lambda _, x: 2 * x, "loss")
    for test in (changed(broken(), lambda _, x: 2 * x, "loss"), broken()):
        assert judge(test, doubled).judgement is not Judgement.PASS


def test_a_mean_of_means_that_agrees_at_the_first_step_shows_over_the_others():
    test = broken(gradient=turned(everywhere, 1e-3))
    test = changed(test, lambda step, x: x * (1 + 2e-6 * ((step - 1) % 5)), "loss")
    verdict = verdict_of(test)
    assert verdict.cause_class is CauseClass.OBJECTIVE
    assert "is not the mean cross entropy" in verdict.cause
    same = verdict_of(broken(gradient=turned(everywhere, 1e-3)))
    assert same.cause_class is CauseClass.GRADIENT_DIRECTION


def test_a_loss_off_by_little_beside_gradients_that_are_all_off_is_the_forward_pass():
    test = broken(gradient=turned(everywhere, 1e-2))
    for slight, cause in ((8e-8, CauseClass.OBJECTIVE), (3e-9, CauseClass.GRADIENT_DIRECTION)):
        run = changed(test, lambda _, x, slight=slight: x * (1 + slight), *BOTH_LOSSES)
        assert verdict_of(run).cause_class is cause
    some = changed(
        broken(gradient=turned(lambda name: "norm" in name, 1e-2)),
        lambda _, x: x * (1 + 8e-8),
        *BOTH_LOSSES,
    )
    assert verdict_of(some).cause_class is CauseClass.GRADIENT_DIRECTION


# ------------------------------------------------------------------ low precision

LOW = {"precision": Precision.BF16}
REFERENCE = replace(CONTROL, **LOW)


def low(run, change):
    """The run in bfloat16 with another reported loss."""
    return replace(changed(run, change, "loss"), **LOW)


def with_term(step, x):
    """A loss with a term that changes slowly, as z-loss does."""
    return x + 1e-2 - 1e-4 * step


def test_gradients_inside_their_limits_follow_an_objective_when_the_forward_pass_is_the_same():
    verdict = verdict_of(low(broken(gradient=turned(everywhere, 1e-2)), with_term), REFERENCE)
    assert verdict.cause_class is CauseClass.OBJECTIVE
    assert "the same to the last bit, and 35 of 35 gradients are not" in verdict.cause
    assert "z-loss" in verdict.look_at


def test_the_output_is_the_first_that_an_objective_turns():
    wrong = turned(lambda name: name in ("output.weight", "norm.weight"), 0.25)
    verdict = verdict_of(low(broken(gradient=wrong), with_term), REFERENCE)
    assert verdict.cause_class is CauseClass.OBJECTIVE
    doubled = verdict_of(low(broken(gradient=wrong), lambda _, x: 2 * x), REFERENCE)
    assert "objective differs" not in doubled.cause
    elsewhere = turned(lambda name: "attention" in name, 0.2)
    verdict = verdict_of(low(broken(gradient=elsewhere), with_term), REFERENCE)
    assert "objective differs" not in verdict.cause


def test_a_term_whose_gradients_are_rounded_away_is_recognised_by_its_shape():
    verdict = verdict_of(low(broken(), with_term), REFERENCE)
    assert verdict.cause_class is CauseClass.OBJECTIVE
    assert "another term: the loss that the trainer reports is the cross entropy" in verdict.cause
    assert "may be that only the log has it" in verdict.cause
    fp32 = verdict_of(changed(broken(), with_term, "loss"))
    assert fp32.cause_class is CauseClass.METRIC_ONLY


METRICS = {
    "a factor": lambda step, x: 1.01 * x,
    "up and down": lambda step, x: x * (1 + 1e-2 * (-1) ** step),
    "another share at each step": lambda step, x: x * (1.01 + 5e-3 * (step % 3)),
    "a rank's part": lambda step, x: x * (0.5 + 1e-3 * step),
}


@pytest.mark.parametrize("case", METRICS)
def test_a_metric_that_is_wrong_under_the_same_gradients_is_no_objective(case):
    verdict = verdict_of(low(broken(), METRICS[case]), REFERENCE)
    assert verdict.cause_class is CauseClass.METRIC_ONLY
    assert "training itself is right" in verdict.cause


def test_a_wrong_metric_beside_coarse_gradients_is_not_called_right_training():
    tp2 = Parallelism(dp_shard=2, tp=2)
    run = low(broken(tp2, noise=2e-2), lambda step, x: x * (1.01 + 5e-3 * (step % 3)))
    verdict = verdict_of(run, REFERENCE)
    assert verdict.cause_class is CauseClass.METRIC_ONLY
    assert "training itself is right" not in verdict.cause
    assert "as far as bf16 arithmetic shows" in verdict.cause
