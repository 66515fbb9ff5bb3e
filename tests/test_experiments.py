"""The experiments that come with the project can all be planned."""

from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import pytest

from converge_harness.experiment import load_experiment
from converge_harness.launch.stopping import looks
from converge_harness.model import (
    FROZEN_STEPS,
    Job,
    Precision,
    RepeatKind,
    Role,
    Stop,
    Surroundings,
    Technique,
    Toolchain,
)
from converge_harness.plan import describe, make_plan
from converge_harness.trainers import trainer_of

FOLDER = Path(__file__).parent.parent / "experiments"
TITAN_03 = Toolchain(
    name="torchtitan-0.3.0",
    python=Path("python"),
    dialect="titan_0_3",
    versions={"torch": "2.15.0", "torchtitan": "0.3.0"},
)
TITAN_02 = replace(
    TITAN_03,
    name="torchtitan-0.2.2",
    dialect="titan_0_2",
    versions={"torch": "2.13.0", "torchtitan": "0.2.2"},
)
TITAN_03_OLDER_TORCH = replace(
    TITAN_03,
    name="torchtitan-0.3.0-torch-2.13",
    versions={"torch": "2.13.0", "torchtitan": "0.3.0"},
)
TITAN_MAIN = replace(
    TITAN_03,
    name="torchtitan-main",
    dialect="titan_main",
    versions={"torch": "2.15.0", "torchtitan": "0.2.2+gb5bcd76c66d0"},
)
TITAN_STREAMING = replace(TITAN_03, name="torchtitan-0.3.0-streaming")
FRAMEWORKS = tuple(
    replace(TITAN_03, name=name, dialect="command")
    for name in ("composer-0.32.1", "deepspeed-0.19.8", "transformers-5.23.0")
)
MEGATRON = replace(
    TITAN_03,
    name="megatron-core-0.16.1",
    dialect="megatron_0_16",
    versions={"torch": "2.13.0", "megatron-core": "0.16.1"},
)
NEWEST_MEGATRON = replace(
    MEGATRON,
    name="megatron-core-0.19.2",
    versions={"torch": "2.13.0", "megatron-core": "0.19.2"},
)
TOOLCHAINS = {
    each.name: each
    for each in (
        *(TITAN_02, TITAN_03, TITAN_03_OLDER_TORCH, TITAN_MAIN, TITAN_STREAMING),
        *FRAMEWORKS,
        *(MEGATRON, NEWEST_MEGATRON),
    )
}


@pytest.fixture(autouse=True)
def weights(tmp_path, monkeypatch):
    """What `nox -s upgrade` makes, for the experiment that starts from it."""
    folder = tmp_path / ".converge" / "upgrade_weights"
    folder.mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp"):
        (folder / name).write_text("x")
    monkeypatch.chdir(tmp_path)


def plan_of(name: str):
    experiment = load_experiment(FOLDER / f"{name}.toml")
    specs = (*experiment.controls, *experiment.tests)
    techniques = [technique for spec in specs for technique in spec.own_techniques]
    own = [function for technique in techniques for function in technique.functions]
    surroundings = Surroundings(
        hardware="cpu-test",
        rank_code="r",
        data={spec.train_config.data: "d" for spec in specs if spec.train_config.data},
        injected=dict.fromkeys([*own, *(spec.inject for spec in specs if spec.inject)], "i"),
        sources={path: "p" for spec in specs for path, *_ in trainer_of(spec).sources(spec)},
        seed_checkpoint="s",
    )
    return make_plan(experiment, TOOLCHAINS, surroundings)


def jobs_of(name: str) -> dict[str, Job]:
    return {job.name: job for job in plan_of(name).jobs if job.role is Role.TEST}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_every_experiment_can_be_planned(path):
    rows = describe(plan_of(path.stem))
    assert len(rows) > 1
    assert all(row.serves for row in rows)


def test_smoke_covers_every_parallelism_and_the_techniques_of_a_cpu():
    jobs = jobs_of("smoke")
    assert {str(job.spec.parallelism) for job in jobs.values()} == {
        "FSDP 2",
        "DDP 2",
        "HSDP 2x2",
        "FSDP 2 x TP 2",
        "FSDP 2 x PP 2",
        "FSDP 2 x CP 2",
        "FSDP 2 x TP 2 x PP 2",
    }
    techniques = {each for job in jobs.values() for each in job.spec.techniques}
    assert techniques == {Technique.FLOAT8, Technique.COMPILE, Technique.BF16}
    assert {job.tokens_per_step for job in jobs.values()} == {8 * 256}
    assert min(job.steps for job in jobs.values()) >= 20
    assert jobs["grad_accumulation"].gradient_accumulation_steps == 2
    assert max(job.world_size for job in jobs.values()) == 8
    assert len({job.needs for job in jobs.values()}) == 1


def test_smoke_waives_one_rule_and_says_why():
    (waived,) = plan_of("smoke").waived
    assert waived.startswith("hsdp2x2 waives same-dp-degree")
    assert "does not depend on the data-parallel degree" in waived


def test_smoke_challenges_its_control_with_one_device():
    anchor = next(job for job in plan_of("smoke").jobs if job.role is Role.ANCHOR)
    assert (anchor.world_size, anchor.tokens_per_step) == (1, 8 * 256)
    assert anchor.precision is Precision.FP32
    assert anchor.needs == plan_of("smoke").job("fsdp2").needs


@pytest.mark.parametrize("name", ["smoke", "known_bugs", "async_tp"])
def test_envelopes_are_learnt_from_all_kinds_of_repeats(name):
    plan = plan_of(name)
    for control in plan.experiment.controls:
        repeats = [
            job.repeat
            for job in plan.jobs
            if job.role is Role.REPEAT and job.spec.name == control.name
        ]
        low = plan.job(control.name).precision is not Precision.FP32
        spoken, silent = RepeatKind.ROUNDING, RepeatKind.ULP
        if not low:
            spoken, silent = silent, spoken
        assert {repeat.kind for repeat in repeats} == set(RepeatKind) - {silent}
        assert sum(repeat.kind is spoken for repeat in repeats) >= 2


def test_smoke_judges_what_computes_in_bf16_by_a_run_in_float32():
    plan = plan_of("smoke")
    for name in ("mixed_tp2", "mixed_compile"):
        test = plan.job(name)
        assert (test.matched, test.reference) == ("fsdp2_mixed", "fsdp2_mixed.float32")
        assert test.frozen == plan.job("fsdp2_mixed.float32").frozen == FROZEN_STEPS
    assert plan.job("bf16").reference == plan.job("float8").reference == "fsdp2"


def test_four_d_has_sixteen_ranks_and_every_technique():
    repaired, released = jobs_of("four_d").values()
    every = {Technique.FLOAT8, Technique.FLOAT8_TP, Technique.COMPILE, Technique.ASYNC_TP}
    for job in (repaired, released):
        assert job.world_size == 16
        assert every <= set(job.spec.techniques)
        assert job.spec.setting("parallelism.pipeline_parallel_microbatch_size") == 2
    assert [each.name for each in repaired.spec.own_techniques] == ["divided_pipeline_gradients"]
    assert released.spec.own_techniques == ()


@pytest.mark.parametrize(
    ("name", "control", "before", "after"),
    [
        ("upgrade_main", "fsdp2_of_0.3.0", "torchtitan-0.3.0", "torchtitan-main"),
        (
            *("upgrade_torch", "fsdp2_torch_2.13"),
            *("torchtitan-0.3.0-torch-2.13", "torchtitan-0.3.0"),
        ),
        ("upgrade_megatron", "dp2_of_0.16.1", "megatron-core-0.16.1", "megatron-core-0.19.2"),
    ],
)
def test_an_upgrade_has_its_sets_in_the_newer_toolchain(name, control, before, after):
    """A set that names no toolchain has its control's, whatever [trainer] says."""
    plan = plan_of(name)
    assert plan.job(control).toolchain.name == before
    tests = [job for job in plan.jobs if job.role is Role.TEST]
    assert {job.toolchain.name for job in tests} == {after}


def test_an_auxiliary_loss_of_microbatches_is_not_repeated_with_other_samples_in_them():
    names = {job.name for job in plan_of("megatron").jobs}
    assert "experts_dp2.permute" in names
    assert {"balanced_dp2.rerun", "balanced_dp2.ulp"} <= names
    assert not any(name.startswith("balanced_dp2.permute") for name in names)


def test_known_bugs_inject_nothing():
    jobs = jobs_of("known_bugs")
    assert len(jobs) == 13
    assert all(job.spec.inject is None and job.spec.note for job in jobs.values())
    left_out = [fix for job in jobs.values() for fix in job.spec.without_fixes]
    assert sorted(left_out) == ["act-grad", "cp-rotation", "float8-tp", "rs-scatter", "symm-mem"]


def test_llama3_8b_is_the_table_of_the_converging_guide():
    rows = {row.name: row for row in describe(plan_of("llama3_8b"))}
    assert {name: row.world_size for name, row in rows.items()} == {
        "fsdp8": 8,
        "fsdp8_tp2_pp2": 32,
        "fsdp8_tp2_cp2_pp2": 64,
        "fsdp8_cp8": 64,
    }
    assert {(row.steps, row.global_batch_size, row.seq_len) for row in rows.values()} == {
        (3000, 32, 8192)
    }
    control = load_experiment(FOLDER / "llama3_8b.toml").controls[0]
    assert control.setting("lr_scheduler.warmup_steps") == 600


def test_guide_is_the_table_of_the_converging_guide_at_debug_size():
    plan = plan_of("guide")
    control, tests = plan.job("fsdp2"), jobs_of("guide")
    assert str(control.spec.parallelism) == "FSDP 2"
    assert {name: str(job.spec.parallelism) for name, job in tests.items()} == {
        "tp2_pp2": "TP 2 x PP 2",
        "tp2_cp2_pp2": "TP 2 x CP 2 x PP 2",
        "cp4": "CP 4",
    }
    assert {job.seed for job in plan.jobs if job.spec.name == "tp2_cp2_pp2"} == {42, 43, 44}
    for job in (control, *tests.values()):
        assert (job.steps, job.spec.setting("lr_scheduler.warmup_steps")) == (3000, 600)
        assert job.spec.setting("training.mixed_precision_param") == "bfloat16"
        assert job.tokens_per_step == 4 * 512
        data = job.spec.train_config.data
        assert data is not None
        assert data.tokens > job.steps * job.tokens_per_step  # nothing is seen twice


@pytest.mark.parametrize("name", ["guide_drift", "guide_bugs"])
def test_the_control_of_guide_and_its_repeats_are_used_again(name):
    guide, other = plan_of("guide"), plan_of(name)
    shared = {job.name for job in other.jobs if job.role in {Role.CONTROL, Role.REPEAT}}
    assert len(shared) == 4
    assert {other.job(name).identity for name in shared} == {
        guide.job(name).identity for name in shared
    }


def test_guide_bugs_has_one_of_each_class_that_is_stopped_after_16_steps():
    plan, jobs = plan_of("guide_bugs"), jobs_of("guide_bugs")
    classes = [(job.spec.note or "").partition(":")[0] for job in jobs.values()]
    assert classes == [f"C{number}" for number in range(1, 8)]
    for job in jobs.values():
        assert looks(job, plan.experiment)[0] == 16


def test_guide_drift_stops_nothing():
    jobs = jobs_of("guide_drift").values()
    assert {job.spec.stop for job in jobs} == {Stop.NEVER}
    assert {job.name for job in jobs if job.spec.inject is None} == {"ddp2", "grad_accumulation"}
    assert {job.name for job in jobs if job.spec.inject is not None} == {
        "gradient_scale",
        "one_head_unscaled",
        "one_layer_stale",
    }


def levels_of(spec):
    """What a set of ``megatron_pairs`` says of each factor."""
    degrees, setting = spec.parallelism, spec.setting
    overlapped = setting("ddp.overlap_param_gather")
    sharded = "overlapped" if overlapped else "sharded" if degrees.dp_shard > 1 else "replicated"
    tensor = "sequence parallel" if setting("transformer.sequence_parallel") else degrees.tp
    tied = setting("gpt.share_embeddings_and_output_weights")
    experts = setting("transformer.moe_token_dispatcher_type") if degrees.ep > 1 else None
    return {
        "data": sharded,
        "tensor": tensor,
        "pipeline": spec.pipeline_schedule,
        "model": experts or ("tied" if tied else "dense"),
        "recomputed": bool(setting("transformer.recompute_granularity")),
        "bf16": Technique.BF16 in spec.techniques,
    }


def of_fsdp(spec):
    """The same of ``megatron_fsdp``, which has other factors."""
    found = levels_of(spec)
    del found["pipeline"]
    return {
        **found,
        "data": spec.setting("ddp.data_parallel_sharding_strategy"),
        "overlapped": bool(spec.setting("ddp.overlap_param_gather")),
        "accumulated": spec.setting("training.local_batch_size") == 1,
    }


def pairs_of(experiment, levels):
    """How many levels each factor has, and the pairs of levels that no set has."""
    jobs = [job for job in plan_of(experiment).jobs if job.role is Role.TEST]
    sets = [levels(job.spec) for job in jobs]
    known = {factor: {each[factor] for each in sets} for factor in sets[0]}
    missing = [
        (one, other)
        for first, second in combinations(known, 2)
        for one, other in product(known[first], known[second])
        if not any(each[first] == one and each[second] == other for each in sets)
    ]
    return [len(found) for found in known.values()], sorted(missing, key=str)


def test_the_pairs_of_megatron_core_all_meet():
    counts, missing = pairs_of("megatron_pairs", levels_of)
    assert counts == [3, 3, 3, 4, 2, 2]
    # Experts under tensor parallelism need sequence parallelism.
    assert missing == [(2, "allgather"), (2, "alltoall")]


def test_the_pairs_of_megatron_fsdp_all_meet():
    counts, missing = pairs_of("megatron_fsdp", of_fsdp)
    assert counts == [3, 3, 4, 2, 2, 2, 2]
    assert missing == [(2, "allgather"), (2, "alltoall")]  # the same
