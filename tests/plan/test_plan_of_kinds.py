"""Plans of elastic, fault and space-time sets."""

from dataclasses import asdict

import pytest

from converge_harness.errors import ConfigError
from converge_harness.model import Parallelism, Role
from converge_harness.plan import describe, select
from converge_harness.plan.rules.rule import job_segments

STOCK = 'loader = "torchtitan"\n'
ELASTIC = """kind = "elastic"
segments = [
  {{ until = 4, dp_shard = 2 }},
  {{ until = 8, {middle} }},
  {{ until = 20, dp_shard = 4, local_batch_size = 2 }},
]
"""
RESIZED = ELASTIC.format(middle="dp_shard = 1")
NODES = """kind = "fault"
parallelism = { dp_shard = 2 }
checkpoint_every = 5
nodes = [1, 2]
faults = [{ kind = "agent_loss", step = 6 }, { kind = "join", step = 11 }]
"""
SPACE_TIME = 'kind = "space_time"\nproduct = 2\npp = [1, 2]\n'


def test_a_resized_set_is_one_job_as_wide_as_its_widest_segment(planner):
    plan = planner.test_set(RESIZED)
    job = plan.job("t")
    assert (job.role, job.world_size, job.global_batch_size) == (Role.TEST, 4, 8)
    assert (job.spec.parallelism, job.local_batch_size) == (Parallelism(dp_shard=2), 4)
    inside = [job.in_segment(segment) for segment in job.spec.segments]
    assert [each.gradient_accumulation_steps for each in inside] == [1, 2, 1]
    assert plan.waived == ()


@pytest.mark.parametrize(
    ("middle", "found"),
    [
        (
            "dp_shard = 3",
            "segments[1]: set.training.global_batch_size: 8 is not a multiple of local ",
        ),
        (
            "dp_shard = 2, tp = 4",
            "segments[1]: parallelism.tp: n_kv_heads = 2 is not a multiple of ",
        ),
        (
            'dp_shard = 1, pp = 2, pipeline_schedule = "Interleaved1F1B", local_batch_size = 2',
            "segments[1]: set.training.local_batch_size: 2 microbatches for 4 stages",
        ),
    ],
)
def test_a_rule_names_the_segment_that_breaks_it(planner, middle, found):
    refused = planner.refused(ELASTIC.format(middle=middle))
    assert refused
    assert refused[0].startswith(f"test 't': {found}")


def test_what_is_wrong_in_every_segment_is_said_once(planner):
    refused = planner.refused(RESIZED + 'set = { "training.seq_len" = 512 }\n')
    (said,) = [each for each in refused if "[same-token-budget]" in each]
    assert said.startswith("test 't': set.training.global_batch_size")


def test_a_segment_may_have_more_ranks_than_there_are_slots(planner):
    refused = planner.refused(RESIZED, trainer="cpu_ranks = 2\n")
    assert len(refused) == 1
    assert refused[0].startswith("test 't': segments[2]: parallelism: 4 ranks")


def test_a_changing_degree_needs_a_stated_global_batch(planner):
    unstated = '[trainer.set]\n"training.global_batch_size" = -1\n'
    for body in (RESIZED, NODES):
        (found,) = planner.refused(body, trainer=unstated)
        assert "'t': training.global_batch_size: is not set, and would change" in found


def test_a_fault_set_is_looked_at_on_every_number_of_nodes(planner):
    job = planner.test_set(NODES).job("t")
    assert [(each.name, each.job.world_size) for each in job_segments(job)] == [
        ("", 2),
        ("on 1 of 2 nodes", 1),
    ]
    wide = NODES.replace("dp_shard = 2 }", "dp_shard = 6 }").replace("[1, 2]", "[2, 3]")
    lost = wide.replace(', { kind = "join", step = 11 }', "")
    batch = 'set = { "training.local_batch_size" = 1, "training.global_batch_size" = 6 }\n'
    control = '[control]\nparallelism = { dp_shard = 2 }\nset = { "training.global_batch_size" = 6'
    control += ', "training.local_batch_size" = 3 }\n'
    (found,) = planner.refused(lost + batch, control=control)
    assert found.startswith(
        "test 't': on 2 of 3 nodes: set.training.global_batch_size: 6 is not a "
    )


@pytest.mark.parametrize("body", [RESIZED, NODES])
def test_a_loader_that_splits_by_rank_needs_the_same_degree(planner, body):
    base = planner.folder / "base.toml"
    base.write_text(base.read_text() + STOCK)
    found = planner.refused(body)
    assert all("[same-dp-degree]" in each for each in found), found
    waived = planner.test_set(body + 'waive = ["same-dp-degree"]\n').waived
    assert len(waived) == len(found)
    assert ("segments[1]" in waived[0]) is (body is RESIZED)


def test_only_our_loader_can_deal_a_batch_out_in_another_order(planner):
    base = planner.folder / "base.toml"
    base.write_text(base.read_text() + STOCK)
    plan = planner.test_set("parallelism = { dp_shard = 2 }")
    assert "control.permute" not in [job.name for job in plan.jobs]


def test_the_start_of_generated_names_selects_them_all(planner):
    experiment = planner.sets(
        f'[[test]]\nname = "st"\n{SPACE_TIME}[[test]]\nname = "st_alike"\n{RESIZED}'
    ).experiment

    def selected(*names):
        return [spec.name for spec in select(experiment, names).tests]

    assert selected("st") == [spec.name for spec in experiment.tests if spec.name != "st_alike"]
    assert selected("st_fsdp1") == ["st_fsdp1_acc2", "st_fsdp1_pp2_acc2"]
    assert selected("st_alike", "st_ddp2") == ["st_ddp2", "st_alike"]
    with pytest.raises(ConfigError, match="no set 's'"):
        selected("s")


def test_a_plan_says_what_each_kind_puts_to_the_test(planner):
    plan = planner.sets(
        f'[[test]]\nname = "e"\n{RESIZED}[[test]]\nname = "f"\n{NODES}'
        f'[[test]]\nname = "s"\n{SPACE_TIME}'
    )
    rows = {row.name: row for row in describe(plan)}
    assert rows["e"].serves == "elastic determinism: FSDP 2, one rank, FSDP 4 as one curve"
    assert rows["f"].serves == "recovery from agent_loss, join"
    assert rows["s_fsdp1_acc2"].serves == "space-time equivalence: one rank, 2 x accumulated"
    assert [rows[name].passes for name in ("control", "e", "f", "s_ddp2")] == [1, 3, 3, 1]
    assert asdict(rows["e"])["segments"][2]["until"] == 20
    assert asdict(rows["f"])["recovery"]["faults"][1]["kind"] == "join"
