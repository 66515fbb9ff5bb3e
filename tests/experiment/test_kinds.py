"""Test sets of other kinds: what is read from right ones, and what is said of wrong ones."""

import pytest

from converge_harness.model import (
    Fault,
    FaultKind,
    Kind,
    Loader,
    Parallelism,
    Recovery,
    RestartOwner,
    Segment,
    Torn,
)

HEAD = """
schema = 1
[trainer]
train_config = "base.toml"
[control]
parallelism = { dp_shard = 2 }
[[test]]
name = "t"
"""
ELASTIC = HEAD + 'kind = "elastic"\n'
FAULT = HEAD + 'kind = "fault"\nparallelism = { dp_shard = 2 }\n'
SPACE_TIME = HEAD + 'kind = "space_time"\nproduct = 2\n'
SEGMENTS = """segments = [
  { until = 8, dp_shard = 2 },
  { until = 12, dp_shard = 1, local_batch_size = 8 },
  { until = 20, dp_shard = 2, pp = 2 },
]
"""
SCRIPT = 'checkpoint_every = 5\nfaults = [{ kind = "kill", step = 6, rank = 1 }]\n'


def test_an_elastic_set_has_segments_with_their_own_degrees(load):
    (test,) = load(ELASTIC + SEGMENTS + 'techniques = ["compile"]\n').tests
    assert test.kind is Kind.ELASTIC
    assert test.resumes
    assert test.segments == (
        Segment(8, Parallelism(dp_shard=2), 4),
        Segment(12, Parallelism(), 8),
        Segment(20, Parallelism(dp_shard=2, pp=2), 4, "1F1B"),
    )
    assert test.parallelism == Parallelism(dp_shard=2)
    assert test.techniques == ("compile",)


def test_a_local_batch_of_the_set_holds_for_its_segments(load):
    text = ELASTIC + SEGMENTS + 'set = { "training.local_batch_size" = 2 }\n'
    (test,) = load(text).tests
    assert [segment.local_batch_size for segment in test.segments] == [2, 8, 2]


def test_a_fault_set_has_a_script_in_the_order_of_its_steps(load):
    (test,) = load(
        FAULT
        + """checkpoint_every = 5
max_restarts = 4
recover_within_s = 60
restarts = "harness"
nodes = [1, 2]
faults = [
  { kind = "ckpt_torn", step = 15, torn = "truncated", rank = 1 },
  { kind = "agent_loss", step = 3 },
  { kind = "join", step = 9 },
]
"""
    ).tests
    assert test.kind is Kind.FAULT
    assert test.recovery == Recovery(
        faults=(
            Fault(FaultKind.AGENT_LOSS, 3),
            Fault(FaultKind.JOIN, 9),
            Fault(FaultKind.CKPT_TORN, 15, rank=1, torn=Torn.TRUNCATED),
        ),
        checkpoint_every=5,
        restarts=RestartOwner.HARNESS,
        max_restarts=4,
        within_s=60.0,
        nodes=(1, 2),
    )


def test_a_fault_set_has_the_documented_defaults(load):
    (test,) = load(FAULT + SCRIPT).tests
    assert test.recovery == Recovery((Fault(FaultKind.KILL, 6, rank=1),), checkpoint_every=5)


@pytest.mark.parametrize(
    ("degrees", "left"),
    [
        ({"dp_shard": 4}, {"dp_shard": 2}),
        ({"dp_replicate": 2}, {}),
        ({"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate": 2}),
        ({"dp_replicate": 2, "tp": 2}, {"tp": 2}),
    ],
)
def test_half_the_nodes_leave_half_of_what_is_split_over_nodes(degrees, left):
    assert Parallelism(**degrees).on_nodes(1, 2) == Parallelism(**left)


def test_a_space_time_table_is_sets_of_equal_product(load):
    text = SPACE_TIME.replace("product = 2", "product = 4\nlocal_batch_size = 2\npp = [1, 2]")
    tests = load(text + 'note = "why"\n').tests
    assert [test.name for test in tests] == [
        "t_fsdp4_acc1",
        "t_fsdp2_acc2",
        "t_fsdp1_acc4",
        "t_fsdp2_pp2_acc2",
        "t_fsdp1_pp2_acc4",
        "t_ddp4",
        "t_hsdp2x2",
        "t_fsdp4_zero3",
        "t_fsdp4_zero2",
    ]
    assert {(test.kind, test.note, test.control) for test in tests} == {
        (Kind.SPACE_TIME, "why", "control")
    }
    assert all(test.setting("training.global_batch_size") == 8 for test in tests)
    named = {test.name: test for test in tests}
    assert named["t_fsdp2_pp2_acc2"].parallelism == Parallelism(dp_shard=2, pp=2)
    assert named["t_fsdp2_pp2_acc2"].pipeline_schedule == "1F1B"
    assert named["t_hsdp2x2"].parallelism == Parallelism(dp_replicate=2, dp_shard=2)
    reshard = "parallelism.fsdp_reshard_after_forward"
    assert named["t_fsdp4_zero3"].overrides[reshard] == "always"
    assert named["t_fsdp4_zero2"].overrides[reshard] == "never"


def test_two_replicas_of_one_shard_are_ddp_and_no_hsdp(load):
    names = [test.name for test in load(SPACE_TIME).tests]
    assert names == ["t_fsdp2_acc1", "t_fsdp1_acc2", "t_ddp2", "t_fsdp2_zero3", "t_fsdp2_zero2"]


def test_a_train_config_names_what_reads_the_corpus(load, folder):
    config = folder / "base.toml"
    config.write_text(config.read_text() + 'loader = "torchtitan"\n')
    assert load(FAULT + SCRIPT).controls[0].train_config.loader is Loader.TORCHTITAN


NOT_OURS = "is a key of kind"
WRONG = {
    "unknown kind": (HEAD + 'kind = "elastc"\n', ["kind", "'elastic'"]),
    "degrees beside segments": (
        ELASTIC + SEGMENTS + "parallelism = { dp_shard = 2 }\n",
        ["parallelism", NOT_OURS, "every segment has its own degrees"],
    ),
    "a fault's key in an elastic set": (
        ELASTIC + SEGMENTS + "checkpoint_every = 2\n",
        ["checkpoint_every", NOT_OURS, "'fault'", "'elastic'"],
    ),
    "segments of a parallel set": (
        HEAD + "parallelism = { dp_shard = 2 }\n" + SEGMENTS,
        ["segments", NOT_OURS, "'elastic'", "'parallel'"],
    ),
    "no segments": (ELASTIC, ["segments", "is missing"]),
    "empty segments": (ELASTIC + "segments = []\n", ["segments", "two or more segments"]),
    "one segment": (
        ELASTIC + "segments = [{ until = 20, dp_shard = 2 }]\n",
        ["segments", "two or more segments"],
    ),
    "a misspelt degree": (
        ELASTIC + SEGMENTS.replace("dp_shard = 1", "dp_shrd = 1"),
        ["segments[1].dp_shrd", "'dp_shard'"],
    ),
    "overlapping segments": (
        ELASTIC + SEGMENTS.replace("until = 12", "until = 7"),
        ["segments[1].until", "7 is not after", "8"],
    ),
    "an empty segment": (
        ELASTIC + SEGMENTS.replace("until = 12", "until = 8"),
        ["segments[1].until", "8 is not after"],
    ),
    "segments that end too soon": (
        ELASTIC + SEGMENTS.replace("until = 20", "until = 18"),
        ["segments[2].until", "ends with step 18", "training.steps is 20"],
    ),
    "checkpoint settings": (
        ELASTIC + SEGMENTS + 'set = { "checkpoint.interval" = 3 }\n',
        ["set.checkpoint.interval", "converge writes and loads"],
    ),
    "checkpoint settings of a fault set": (
        FAULT + SCRIPT + 'set.checkpoint = { folder = "x", keep_latest_k = 1 }\n',
        ["set.checkpoint.folder", "use trainer.seed_checkpoint", "set.checkpoint.keep_latest_k"],
    ),
    "no faults": (FAULT + "checkpoint_every = 5\nfaults = []\n", ["faults", "name a fault"]),
    "an unknown fault": (
        FAULT + SCRIPT.replace('"kill"', '"kil"'),
        ["faults[0].kind", "'kill'"],
    ),
    "a fault after the last step": (
        FAULT + SCRIPT.replace("step = 6", "step = 21"),
        ["faults[0].step", "21 comes after the last step", "20"],
    ),
    "a fault before the first step": (
        FAULT + SCRIPT.replace("step = 6", "step = 0"),
        ["faults[0].step", "greater than or equal to 1"],
    ),
    "a rank that is not there": (
        FAULT + SCRIPT.replace("rank = 1", "rank = 2"),
        ["faults[0].rank", "no rank 2", "from 0 to 1"],
    ),
    "a torn checkpoint where none is written": (
        FAULT + 'checkpoint_every = 5\nfaults = [{ kind = "ckpt_torn", step = 6 }]\n',
        ["faults[0].step", "no checkpoint is written at step 6", "5, 10"],
    ),
    "a full disk at the last step": (
        FAULT + 'checkpoint_every = 5\nfaults = [{ kind = "disk_full", step = 20 }]\n',
        ["faults[0].step", "that is the last"],
    ),
    "preemption after the last step": (
        FAULT + 'checkpoint_every = 5\nfaults = [{ kind = "preempt", step = 20 }]\n',
        ["faults[0].step", "that is the last"],
    ),
    "as much time to stop as to recover": (
        FAULT
        + "recover_within_s = 20\ncheckpoint_every = 5\n"
        + 'faults = [{ kind = "preempt", step = 6, grace_s = 20 }]\n',
        ["faults[0].grace_s", "may take 20 s to stop", "a longer recover_within_s"],
    ),
    "time to stop of a kill": (
        FAULT + SCRIPT.replace("rank = 1", "grace_s = 5"),
        ["faults[0].grace_s", "is not a key of kill", "of preempt"],
    ),
    "saving before a kill": (
        FAULT + SCRIPT.replace("rank = 1", "saves = true"),
        ["faults[0].saves", "is not a key of kill", "of preempt"],
    ),
    "a rank of a death of all": (
        FAULT + 'checkpoint_every = 5\nfaults = [{ kind = "ckpt_torn", step = 5, rank = 1 }]\n',
        ["faults[0].rank", "leave rank out"],
    ),
    "keys of another fault": (
        FAULT + SCRIPT.replace("rank = 1", 'torn = "death", node = 1'),
        ["faults[0].torn", "of ckpt_torn", "faults[0].node", "of agent_loss"],
    ),
    "a loss without nodes": (
        FAULT + 'checkpoint_every = 5\nfaults = [{ kind = "agent_loss", step = 6 }]\n',
        ["faults[0].kind", "nodes = [1, 2]"],
    ),
    "a node that is not there": (
        FAULT
        + "nodes = [1, 2]\ncheckpoint_every = 5\n"
        + 'faults = [{ kind = "agent_loss", step = 6, node = 2 }]\n',
        ["faults[0].node", "no node 2 of 2"],
    ),
    "a node too many": (
        FAULT
        + "nodes = [1, 2]\ncheckpoint_every = 5\n"
        + 'faults = [{ kind = "join", step = 6 }, { kind = "join", step = 8 }]\n',
        ["faults[1].kind", "no node can join"],
    ),
    "a node too few": (
        FAULT
        + "nodes = [1, 2]\ncheckpoint_every = 5\nfaults = [\n"
        + '{ kind = "agent_loss", step = 6 }, { kind = "agent_loss", step = 8 }]\n',
        ["faults[1].kind", "no node can be lost"],
    ),
    "a rank of a node that is gone": (
        FAULT
        + "nodes = [1, 2]\ncheckpoint_every = 5\nfaults = [\n"
        + '{ kind = "agent_loss", step = 6 }, { kind = "kill", step = 8, rank = 1 }]\n',
        ["faults[1].rank", "no rank 1", "1 of 2 nodes"],
    ),
    "fewest nodes above the most": (FAULT + SCRIPT + "nodes = [2, 1]\n", ["nodes", "[2, 1]"]),
    "one number of nodes": (FAULT + SCRIPT + "nodes = [2]\n", ["nodes", "as [1, 2]"]),
    "shards that do not divide over nodes": (
        FAULT + SCRIPT + "nodes = [1, 3]\n",
        ["nodes", "dp_shard 2 is not a multiple of 3 nodes"],
    ),
    "too few restarts": (
        FAULT + SCRIPT + "max_restarts = 0\n",
        ["max_restarts", "is 0, and 1 fault needs a restart"],
    ),
    "too few restarts for several faults": (
        FAULT
        + "max_restarts = 1\ncheckpoint_every = 5\n"
        + 'faults = [{ kind = "kill", step = 6 }, { kind = "kill", step = 7 }]\n',
        ["max_restarts", "is 1, and 2 faults need a restart each"],
    ),
    "checkpoints that are never written": (
        FAULT + SCRIPT.replace("every = 5", "every = 100"),
        ["faults of 't'", "none happens after a complete checkpoint", "a fault after step 100"],
    ),
    "a fault before the first checkpoint": (
        FAULT + SCRIPT.replace("step = 6", "step = 5"),
        ["faults of 't'", "checkpoint_every = 5 the first one is at step 5"],
    ),
    "the first checkpoint torn": (
        FAULT + 'checkpoint_every = 5\nfaults = [{ kind = "ckpt_torn", step = 5 }]\n',
        ["faults of 't'", "a fault after step 5"],
    ),
    "two faults at once": (
        FAULT
        + "checkpoint_every = 4\nfaults = [\n"
        + '{ kind = "preempt", step = 8 }, { kind = "kill", step = 3 },\n'
        + '{ kind = "ckpt_torn", step = 8 }]\n',
        [
            "faults[2].step",
            "ckpt_torn happens at step 8",
            "faults[0], preempt",
            "one fault per step",
        ],
    ),
    "no time to notice a hang": (
        FAULT + SCRIPT.replace('"kill"', '"hang"') + "recover_within_s = 5\n",
        ["recover_within_s", "5 s are too few", "at least 10 s"],
    ),
    "torchrun preempted": (
        FAULT
        + 'restarts = "torchrun"\ncheckpoint_every = 5\n'
        + 'faults = [{ kind = "preempt", step = 6 }]\n',
        ["faults[0].kind", "SIGTERM", 'restarts = "harness"'],
    ),
    "torchrun and a truncated shard": (
        FAULT
        + 'restarts = "torchrun"\ncheckpoint_every = 5\n'
        + 'faults = [{ kind = "ckpt_torn", step = 5, torn = "truncated" }]\n',
        ["faults[0].torn", "looks complete", 'restarts = "harness"'],
    ),
    "torchrun and a hanging rank": (
        FAULT
        + 'restarts = "torchrun"\ncheckpoint_every = 5\nfaults = [{ kind = "hang", step = 6 }]\n'
        + 'set = { "comm.train_timeout_seconds" = 120 }\n',
        ["faults[0].kind", "is 120, recover_within_s 120"],
    ),
    "torchrun without its rendezvous": (
        FAULT
        + 'restarts = "torchrun"\nnodes = [1, 2]\ncheckpoint_every = 5\n'
        + 'faults = [{ kind = "agent_loss", step = 6, node = 0 }]\n',
        ["faults[0].node", "rendezvous store"],
    ),
    "half a checkpoint that is written in the background": (
        FAULT
        + 'checkpoint_every = 5\nfaults = [{ kind = "ckpt_torn", step = 5 }]\n'
        + 'set = { "checkpoint.async_mode" = "async" }\n',
        ["set.checkpoint.async_mode", "ckpt_torn strikes while a step writes", "leave one of"],
    ),
    "a checkpoint in pinned memory": (
        FAULT + SCRIPT + 'set = { "checkpoint.async_mode" = "async_with_pinned_mem" }\n',
        ["set.checkpoint.async_mode", "needs an accelerator", "'disabled' or 'async'"],
    ),
    "an unknown way to write checkpoints": (
        FAULT + SCRIPT + 'set = { "checkpoint.async_mode" = "later" }\n',
        ["set.checkpoint.async_mode", "is 'later' (use 'disabled' or 'async')"],
    ),
    "a product of one": (
        SPACE_TIME.replace("product = 2", "product = 1"),
        ["product", "greater than or equal to 2"],
    ),
    "another global batch": (
        SPACE_TIME + "local_batch_size = 2\n",
        ["product", "2 x local batch 2 = 4", "training.global_batch_size is 8"],
    ),
    "another global batch than the control's": (
        SPACE_TIME + 'set = { "training.global_batch_size" = 16 }\nlocal_batch_size = 8\n',
        ["product", "= 16 samples", "'control' has 8"],
    ),
    "a local batch said twice": (
        SPACE_TIME + 'local_batch_size = 4\nset = { "training.local_batch_size" = 4 }\n',
        ["local_batch_size", "also set.training.local_batch_size"],
    ),
    "stages without data parallelism": (
        SPACE_TIME + "pp = [1, 4]\n",
        ["pp[1]", "4 leaves no data parallelism"],
    ),
    "what the sets vary": (
        SPACE_TIME + 'set = { "parallelism.fsdp_reshard_after_forward" = "never" }\n',
        ["set.parallelism.fsdp_reshard_after_forward", "vary"],
    ),
}


def test_a_fault_that_is_refused_takes_no_node_from_those_after_it(problems):
    script = (
        'checkpoint_every = 5\nfaults = [{ kind = "agent_loss", step = 6 }, '
        '{ kind = "kill", step = 8, rank = 1 }]\n'
    )
    (problem,) = problems(FAULT + script)
    assert "faults[0].kind" in problem
    problem, *others = problems(FAULT + "nodes = [1, 2]\n" + script)
    assert "faults[1].rank" in problem  # the loss happens
    assert others == []


def test_checkpoints_may_be_written_in_the_background(load):
    mode = {"checkpoint.async_mode": "async"}
    text = FAULT + SCRIPT + 'set = { "checkpoint.async_mode" = "async" }\n'
    (test,) = load(text).tests
    assert mode.items() <= test.overrides.items()


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_with_its_place(problems, case):
    text, words = WRONG[case]
    found = problems(text)
    assert all(word in "\n".join(found) for word in words), found
    assert all(each.startswith(": test[0].") and " of 't'" in each for each in found), found


@pytest.mark.parametrize(
    "faults",
    [
        '{ kind = "preempt", step = 5 }',  # strikes when the checkpoint of its step is written
        '{ kind = "kill", step = 6 }, { kind = "kill", step = 2 }',
        '{ kind = "ckpt_torn", step = 5 }, { kind = "kill", step = 7 }',  # whole in the replay
        '{ kind = "disk_full", step = 10 }',
    ],
)
def test_one_fault_after_a_whole_checkpoint_makes_a_script(load, faults):
    (test,) = load(FAULT + f"checkpoint_every = 5\nfaults = [{faults}]\n").tests
    assert test.recovery.checkpoint_every == 5


OF_HARNESS = ("interval = 5", "load_step = 4", 'initial_load_path = "x"', "load_only = true")


@pytest.mark.parametrize("body", [ELASTIC + SEGMENTS, FAULT + SCRIPT])
def test_a_train_config_leaves_the_checkpoints_of_resumed_sets_alone(problems, folder, body):
    config = folder / "base.toml"
    kept = 'exclude_from_loading = ["dataloader"]'
    config.write_text(config.read_text() + "\n".join(["[checkpoint]", kept, *OF_HARNESS]))
    found = problems(body)
    keys = sorted(written.split()[0] for written in OF_HARNESS)
    assert [each.split(": ")[:2] for each in found] == [
        ["base.toml", f"checkpoint.{key}"] for key in keys
    ]
    assert all("converge writes and loads" in each for each in found)


def test_a_train_config_may_write_checkpoints_of_sets_that_do_not_resume(load, folder):
    config = folder / "base.toml"
    config.write_text(config.read_text() + "[checkpoint]\ninterval = 5\n")
    assert load(HEAD + "parallelism = { dp_shard = 2 }\n").tests


def test_torchrun_survives_a_hang_that_collectives_notice_in_time(load):
    text = (
        FAULT
        + 'restarts = "torchrun"\ncheckpoint_every = 5\nfaults = [{ kind = "hang", step = 6 }]\n'
        + 'set = { "comm.train_timeout_seconds" = 30 }\n'
    )
    (test,) = load(text).tests
    assert test.recovery.faults == (Fault(FaultKind.HANG, 6),)


@pytest.mark.parametrize("written", ["", 'loader = "torchtitan"\n'])
def test_space_time_needs_an_order_that_no_degree_changes(problems, folder, written):
    config = (folder / "base.toml").read_text()
    config = config + written if written else config.replace("[converge.data]", "")
    (folder / "base.toml").write_text(config)
    (found,) = problems(SPACE_TIME)  # once, though five sets come from the table
    assert "test[0].kind of 't': space_time needs [converge.data] in base.toml" in found


def test_all_problems_of_all_kinds_come_at_once(problems):
    found = problems(
        ELASTIC
        + SEGMENTS.replace("until = 20", "until = 19")
        + '[[test]]\nname = "f"\nkind = "fault"\nparallelism = { dp_shard = 2 }\n'
        + SCRIPT.replace("rank = 1", "rank = 5")
        + 'set = { "checkpoint.enable" = true }\nmax_restarts = 0\n'
        + '[[test]]\nname = "s"\nkind = "space_time"\nproduct = 3\n'
    )
    places = [each.split(": ")[1] for each in found]
    assert places == [
        "test[0].segments[2].until of 't'",
        "test[1].set.checkpoint.enable of 'f'",
        "test[1].max_restarts of 'f'",
        "test[1].faults[0].rank of 'f'",
        "test[2].product of 's'",
    ]


TO_SLURM = 'launcher = "slurm"\n'
ON_NODES = "[cluster]\nranks_per_node = 2\n"
IN_PLACE = 'restarts = "torchrun"\n'


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (SCRIPT, "restarts of 't': converge does not run next to the ranks of a cluster"),
        (SCRIPT.replace("kill", "hang"), 'it cannot restart them (restarts = "torchrun", or run'),
        (
            SCRIPT.replace('"kill", step = 6, rank = 1', '"preempt", step = 6') + IN_PLACE,
            "faults[0].kind of 't': preempt is caused by converge on the machine of the ranks",
        ),
        (
            SCRIPT + IN_PLACE + "nodes = [2, 2]\n",
            "nodes of 't': a scheduler decides on the nodes: they do not change during a job",
        ),
    ],
)
def test_on_a_cluster_a_script_that_needs_converge_there_is_refused(problems, body, expected):
    found = problems(TO_SLURM + FAULT + body + ON_NODES)
    assert any(expected in each for each in found), found


def test_on_a_cluster_the_ranks_strike_themselves_and_torchrun_restarts_them(load):
    (test,) = load(TO_SLURM + FAULT + SCRIPT + IN_PLACE + ON_NODES).tests
    assert test.recovery.restarts is RestartOwner.TORCHRUN
