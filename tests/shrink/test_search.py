"""The search for the smallest pair, with failures that are known by construction."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from converge_harness.experiment import load_experiment
from converge_harness.plan import select
from converge_harness.shrink import Effect, Trial, parts_of, reductions, search, smallest_pair

ROOT = Path(__file__).parents[2]
EXPERIMENT = f"""
schema = 1
[trainer]
train_config = "{ROOT}/train_configs/llama3_debug.toml"
[technique.fused]
what = "RMSNorm by a fused kernel"
set = {{ "model.fused_norm" = true }}
[control]
name = "fsdp2"
parallelism = {{ dp_shard = 2 }}
[[test]]
name = "all"
parallelism = {{ dp_shard = 2, tp = 4, pp = 2 }}
pipeline_schedule = "Interleaved1F1B"
techniques = ["compile", "float8", "fused"]
set = {{ "training.max_norm" = 1.0 }}
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    path = tmp_path_factory.mktemp("shrink") / "all.toml"
    path.write_text(EXPERIMENT)
    return smallest_pair(load_experiment(path), (), ("same-dp-degree",))


def shrunk(pair, fails, *, tries=1000):
    """The result, and all trials; ``fails`` says of a test set whether it still does."""
    told = []

    def trial(reduction):
        (test,) = reduction.made.tests
        return Trial(Effect.SAME if fails(test) else Effect.PASSES)

    def tell(found, tried):
        told.append(tried)

    return search(pair, trial, lambda tried: tried < tries, tell), told


def set_of(experiment):
    return experiment.tests[0]


def test_only_the_guilty_pair_is_left(pair):
    def compile_and_tp(test):
        return "compile" in test.techniques and test.parallelism.tp > 1

    found, told = shrunk(pair, compile_and_tp)
    assert found.done
    (control,), (test,) = found.experiment.controls, found.experiment.tests
    assert parts_of(test) == ("tp 2", "compile")
    assert {each.reduction.what for each in found.needed} == {"compile", "tp 2"}
    assert test.pipeline_schedule is None
    assert dict(test.overrides) == {
        "training.steps": 2,
        "training.seq_len": 32,
        "training.local_batch_size": 1,
        "training.global_batch_size": 1,
        "training.max_norm": 0.2,
    }
    assert test.train_config.model["n_layers"] == control.train_config.model["n_layers"] == 1
    assert parts_of(control) == ()
    assert found.tried == len(told)


def test_what_a_larger_pair_needed_is_tried_again(pair):
    """Without Float8 it passes only as long as there are two pipeline stages."""

    def fails(test):
        return "float8" in test.techniques or test.parallelism.pp == 1

    found, _ = shrunk(pair, fails)
    assert parts_of(set_of(found.experiment)) == ()
    assert found.needed == ()


def test_what_a_larger_pair_showed_is_kept_where_a_smaller_one_shows_nothing(pair):
    """Without compile it passes, and cannot be judged once there is no Float8 either."""

    def trial(reduction):
        (test,) = reduction.made.tests
        if "compile" in test.techniques:
            return Trial(Effect.SAME)
        return Trial(Effect.PASSES if "float8" in test.techniques else Effect.UNDECIDED)

    found = search(pair, trial, lambda tried: True, lambda found, tried: None)
    assert found.done
    assert [(each.reduction.what, each.trial.effect) for each in found.needed] == [
        ("compile", Effect.PASSES)
    ]


def test_samples_a_step_stay_as_they_were(pair):
    found, told = shrunk(pair, lambda test: True)
    for tried in told:
        sets = (*tried.reduction.made.controls, *tried.reduction.made.tests)
        whole = {spec.setting("training.global_batch_size") for spec in sets}
        assert len(whole) == 1
        for spec in sets:
            local = spec.setting("training.local_batch_size") * spec.parallelism.dp
            assert next(iter(whole)) % local == 0
    assert found.experiment.tests[0].parallelism.world_size == 1


def test_a_technique_goes_from_both_sets_with_its_keys(pair):
    (own,) = [each for each in reductions(pair) if each.what == "fused"]
    (test,) = own.made.tests
    assert [each.name for each in test.own_techniques] == []
    assert "model.fused_norm" not in test.overrides
    assert "model.fused_norm" in pair.tests[0].overrides


def test_a_budget_ends_the_search_with_the_best_so_far(pair):
    found, told = shrunk(pair, lambda test: True, tries=3)
    assert (found.done, found.tried, len(told)) == (False, 3, 3)
    assert found.experiment == told[-1].reduction.made


NEEDS = st.sets(st.sampled_from(["compile", "float8", "fused", "tp", "pp"]))


@settings(max_examples=30)
@given(NEEDS)
def test_whatever_it_needs_is_what_is_left(pair, needs):
    def fails(test):
        has = {name.partition(" ")[0] for name in parts_of(test)}
        return needs <= has

    found, _ = shrunk(pair, fails)
    left = {name.partition(" ")[0] for name in parts_of(set_of(found.experiment))}
    assert left == needs


def test_of_a_program_only_what_its_runs_show_is_taken_away():
    """Whether it reads any other setting of both sets, nobody knows."""
    experiment = load_experiment(ROOT / "experiments" / "zero_bugs.toml")
    (first, *_) = experiment.tests
    pair = smallest_pair(select(experiment, [first.name]), (), ())
    changes = {each.change for each in reductions(pair)}
    assert "2 steps instead of 16" in changes
    assert "dp_shard 1 instead of 2" in changes
    assert not [change for change in changes if "tokens" in change or "float32" in change]


def test_no_two_changes_have_one_name(tmp_path):
    text = EXPERIMENT.replace(
        '"training.max_norm" = 1.0',
        '"training.dtype" = "bfloat16", "training.mixed_precision_param" = "bfloat16"',
    )
    path = tmp_path / "low.toml"
    path.write_text(text)
    pair = smallest_pair(load_experiment(path), (), ())
    changes = [each.change for each in reductions(pair)]
    assert len(changes) == len(set(changes))
    assert sum("float32 instead of bfloat16" in change for change in changes) == 2


def test_what_nobody_could_judge_is_not_said_to_be_needed(pair):
    def trial(reduction):
        (test,) = reduction.made.tests
        return Trial(Effect.SAME if "compile" in test.techniques else Effect.IMPOSSIBLE, "a rule")

    found = search(pair, trial, lambda tried: True, lambda found, tried: None)
    assert [each.reduction.what for each in found.left] == ["compile"]
    assert found.needed == ()
