"""``[trainers.NAME]``: test sets of another trainer than their control's."""

import pytest

from converge_harness.model import Surroundings
from converge_harness.plan import make_plan
from converge_harness.plan.identity import seed_identity
from converge_harness.trainers import assume_toolchain, job_payload

MEGATRON = """
[converge.data]
[training]
local_batch_size = 2
global_batch_size = 8
seq_len = 256
steps = 20
[transformer]
num_layers = 4
"""
NAMES = """
rotary_interleaved = true
[parameters]
"final_layernorm.weight" = "norm.weight"
"""
TEXT = """
schema = 1
[trainer]
train_config = "base.toml"
toolchain = "torchtitan-0.3.0-torch-2.13"
[trainer.set]
"training.max_norm" = 0.5

[trainers.megatron]
kind = "megatron"
train_config = "megatron.toml"
weights = "names.toml"
[trainers.megatron.set]
"optimizer.clip_grad" = 0.5

[control]
name = "titan"
parallelism = { dp_shard = 2 }

[[test]]
name = "tp2"
trainer = "megatron"
parallelism = { tp = 2 }

[[test]]
name = "pp2"
parallelism = { dp_shard = 2, pp = 2 }
"""


@pytest.fixture
def folder(folder):
    (folder / "megatron.toml").write_text(MEGATRON)
    (folder / "names.toml").write_text(NAMES)
    return folder


def test_a_set_has_the_train_config_the_toolchain_and_the_keys_of_its_trainer(load):
    tp2, pp2 = load(TEXT).tests
    assert (tp2.trainer.kind, tp2.toolchain) == ("megatron", "megatron-core-0.19.2")
    assert tp2.train_config.path == "megatron.toml"
    assert tp2.overrides == {"optimizer.clip_grad": 0.5}
    assert tp2.starts_from_control
    assert tp2.spmd_backend is None
    assert (pp2.trainer.kind, pp2.toolchain) == ("torchtitan", "torchtitan-0.3.0-torch-2.13")
    assert pp2.overrides == {"training.max_norm": 0.5}
    assert not pp2.starts_from_control


def plan_of(experiment):
    specs = (*experiment.controls, *experiment.tests)
    toolchains = {
        spec.toolchain: assume_toolchain(spec.toolchain, None, spec.trainer) for spec in specs
    }
    data = {spec.train_config.data: "d" for spec in specs}
    surroundings = Surroundings("cpu-test", "r", data=data, injected={}, sources={})
    return make_plan(experiment, toolchains, surroundings), surroundings


def test_all_start_from_the_seed_checkpoint_that_the_controls_trainer_makes(load):
    plan, surroundings = plan_of(load(TEXT))
    (seed,) = (job for job in plan.jobs if job.name == "seed")
    assert seed.spec.trainer.kind == "torchtitan"
    assert {plan.job(name).needs for name in ("titan", "tp2", "pp2")} == {seed.identity}
    tp2 = plan.job("tp2")
    # By itself it would have another.
    own = seed_identity(tp2.spec, tp2.toolchain, tp2.seed, surroundings)
    assert own != seed.identity


def test_so_do_those_of_other_seeds(load):
    plan, _ = plan_of(load(f"{TEXT}\n[seeds]\ncount = 2\n"))
    of_seed = [plan.job(f"{name}.seed43") for name in ("titan", "tp2")]
    assert len({job.needs for job in of_seed}) == 1
    assert of_seed[0].needs != plan.job("titan").needs


def test_ranks_get_the_names_which_count_to_the_identity(load, folder):
    plan, _ = plan_of(load(TEXT))
    job = plan.job("tp2")
    payload = job_payload(job, folder, data=None, seed_checkpoint=None, device="cpu")
    assert payload["weights"] == {
        "parameters": {"final_layernorm.weight": "norm.weight"},
        "modules": {},
        "beside": [],
        "rotary_interleaved": True,
        "half_split": {},
    }
    (folder / "names.toml").write_text(NAMES.replace("true", "false"))
    again, _ = plan_of(load(TEXT))
    assert again.job("tp2").identity != job.identity
    assert again.job("pp2").identity == plan.job("pp2").identity


WEIGHTS = 'weights = "names.toml"\n'
NAMED = 'trainer = "megatron"\n'


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            NAMED,
            'trainer = "megatrom"\n',
            "there is no [trainers.megatrom] (did you mean 'megatron'",
        ),
        (
            WEIGHTS,
            "",
            ": trainers.megatron.weights: is missing: its sets start from torchtitan's checkpoint",
        ),
        ('"names.toml"', '"x"', ": trainers.megatron.weights: there is no file 'x'"),
        (
            'kind = "megatron"\ntrain_config = "megatron.toml"\nweights = "names.toml"\n',
            'train_config = "base.toml"\n',
            ": trainers.megatron.kind: 'torchtitan' cannot start from the checkpoint of another",
        ),
        (
            WEIGHTS,
            f"{WEIGHTS}cpu_ranks = 2\n",
            ": trainers.megatron.cpu_ranks: is for all sets of a file (put it under [trainer])",
        ),
        (WEIGHTS, f"{WEIGHTS}wights = 1\n", ": trainers.megatron.wights: unknown key"),
        (NAMED, "", ": trainers.megatron: no test set names it"),
        (
            WEIGHTS,
            f'{WEIGHTS}toolchain = "torchtitan-0.3.0-torch-2.13"\n',
            "is for torchtitan and, in 'tp2', for megatron",
        ),
        (
            'train_config = "megatron.toml"\n',
            "",
            "train_config of 'tp2': is missing (set trainers.megatron.train_config for all sets)",
        ),
        (
            "[trainers.megatron.set]",
            "checkpoint_every = 4\n[trainers.megatron.set]",
            ": trainers.megatron.checkpoint_every: unknown key",
        ),
        (
            "schema = 1",
            "schema = 1\ncheckpoint_every = 4",
            "a megatron trainer decides itself when it writes a checkpoint",
        ),
        (
            "schema = 1",
            'schema = 1\nbaseline = "night"',
            ": baseline: has no weights for the sets of [trainers.megatron]",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place(problems, old, new, says):
    assert old in TEXT
    assert any(says in each for each in problems(TEXT.replace(old, new, 1)))


def test_a_misspelt_kind_is_the_only_thing_said_of_its_table(problems):
    found = problems(TEXT.replace('kind = "megatron"', 'kind = "megatronn"'))
    assert any("megatronn" in each for each in found)
    assert not any("cannot start from the checkpoint" in each for each in found)


def test_controls_start_from_their_own_weights(problems):
    text = TEXT.replace("[trainer]\n", '[trainer]\nkind = "megatron"\nweights = "names.toml"\n')
    assert any(
        each.startswith(": trainer.weights: names the parameters of another trainer's checkpoint")
        for each in problems(text.replace('"base.toml"', '"megatron.toml"'))
    )


def test_a_control_names_no_trainer(problems):
    text = TEXT.replace('name = "titan"', 'name = "titan"\ntrainer = "megatron"')
    assert any("control.trainer of 'titan': unknown key" in each for each in problems(text))


PROGRAM = """
rotary_interleaved = true
[half_split]
"q.weight" = 4
[parameters]
"q.weight" = "wq.weight"
"""
OF_PROGRAM = """
schema = 1
[trainer]
train_config = "base.toml"
[trainers.mine]
kind = "command"
command = ["mine.py", "--steps", "{steps}"]
toolchain = "transformers-5.23.0"
weights = "mine_names.toml"
[trainers.mine.config]
training = { steps = 10, local_batch_size = 4, global_batch_size = 8, seq_len = 64 }
[control]
name = "titan"
parallelism = { dp_shard = 2 }
[[test]]
name = "ddp2"
trainer = "mine"
parallelism = { dp_replicate = 2 }
"""


@pytest.fixture
def program(folder):
    (folder / "mine.py").touch()
    (folder / "mine_names.toml").write_text(PROGRAM)
    return folder


@pytest.mark.usefixtures("program")
def test_a_program_starts_from_the_seed_checkpoint_of_its_control(load):
    experiment = load(OF_PROGRAM)
    (ddp2,) = experiment.tests
    assert ddp2.trainer.can.shares_initial_weights
    assert ddp2.starts_from_control
    assert ddp2.trainer.settings.weights.order_of_rows("q.weight") == (0, 2, 1, 3)


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            'weights = "mine_names.toml"\n',
            "",
            ": trainers.mine.weights: is missing: its sets start from torchtitan's checkpoint",
        ),
        (
            'weights = "mine_names.toml"\n',
            'weights = "mine_names.toml"\nprobe = false\ncurves = "{output}/c.csv"\n',
            ": trainers.mine.weights: has no effect without the probe",
        ),
    ],
)
def test_a_program_needs_the_names_and_the_probe(problems, old, new, says):
    assert old in OF_PROGRAM
    assert any(says in each for each in problems(OF_PROGRAM.replace(old, new, 1)))
