"""``kind = "space_time"`` of a program of one's own: which sets it can be told to run."""

import pytest

from converge_harness.errors import ConfigError
from converge_harness.model import Kind, Parallelism
from converge_harness.plan.select import select

LOCAL = '"{local_batch_size}"'
SIZES = '"--micro", "{local_batch_size}", "--global", "{global_batch_size}"'
DDP = ["st_ddp4_acc1", "st_ddp2_acc2", "st_ddp1_acc4"]
FSDP = ["st_fsdp4_acc1", "st_fsdp2_acc2"]
GATHERED = ["st_fsdp4_zero3", "st_fsdp4_zero2"]
NOT_SHARDED = "nothing passes {dp_shard} to the program"


@pytest.fixture(autouse=True)
def script(folder):
    (folder / "train.py").touch()


def text(options=SIZES, *, control="dp_replicate = 2", more="", product=4, local=4):
    return f"""schema = 1
[trainer]
kind = "command"
toolchain = "mine"
command = ["train.py", {options}]
[trainer.config]
training = {{ steps = 20, local_batch_size = {local}, global_batch_size = 8 }}
parallelism = {{ fsdp_reshard_after_forward = "default" }}
[control]
name = "right"
parallelism = {{ {control} }}
[[test]]
kind = "space_time"
name = "st"
product = {product}
local_batch_size = 2
{more}"""


def test_a_ddp_script_trades_ranks_for_accumulation(load):
    experiment = load(text())
    assert [test.name for test in experiment.tests] == DDP
    assert [test.parallelism for test in experiment.tests] == [
        Parallelism(dp_replicate=4),
        Parallelism(dp_replicate=2),
        Parallelism(),
    ]
    assert {test.kind for test in experiment.tests} == {Kind.SPACE_TIME}
    sizes = ("training.local_batch_size", "training.global_batch_size")
    assert {tuple(map(test.setting, sizes)) for test in experiment.tests} == {(2, 8)}
    assert {name: experiment.left_out[name].why for name in FSDP} == dict.fromkeys(
        FSDP, NOT_SHARDED
    )
    assert set(experiment.left_out) == {*FSDP, *GATHERED, "st_hsdp2x2"}


@pytest.mark.parametrize(
    ("options", "control", "more", "names"),
    [
        (f'{SIZES}, "{{dp_shard}}"', "dp_replicate = 2", "", [*DDP, *FSDP]),
        (
            f'{SIZES}, "{{dp_shard}}", "{{dp_replicate}}"',
            "dp_shard = 2",
            "",
            [*DDP, *FSDP, "st_hsdp2x2"],
        ),
        (
            f'{SIZES}, "{{dp_shard}}", "{{config.parallelism.fsdp_reshard_after_forward}}"',
            "dp_shard = 2",
            "",
            [*DDP, *FSDP, *GATHERED],
        ),
        # It says nothing about sharding: it always shards.
        (SIZES, "dp_shard = 2", "", [DDP[-1], *FSDP]),
        (f'"{{gradient_accumulation_steps}}", {LOCAL}', "dp_replicate = 2", "", DDP),
        ('"{gradient_accumulation_steps}", "{global_batch_size}"', "dp_replicate = 2", "", DDP),
        ('"{config.training.local_batch_size}", "{global_batch_size}"', "", "", DDP),
        # It takes its global batch at once, whatever the number of ranks.
        ('"{global_batch_size}"', "dp_replicate = 2", "", ["st_ddp4_acc1"]),
        (
            f'{SIZES}, "{{pp}}"',
            "dp_replicate = 2",
            "pp = [1, 2]",
            [*DDP, "st_ddp2_pp2_acc2", "st_ddp1_pp2_acc4"],
        ),
        (SIZES, "dp_replicate = 2", "pp = [1, 2]", DDP),
        # Nothing says what its ranks do under a control of one rank, or under HSDP.
        (SIZES, "dp_replicate = 1", "", [DDP[-1]]),
        (SIZES, "dp_replicate = 2, dp_shard = 2", "", [DDP[-1]]),
    ],
)
def test_what_a_program_is_not_told_leaves_out_exactly_the_sets_that_need_it(
    load, options, control, more, names
):
    experiment = load(text(options, control=control or "dp_replicate = 2", more=more))
    assert [test.name for test in experiment.tests] == names
    assert not set(names) & set(experiment.left_out)


def test_a_program_without_a_launcher_has_to_be_told_its_ranks(load):
    def by_itself(options):
        made = text(options).replace('["train.py"', '["{python}", "train.py"')
        return load(made.replace("[trainer]\n", '[trainer]\nlauncher = "none"\n'))

    assert [test.name for test in by_itself(f'{SIZES}, "{{ranks}}"').tests] == DDP
    untold = by_itself(SIZES)
    assert [test.name for test in untold.tests] == ["st_ddp2_acc2"]  # as many as its control
    assert untold.left_out["st_ddp1_acc4"].why == "nothing passes {ranks} to the program"


@pytest.mark.parametrize(
    ("options", "local", "names"),
    [
        # Its ranks accumulate two microbatches, as the control's do, whatever the set.
        ('"{dp_replicate}"', 2, ["st_ddp2_acc2"]),
        ('"{global_batch_size}"', 2, ["st_ddp2_acc2"]),
        ('"{gradient_accumulation_steps}"', 2, DDP),
        (SIZES, 2, DDP),
        # Or four.
        ('"{global_batch_size}"', 1, ["st_ddp1_acc4"]),
        (LOCAL, 1, ["st_ddp1_acc4"]),
    ],
)
def test_a_program_that_is_not_told_accumulates_as_its_control(load, options, local, names):
    assert [test.name for test in load(text(options, local=local)).tests] == names


@pytest.mark.parametrize(
    "options",
    [
        '"{gradient_accumulation_steps}"',  # the control's local batch is 4, theirs 2
        # Values of the file, which are the same in every set.
        '"{config.training.gradient_accumulation_steps}", "{config.training.dp_shard}"',
    ],
)
def test_a_program_that_is_not_told_its_batch_has_no_set(problems, options):
    fixed = "training = { gradient_accumulation_steps = 1, dp_shard = 1, "
    (found,) = problems(text(options).replace("training = { ", fixed))
    assert "leaves no set" in found
    assert "{local_batch_size}" in found


def test_a_selection_knows_what_is_left_out(load):
    experiment = load(text(more='[[test]]\nname = "x"\nparallelism = { dp_replicate = 4 }\n'))
    assert select(experiment, ["st"]).left_out == experiment.left_out
    assert select(experiment, ["x"]).left_out == {}
    with pytest.raises(ConfigError, match=r"'st_fsdp2_acc2' is left out: nothing passes"):
        select(experiment, ["st_fsdp2_acc2"])


def test_a_table_without_any_set_is_a_mistake(problems):
    (found,) = problems(text(more="pp = [2]"))
    assert "test[0].kind of 'st': leaves no set: nothing passes {pp} to the program, and" in found


def test_samples_of_a_step_are_the_controls(problems):
    (found,) = problems(text(product=2))
    assert "product of 'st': 2 x local batch 2 = 4 samples per step" in found
