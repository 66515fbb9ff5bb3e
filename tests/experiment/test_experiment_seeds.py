"""``[seeds]`` and ``ask``: what a file may say of several seeds and of intended changes."""

import pytest

from converge_harness.errors import ConfigError
from converge_harness.model import Ask

TOP = """
schema = 1
seed = {seed}
{seeds}
[trainer]
train_config = "base.toml"
[control]
parallelism = {{ dp_shard = 2 }}
[[test]]
name = "tp"
parallelism = {{ dp_shard = 2, tp = 2 }}
"""
COMMAND = """
schema = 1
[seeds]
count = 2
[trainer]
kind = "command"
command = ["train.py", "--steps", "{steps}", "--out", "{output}"SEED]
probe = false
curves = "{output}/loss.csv"
[trainer.config.training]
steps = 20
local_batch_size = 4
seq_len = 256
[control]
parallelism = { dp_shard = 2 }
[[test]]
name = "other"
parallelism = { dp_shard = 2 }
"""


def problems_of(load, text):
    with pytest.raises(ConfigError) as error:
        load(text)
    return [str(problem) for problem in error.value.problems]


def test_a_file_without_seeds_has_one(load):
    experiment = load(TOP.format(seed=7, seeds=""))
    assert (experiment.seed, experiment.other_seeds) == (7, ())


def test_other_seeds_follow_the_first(load):
    experiment = load(TOP.format(seed=7, seeds="[seeds]\ncount = 3"))
    assert (experiment.seed, experiment.other_seeds) == (7, (8, 9))


@pytest.mark.parametrize(
    ("seed", "seeds", "said"),
    [
        (7, "[seeds]", "seeds.count: is missing"),
        (7, "[seeds]\ncount = 1", "seeds.count: must be greater than or equal to 2"),
        (7, "[seeds]\ncount = 101", "seeds.count: must be less than or equal to 100"),
        (7, "[seeds]\ncount = true", "seeds.count: must be a whole number"),
        (7, "[seeds]\nvalues = [1]", "seeds.values: unknown key"),
        (7, "seeds = 3", "seeds: must be a table, not 3"),
        (2**32 - 2, "[seeds]\ncount = 3", "seeds.count: ends at seed 4294967296"),
        (
            *(7, '[seeds]\ncount = 3\n[stop]\nwhen = "settled"'),
            'seeds: cannot be combined with stop = "settled" (',
        ),
        (7, 'baseline = "g"\n[seeds]\ncount = 3', "seeds: cannot be combined with a baseline"),
    ],
)
def test_what_is_wrong_with_seeds_is_said(load, seed, seeds, said):
    assert any(said in problem for problem in problems_of(load, TOP.format(seed=seed, seeds=seeds)))


def test_every_seed_would_begin_with_the_weights_of_a_given_checkpoint(load, folder):
    (folder / "weights").mkdir()
    (folder / "weights" / ".metadata").write_bytes(b"x")
    text = TOP.format(seed=1, seeds="[seeds]\ncount = 2")
    text = text.replace("[control]", 'seed_checkpoint = "weights"\n[control]', 1)
    assert any("trainer.seed_checkpoint" in problem for problem in problems_of(load, text))


def test_a_program_has_to_be_given_its_seed(load, folder):
    (folder / "train.py").write_text("")
    (said,) = problems_of(load, COMMAND.replace("SEED", ""))
    assert "seeds: has no effect on a program that does not get the seed" in said
    assert '"{seed}"' in said
    told = load(COMMAND.replace("SEED", ', "--seed={seed}"'))
    assert told.other_seeds == (43,)


def test_the_name_of_a_run_by_another_seed_is_taken(load):
    text = TOP.format(seed=7, seeds="[seeds]\ncount = 3").replace('"tp"', '"Control.seed9"')
    assert any("'control' by seed 9" in problem for problem in problems_of(load, text))
    load(text.replace("seed9", "seed10"))


def test_a_test_set_asks_for_the_same_unless_it_says_otherwise(load):
    text = TOP.format(seed=7, seeds="")
    (same,) = load(text).tests
    (no_worse,) = load(text + 'ask = "no worse"').tests
    assert (same.ask, no_worse.ask) == (Ask.SAME, Ask.NO_WORSE)
    assert any(
        "ask of 'tp': 'better' is not known" in problem
        for problem in problems_of(load, text + 'ask = "better"')
    )


def test_the_sets_of_a_matrix_ask_alike(load):
    text = TOP.format(seed=7, seeds="").partition("[[test]]")[0]
    text += '[matrix]\nask = "no worse"\nparallelism = { dp_shard = [2], tp = [1, 2] }'
    assert [spec.ask for spec in load(text).tests] == [Ask.NO_WORSE] * 2


@pytest.mark.parametrize(
    "kind",
    [
        (
            'kind = "fault"\nparallelism = { dp_shard = 2 }\ncheckpoint_every = 4\n'
            'faults = [{ kind = "kill", step = 6 }]'
        ),
        'kind = "elastic"\nsegments = [{ until = 4, dp_shard = 2 }, { until = 20, dp_shard = 4 }]',
    ],
)
def test_a_run_that_has_to_go_on_as_it_was_asks_for_the_same(load, kind):
    text = TOP.format(seed=7, seeds="") + f'[[test]]\nname = "x"\n{kind}\n'
    load(text)
    assert any("ask" in problem for problem in problems_of(load, text + 'ask = "no worse"'))
    own = problems_of(load, text + "own_random_numbers = true")
    assert any("own_random_numbers" in problem for problem in own)


def test_random_numbers_of_a_set_need_frozen_steps(load):
    text = TOP.format(seed=7, seeds="")
    own = "own_random_numbers = true\n"
    assert [spec.own_random_numbers for spec in load(text + own).tests] == [True]
    for more, place in (
        ("[probe]\nfrozen = 3", "probe.frozen"),
        ('ask = "no worse"', "own_random_numbers"),
    ):
        (problem,) = problems_of(load, text + own + more)
        assert place in problem
    without = text.replace("schema = 1\n", "schema = 1\nreference = false\n")
    (problem,) = problems_of(load, without + own)
    assert "reference" in problem
