"""From an experiment to jobs."""

from dataclasses import replace

import pytest
from plan_examples import CONTROL, HEAD

from converge_harness.model import Precision, Repeat, RepeatKind, Role

TWO_CONTROLS = """
[[test]]
name = "tp"
parallelism = { dp_shard = 2, tp = 2 }
[[test]]
name = "old"
control = "other"
parallelism = { dp_shard = 2 }
[controls.other]
parallelism = { dp_shard = 2 }
toolchain = "torchtitan-0.2.2"
"""


def test_jobs_come_as_seeds_controls_repeats_tests(planner):
    plan = planner.text('repeats = ["rerun", "ulp.2"]' + HEAD + CONTROL + TWO_CONTROLS)
    assert [(job.name, job.role) for job in plan.jobs] == [
        ("seed.1", Role.SEED),
        ("seed.2", Role.SEED),
        ("control", Role.CONTROL),
        ("other", Role.CONTROL),
        ("control.rerun", Role.REPEAT),
        ("control.ulp.2", Role.REPEAT),
        ("other.rerun", Role.REPEAT),
        ("other.ulp.2", Role.REPEAT),
        ("tp", Role.TEST),
        ("old", Role.TEST),
    ]
    repeat = plan.job("other.ulp.2")
    assert (repeat.repeat, repeat.spec.name) == (Repeat(RepeatKind.ULP, 2), "other")
    assert repeat.toolchain.name == "torchtitan-0.2.2"


def test_sets_share_a_seed_checkpoint_unless_their_weights_differ(planner):
    plan = planner.sets(TWO_CONTROLS)
    seeds = {job.identity: job for job in plan.jobs if job.role is Role.SEED}
    assert all(job.needs in seeds for job in plan.jobs if job.role is not Role.SEED)
    assert plan.job("tp").needs == plan.job("control").needs == plan.job("control.ulp").needs
    assert plan.job("old").needs == plan.job("other").needs != plan.job("tp").needs
    seed = seeds[plan.job("tp").needs]
    assert (seed.world_size, seed.needs, seed.precision) == (1, None, Precision.FP32)
    assert seed.spec.techniques == ()


def test_one_seed_checkpoint_is_named_plainly(planner):
    plan = planner.test_set('parallelism = { dp_shard = 2 }\ntechniques = ["float8"]')
    assert [job.name for job in plan.jobs if job.role is Role.SEED] == ["seed"]


def test_sizes_come_from_set_then_from_the_train_config(planner):
    job = planner.test_set(
        'parallelism = { dp_shard = 2 }\nset = { "training.local_batch_size" = 2 }'
    ).job("t")
    assert (job.local_batch_size, job.global_batch_size, job.seq_len, job.steps) == (2, 8, 256, 20)
    assert (job.gradient_accumulation_steps, job.tokens_per_step) == (2, 2048)


@pytest.mark.parametrize("default", ["", "global_batch_size = -1"])
def test_a_global_batch_that_is_not_set_is_local_batch_times_dp(planner, default):
    base = planner.folder / "base.toml"
    base.write_text(base.read_text().replace("global_batch_size = 8", default))
    job = planner.test_set("parallelism = { dp_shard = 2, tp = 2 }").job("t")
    assert job.global_batch_size == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('"training.steps" = 0', "training.steps: must be a positive integer, not 0"),
        ('"training.steps" = true', "training.steps: must be a positive integer, not True"),
        ('"training.seq_len" = "256"', "training.seq_len: must be a positive integer, not '256'"),
        ('"training.global_batch_size" = -2', "must be a positive integer, or -1 for local batch"),
    ],
)
def test_wrong_sizes_are_refused(planner, change, message):
    found = planner.refused(f"parallelism = {{ dp_shard = 2 }}\nset = {{ {change} }}")
    assert message in found[0]


def test_a_train_config_without_sizes_says_what_is_missing(planner):
    (planner.folder / "base.toml").write_text("[training]\nsteps = 3\n")
    found = planner.refused("parallelism = { dp_shard = 2 }")
    assert len(found) == 4
    assert found[0] == "'control': training.local_batch_size: is not set (in base.toml, or by set)"


@pytest.mark.parametrize(
    ("body", "precision"),
    [
        ("", Precision.FP32),
        ('techniques = ["compile"]', Precision.FP32),
        ('techniques = ["bf16"]', Precision.BF16),
        ('techniques = ["bf16", "float8"]', Precision.FLOAT8),
        ('techniques = ["float8_rowwise"]', Precision.FLOAT8),
        ('set = { "training.mixed_precision_param" = "bfloat16" }', Precision.BF16),
        ('set = { "training.mixed_precision_param" = "float16" }', Precision.BF16),
        ('set = { "training.dtype" = "bfloat16" }', Precision.BF16),
    ],
)
def test_precision_is_the_coarsest_arithmetic(planner, body, precision):
    plan = planner.test_set("parallelism = { dp_shard = 2 }\n" + body)
    assert plan.job("t").precision is precision


def test_mixed_precision_is_bfloat16_when_nothing_is_said(planner):
    base = planner.folder / "base.toml"
    base.write_text(base.read_text().replace('mixed_precision_param = "float32"', ""))
    plan = planner.test_set("parallelism = { dp_shard = 2 }")
    assert plan.job("t").precision is Precision.BF16


def test_a_job_is_not_its_repeat(planner):
    plan = planner.test_set("parallelism = { dp_shard = 2 }")
    same = replace(plan.job("control.rerun"), identity="", repeat=None)
    assert same.spec == plan.job("control").spec
    identities = [job.identity for job in plan.jobs if job.name != "t"]
    assert len(set(identities)) == len(identities)
    assert plan.job("t").identity == plan.job("control").identity  # one run serves both


ANCHOR = """
[anchor]
parallelism = {}
set = { "training.local_batch_size" = 8 }
"""
TEST = """
[[test]]
name = "t"
parallelism = { dp_shard = 2 }
"""


def test_an_anchor_comes_before_the_control_and_shares_its_seed_checkpoint(planner):
    plan = planner.sets(TEST + ANCHOR)
    roles = [job.role for job in plan.jobs if job.role is not Role.REPEAT]
    assert roles == [Role.SEED, Role.ANCHOR, Role.CONTROL, Role.TEST]
    anchor = plan.job("anchor")
    assert (anchor.world_size, anchor.needs) == (1, plan.job("control").needs)
    assert not [job for job in plan.jobs if job.role is Role.REPEAT and job.spec is anchor.spec]


def test_a_calibration_takes_the_place_of_repeats(planner):
    plan = planner.text('calibration = "c.json"' + HEAD + CONTROL + TEST)
    assert [job.name for job in plan.jobs] == ["seed", "control", "t"]
    learnt_anew = planner.sets(TEST)
    assert plan.job("control").identity == learnt_anew.job("control").identity


def test_default_repeats_leave_out_what_somebody_elses_loader_cannot_do(planner):
    base = planner.folder / "base.toml"
    base.write_text(base.read_text().replace("[converge.data]\n", ""))
    made = [str(job.repeat) for job in planner.sets(TEST).jobs if job.role is Role.REPEAT]
    assert made == ["rerun", "ulp", "ulp.2", "ulp.3"]


def test_every_job_that_trains_samples_by_the_cadence(planner):
    plan = planner.sets(TEST + ANCHOR)
    sampled = {job.sample_steps for job in plan.jobs if job.role is not Role.SEED}
    assert sampled == {(0, 1, 2, 4, 8, 16)}
    off = planner.sets(TEST + "[probe]\ncadence = 'off'")
    assert {job.sample_steps for job in off.jobs} == {()}
    assert off.job("control").identity != plan.job("control").identity
    assert off.job("seed").identity == plan.job("seed").identity


def test_a_listed_step_after_the_last_one_is_refused(planner):
    found = planner.refused("parallelism = { dp_shard = 2 }\n[probe]\ncadence = [0, 20, 21]")
    assert found[0].startswith("probe.cadence: step 21 comes after the last step of 'control'")


SEEDS = "[seeds]\ncount = 3\n"
RESUMED = """
[[test]]
name = "killed"
kind = "fault"
parallelism = { dp_shard = 2 }
checkpoint_every = 4
faults = [{ kind = "kill", step = 6 }]
"""


def test_every_set_that_trains_in_one_pass_is_trained_by_every_seed(planner):
    plan = planner.text('repeats = ["rerun"]' + HEAD + SEEDS + CONTROL + TWO_CONTROLS + RESUMED)
    others = [job for job in plan.jobs if job.role is Role.OTHER_SEED]
    assert [(job.name, job.seed, job.spec.name) for job in others] == [
        (f"{name}.seed{seed}", seed, name)
        for name in ("control", "other", "tp", "old")
        for seed in (43, 44)
    ]
    assert len({job.identity for job in others if job.spec.name in ("control", "tp")}) == 4
    assert plan.job("tp.seed43").needs == plan.job("control.seed43").needs
    assert plan.job("tp.seed43").needs != plan.job("tp").needs
    seeds = {job.identity: job.seed for job in plan.jobs if job.role is Role.SEED}
    assert all(seeds[job.needs] == job.seed for job in plan.jobs if job.role is not Role.SEED)


def test_a_run_by_another_seed_is_that_of_an_experiment_with_this_seed(planner):
    several = planner.text(HEAD + SEEDS + CONTROL + TWO_CONTROLS)
    one = planner.text("seed = 43" + HEAD + CONTROL + TWO_CONTROLS)
    for name in ("control", "tp", "old"):
        assert several.job(f"{name}.seed43").identity == one.job(name).identity


def test_an_intended_change_of_precision_needs_no_reference(planner):
    text = HEAD + CONTROL + '[[test]]\nname = "low"\ntechniques = ["bf16"]\n'
    text += "parallelism = { dp_shard = 2 }\n"
    asked, no_worse = planner.text(text), planner.text(text + 'ask = "no worse"\n')
    assert any(job.role is Role.MATCHED for job in asked.jobs)
    assert not any(job.role in (Role.MATCHED, Role.REFERENCE) for job in no_worse.jobs)
