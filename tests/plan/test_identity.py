"""Identities change with what changes numbers, and with nothing else."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_examples import SURROUNDINGS, TITAN_02, TITAN_03

from converge_harness.errors import ConfigError
from converge_harness.model import (
    Experiment,
    Fault,
    FaultKind,
    Loader,
    Parallelism,
    Recovery,
    Repeat,
    RepeatKind,
    RestartOwner,
    Role,
    Segment,
    SetSpec,
    SyntheticData,
    Technique,
    TrainConfig,
)
from converge_harness.plan import identity_facts, make_plan
from converge_harness.plan.identity import job_identity, seed_identity
from converge_harness.trainers.torchtitan import TORCHTITAN

CONFIG = TrainConfig(
    path="base.toml",
    settings={
        "training": {"steps": 20, "local_batch_size": 4, "global_batch_size": 8, "seq_len": 256}
    },
    module="llama3",
    config="llama3_debugmodel",
    model={"dim": 64},
    data=SyntheticData(),
)
SPEC = SetSpec(
    name="a",
    parallelism=Parallelism(dp_shard=2),
    train_config=CONFIG,
    toolchain="torchtitan-0.3.0",
    overrides={"lr_scheduler.warmup_steps": 2},
    trainer=TORCHTITAN,
)
INJECT = {"/a/bug.py:f": "i1", "/b/bug.py:f": "i1", "/a/bug.py:g": "i1", "/a/other.py:f": "i2"}
TEST = '[[test]]\nname = "t"\nparallelism = { dp_shard = 2, tp = 2 }\n'
WORLD = replace(SURROUNDINGS, injected=INJECT)


def identity(spec=SPEC, toolchain=TITAN_03, seed=42, world=WORLD, **options) -> str:
    starts_from = seed_identity(spec, toolchain, seed, world)
    return job_identity(spec, toolchain, seed, world, **{"starts_from": starts_from, **options})


def with_config(**changes) -> SetSpec:
    return replace(SPEC, train_config=replace(CONFIG, **changes))


def with_recovery(**changes) -> SetSpec:
    return replace(SPEC, recovery=replace(RECOVERY, **changes))


SEGMENTS = (Segment(10, Parallelism(dp_shard=2), 4), Segment(20, Parallelism(), 8))
OTHER_DP = {"parallelism": Parallelism(dp_shard=4), "local_batch_size": 2}
RECOVERY = Recovery((Fault(FaultKind.KILL, 6),), checkpoint_every=4)
SAME = {
    "name": replace(SPEC, name="b"),
    "note": replace(SPEC, note="because"),
    "tolerances": replace(SPEC, tolerances={"loss": 1.0}),
    "waive": replace(SPEC, waive=("same-steps",)),
    "control": replace(SPEC, control="b"),
    "toolchain name": replace(SPEC, toolchain="mine"),
    "train config path": with_config(path="elsewhere/base.toml"),
    "key order": replace(SPEC, overrides=dict(reversed(SPEC.overrides.items()))),
}
OTHER = {
    "parallelism": replace(SPEC, parallelism=Parallelism(dp_shard=2, tp=2)),
    "dp layout": replace(SPEC, parallelism=Parallelism(dp_replicate=2)),
    "techniques": replace(SPEC, techniques=(Technique.COMPILE,)),
    "schedule": replace(SPEC, pipeline_schedule="GPipe"),
    "rotation": replace(SPEC, cp_rotation="alltoall"),
    "not deterministic": replace(SPEC, deterministic=False),
    "SPMD backend": replace(SPEC, spmd_backend="full_dtensor"),
    "override value": replace(SPEC, overrides={"lr_scheduler.warmup_steps": 3}),
    "override type": replace(SPEC, overrides={"lr_scheduler.warmup_steps": 2.0}),
    "override key": replace(SPEC, overrides={"lr_scheduler.decay_steps": 2}),
    "without_fixes": replace(SPEC, without_fixes=("act-grad",)),
    "inject": replace(SPEC, inject="/a/bug.py:f"),
    "inject function": replace(SPEC, inject="/a/bug.py:g"),
    "inject contents": replace(SPEC, inject="/a/other.py:f"),
    "settings": with_config(settings={"training": {"steps": 21}}),
    "module": with_config(module="qwen3"),
    "config": with_config(config="llama3_8b"),
    "model": with_config(model={"dim": 128}),
    "data": with_config(data=SyntheticData(seed=2)),
    "own data": with_config(data=None),
    "loader": with_config(loader=Loader.TORCHTITAN),
    "segments": replace(SPEC, segments=SEGMENTS),
    "a segment's end": replace(SPEC, segments=(replace(SEGMENTS[0], until=9), SEGMENTS[1])),
    "a segment's degrees": replace(SPEC, segments=(SEGMENTS[0], replace(SEGMENTS[1], **OTHER_DP))),
    "recovery": replace(SPEC, recovery=RECOVERY),
    "faults": with_recovery(faults=(Fault(FaultKind.KILL, 6, rank=1),)),
    "checkpoints": with_recovery(checkpoint_every=5),
    "who restarts": with_recovery(restarts=RestartOwner.TORCHRUN),
    "restarts": with_recovery(max_restarts=9),
    "nodes": with_recovery(nodes=(1, 2)),
}


@pytest.mark.parametrize("change", SAME)
def test_what_changes_no_number_changes_no_identity(change):
    assert identity(SAME[change]) == identity()


def test_whatever_else_changes_a_number_changes_the_identity():
    identities = [identity(), *(identity(spec) for spec in OTHER.values())]
    identities += [
        identity(seed=43),
        identity(toolchain=TITAN_02),
        identity(world=replace(WORLD, hardware="cpu-aarch64")),
        identity(world=replace(WORLD, rank_code="r2")),
        identity(world=replace(WORLD, data={SyntheticData(): "d9"})),
        identity(repeat=Repeat(RepeatKind.RERUN)),
        identity(repeat=Repeat(RepeatKind.ULP)),
        identity(repeat=Repeat(RepeatKind.ULP, 2)),
        identity(sample_steps=(0, 1)),
        identity(starts_from="0"),
    ]
    assert len(set(identities)) == len(identities)


def test_how_long_a_recovery_may_take_is_no_matter():
    assert identity(with_recovery(within_s=60.0)) == identity(with_recovery())


def test_how_long_a_recovery_may_take_decides_when_a_rank_that_hangs_is_given_up():
    hang = (Fault(FaultKind.HANG, 6),)
    shorter, default = (
        with_recovery(faults=hang, **changes) for changes in ({"within_s": 60.0}, {})
    )
    assert identity(shorter) != identity(default)


def test_a_checkpoint_that_the_file_names_stands_for_the_seed_job(planner):
    def planned(digest):
        world = replace(SURROUNDINGS, seed_checkpoint=digest)
        return planner.sets(TEST, trainer='seed_checkpoint = "c"\n', surroundings=world).jobs

    folder = planner.folder / "c"
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"m")
    (folder / "__0_0.distcp").write_bytes(b"s")
    jobs = planned("c1")
    assert [job.role for job in jobs if job.role is Role.SEED] == []
    assert {(job.needs, job.starts_from) for job in jobs} == {(None, folder)}
    others = [*planner.sets(TEST).jobs, *planned("c2")]
    assert not {job.identity for job in jobs} & {job.identity for job in others}


def test_where_an_injected_file_lies_is_no_matter():
    here, there = (identity(replace(SPEC, inject=f"/{folder}/bug.py:f")) for folder in "ab")
    assert here == there


def test_the_harness_version_is_no_matter():
    newer = replace(
        TITAN_03, versions={**TITAN_03.versions, "converge-harness": "9.9"}, name="mine"
    )
    assert identity(toolchain=newer) == identity()


def test_a_seed_checkpoint_depends_on_the_model_and_not_on_how_it_is_trained():
    def of(spec):
        return seed_identity(spec, TITAN_03, 42, WORLD)

    shared = ("parallelism", "techniques", "override value", "inject", "data", "own data")
    assert {of(OTHER[change]) for change in shared} == {of(SPEC)}
    assert of(with_config(model={"dim": 128})) != of(SPEC)
    assert of(replace(SPEC, overrides={"model.flavor": "8B"})) != of(SPEC)
    assert seed_identity(SPEC, TITAN_03, 43, WORLD) != of(SPEC)


# ---------------------------------------------------------------- hypothesis

UNTIMED = settings(deadline=None)
"""On a loaded machine one example may take long."""
DEGREES = st.sampled_from([1, 1, 2, 4])
TEST_SPECS = st.lists(
    st.builds(
        lambda parallelism, techniques, local: replace(
            SPEC,
            control="control",
            parallelism=parallelism,
            techniques=tuple(sorted(techniques)),
            pipeline_schedule="1F1B" if parallelism.pp > 1 else None,
            overrides={"training.local_batch_size": local},
            waive=("same-dp-degree", "same-token-budget", "pp-microbatches"),
        ),
        st.builds(Parallelism, DEGREES, DEGREES, DEGREES, DEGREES, DEGREES),
        st.sets(st.sampled_from(Technique)),
        st.sampled_from([1, 2, 4]),
    ),
    min_size=1,
    max_size=5,
)


def plan_of(specs):
    control = replace(SPEC, name="control", overrides={})
    tests = tuple(replace(spec, name=f"t{index}") for index, spec in enumerate(specs))
    experiment = Experiment("x", Path("x.toml"), (control,), tests)
    try:
        return make_plan(experiment, {TITAN_03.name: TITAN_03}, WORLD)
    except ConfigError:
        return None


@UNTIMED
@given(TEST_SPECS)
def test_every_plan_holds_together(specs):
    plan = plan_of(specs)
    if plan is None:
        return
    identities = {job.identity for job in plan.jobs if job.role is Role.SEED}
    assert len({job.name for job in plan.jobs}) == len(plan.jobs)
    for job in plan.jobs:
        degrees = job.spec.parallelism
        expected = degrees.dp_replicate * degrees.dp_shard * degrees.tp * degrees.cp * degrees.pp
        assert job.world_size == expected
        assert (job.role is Role.SEED) == (job.needs is None)
        assert job.needs is None or job.needs in identities
        assert (
            job.role is Role.SEED
            or job.local_batch_size * degrees.dp * job.gradient_accumulation_steps
            == job.global_batch_size
        )
    by_contents = {
        (job.spec.parallelism, job.spec.techniques, job.local_batch_size, job.role)
        for job in plan.jobs
        if job.role is Role.TEST
    }
    tests = {job.identity for job in plan.jobs if job.role is Role.TEST}
    assert len(tests) == len(by_contents)


@UNTIMED
@given(TEST_SPECS, st.randoms(use_true_random=False))
def test_the_order_of_sets_changes_no_identity(specs, random):
    shuffled = random.sample(specs, len(specs))
    plans = [plan_of(each) for each in (specs, shuffled)]
    if None in plans:
        assert plans == [None, None]
        return
    ours, theirs = ({job.identity for job in plan.jobs} for plan in plans)
    assert ours == theirs


def test_two_controls_differ_in_identity_when_and_only_when_their_facts_do(planner):
    plan = planner.test_set("parallelism = { dp_shard = 2 }")
    control, test, ulp = (plan.job(name) for name in ("control", "t", "control.ulp"))
    facts = identity_facts(control, SURROUNDINGS)
    assert facts == identity_facts(test, SURROUNDINGS) == identity_facts(ulp, SURROUNDINGS)
    assert control.identity == test.identity != ulp.identity
    assert json.loads(json.dumps(facts)) == facts
    moved = replace(SURROUNDINGS, hardware="cpu-aarch64")
    assert identity_facts(control, moved) != facts
    denser = planner.sets(TEST_SET + "[probe]\ncadence = 1")
    assert identity_facts(denser.job("control"), SURROUNDINGS) != facts
    recovery = Recovery((), checkpoint_every=4, restarts=RestartOwner.CLUSTER)
    requeued = replace(control, spec=replace(control.spec, recovery=recovery))
    facts = identity_facts(requeued, SURROUNDINGS)
    assert facts["recovery"]["checkpoint_every"] == 4
    assert json.loads(json.dumps(facts)) == facts


TEST_SET = '[[test]]\nname = "t"\nparallelism = { dp_shard = 2 }\n'
