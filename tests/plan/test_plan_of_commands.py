"""Plans of sets that any program trains: sizes, precision, rules, identities, words."""

from dataclasses import replace
from pathlib import Path

import pytest
from plan_examples import SURROUNDINGS, Planner

from converge_harness.errors import ConfigError
from converge_harness.experiment import load_experiment
from converge_harness.model import Precision, Role, Toolchain
from converge_harness.plan import describe, make_plan
from converge_harness.trainers.command import trained_by

MINE = Toolchain("mine", Path("/mine/bin/python"), "command", {"torch": "2.13.0"})
TOP = "schema = 1\n"
COMMAND = '["train.py", "--stage", "{config.zero.stage}", "--output", "{output}"]'
HEAD = f"""[trainer]
kind = "command"
command = {COMMAND}
toolchain = "mine"
"""
CONFIG = """[trainer.config]
training = { steps = 20, local_batch_size = 2, global_batch_size = 8 }
zero = { stage = 0 }
"""
CONTROL = """[control]
name = "ddp2"
parallelism = { dp_replicate = 2 }
"""
ZERO = """[[test]]
name = "zero2"
parallelism = { dp_shard = 2 }
set = { zero.stage = 2 }
"""
CURVES = 'probe = false\ncurves = "{output}/loss.csv"\n'


@pytest.fixture
def planned(tmp_path):
    """A plan from what differs from the usual file."""

    def planned(
        tests=ZERO,
        *,
        trainer="",
        config=CONFIG,
        control=CONTROL,
        digest="s1",
        top=TOP,
        command=None,
        **changes,
    ):
        (tmp_path / "train.py").touch()
        path = tmp_path / "x.toml"
        head = HEAD if command is None else HEAD.replace(COMMAND, command)
        path.write_text(top + head + trainer + config + control + tests)
        sources = {tmp_path / "train.py": digest}
        toolchain = replace(MINE, **changes)
        return make_plan(
            load_experiment(path), {"mine": toolchain}, replace(SURROUNDINGS, sources=sources)
        )

    return planned


@pytest.fixture
def refused(planned):
    def refused(*arguments, **changes):
        with pytest.raises(ConfigError) as caught:
            planned(*arguments, **changes)
        return [str(each).split("x.toml: ", 1)[-1] for each in caught.value.problems]

    return refused


def test_there_is_no_seed_checkpoint_and_what_the_probe_can_repeat(planned):
    plan = planned()
    assert [(job.name, job.role) for job in plan.jobs] == [
        ("ddp2", Role.CONTROL),
        ("ddp2.rerun", Role.REPEAT),
        ("ddp2.ulp", Role.REPEAT),
        ("ddp2.ulp.2", Role.REPEAT),
        ("ddp2.ulp.3", Role.REPEAT),
        ("zero2", Role.TEST),
    ]
    assert {(job.needs, job.starts_from) for job in plan.jobs} == {(None, None)}
    assert all(job.spec.trainer.kind == "command" for job in plan.jobs)
    assert len({job.identity for job in plan.jobs}) == len(plan.jobs)


def test_below_float32_the_probe_rounds_otherwise(planned):
    """An ulp of a weight in float32 is lost in autocast's cast to bfloat16."""
    low = CONFIG.replace("steps = 20", 'steps = 20, mixed_precision_param = "bfloat16"')
    repeats = [job.name for job in planned(config=low).jobs if job.role is Role.REPEAT]
    assert repeats == ["ddp2.rerun", "ddp2.rounding", "ddp2.rounding.2", "ddp2.rounding.3"]
    plan = planned(config=low, trainer=CURVES)
    assert [job.name for job in plan.jobs] == ["ddp2", "ddp2.rerun", "zero2"]


def test_without_the_probe_there_is_a_rerun_and_no_sampled_step(planned):
    plan = planned(trainer=CURVES)
    assert [job.name for job in plan.jobs] == ["ddp2", "ddp2.rerun", "zero2"]
    assert {job.sample_steps for job in plan.jobs} == {()}


def test_sizes_come_from_the_config_and_a_length_may_be_left_out(planned):
    job = planned().job("zero2")
    assert (job.steps, job.local_batch_size, job.global_batch_size, job.seq_len) == (20, 2, 8, 1)
    assert (job.gradient_accumulation_steps, job.world_size) == (2, 2)


@pytest.mark.parametrize(
    ("written", "precision"),
    [
        ("", Precision.FP32),
        ('dtype = "bfloat16"', Precision.BF16),
        ('mixed_precision_param = "bfloat16"', Precision.BF16),
        ('dtype = "float32", mixed_precision_param = "float16"', Precision.BF16),
    ],
)
def test_arithmetic_is_float32_unless_the_config_says_otherwise(planned, written, precision):
    sizes = "training = { steps = 2, local_batch_size = 2, " + written + " }\n"
    config = f"[trainer.config]\n{sizes}zero = {{ stage = 0 }}\n"
    assert planned(config=config).job("zero2").precision is precision


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("training = { local_batch_size = 2 }", "training.steps: is not set (in [trainer.config]"),
        (
            "training = { steps = 2, local_batchsize = 2 }",
            "training.local_batchsize: is not a key that converge reads",
        ),
        ("training = { steps = 2, local_batch_size = 0 }", "must be a positive integer, not 0"),
        (
            "training = { steps = 2, local_batch_size = 2, dtype = 'fp32' }",
            "training.dtype: 'fp32' is not a known data type",
        ),
        (
            "training = { steps = 2, local_batch_size = 2, dtype = ['float32'] }",
            "training.dtype: ['float32'] is not a known data type (did you mean 'float32'?",
        ),
    ],
)
def test_sizes_that_a_plan_needs(refused, config, expected):
    found = refused(config=f"[trainer.config]\n{config}\nzero = {{ stage = 0 }}\n")
    assert any(expected in problem for problem in found), found


@pytest.mark.parametrize(
    ("degrees", "settings"),
    [
        ("tp = 2, dp_shard = 3", "training.seq_len = 7, training.global_batch_size = 12"),
        ("dp_replicate = 4", "training.local_batch_size = 1"),
        ("pp = 4", ""),
        ("dp_shard = 2, ep = 8", ""),
    ],
)
def test_rules_about_torchtitans_own_parallelism_are_silent(planned, degrees, settings):
    # The same sizes in the control, so that nothing but the degrees is to be ruled on.
    sizes = f"set = {{ {settings} }}\n" if settings else ""
    control = f"[control]\nname = 'ddp2'\nparallelism = {{ dp_replicate = 2 }}\n{sizes}"
    test = f"[[test]]\nname = 't'\nparallelism = {{ {degrees} }}\n{sizes}"
    if "dp_shard = 3" in degrees:
        control = control.replace("dp_replicate = 2", "dp_replicate = 3")
    planned(test, control=control, command='["train.py", "{ep}"]')


@pytest.mark.parametrize(
    ("command", "test"),
    [
        ('["train.py"]', "parallelism = { dp_shard = 2 }"),
        ('["train.py", "{output}", "{name}", "{ranks}"]', "parallelism = { dp_shard = 2 }"),
        (
            '["train.py"]',
            "parallelism = { dp_replicate = 2 }\nset = { training.dtype = 'bfloat16' }",
        ),
        (
            '["train.py", "{tp}"]',
            "parallelism = { dp_replicate = 2 }\nset = { training.local_batch_size = 1 }",
        ),
    ],
)
def test_a_set_whose_program_is_called_as_its_controls_is_refused(planned, refused, command, test):
    tests = f"[[test]]\nname = 't'\n{test}\n"
    (found,) = refused(tests, command=command)
    assert "calls t exactly like ddp2" in found
    told = '["{dp_shard}", "{config.training.dtype}", "{local_batch_size}"]'
    config = CONFIG.replace("steps", "dtype = 'float32', steps")
    planned(tests, command=f'["train.py", {told[1:]}', config=config)


def test_a_set_that_says_what_its_control_has_anyway_is_no_other_call(planned):
    same = "parallelism = { dp_replicate = 2 }\nset = { training.local_batch_size = 2 }"
    planned(f"[[test]]\nname = 't'\n{same}\n", command='["train.py"]')


def test_a_program_without_a_launcher_is_told_how_many_ranks_it_has(planned, refused):
    tests = (
        "[[test]]\nname = 't'\nparallelism = { dp_replicate = 4 }\n"
        "set = { training.local_batch_size = 1 }\n"
    )
    none = 'launcher = "none"\n'
    command = '["{python}", "train.py", "{local_batch_size}"]'
    (found,) = refused(tests, trainer=none, command=command)
    assert "nothing tells the program of t to use 4 ranks" in found
    named = command.replace("]", ', "{config.training.dtype}"]')
    config = CONFIG.replace("steps", "dtype = 'float32', steps")
    (found,) = refused(tests, trainer=none, command=named, config=config)
    assert "nothing tells the program of t to use 4 ranks" in found
    planned(tests, trainer=none, command=command.replace("]", ', "{ranks}"]'))
    stage = command.replace("]", ', "{config.zero.stage}"]')
    planned(tests.replace("= 1 }", "= 1, zero.stage = 2 }"), trainer=none, command=stage)
    planned(tests, command=command)
    same = "[[test]]\nname = 't'\nparallelism = { dp_replicate = 4 }\n"
    (found,) = refused(same, trainer=none, command='["{python}", "train.py"]')
    assert "calls t exactly like ddp2" in found


def test_a_program_without_a_launcher_is_told_the_ranks_of_every_segment(planned, refused):
    tests = (
        "[[test]]\nkind = 'elastic'\nname = 't'\nset = { zero.stage = 2 }\n"
        "segments = [{ until = 4, dp_replicate = 2 }, { until = 20, dp_replicate = 1 }]\n"
    )
    none = 'launcher = "none"\n[trainer.checkpoints]\nname = "step-{step}.pt"\n'
    command = (
        '["{python}", "train.py", "{checkpoint_dir}", "{resume_from}", "{stop_at}", '
        '"{gradient_accumulation_steps}", "{config.zero.stage}"]'
    )
    (found,) = refused(tests, trainer=none, command=command)
    assert "nothing tells the program of t to use 1 ranks, because there is no launcher" in found
    planned(tests, trainer=none, command=command.replace("]", ', "{ranks}"]'))
    planned(tests, trainer=none.replace("none", "mpirun"), command=command)


@pytest.mark.parametrize("launcher", ["composer", "deepspeed", "none", "torchrun", "srun"])
def test_several_nodes_need_a_launcher_that_starts_ranks_on_them(planned, refused, launcher):
    wide = ZERO.replace("dp_shard = 2", "dp_shard = 4") + "[cluster]\nranks_per_node = "
    by = {
        "trainer": f'launcher = "{launcher}"\n',
        "command": '["train.py", "--stage", "{config.zero.stage}", "--ranks", "{ranks}"]',
        "top": f'{TOP}launcher = "slurm"\n',
    }
    if launcher in ("none", "srun"):
        by["command"] = by["command"].replace("[", '["{python}", ')
    planned(f"{wide}4\n", **by)
    if launcher in ("torchrun", "srun"):
        planned(f"{wide}2\n", **by)
        return
    (found,) = refused(f"{wide}2\n", **by)
    assert "parallelism: 4 ranks need 2 nodes, but " in found
    assert "starts ranks on one node only [nodes-filled]" in found
    assert "(trainer.launcher = 'torchrun' or 'srun')" in found


def test_a_set_that_differs_in_nothing_from_its_control_may_be_run(planned):
    planned("[[test]]\nname = 'a'\nparallelism = { dp_replicate = 2 }\n", command='["train.py"]')


@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ("training.steps = 10", "same-steps"),
        ("training.global_batch_size = 16", "same-token-budget"),
        ("training.seq_len = 2", "same-token-budget"),
        ("training.local_batch_size = 3", "batch-divisible"),
    ],
)
def test_rules_about_any_training_hold(refused, setting, rule):
    test = f"[[test]]\nname = 't'\nparallelism = {{ dp_shard = 2 }}\nset = {{ {setting} }}\n"
    assert any(f"[{rule}]" in problem for problem in refused(test))


def test_a_control_without_repeats_breaks_a_rule(refused):
    problems = refused(top=TOP + "repeats = []\n")
    assert any("[control-is-repeated]" in problem for problem in problems)


def test_the_identity_follows_what_changes_numbers_and_nothing_else(planned):
    def identity(**changes):
        return planned(**changes).job("zero2").identity

    usual = identity()
    others = [
        identity(digest="s2"),
        identity(trainer='launcher = "deepspeed"\n'),
        identity(trainer='environment = { A = "1" }\n'),
        identity(trainer=CURVES),
        identity(trainer=CURVES + 'columns = { loss = "x" }\n'),
        identity(versions={"torch": "2.14.0"}),
        identity(config=CONFIG.replace("steps = 20", "steps = 21")),
        identity(tests=ZERO.replace("stage = 2", "stage = 3")),
    ]
    assert len({usual, *others}) == len(others) + 1
    assert identity(trainer="startup_timeout_s = 5\n") == usual
    assert identity(tests=ZERO + 'note = "n"\n') == usual
    assert identity(python=Path("/elsewhere/bin/python")) == usual


def test_sources_count_by_what_is_in_them_wherever_they_lie(planned, tmp_path):
    plan = planned()
    (job,) = (job for job in plan.jobs if job.name == "zero2")
    settings = job.spec.trainer.settings
    elsewhere = Path("/elsewhere")
    moved = trained_by(replace(settings, folder=elsewhere, sources=(elsewhere / "t",)))
    experiment = replace(
        plan.experiment,
        controls=tuple(replace(each, trainer=moved) for each in plan.experiment.controls),
        tests=tuple(replace(each, trainer=moved) for each in plan.experiment.tests),
    )
    there = replace(SURROUNDINGS, sources={Path("/elsewhere/t"): "s1"})
    assert make_plan(experiment, {"mine": MINE}, there).job("zero2").identity == job.identity


@pytest.mark.parametrize("where", ["command", "trainer"])
def test_the_name_of_a_set_counts_where_its_program_is_told_it(planned, where):
    again = "[[test]]\nname = 'again'\nparallelism = { dp_replicate = 2 }\n"
    same = planned(again)
    assert same.job("again").identity == same.job("ddp2").identity
    told = {
        "command": '["train.py", "{name}", "{config.zero.stage}"]',
        "trainer": 'environment = { NAME = "{name}" }\n',
    }
    plan = planned(again, **{where: told[where]})
    assert plan.job("again").identity != plan.job("ddp2").identity


def test_a_setting_that_is_an_empty_text_can_be_seen(planned):
    plan = planned("[[test]]\nname = 'none'\nparallelism = {}\nset = { zero.stage = '' }\n")
    rows = {row.name: row.serves for row in describe(plan)}
    assert rows["none"].endswith(", zero.stage '' against 0")
    assert describe(planned())[1].serves.endswith(", zero.stage 2 against 0")


def test_a_row_says_what_trains_and_what_differs(planned):
    control, test = describe(planned())
    assert control.serves == "control: DDP 2 on 2 ranks"
    assert test.serves == "FSDP 2 against DDP 2, zero.stage 2 against 0"
    assert test.trainer == "train.py by torchrun, probed"
    (_, curves) = describe(planned(trainer=CURVES + 'launcher = "composer"\n'))
    assert curves.trainer == "train.py by composer, curves only"
    mine = 'launcher = "none"\n'
    (_, called) = describe(
        planned(trainer=mine, command='["{python}", "-u", "train.py", "{config.zero.stage}"]')
    )
    assert called.trainer == "train.py, probed"


def test_torchtitans_sets_are_described_as_before(tmp_path):
    plan = Planner(tmp_path).test_set("parallelism = { dp_shard = 2, tp = 2 }")
    assert {row.trainer for row in describe(plan)} == {""}
