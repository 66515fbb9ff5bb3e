"""Every rule: a set that keeps it and one that breaks it; waivers."""

from dataclasses import replace
from pathlib import Path

import pytest
from plan_examples import CLUSTER, CONTROL, HEAD, SURROUNDINGS

from converge_harness.errors import ConfigError
from converge_harness.model import Launcher, Toolchain
from converge_harness.plan.rules import RULES

FSDP_2 = "parallelism = { dp_shard = 2 }"
PP_2 = "parallelism = { dp_shard = 2, pp = 2 }\n"
INTERLEAVED = PP_2 + 'pipeline_schedule = "Interleaved1F1B"\n'
RESIZED = (
    "kind = 'elastic'\n"
    "segments = [{ until = 4, dp_shard = 2 }, { until = 20, dp_shard = 2, pp = 3 }]"
)
SETTLED = FSDP_2 + '\nstop = "settled"\n'
MICROBATCH = '"parallelism.pipeline_parallel_microbatch_size"'


def test_every_rule_has_a_name_and_a_title():
    assert list(RULES)[:6] == [
        "control-is-1d-fsdp",
        "control-is-repeated",
        "same-dp-degree",
        "same-token-budget",
        "same-steps",
        "same-initial-weights",
    ]
    assert all(rule.title.endswith(".") for rule in RULES.values())


KEPT = {
    "same-dp-degree": "parallelism = { dp_replicate = 2, tp = 2 }",
    "same-token-budget": FSDP_2 + '\nset = { "training.local_batch_size" = 2 }',
    "same-steps": FSDP_2,
    "same-initial-weights": FSDP_2 + '\ntechniques = ["float8"]',
    "pp-microbatches": INTERLEAVED,
    "pp-microbatches-fit": PP_2 + f"set = {{ {MICROBATCH} = 2 }}",
    "batch-divisible": FSDP_2 + '\nset = { "training.local_batch_size" = 1 }',
    "warm-up-is-known": SETTLED + 'set = { "lr_scheduler.warmup_steps" = 0 }',
    "sequence-divisible": "parallelism = { dp_shard = 2, cp = 2, tp = 2 }",
    "technique-needs": "parallelism = { dp_shard = 2, tp = 2 }\n"
    'techniques = ["compile", "async_tp", "float8", "float8_tp"]',
    "spmd-backend-exists": FSDP_2 + '\nspmd_backend = "full_dtensor"',
    "model-divisible": "parallelism = { dp_shard = 2, tp = 2 }",
    "expert-degree-divides": "parallelism = { dp_shard = 2, tp = 2, ep = 4 }",
    "ranks-fit": "parallelism = { dp_shard = 2, tp = 2 }",
    "nodes-filled": "parallelism = { dp_shard = 2, tp = 2, cp = 2 }",
}

BROKEN = [
    ("same-dp-degree", 'parallelism = { dp_shard = 4 }\nset = { "training.local_batch_size" = 2 }'),
    ("same-token-budget", FSDP_2 + '\nset = { "training.global_batch_size" = 16 }'),
    ("same-token-budget", FSDP_2 + '\nset = { "training.seq_len" = 512 }'),
    ("same-steps", FSDP_2 + '\nset = { "training.steps" = 21 }'),
    ("same-initial-weights", FSDP_2 + '\ntoolchain = "torchtitan-0.2.2"'),
    ("same-initial-weights", FSDP_2 + '\nset = { "model.flavor" = "8B" }'),
    ("pp-microbatches", INTERLEAVED + f"set = {{ {MICROBATCH} = 2 }}"),
    ("pp-microbatches-fit", PP_2 + f"set = {{ {MICROBATCH} = 3 }}"),
    ("pp-microbatches-fit", PP_2 + f"set = {{ {MICROBATCH} = 4 }}"),
    (
        "pp-microbatches-fit",
        INTERLEAVED + "set.training = { local_batch_size = 5, global_batch_size = 10 }",
    ),
    ("warm-up-is-known", SETTLED),
    ("batch-divisible", FSDP_2 + '\nset = { "training.local_batch_size" = 3 }'),
    (
        "sequence-divisible",
        'parallelism = { dp_shard = 2, tp = 2 }\nset = {"training.seq_len"=255}',
    ),
    ("sequence-divisible", "parallelism = { dp_shard = 2, cp = 4 }"),
    ("technique-needs", FSDP_2 + '\ntechniques = ["compile", "async_tp"]'),
    ("technique-needs", 'parallelism = { dp_shard = 2, tp = 2 }\ntechniques = ["async_tp"]'),
    ("technique-needs", 'parallelism = { dp_shard = 2, tp = 2 }\ntechniques = ["float8_tp"]'),
    ("technique-needs", FSDP_2 + '\ntechniques = ["float8", "float8_tp"]'),
    ("technique-needs", FSDP_2 + '\ntechniques = ["float8", "float8_rowwise"]'),
    ("technique-needs", FSDP_2 + '\npipeline_schedule = "1F1B"'),
    ("technique-needs", FSDP_2 + '\ncp_rotation = "alltoall"'),
    ("technique-needs", 'parallelism = { dp_shard = 2, cp = 2 }\ncp_rotation = "alltoall"'),
    (
        "spmd-backend-exists",
        FSDP_2 + '\ntoolchain = "torchtitan-0.2.2"\nspmd_backend = "full_dtensor"\n'
        'waive = ["same-initial-weights"]',
    ),
    ("model-divisible", "parallelism = { dp_shard = 2, tp = 4 }"),
    ("model-divisible", "parallelism = { dp_shard = 2, pp = 7 }"),
    ("expert-degree-divides", "parallelism = { dp_shard = 2, ep = 3 }"),
    ("ranks-fit", "parallelism = { dp_shard = 2, tp = 2, pp = 2 }"),
    ("nodes-filled", "parallelism = { dp_shard = 2, pp = 3 }"),
    ("nodes-filled", RESIZED),
]

LIMITED = "cpu_ranks = 4\n"
OPTIONS = {
    "ranks-fit": {"trainer": LIMITED},
    "nodes-filled": {"trainer": CLUSTER, "launcher": Launcher.SLURM},
}
"""What an experiment needs for a rule to have a say."""


@pytest.mark.parametrize(("rule", "body"), KEPT.items(), ids=KEPT)
def test_a_set_that_keeps_the_rule_is_planned(planner, rule, body):
    assert rule in RULES
    assert planner.test_set(body, **OPTIONS.get(rule, {})).waived == ()


@pytest.mark.parametrize(("rule", "body"), BROKEN)
def test_a_set_that_breaks_the_rule_is_refused_by_its_name(planner, rule, body):
    found = planner.refused(body, **OPTIONS.get(rule, {}))
    assert any(f"[{rule}]" in each for each in found), found
    assert all(each.startswith("test 't': ") for each in found)


def test_every_rule_has_an_example_of_each_kind():
    # Examples of the two about controls: below, and through the CLI in tests/cli/test_bad_input.py.
    about_controls = {"control-is-1d-fsdp", "control-is-repeated"}
    # "differences-reach-the-program" has its examples in test_plan_of_commands.py, and
    # "same-microbatch" below.
    elsewhere = about_controls | {"differences-reach-the-program", "same-microbatch"}
    assert set(KEPT) | elsewhere == set(RULES)
    assert {rule for rule, _ in BROKEN} | elsewhere == set(RULES)


MEGATRON = Toolchain("megatron-core-0.19.2", Path("/toolchain/bin/python"), "megatron_0_16", {})
BALANCED = "transformer = { num_moe_experts = 4, moe_aux_loss_coeff = 0.1 }"
BY_SAMPLE = BALANCED.replace(" }", ', moe_router_load_balancing_type = "seq_aux_loss" }')
HALF = "training.local_batch_size = 2"


@pytest.mark.parametrize(
    ("control", "test", "keeps"),
    [
        (BALANCED, BALANCED, True),
        (BALANCED, f"{BALANCED}, {HALF}", False),
        (f"{BALANCED}, {HALF}", BALANCED, False),
        (BY_SAMPLE, f"{BY_SAMPLE}, {HALF}", True),
        ("transformer.num_moe_experts = 4", f"transformer.num_moe_experts = 4, {HALF}", True),
    ],
)
def test_a_loss_of_a_microbatch_needs_the_same_microbatch(planner, control, test, keeps):
    (planner.folder / "base.toml").write_text(
        "[training]\nsteps = 4\nlocal_batch_size = 4\nglobal_batch_size = 8\nseq_len = 16\n"
        "[transformer]\nnum_layers = 4\n[converge.data]\n"
    )
    text = HEAD.replace("[trainer]", '[trainer]\nkind = "megatron"') + (
        f"[control]\nparallelism = {{ dp_replicate = 2 }}\nset = {{ {control} }}\n"
        f'[[test]]\nname = "t"\nparallelism = {{ dp_replicate = 2 }}\nset = {{ {test} }}\n'
    )
    if keeps:
        assert planner.text(text, toolchains=(MEGATRON,)).waived == ()
        return
    with pytest.raises(ConfigError) as caught:
        planner.text(text, toolchains=(MEGATRON,))
    ours, theirs = (2, 4) if HALF in test else (4, 2)
    assert f"{ours} samples here, {theirs} in 'control', which is another" in str(caught.value)
    assert f"write local_batch_size = {theirs}, or use a per-sample loss" in str(caught.value)
    assert "[same-microbatch]" in str(caught.value)


@pytest.mark.parametrize(
    ("control", "message"),
    [
        ("parallelism = { dp_shard = 2, tp = 2 }", "the control is FSDP 2 x TP 2, not 1D FSDP"),
        ("parallelism = { dp_replicate = 2 }", "the control is DDP 2, not 1D FSDP"),
        (FSDP_2 + '\ntechniques = ["bf16"]', "the control uses bf16"),
        (FSDP_2 + '\nwithout_fixes = ["act-grad"]', "the control shows an upstream bug on purpose"),
    ],
)
def test_a_control_that_is_not_1d_fsdp_is_waived_by_name(planner, control, message):
    table = f"[control]\n{control}\n"
    found = planner.refused("parallelism = { dp_shard = 2 }", control=table)
    assert found == [
        f"control 'control': {key}: {message} [control-is-1d-fsdp] "
        '(if meant, waive = ["control-is-1d-fsdp"])'
        for key in [found[0].split(": ")[1]]
    ]
    waived = table + 'waive = ["control-is-1d-fsdp"]\nnote = "verified in March"\n'
    plan = planner.test_set("parallelism = { dp_shard = 2 }", control=waived)
    assert plan.waived == (f"control waives control-is-1d-fsdp ({message}): verified in March",)


def test_all_broken_rules_of_all_sets_come_at_once(planner):
    found = planner.refused(
        """parallelism = { dp_shard = 4 }
techniques = ["async_tp"]
[[test]]
name = "u"
parallelism = { dp_shard = 2 }
set = { "training.steps" = 5 }
"""
    )
    rules = [each.split("[")[1].split("]")[0] for each in found]
    assert rules == [
        "same-dp-degree",
        "batch-divisible",
        "technique-needs",
        "technique-needs",
        "same-steps",
    ]


def test_a_necessity_cannot_be_waived(planner):
    found = planner.refused(FSDP_2 + '\nwaive = ["batch-divisible", "same-dp-degre"]')
    assert found[0] == "test 't': waive: 'batch-divisible' is required: it cannot be waived"
    assert found[1].startswith("test 't': waive: no rule 'same-dp-degre' (did you mean 'same-dp-d")


def test_a_waiver_that_is_not_needed_says_nothing(planner):
    assert planner.test_set(FSDP_2 + '\nwaive = ["same-steps"]').waived == ()


def test_cpu_slots_do_not_limit_gpus(planner):
    gpu = replace(SURROUNDINGS, hardware="gpu NVIDIA H200")
    body = "parallelism = { dp_shard = 2, tp = 2, pp = 2 }"
    assert planner.test_set(body, trainer=LIMITED, surroundings=gpu).job("t").world_size == 8


def test_torchtitan_02_takes_a_rotation_and_any_context_parallel_blocks(planner):
    body = 'parallelism = { dp_shard = 2, cp = 4 }\ncp_rotation = "alltoall"'
    plan = planner.test_set(body, trainer='toolchain = "torchtitan-0.2.2"\n')
    assert plan.job("t").spec.cp_rotation == "alltoall"


def test_stages_follow_layers_per_stage(planner):
    body = (
        'parallelism = { dp_shard = 2, pp = 2 }\npipeline_schedule = "Interleaved1F1B"\n'
        'set = { "parallelism.pipeline_parallel_layers_per_stage" = 1 }'
    )
    (only,) = planner.refused(body)  # 4 layers, embedding and output: 6 stages, 4 microbatches
    assert "4 microbatches for 6 stages of Interleaved1F1B [pp-microbatches]" in only


TEST = f'[[test]]\nname = "t"\n{FSDP_2}\n'
ONE_RANK = '[anchor]\nparallelism = {}\nset = { "training.local_batch_size" = 8 }\n'


def anchored(planner, anchor: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        planner.sets(TEST + anchor)
    return [str(each).split("x.toml: ", 1)[-1] for each in caught.value.problems]


def test_an_anchor_may_have_another_dp_degree_and_set_up_but_not_another_budget(planner):
    assert planner.sets(TEST + ONE_RANK).waived == ()
    tensor_parallel = '[anchor]\nparallelism = { tp = 2 }\ntechniques = ["compile"]\n'
    assert planner.sets(TEST + tensor_parallel).waived == ()
    (only,) = anchored(
        planner, '[anchor]\nparallelism = {}\nset = { "training.global_batch_size" = 4 }\n'
    )
    assert only.startswith("anchor 'anchor': set.training.global_batch_size: 4 x 256 = 1024 tokens")
    assert "[same-token-budget]" in only


def test_an_anchor_on_somebody_elses_loader_keeps_the_dp_degree(planner):
    base = planner.folder / "base.toml"
    base.write_text(base.read_text().replace("[converge.data]\n", ""))
    (only,) = anchored(planner, ONE_RANK)
    assert "[same-dp-degree]" in only


def test_a_calibration_stands_for_repeats(planner):
    without = "repeats = []\n" + HEAD + CONTROL + TEST
    with pytest.raises(ConfigError, match="control-is-repeated"):
        planner.text(without)
    assert planner.text('calibration = "c.json"\n' + without)
