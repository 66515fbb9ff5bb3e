"""Each class of silent bug is recognised by its signature."""

import math
from dataclasses import replace

import pytest
from judge_examples import (
    LOSSES,
    NORMS,
    SAMPLES,
    STEPS,
    TOKENS,
    foreign,
    in_force,
    judge,
    run,
    spec,
    with_signals,
)

from converge_harness.judge import calibrate
from converge_harness.model import CauseClass, Judgement, Parallelism, Precision, Technique

CONTROL = run()
SPEC = spec()
BOTH_NORMS = ("grad_norm", "grad_norm_recomputed")
BOTH_LOSSES = ("loss", "loss_recomputed")


def cause_of(test, control=CONTROL, test_spec=None):
    verdict = judge(test, control, spec=test_spec, control_spec=SPEC)
    assert verdict.judgement is Judgement.FAIL, verdict
    assert verdict.next_command == f"converge compare runs/fsdp2 runs/{test.name}"
    return verdict.cause


def changed(test, change, *signals):
    return with_signals(test, **dict.fromkeys(signals, change))


def parallel(name="t", **degrees):
    return run(name, Parallelism(**degrees))


# ------------------------------------------------------------- C1: scale

SCALED = {
    "2318": (parallel(dp_replicate=2), 0.5, "scaled by 0.5, which equals 1 / the replicate degree"),
    "tp": (parallel(dp_shard=2, tp=4), 4, "scaled by 4, which equals the TP degree (4)"),
    "cp": (parallel(dp_shard=2, cp=2), 0.5, "equals 1 / the CP degree (2)"),
    "pp": (parallel(dp_shard=2, pp=3), 3, "equals the PP degree (3)"),
    "microbatches": (parallel(dp_shard=2, pp=2), 4, "pipeline microbatches (4)"),
    "loss mesh": (parallel(dp_shard=2, cp=3), 6, "share the loss (dp x cp) (6)"),
    "world": (parallel(dp_shard=2, cp=2, tp=3), 12, "equals the world size (12)"),
    "hsdp": (parallel(dp_replicate=3, dp_shard=2), 6, "the data-parallel degree (6)"),
    "shared with the control": (parallel(dp_shard=2), 2, "equals the shard degree (2)"),
    "accumulation": (
        replace(run("t"), in_force=in_force(gradient_accumulation_steps=8)),
        1 / 8,
        "equals 1 / gradient accumulation steps (8)",
    ),
    "nothing known": (run("t"), 1.37, "scaled by 1.37, the same at every step, which equals no"),
}


@pytest.mark.parametrize("case", SCALED)
def test_a_scale_is_named(case):
    test, factor, words = SCALED[case]
    cause = cause_of(changed(test, lambda step, x: x * factor, *BOTH_NORMS))
    assert words in cause
    assert "gradients are scaled" in cause
    assert cause.endswith("at step 1, while the loss is the same")


def test_degrees_that_the_control_shares_explain_less():
    test = parallel(dp_shard=2, tp=2)
    cause = cause_of(changed(test, lambda step, x: x * 2, *BOTH_NORMS))
    assert "equals the TP degree (2):" in cause


def test_gradients_not_divided_by_the_tokens_2972():
    test = changed(parallel(dp_shard=2, pp=2), lambda step, x: x * TOKENS[step - 1], *BOTH_NORMS)
    cause = cause_of(test)
    assert "equals the valid tokens of the step (1000)" in cause
    per_rank = changed(
        parallel(dp_shard=2, pp=2), lambda step, x: x * TOKENS[step - 1] / 2, *BOTH_NORMS
    )
    assert "valid tokens of a data-parallel rank (500)" in cause_of(per_rank)


# --------------------------------------------------------- C2: direction


def test_a_missing_gradient_is_named():
    test = replace(
        with_signals(
            changed(run("t"), lambda step, x: x * 1.0019, *BOTH_NORMS),
            grads_missing=lambda *_: 1.0,
        ),
        grads_missing=("tok_embeddings.weight",),
    )
    assert cause_of(test).startswith("no gradient for tok_embeddings.weight at step 1")


def test_a_norm_off_by_no_single_factor_is_a_wrong_backward():
    test = changed(run("t"), lambda step, x: x * (1.1 + 0.05 * (step % 3)), *BOTH_NORMS)
    cause = cause_of(test)
    assert "the backward pass differs: recomputed grad norm is off by 0.15 at step 1" in cause
    assert "not by one factor" in cause


def test_a_small_constant_excess_is_not_called_a_scale():
    test = changed(run("t"), lambda step, x: x * 1.0019, *BOTH_NORMS)
    assert "the backward pass differs" in cause_of(test)


def test_two_steps_are_too_few_to_call_a_factor_constant():
    control = foreign("a", loss=LOSSES[:2], grad_norm=NORMS[:2])
    test = with_signals(control, grad_norm=lambda step, x: x * 13.7)
    assert (
        "the curves differ: grad norm 12.33 (control: 0.9) at step 1 (13.7 times as much), while "
        "the loss is the same" in judge(test, control).cause
    )


# --------------------------------------------------- C4, C5: loss, metrics


def test_a_wrong_objective():
    cause = cause_of(changed(run("t"), lambda step, x: x * 1.01, *BOTH_LOSSES, *BOTH_NORMS))
    assert "the forward pass or the objective differs: recomputed loss 8.08 (control: 8)" in cause
    assert "on the same samples and weights" in cause


def test_two_losses_are_printed_with_digits_that_differ():
    norms_off = changed(run("t"), lambda step, x: x * 1.01, *BOTH_NORMS)
    cause = cause_of(changed(norms_off, lambda step, x: x * (1 + 6e-7), *BOTH_LOSSES))
    assert "recomputed loss 8.0000048 (control: 8) at step 1" in cause


def test_a_wrong_objective_without_digests_claims_less():
    control = foreign("a", loss=LOSSES)
    test = with_signals(control, loss=lambda step, x: x * 1.249)
    cause = judge(test, control).cause
    assert "the curves differ: loss 9.992 (control: 8) at step 1 (relative 0.25);" in cause
    assert "two curves do not show the cause" in cause


def test_a_logged_loss_times_the_loss_mesh_is_a_wrong_metric():
    cause = cause_of(changed(run("t"), lambda step, x: 2 * x, "loss"))
    assert "only the metric is wrong: the reported loss is 2 times the control's at step 1" in cause
    assert "which equals the shard degree (2)" in cause
    assert "training itself is right" in cause


def test_a_wrong_grad_norm_metric_may_clip_wrongly():
    silent = replace(run("t"), samples=tuple(replace(each, post_step=None) for each in SAMPLES))
    cause = cause_of(changed(silent, lambda step, x: x * 0.7, "grad_norm"))
    assert "only the metric is wrong: the reported grad norm" in cause
    assert "unless clipping uses that norm" in cause


def test_without_a_probe_a_scaled_loss_beside_a_right_norm_is_probably_the_metric():
    control = foreign("a", loss=LOSSES, grad_norm=NORMS)
    test = with_signals(control, loss=lambda step, x: 2 * x)
    assert "probably only the metric is wrong" in judge(test, control).cause
    bent = with_signals(control, loss=lambda step, x: x * (1.5 + step / 20))
    assert "the curves differ: loss" in judge(bent, control).cause


def test_a_run_that_contradicts_itself_alone_has_a_wrong_metric():
    control = run()
    test = with_signals(run("t"), loss=lambda step, x: x * (1 + 1.5e-5))
    verdict = judge(test, control, spec=SPEC, control_spec=SPEC, tolerances={"loss": 1e-3})
    assert verdict.judgement is Judgement.FAIL
    assert verdict.cause_class is CauseClass.METRIC_ONLY
    assert "only the metric is wrong: the loss that is reported " in verdict.cause
    assert " times the recomputed one, by no single factor, while all that" in verdict.cause
    assert "while all that was compared with the control agrees" in verdict.cause


# ------------------------------------------------- C3, C6: state and data


def test_other_samples_are_named_before_what_they_do():
    test = changed(run("t"), lambda step, x: x * 1.01, *BOTH_LOSSES)
    test = replace(test, batch_digests=("f" * 16,) * STEPS)
    cause = cause_of(test)
    # A digest is of samples with their labels, so by itself it does not show which of them differ.
    assert cause.startswith("the batch or its labels differ: t trained on other samples")
    assert "note that" not in cause  # the cause is itself what may explain the difference
    later = ("f" * 16, *[f"{step:016x}" for step in range(1, STEPS)])
    late = replace(test, batch_digests=later)
    shifted = replace(CONTROL, batch_digests=tuple(f"{step:016x}" for step in range(STEPS)))
    by_one = replace(test, batch_digests=(*shifted.batch_digests[1:], "f" * 16))
    assert cause_of(late, shifted).startswith("the batch or its labels differ")
    assert cause_of(by_one, shifted) == (
        "data order: t trained on other samples than the control at step 1, so the curves cannot "
        "agree; these samples are the control's of step 2"
    )


def test_another_schedule_is_named_when_the_curves_part_after_it():
    test = with_signals(
        run("t"),
        loss=lambda step, x: x * (1.01 if step > 12 else 1),
        lr=lambda step, x: x * (0.1 if step > 10 else 1),
    )
    assert cause_of(test).startswith("learning-rate schedule: lr is 0.0001 at step 11, 0.001 in")
    before = changed(test, lambda step, x: x * (1.02 if step > 5 else 1), *BOTH_LOSSES)
    assert "agree until step 6" in cause_of(before)


def test_a_difference_from_the_first_update_on():
    test = changed(run("t"), lambda step, x: x * (1.001 if step > 1 else 1), *BOTH_LOSSES)
    cause = cause_of(replace(test, samples=()))  # which would show that the first update agrees
    assert "agree until step 2, where" in cause
    assert "the first update differs" in cause


def test_a_later_onset_is_state():
    test = changed(run("t"), lambda step, x: x * (1.001 if step > 9 else 1), *BOTH_LOSSES)
    assert "agree until step 10, where" in cause_of(test)
    assert "state that is kept from step to step" in cause_of(test)


def test_under_a_coarse_floor_the_onset_may_be_late():
    test = changed(run("t"), lambda step, x: x * (1 + 1e-3 * step), *BOTH_LOSSES)
    cause = cause_of(replace(test, precision=Precision.FLOAT8))
    assert "agree until step 2, where" in cause
    assert "hide below the floor of float8 arithmetic" in cause


def test_one_step_alone():
    test = changed(run("t"), lambda step, x: x * (100 if step == 7 else 1), *BOTH_LOSSES)
    assert "one step alone is off: loss is 100 times the control's at step 7" in cause_of(test)


def test_the_last_step_alone_may_be_the_beginning_of_anything():
    test = changed(run("t"), lambda step, x: x * (2 if step == STEPS else 1), *BOTH_LOSSES)
    assert f"agree until step {STEPS}" in cause_of(test)


def test_a_zero_in_the_control_is_no_crash():
    control = foreign("a", loss=LOSSES, grad_norm=(0.0, *NORMS[1:]))
    test = foreign("b", loss=LOSSES, grad_norm=NORMS)
    cause = judge(test, control).cause
    assert "infinitely many times" in cause or "backward pass differs" in cause


def test_a_zero_loss_alone_is_no_crash():
    control = foreign("a", loss=(*LOSSES[:5], 0.0, *LOSSES[6:]))
    cause = judge(foreign("b", loss=LOSSES), control).cause
    assert "loss is infinitely many times the control's at step 6" in cause


# -------------------------------------------------------------- the others


def test_a_blow_up_names_what_was_off_before():
    test = with_signals(
        run("t"),
        loss=lambda step, x: math.nan if step == 12 else x,
        loss_recomputed=lambda step, x: math.nan if step == 12 else x,
        grad_norm=lambda step, x: x * (1.5 if step > 7 else 1),
    )
    cause = cause_of(test)
    assert "training blew up: loss is nan at step 12" in cause
    assert "grad norm was already off at step 8" in cause


def test_what_the_comparison_itself_may_explain_is_said():
    test_spec = spec(techniques=(Technique.FLOAT8,))
    test = changed(run("t"), lambda step, x: x * 1.01, *BOTH_LOSSES)
    cause = cause_of(test, test_spec=test_spec)
    assert "note that float8 is named but not in force" in cause


def test_the_next_command_has_the_repeats_that_taught_the_limits():
    test = changed(run("t"), lambda step, x: 2 * x, *BOTH_NORMS)
    repeats = [run("fsdp2.rerun"), replace(run("ulp"), source="runs/fsdp2 ulp")]
    command = judge(test, CONTROL, calibrate(CONTROL, repeats)).next_command
    assert command == (
        "converge compare runs/fsdp2 runs/t --repeat runs/fsdp2.rerun --repeat 'runs/fsdp2 ulp'"
    )


def test_paths_with_spaces_are_one_word_of_the_next_command():
    test = replace(with_signals(run("t"), loss=lambda *_: math.nan), source="my runs/it's <b>")
    command = judge(test, CONTROL).next_command
    assert command == "converge compare runs/fsdp2 'my runs/it'\"'\"'s <b>'"


# ---------------------------------------------------------- loss-only gate
