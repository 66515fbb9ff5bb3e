"""References in float32 and matched controls: which runs a plan adds, and for which sets."""

import pytest
from plan_examples import CONTROL, HEAD, SURROUNDINGS

from converge_harness.errors import ConfigError
from converge_harness.model import FROZEN_STEPS, Precision, Role
from converge_harness.plan import in_float32, make_plan, precision_of, select, select_controls

MIXED = 'set = { "training.mixed_precision_param" = "bfloat16" }'
MIXED_CONTROL = f"[control]\nparallelism = {{ dp_shard = 2 }}\n{MIXED}\n"
TP = '[[test]]\nname = "tp"\nparallelism = { dp_shard = 2, tp = 2 }\n'
BF16 = '[[test]]\nname = "bf16"\nparallelism = { dp_shard = 2 }\ntechniques = ["bf16"]\n'


def short_runs(plan):
    return {job.name: job for job in plan.jobs if job.role in (Role.REFERENCE, Role.MATCHED)}


def test_sets_in_float32_need_no_reference(planner):
    plan = planner.sets(TP)
    assert short_runs(plan) == {}
    assert all(job.frozen == 0 and job.reference is None for job in plan.jobs)


def test_a_set_with_random_numbers_of_its_own_makes_frozen_steps_in_float32_too(planner):
    plan = planner.sets(TP + "own_random_numbers = true\n" + TP.replace('"tp"', '"other"'))
    assert short_runs(plan) == {}
    assert (plan.job("tp").matched, plan.job("tp").reference) == ("control", "control")
    assert plan.job("control").frozen == plan.job("tp").frozen == FROZEN_STEPS
    assert (plan.job("other").frozen, plan.job("other").reference) == (0, None)


def test_a_reference_is_the_control_in_float32_for_one_step(planner):
    plan = planner.text(HEAD + MIXED_CONTROL + TP + MIXED)
    assert list(short_runs(plan)) == ["control.float32"]
    reference, control, test = (plan.job(name) for name in ("control.float32", "control", "tp"))
    assert reference.role is Role.REFERENCE
    assert (reference.precision, reference.steps) == (Precision.FP32, 1)
    assert reference.spec.parallelism == control.spec.parallelism
    assert reference.needs == control.needs  # the same initial weights
    assert (test.matched, test.reference) == ("control", "control.float32")
    assert {job.frozen for job in (reference, control, test)} == {FROZEN_STEPS}
    repeats = [job for job in plan.jobs if job.role is Role.REPEAT]
    assert [str(job.repeat) for job in repeats] == [
        *("rerun", "rounding", "rounding.2", "rounding.3", "permute", "permute.2")
    ]
    assert {job.frozen for job in repeats} == {0}


def test_a_coarser_set_gets_a_matched_control_and_the_control_is_the_reference(planner):
    plan = planner.sets(TP + BF16)
    assert list(short_runs(plan)) == ["control.bfloat16"]
    matched = plan.job("control.bfloat16")
    assert (matched.role, matched.precision, matched.steps) == (Role.MATCHED, Precision.BF16, 1)
    assert matched.spec.overrides["training.dtype"] == "bfloat16"
    test = plan.job("bf16")
    assert (test.matched, test.reference) == ("control.bfloat16", "control")
    assert plan.job("control").frozen == test.frozen == FROZEN_STEPS
    assert plan.job("tp").frozen == 0


def test_two_mixed_precisions_have_a_matched_control_each(planner):
    fsdp = "parallelism = { dp_shard = 2 }"
    key = '"training.mixed_precision_param"'
    sets = [
        f'[[test]]\nname = "{name}"\n{fsdp}\nset = {{ {key} = "{name}" }}\n'
        for name in ("bfloat16", "float16")
    ]
    plan = planner.sets("".join(sets))
    assert list(short_runs(plan)) == ["control.mixed", "control.mixed_float16"]
    assert plan.job("float16").matched == "control.mixed_float16"


def test_a_coarser_set_of_a_low_precision_control_has_both(planner):
    float8 = '[[test]]\nname = "float8"\nparallelism = { dp_shard = 2 }\ntechniques = ["float8"]\n'
    plan = planner.text(HEAD + MIXED_CONTROL + float8 + MIXED)
    assert list(short_runs(plan)) == ["control.float32", "control.float8_mixed"]
    test = plan.job("float8")
    assert (test.matched, test.reference) == ("control.float8_mixed", "control.float32")
    assert plan.job("control.float8_mixed").precision is Precision.FLOAT8
    assert plan.job("control.float32").spec.techniques == ()


def test_an_anchor_is_the_measure_of_its_control(planner):
    anchor = f'[anchor]\nname = "one"\nparallelism = {{ dp_shard = 1 }}\n{MIXED}\n'
    plan = planner.text(HEAD + MIXED_CONTROL + anchor + TP + MIXED)
    control = plan.job("control")
    assert (control.matched, control.reference) == ("one", "control.float32")
    assert plan.job("one").frozen == FROZEN_STEPS


def test_reference_and_frozen_steps_can_be_switched_off(planner):
    off = planner.text("reference = false" + HEAD + MIXED_CONTROL + TP + MIXED)
    assert short_runs(off) == {}
    assert off.job("tp").frozen == 0
    text = HEAD + "[probe]\nfrozen = 0\n" + MIXED_CONTROL + TP + MIXED
    without = planner.text(text)
    assert without.job("tp").reference == "control.float32"
    assert {job.frozen for job in without.jobs} == {0}


def test_frozen_steps_count_to_the_identity(planner):
    eight = planner.text(HEAD + "[probe]\nfrozen = 8\n" + MIXED_CONTROL + TP + MIXED)
    sixteen = planner.text(HEAD + MIXED_CONTROL + TP + MIXED)
    assert eight.job("tp").identity != sixteen.job("tp").identity
    assert eight.job("control.rerun").identity == sixteen.job("control.rerun").identity


def test_an_ulp_of_low_precision_is_made_as_rounding(planner):
    """An ulp of a weight in float32 is lost in the cast to bfloat16."""
    plan = planner.text('repeats = ["ulp.3", "rounding.3"]' + HEAD + MIXED_CONTROL + TP + MIXED)
    made = [job.name for job in plan.jobs if job.role is Role.REPEAT]
    assert made == ["control.rounding.3"]
    plain = planner.text('repeats = ["ulp.3"]' + HEAD + CONTROL + TP)
    assert [job.name for job in plain.jobs if job.role is Role.REPEAT] == ["control.ulp.3"]


def test_sets_that_resume_are_not_measured(planner):
    elastic = (
        '[[test]]\nname = "e"\nkind = "elastic"\n'
        "segments = [{ until = 10, dp_shard = 2 },"
        " { until = 20, dp_shard = 1 }]\n"
    )
    plan = planner.text(HEAD + MIXED_CONTROL + elastic + MIXED)
    assert (plan.job("e").reference, plan.job("e").frozen) == (None, 0)


def test_a_set_cannot_take_the_name_of_a_short_run(planner):
    taken = TP.replace('"tp"', '"control.float32"')
    with pytest.raises(
        ConfigError,
        match=r"control\.float32.*is the name of a run that converge makes for a control",
    ):
        planner.text(HEAD + MIXED_CONTROL + taken + MIXED)


def test_an_experiment_in_float32_is_the_same_but_for_what_it_computes_in(planner):
    plan = planner.text(HEAD + MIXED_CONTROL + TP + MIXED + "\n" + BF16.replace("bf16", "b", 1))
    made = in_float32(plan.experiment)
    for spec in (*made.controls, *made.tests):
        assert precision_of(spec) is Precision.FP32
        assert spec.techniques == ()
    assert [spec.name for spec in made.tests] == ["tp", "b"]
    assert made.tests[0].parallelism == plan.job("tp").spec.parallelism
    assert "training.steps" not in made.tests[0].overrides


def test_a_control_is_one_run_whichever_of_its_sets_are_asked_for(planner):
    """Else its calibration, or a part of the matrix, would be of another control."""
    whole = planner.sets(TP + BF16)
    toolchains = {job.toolchain.name: job.toolchain for job in whole.jobs}

    def control_of(experiment):
        return make_plan(experiment, toolchains, SURROUNDINGS).job("control")

    part = select(whole.experiment, ["tp"])
    assert control_of(part).identity == whole.job("control").identity
    assert short_runs(make_plan(part, toolchains, SURROUNDINGS)) == {}
    alone = select_controls(whole.experiment, [])
    assert control_of(alone).identity == whole.job("control").identity
