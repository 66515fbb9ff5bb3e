"""What a plan says that it costs."""

from dataclasses import replace
from pathlib import Path

import pytest

from converge_harness.matrix.cost import cost_of
from converge_harness.matrix.load import load_plan
from converge_harness.model import Role
from converge_harness.trainers import assume_toolchain

ROOT = Path(__file__).parents[2]
EXPERIMENT = f"""
schema = 1
repeats = ["ulp", "permute"]
[trainer]
train_config = "{ROOT}/train_configs/llama3_debug.toml"
set = {{ "training.steps" = 1000 }}
[stop]
when = "WHEN"
waiting_ranks = 10
[control]
name = "fsdp2"
parallelism = {{ dp_shard = 2 }}
[[test]]
name = "ddp2"
parallelism = {{ dp_replicate = 2 }}
[[test]]
name = "hsdp"
parallelism = {{ dp_replicate = 2, dp_shard = 2 }}
waive = ["same-dp-degree"]
set = {{ "training.local_batch_size" = 2 }}
"""
PROGRAM = """
schema = 1
[trainer]
kind = "command"
command = ["train.py", "--micro-batch", "{local_batch_size}"]
toolchain = "mine"
probe = false
curves = "{output}/loss.csv"
config.training = { steps = 8, local_batch_size = 4, global_batch_size = 8MORE }
[control]
parallelism.dp_replicate = 2
[[test]]
name = "accumulated"
parallelism.dp_replicate = 2
set = { training.local_batch_size = 2 }
"""
STEP = 8 * 256
"""Tokens."""


@pytest.fixture
def plan(tmp_path):
    def make(when):
        path = tmp_path / f"{when}.toml"
        path.write_text(EXPERIMENT.replace("WHEN", when))
        return load_plan(path, (), on_gpu=False, find=assume_toolchain)

    return make


def test_a_wrong_set_is_known_after_the_first_look_of_all_that_it_is_judged_by(plan):
    cost = cost_of(plan("fail"))
    assert cost.at_most == cost.settled == 5 * 1000 * STEP
    assert cost.known_wrong == 4 * 16 * STEP
    said = cost.sentence(None)
    assert said.startswith("cost: 1e+07 tokens if every run trains to its last step; 1.3% is what")
    assert "settled" not in said


def test_what_a_set_needs_that_trains_to_its_end_costs_all_of_its_steps(plan, tmp_path):
    whole = EXPERIMENT.replace("WHEN", "settled") + 'stop = "fail"\n'
    (tmp_path / "whole.toml").write_text(whole)
    cost = cost_of(load_plan(tmp_path / "whole.toml", (), on_gpu=False, find=assume_toolchain))
    assert cost.settled == (4 * 1000 + 125) * STEP
    # After a long warm-up the first look is late, and what has no checkpoint would begin again:
    # runs that wait have one.
    late = EXPERIMENT.replace("WHEN", "settled").replace(
        '"training.steps" = 1000', '"training.steps" = 1000, "lr_scheduler.warmup_steps" = 300'
    )
    (tmp_path / "late.toml").write_text(late)
    cost = cost_of(load_plan(tmp_path / "late.toml", (), on_gpu=False, find=assume_toolchain))
    assert cost.settled == 5 * 600 * STEP
    late = late.replace("waiting_ranks = 10", "waiting_ranks = 9")
    (tmp_path / "late.toml").write_text(late)
    cost = cost_of(load_plan(tmp_path / "late.toml", (), on_gpu=False, find=assume_toolchain))
    assert cost.settled == (3 * 1000 + 2 * 600) * STEP
    said = "the runs of fsdp2 do not wait for each other, since 10 ranks would have to be in memory"
    assert f"{said} at once and 9 may (waiting_ranks in [stop])" in cost.sentence(None)
    (tmp_path / "resumed.toml").write_text(
        late.replace("schema = 1", "schema = 1\ncheckpoint_every = 50")
    )
    cost = cost_of(load_plan(tmp_path / "resumed.toml", (), on_gpu=False, find=assume_toolchain))
    assert cost.settled == 5 * 600 * STEP


def test_sets_that_may_be_settled_cost_as_much_as_up_to_their_first_look(plan):
    cost = cost_of(plan("settled"))
    assert cost.settled == 5 * 125 * STEP  # the control and its repeats end with them
    assert "12.5% if every set is settled at its first look;" in cost.sentence(None)
    assert cost.sentence(None).endswith(
        "is found to be wrong at its first step; up to 10 ranks wait for others in memory meanwhile"
    )
    # GPUs are not kept from others by a run that waits.
    made = plan("settled")
    on_gpus = replace(made, surroundings=replace(made.surroundings, hardware="gpu-H100"))
    said = cost_of(on_gpus).sentence(None)
    assert said.endswith("at its first step, if they train side by side")
    assert "at its first look and its control and the repeats train beside it;" in said
    assert cost.sentence(5000).startswith("cost: 0.6 GPU-hours at 5,000 tokens per second and GPU")


OTHER = """[controls.other]
parallelism = { dp_shard = 2 }
set = { "optimizer.lr" = 1e-3 }
[[test]]
name = "small"
control = "other"
parallelism = { dp_replicate = 2 }
set = { "optimizer.lr" = 1e-3 }
"""


def test_a_control_that_is_too_large_to_wait_is_named_beside_those_that_wait(tmp_path):
    text = EXPERIMENT.replace("WHEN", "settled").replace("= 10", "= 9")
    (tmp_path / "two.toml").write_text(text + OTHER)
    cost = cost_of(load_plan(tmp_path / "two.toml", (), on_gpu=False, find=assume_toolchain))
    assert [each.names for each in cost.too_large] == [("fsdp2",)]
    assert (cost.waits, cost.waiting_ranks) == (False, 8)
    assert "; up to 8 ranks wait for others in memory meanwhile; the runs of fsdp2 do not wait" in (
        cost.sentence(None)
    )


def test_where_nothing_stops_there_is_one_cost(plan):
    cost = cost_of(plan("never"))
    assert (cost.settled, cost.known_wrong) == (cost.at_most, None)
    assert cost.sentence(None) == "cost: 1e+07 tokens if every run trains to its last step"


def test_what_a_set_is_judged_by(plan):
    made = plan("fail")
    judged_by = made.judged_by(made.job("ddp2"))
    assert [job.name for job in judged_by] == ["fsdp2", "fsdp2.ulp", "fsdp2.permute"]
    assert not {Role.TEST, Role.SEED} & {job.role for job in judged_by}


def test_a_program_without_a_length_of_samples_is_counted_in_samples(tmp_path):
    (tmp_path / "train.py").touch()
    path = tmp_path / "mine.toml"
    for more, said in (("", "cost: 192 samples if"), (", seq_len = 128", "cost: 24,576 tokens if")):
        path.write_text(PROGRAM.replace("MORE", more))
        cost = cost_of(load_plan(path, (), on_gpu=False, find=assume_toolchain))
        assert cost.sentence(None).startswith(said)
    assert " at 10 tokens per second and GPU" in cost.sentence(10)
