"""Runs of a user's own program: judged as ours where it is probed, by their curves where not."""

from dataclasses import replace
from pathlib import Path

import pytest
from judge_examples import LOSSES, SAMPLE_STEPS, judge, run, samples, truncated, with_signals

from converge_harness.model import (
    CauseClass,
    Evidence,
    Judgement,
    Outcome,
    Parallelism,
    SetSpec,
    TrainConfig,
)
from converge_harness.readers.run_folder.documents import in_force_of
from converge_harness.trainers.command import trained_by
from converge_harness.trainers.command.settings import Command

DDP2 = Parallelism(dp_replicate=2)
SIZES = {"local_batch_size": 4, "global_batch_size": -1, "seq_len": 256}


def spec(name="ddp2", *, probed=True, **changes):
    command = Command(("train.py",), Path("/lab"), probed=probed)
    config = TrainConfig("x.toml", {"training": SIZES})
    made = SetSpec(name, DDP2, config, "mine", trainer=trained_by(command))
    return replace(made, **changes)


def seen(**changes):
    """``in_force.json`` as the probe's library leaves it."""
    probe = {"wrapping": "DDP", "gradients": "before clipping", "recomputes_loss": True}
    document = {
        "world_size": 2,
        "degrees": {"dp_replicate": 2, "dp_shard": 1, "tp": 1, "cp": 1, "pp": 1, "ep": 1},
        "seq_len": 256,
        "local_batch_size": 4,
        "global_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "param_dtype": "float32",
        "config": {"training.seq_len": 256},
        "declared": [],
        **changes,
        "probe": {**probe, **changes.get("probe", {})},
    }
    return in_force_of(document)


def compared():
    """Replicas that were looked at, as DDP has them."""
    return tuple(
        replace(sample, compared={"parameter": 3, "gradient": 3})
        for sample in run(parallelism=DDP2).replicas
    )


def probed(name="ddp2", in_force=None, **changes):
    given = {"in_force": in_force or seen(), "replicas": compared(), **changes}
    return run(name, DDP2, **given)


def judged(test, control=None, test_spec=None, control_spec=None):
    return judge(
        test,
        control or probed("one"),
        spec=test_spec or spec(),
        control_spec=control_spec or spec("one"),
    )


def outcome(verdict, name):
    (found,) = (check for check in verdict.checks if check.name == name)
    return found


def test_a_probed_run_like_its_control_passes_whatever_wraps_it():
    zero = probed(in_force=seen(probe={"wrapping": "ZeRO-2"}))
    verdict = judged(zero)
    assert verdict.judgement is Judgement.PASS, verdict.cause
    skipped = {check.name for check in verdict.checks if check.outcome is Outcome.SKIPPED}
    assert skipped <= {"repeats-sound", "loss-equivalent"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world_size": 1}, "a world of 2 ranks is named, 1 were started"),
        ({"degrees": {"dp_replicate": 1}}, "dp_replicate 2 is named, 1 is in force"),
        ({"local_batch_size": 2}, "local_batch_size 4 is named, 2 is in force"),
        ({"global_batch_size": 4}, "global_batch_size 8 is named, 4 is in force"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps 1 is named, 2 is"),
        (
            {"param_dtype": "bfloat16"},
            "training.dtype is not named, which means float32, bfloat16 is in force",
        ),
        ({"param_dtype": "bfloat16+float32"}, "float32, bfloat16+float32 is in force"),
        ({"param_dtype": "float32+float8_e4m3fn"}, "float32+float8_e4m3fn is in force"),
        ({"seq_len": 128}, "training.seq_len 256 is named, 128 is in force"),
    ],
)
def test_a_size_that_is_not_as_called_is_invalid(changes, words):
    verdict = judged(probed(in_force=seen(**changes)))
    assert verdict.judgement is Judgement.INVALID
    assert words in outcome(verdict, "named-in-force").detail


def test_a_switch_of_a_set_that_its_program_turned_off_is_invalid():
    ran = seen(
        config={"training.seq_len": 256, "megatron.flags": "--swiglu --sequence-parallel"},
        declared=["megatron.flags"],
        probe={"switched_off": ["--sequence-parallel"]},
    )
    for flags in ("--swiglu --sequence-parallel", ["--swiglu", "--sequence-parallel"]):
        test_spec = spec(overrides={"megatron.flags": flags})
        named = outcome(judged(probed(in_force=ran), test_spec=test_spec), "named-in-force")
        assert named.outcome is Outcome.INVALID
        assert named.detail.startswith("--sequence-parallel is named, and the program switched it")
    # One that the command gives to every set is meant for those that can use it.
    for_all = judged(probed(in_force=seen(probe={"switched_off": ["--sequence-parallel"]})))
    assert outcome(for_all, "named-in-force").outcome is Outcome.PASS


def test_parameters_of_a_finer_type_beside_the_named_one_are_as_called():
    sizes = {**SIZES, "dtype": "bfloat16"}
    named = spec(train_config=TrainConfig("x.toml", {"training": sizes}))
    mixed = probed(in_force=seen(param_dtype="bfloat16+float32"))
    assert outcome(judged(mixed, test_spec=named), "named-in-force").outcome is Outcome.PASS


def test_parameters_of_a_finer_type_than_float32_need_no_name():
    double = judged(probed(in_force=seen(param_dtype="float64")))
    assert outcome(double, "named-in-force").outcome is Outcome.PASS


def test_what_could_not_be_seen_is_no_fault():
    unseen = dict.fromkeys(
        ("seq_len", "local_batch_size", "gradient_accumulation_steps", "param_dtype")
    )
    verdict = judged(probed(in_force=seen(**unseen, degrees=dict.fromkeys(("tp", "pp")))))
    assert verdict.judgement is Judgement.PASS, verdict.cause


@pytest.mark.parametrize(
    ("probe", "words"),
    [
        ({"gradients": "at the optimizer's step"}, "call probe.gradients() in both"),
        ({"recomputes_loss": False}, "was recomputed in one and not in ddp2"),
    ],
)
def test_runs_that_were_probed_otherwise_are_no_match(probe, words):
    test = probed(in_force=seen(probe=probe))
    if "recomputes_loss" in probe:
        test = with_signals(test, loss_recomputed=None)
    verdict = judged(test)
    assert verdict.judgement is Judgement.INVALID
    assert words in outcome(verdict, "probed-alike").detail


def test_without_logits_and_norm_on_both_sides_the_rest_is_judged():
    without = {"in_force": seen(probe={"recomputes_loss": False})}
    test, control = (
        with_signals(probed(name, **without), loss_recomputed=None, grad_norm=None)
        for name in ("ddp2", "one")
    )
    verdict = judged(test, control)
    assert verdict.judgement is Judgement.PASS, verdict.cause
    assert outcome(verdict, "loss-recomputed-envelope").outcome is Outcome.SKIPPED
    one_sided = judged(test, probed("one", **without))
    assert one_sided.judgement is Judgement.INVALID


def test_a_norm_before_clipping_is_not_held_against_gradients_after_it():
    after = seen(probe={"gradients": "at the optimizer's step"})
    test, control = (
        with_signals(probed(name, in_force=after), grad_norm=lambda _step, value: 3 * value)
        for name in ("ddp2", "one")
    )
    verdict = judged(test, control)
    assert verdict.judgement is Judgement.PASS, verdict.cause
    assert outcome(verdict, "reported-grad-norm-is-recomputed").outcome is Outcome.SKIPPED


def test_a_wrong_number_sends_nobody_to_torchtitans_functions():
    verdict = judged(with_signals(probed(), loss=lambda _step, value: 2 * value))
    assert verdict.cause_class is CauseClass.METRIC_ONLY
    assert "dist_mean" not in verdict.look_at
    assert "by how many tokens or ranks" in verdict.look_at


def test_a_probe_of_a_model_that_does_not_train_shows_nothing():
    idle = {"grad_norm_recomputed": lambda _step, _value: 0.0, "grad_norm": None}
    test, control = (with_signals(probed(name), **idle) for name in ("ddp2", "one"))
    verdict = judged(test, control)
    assert verdict.judgement is Judgement.INVALID
    assert "every gradient of one is zero" in outcome(verdict, "gradients-present").detail
    alone = judged(test)
    assert alone.judgement is Judgement.FAIL
    assert "scaled by 0" in alone.cause


def test_other_initial_weights_are_no_comparison():
    other = probed(samples=samples(initial=lambda _name, values: values + 0.1))
    verdict = judged(other)
    assert verdict.judgement is Judgement.INVALID
    assert "derive them from {seed} alone" in verdict.cause


def test_initial_weights_that_nobody_sampled_are_not_asked_for():
    test, control = (
        probed(name, samples=(), sample_steps=(), replicas=()) for name in ("ddp2", "one")
    )
    assert judged(test, control).judgement is Judgement.PASS
    unsampled = judged(replace(test, sample_steps=SAMPLE_STEPS), control)
    assert unsampled.judgement is Judgement.INVALID


# -------------------------------------------------------------------- curves only


def curve(name="ddp2", losses=LOSSES, **changes):
    steps = tuple(range(1, len(losses) + 1))
    made = Evidence(name, f"runs/{name}", steps, {"loss": losses}, expected_steps=len(LOSSES))
    return replace(made, identity=name, **changes)


def by_curve(test, control=None):
    plain = spec(probed=False)
    return judge(test, control or curve("one"), spec=plain, control_spec=plain)


def test_a_curve_alone_passes_and_says_what_was_not_looked_at():
    verdict = by_curve(curve())
    assert verdict.judgement is Judgement.PASS, verdict.cause
    assert outcome(verdict, "gradients-first-steps").outcome is Outcome.SKIPPED
    assert outcome(verdict, "named-in-force").outcome is Outcome.SKIPPED


@pytest.mark.parametrize(
    ("test", "judgement", "words"),
    [
        (truncated(curve(), 10), Judgement.INVALID, "left 10 of 20 steps"),
        (
            replace(curve(losses=LOSSES[4::5]), steps=(5, 10, 15, 20)),
            Judgement.INVALID,
            "one in 5, up to step 20: log every step, or every n-th to the last",
        ),
        (curve(losses=(*LOSSES, 1.0)), Judgement.INVALID, "left 21 of 20 steps"),
        (curve(losses=(*LOSSES[:5], float("nan"), *LOSSES[6:])), Judgement.FAIL, "nan at step 6"),
        (
            replace(curve(losses=()), complete=False, problems=("/loss.csv: does not exist",)),
            Judgement.INVALID,
            "left no step at all: /loss.csv: does not exist",
        ),
    ],
)
def test_a_curve_that_is_not_whole_never_passes(test, judgement, words):
    verdict = by_curve(test)
    assert verdict.judgement is judgement
    assert words in verdict.cause


def test_curves_that_were_logged_rarely_are_judged_on_their_grid():
    rare = replace(curve("one", LOSSES[4::5]), steps=(5, 10, 15, 20), logged_every=5)
    same = by_curve(replace(rare, name="ddp2", identity="ddp2"), rare)
    assert same.judgement is Judgement.PASS, same.cause
    assert outcome(same, "same-steps").detail == "4 steps, one in 5"
    wrong = replace(rare, name="ddp2", identity="ddp2", signals={"loss": (4.0, 3.0, 2.0, 1.0)})
    assert by_curve(wrong, rare).judgement is Judgement.FAIL
    assert by_curve(curve(), rare).judgement is Judgement.INVALID
    assert by_curve(rare).judgement is Judgement.INVALID


def test_steps_that_the_control_has_not_are_no_match():
    verdict = by_curve(replace(curve(), steps=tuple(range(len(LOSSES)))))
    assert verdict.judgement is Judgement.INVALID
    assert outcome(verdict, "same-numbering").detail.endswith("; log both from the same step")
    assert "--count-from-1" not in verdict.next_command  # its numbers are in the run folder
    later = by_curve(replace(curve(), steps=tuple(range(2, len(LOSSES) + 2))))
    assert "lacks step 1" in outcome(later, "same-steps").detail
