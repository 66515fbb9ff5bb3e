"""What ``converge plan`` says of each set."""

import pytest

from converge_harness.model import Role
from converge_harness.plan import describe


@pytest.mark.parametrize(
    ("body", "serves"),
    [
        ("parallelism = { dp_shard = 2, tp = 2 }", "minimal test set of TP: 2D, FSDP + TP"),
        ("parallelism = { dp_shard = 2, cp = 2 }", "minimal test set of CP: 2D, FSDP + CP"),
        ("parallelism = { dp_replicate = 2, pp = 2 }", "minimal test set of PP: 2D, DDP + PP"),
        ("parallelism = { dp_shard = 2, tp = 2, pp = 2 }", "N-D test set: FSDP + TP + PP"),
        (
            'parallelism = { dp_shard = 2, tp = 2 }\ntechniques = ["compile", "async_tp"]',
            "technique async_tp on top of FSDP + TP + compile",
        ),
        (
            'parallelism = { dp_shard = 2 }\ntechniques = ["compile"]',
            "technique compile on top of FSDP",
        ),
        (
            'parallelism = {tp=2, pp=2, dp_shard=2}\ntechniques = ["compile","async_tp","float8"]',
            "maximal composability: FSDP + TP + PP with compile, async_tp, float8",
        ),
        (
            "parallelism = { dp_replicate = 2 }",
            "DDP 2 against FSDP 2: FSDP verified by comparing it with other data parallelism",
        ),
        (
            'parallelism = { dp_shard = 2 }\nset = { "training.local_batch_size" = 2 }',
            "same token budget by gradient accumulation",
        ),
        (
            "parallelism = { dp_shard = 2 }\nspmd_backend = 'full_dtensor'",
            "SPMD backend full_dtensor against partial_dtensor: FSDP",
        ),
        (
            'parallelism = { dp_shard = 2 }\nset = { "training.max_norm" = 2 }',
            "the control's parallelism and techniques, with other settings",
        ),
    ],
)
def test_a_test_set_names_the_rule_it_serves(planner, body, serves):
    control, test = describe(planner.test_set(body))
    assert control.serves == "control: 1D FSDP on 2 ranks"
    assert test.serves == serves


def test_a_row_says_what_a_set_costs(planner):
    body = (
        'parallelism = { dp_shard = 2, pp = 2, tp = 2 }\npipeline_schedule = "Interleaved1F1B"\n'
        'techniques = ["float8"]\nnote = "why"'
    )
    plan = planner.test_set(body)
    row = describe(plan)[1]
    assert (row.name, row.control, row.toolchain) == ("t", "control", "torchtitan-0.3.0")
    assert row.techniques == ("float8", "Interleaved1F1B")
    assert row.spmd_backend == "partial_dtensor"  # the default on torch 2.13
    assert (row.world_size, row.tokens_per_step, row.steps) == (8, 2048, 20)
    assert (row.local_batch_size, row.global_batch_size, row.seq_len) == (4, 8, 256)
    assert (row.gradient_accumulation_steps, row.note) == (1, "why")
    assert row.identity == plan.job("t").identity


def test_a_control_by_another_set_up_is_called_that(planner):
    control = "[control]\nparallelism = { dp_shard = 2, tp = 2 }\nwaive = ['control-is-1d-fsdp']\n"
    row = describe(planner.test_set("parallelism = { dp_shard = 2 }", control=control))[0]
    assert row.serves == "control: another verified set-up on 4 ranks"
    assert row.waives == ("control-is-1d-fsdp",)


def test_an_anchor_has_a_row_of_its_own(planner):
    anchor = '[anchor]\nparallelism = {}\nset = { "training.local_batch_size" = 8 }\n'
    rows = describe(planner.test_set("parallelism = { dp_shard = 2 }\n" + anchor))
    assert [(row.name, row.role) for row in rows] == [
        ("anchor", Role.ANCHOR),
        ("control", Role.CONTROL),
        ("t", Role.TEST),
    ]
    assert rows[0].serves == "anchor: the control is itself judged against one rank"
