"""Techniques of the experiment file in a rank: where each is called, and what is seen of it.

First with stand-ins, then in real torchtitan, of either release.
"""

import dataclasses
import importlib.metadata
import sys
from types import SimpleNamespace

import pytest
import torch

from converge_harness.rank.own_techniques import OwnTechniques, TechniqueError, together
from converge_harness.run_folder.job import RankOwnTechnique

SOURCE = """
import functools
import types

import torch

calls = []

def to_config(config):
    config.lr = 2.0

def same_config(config):
    return type(config)(config.lr)

def to_model(model):
    calls.append("model")
    model[0].forward = types.MethodType(lambda self, x: x, model[0])

def other_model(model):
    return torch.nn.Sequential(model, torch.nn.Identity())

def idle(model): ...

def of_class(model):
    Patched = type(model[0])
    Patched.extra = lambda self: None

def to_part(parallel_model):
    calls.append("part")
    parallel_model.register_forward_hook(lambda *_: None)

def to_trainer(trainer):
    trainer.optimizer.param_groups[0]["lr"] = 0.5

def weights(trainer):
    with torch.no_grad():
        trainer.model_parts[0][0].weight.mul_(2)

def idle_trainer(trainer): ...

def raises(model):
    raise ValueError("no kernel for cpu")

def returns_a_word(model):
    return "done"

def returns_a_trainer(trainer):
    return trainer

def count(trainer):
    return len(calls)

def yes(trainer):
    return True

def no(trainer):
    return False

def nothing(trainer): ...
"""


@dataclasses.dataclass
class Config:
    lr: float = 1.0


@dataclasses.dataclass(frozen=True)
class Spec:
    parallelize_fn: object
    pipelining_fn: object = None


@pytest.fixture
def features(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    file = tmp_path / "features.py"
    file.write_text(SOURCE)
    return file


@pytest.fixture
def techniques(features):
    def make(apply, place=None, in_force=None, role=False, **more):
        own = RankOwnTechnique(
            "fused",
            apply=f"{features}:{apply}" if apply else None,
            place=place,
            in_force=f"{features}:{in_force}" if in_force else None,
            **more,
        )
        return OwnTechniques(SimpleNamespace(makes_seed_checkpoint=role, own_techniques=(own,)))

    return make


def model():
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


def trainer():
    parts = [model()]
    return SimpleNamespace(
        model_parts=parts, optimizer=torch.optim.SGD(parts[0].parameters(), lr=1.0)
    )


def seen(own, of=None):
    (found,) = own.see(of)
    return found


def flat(config):
    return dataclasses.asdict(config)


def test_a_config_is_changed_and_the_keys_are_listed(techniques):
    own = techniques("to_config", "config")
    config, keys = own.apply_to_config(Config(), flat)
    assert (config.lr, keys) == (2.0, ("lr",))
    assert seen(own) == {
        "name": "fused",
        "called": True,
        "changed": True,
        "count": None,
        "modules": [],
    }


def test_a_copy_of_a_config_is_no_change(techniques):
    own = techniques("same_config", "config")
    assert own.apply_to_config(Config(), flat)[1] == ()
    assert not seen(own)["changed"]


def parallelized(model, *_, **__):
    return model


def test_a_model_is_given_before_it_is_parallelised_and_after(techniques):
    for apply, place, changed, modules in [
        ("to_model", "model", True, ["Linear"]),
        ("other_model", "model", True, ["Identity", "Sequential"]),
        ("idle", "model", False, []),
        ("to_part", "parallel_model", True, ["Sequential"]),
    ]:
        own = techniques(apply, place)
        spec = own.watch_model(Spec(parallelized))
        assert not seen(own)["called"]
        spec.parallelize_fn(model(), "dims")
        assert (seen(own)["called"], seen(own)["changed"]) == (True, changed), apply
        assert seen(own)["modules"] == modules, apply


def test_a_pipeline_gives_the_whole_model_once_and_each_part(techniques, features):
    def pipelined(whole, parallelize):
        return [parallelize(part) for part in whole]

    own = techniques("to_model", "model", "count")
    spec = own.watch_model(Spec(parallelized, pipelined))
    spec.pipelining_fn(model(), spec.parallelize_fn)
    assert seen(own)["count"] == 1
    own = techniques("to_part", "parallel_model", "count")
    spec = own.watch_model(Spec(parallelized, pipelined))
    spec.pipelining_fn(model(), spec.parallelize_fn)
    assert seen(own)["count"] == 2


def test_a_spec_stays_itself_where_no_technique_is_about_the_model(techniques):
    spec = Spec(parallelized)
    assert techniques("to_config", "config").watch_model(spec) is spec


@pytest.mark.parametrize(
    ("apply", "changed"), [("to_trainer", True), ("weights", True), ("idle_trainer", False)]
)
def test_a_trainer(techniques, apply, changed):
    own = techniques(apply, "trainer")
    own.apply_to_trainer(trainer())
    assert seen(own)["changed"] is changed


def test_methods_of_a_class_count(techniques):
    class Patched(torch.nn.Linear):
        pass

    own = techniques("of_class", "model")
    own.watch_model(Spec(parallelized)).parallelize_fn(torch.nn.Sequential(Patched(2, 2)))
    assert seen(own)["changed"]


def test_a_seed_checkpoint_is_made_without(techniques):
    own = techniques("raises", "model", role=True)
    spec = Spec(parallelized)
    assert own.watch_model(spec) is spec
    assert own.see(None) == []


@pytest.mark.parametrize(("new", "changed"), [(("a.b",), True), (("a.c",), False)])
def test_keys_alone_change_what_they_give_another_value(techniques, new, changed):
    own = techniques(None, set={"a.b": 1})
    own.apply_to_config(Config(), flat, new)
    assert seen(own)["changed"] is changed


@pytest.mark.parametrize(("in_force", "count"), [("yes", 1), ("no", 0)])
def test_a_count_may_be_a_word(techniques, in_force, count):
    assert seen(techniques(None, in_force=in_force))["count"] == count


@pytest.mark.parametrize(
    ("apply", "place", "said"),
    [
        ("raises", "model", "'features.py:raises' raises ValueError: no kernel for cpu"),
        ("returns_a_word", "model", "returns a str; return a module, or nothing"),
    ],
)
def test_a_function_that_does_the_wrong_thing(techniques, apply, place, said):
    spec = techniques(apply, place).watch_model(Spec(parallelized))
    with pytest.raises(TechniqueError, match=r"technique\.fused\.apply = ") as caught:
        spec.parallelize_fn(model())
    assert said in str(caught.value)


def test_a_trainer_cannot_be_replaced(techniques):
    with pytest.raises(TechniqueError, match="a trainer cannot be replaced"):
        techniques("returns_a_trainer", "trainer").apply_to_trainer(trainer())


def test_in_force_must_return_something(techniques):
    with pytest.raises(TechniqueError, match="returns None; return a count, or True or False"):
        seen(techniques(None, in_force="nothing"))


@pytest.mark.parametrize("line", ["import nowhere_at_all", "def f(:", "raise SystemExit"])
def test_a_file_that_cannot_be_imported(techniques, features, line):
    features.write_text(f"{line}\n{SOURCE}")
    with pytest.raises(TechniqueError, match="the file cannot be imported: "):
        techniques("to_model", "model")


def test_one_rank_with_a_technique_in_force_is_enough():
    first = {"name": "fused", "called": True, "changed": False, "count": 0, "modules": []}
    second = {**first, "changed": True, "count": 3, "modules": ["RMSNorm"]}
    assert together([[first], [second]]) == [second]
    assert together([[{**first, "count": None}]])[0]["count"] is None
    assert together([[], []]) == []


# ------------------------------------------------------------------ in real torchtitan

REAL = """
def longer_warmup(config):
    config.lr_scheduler.warmup_steps = 3

def mark(model):
    model.marked_before = True

def mark_part(parallel_model):
    assert parallel_model.marked_before
    parallel_model.marked_after = True

def mark_trainer(trainer):
    assert all(part.marked_after for part in trainer.model_parts)
    trainer.marked = True

def idle(model): ...

def count(trainer):
    return sum(part.marked_before for part in trainer.model_parts)
"""
PLACES = {
    "config": "longer_warmup",
    "model": "mark",
    "parallel_model": "mark_part",
    "trainer": "mark_trainer",
}


def real_jobs():
    version = importlib.metadata.version("torchtitan")
    if version.startswith("0.3."):
        import titan_0_3_jobs

        return titan_0_3_jobs
    import titan_0_2_jobs

    return titan_0_2_jobs


@pytest.mark.slow
@pytest.mark.parametrize("pp", [1, 2])
def test_every_place_in_real_torchtitan(tmp_path, pp):
    jobs = real_jobs()
    file = tmp_path / "real.py"
    file.write_text(REAL)
    own = [
        {"name": place, "apply": f"{file}:{function}", "place": place}
        for place, function in PLACES.items()
    ]
    own.append({"name": "idle", "apply": f"{file}:idle", "place": "model"})
    own.append({"name": "counted", "in_force": f"{file}:count"})
    _, in_force = jobs.Runs(tmp_path).run(
        "own",
        steps=1,
        dp_shard=1,
        pp=pp,
        pipeline_schedule="1F1B" if pp > 1 else None,
        own_techniques=own,
    )
    found = {each["name"]: each for each in in_force["own_techniques"]}
    assert all(each["called"] for each in found.values())
    assert {name for name, each in found.items() if each["changed"]} == set(PLACES)
    assert {name: each["count"] for name, each in found.items() if each["count"]} == {"counted": pp}
    assert found["model"]["modules"]
    assert not found["idle"]["modules"]
    assert in_force["config"]["lr_scheduler.warmup_steps"] == 3
    assert "lr_scheduler.warmup_steps" in in_force["declared"]
