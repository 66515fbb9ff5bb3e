"""What the benchmark of correct set-ups makes of models, seeds and measured errors; real runs."""

import importlib.util
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from converge_harness.experiment import load_experiment
from converge_harness.judge.compare.precision_errors import Errors

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
NAMES = ("norm.weight", "output.weight", "tok_embeddings.weight")


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("right_errors", BENCHMARKS / "right_errors.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["right_errors"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["right_errors"]
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def groups(bench):
    return bench.groups_by_seed(bench.PARTS)[bench.SEEDS[0]]


@pytest.fixture
def experiment(bench, groups, tmp_path):
    for model in bench.MODELS:
        (tmp_path / f"{model.name}.toml").write_text(tomli_w.dumps(model.train_config()))
    file = tmp_path / "x.toml"
    file.write_text(tomli_w.dumps(bench.matrix_of(groups, 44, tmp_path)))
    return load_experiment(file)


def test_a_matrix_has_every_set_of_every_model_against_a_control_of_its_own(
    bench, groups, experiment
):
    from proof.regimes import regime_of

    assert (experiment.seed, experiment.repeats, experiment.reference) == (44, (), True)
    assert [each.name for each in experiment.controls] == [group.name for group in groups]
    kinds = {"tp2", "pp2", "cp2", "hsdp2x2", "accumulation2", "one_device"}
    for control, group in zip(experiment.controls, groups, strict=True):
        tests = [each for each in experiment.tests if each.control == control.name]
        names = {each.name.removeprefix(f"{group.name}_") for each in tests}
        assert len(names) == 6
        assert names == kinds or group.model.sets == "experts"
        for each in (control, *tests):
            assert regime_of(each) is group.regime
            assert each.setting("training.steps") == 1
            assert each.train_config.path.endswith(f"{group.model.name}.toml")
            assert each.train_config.model == group.model.train_config()["converge"]["model"]


def test_every_model_and_precision_has_several_seeds(bench):
    plan = bench.groups_by_seed(bench.PARTS)
    mixed = {seed: [g.model.name for g in of if g.regime == "mixed"] for seed, of in plan.items()}
    assert list(plan) == [42, 43, 44, 45, 46]
    assert {model.name for model in bench.MODELS} == set(mixed[42]) == set(mixed[43])
    for groups in plan.values():
        assert len({group.name for group in groups}) == len(groups) in (4, 7)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--quick", {42: 2}),
        ("--regimes bf16 float8", {42: 2, 43: 2}),
        ("--regimes mixed --seeds 7", {7: 5}),
        ("--models qwen3_128 --seeds 7 8", {7: 3, 8: 3}),
    ],
)
def test_a_part_can_be_asked_for(bench, words, expected):
    parts = bench._asked(bench._parser().parse_args(words.split()))
    plan = bench.groups_by_seed(parts)
    assert {seed: len(groups) for seed, groups in plan.items()} == expected


def test_sizes_and_families_are_those_that_titles_name(bench):
    shapes = [model.train_config()["converge"] for model in bench.MODELS]
    for model, shape in zip(bench.MODELS, shapes, strict=True):
        width, layers = shape["model"]["dim"], shape["model"]["n_layers"]
        assert f"width {width}, {layers} layers" in model.title
        assert {"llama3": "Llama 3", "qwen3": "Qwen 3"}[shape["module"]] in model.title
        assert ("experts" in model.title) == ("num_experts" in shape["model"])
    assert len({shape["model"]["dim"] for shape in shapes}) == 3


def test_the_matrices_are_experiments_by_themselves():
    for file in (BENCHMARKS / "right_sets").glob("*.toml"):
        assert tomllib.loads(file.read_text())["repeats"] == []
        assert len(load_experiment(file).tests) == 6


def errors(ratio, scale=0.0, multiple=1.6):
    return Errors(
        names=NAMES,
        frozen=True,
        test=np.array([ratio, 1.0, 1.9]) * 0.006,
        matched=np.full(3, 0.006),
        multiple=np.array([multiple, multiple, 2 * multiple]),
        scale=np.full((16, 3), scale * 0.006),
        loss=np.zeros(16),
        loss_error=1e-5,
    )


def set_of(bench, name, found, outside=()):
    group = bench.Group(bench.MODELS[0], bench.Regime.MIXED)
    return bench.Measured(group, 42, name, found, outside)


def test_a_row_has_the_largest_of_its_sets(bench):
    sets = [set_of(bench, "tp2", errors(1.2, 0.01)), set_of(bench, "pp2", errors(0.9, -0.02))]
    row = bench.row_of(sets)
    assert (row.sets, row.outside) == (2, 0)
    assert row.ratio == pytest.approx(1.2)  # not the 1.9 of an embedding
    assert row.of_limit == pytest.approx(1.2 / 1.6)
    assert (row.mean, row.size) == (pytest.approx(0.02), pytest.approx(0.02))
    assert row.error == (pytest.approx(0.006), pytest.approx(0.006))


def test_a_set_outside_of_a_limit_is_counted_and_named(bench):
    right = set_of(bench, "tp2", errors(1.1))
    wrong = set_of(bench, "pp2", errors(2.4), ("gradient-errors: norm.weight",))
    assert "1 sets, seeds 42; 0 outside of a limit." in bench.page([right])
    text = bench.page([right, wrong])
    assert "2 sets, seeds 42; 1 outside of a limit:" in text
    assert "- seed 42, bf16 mixed, Llama 3, width 64, 2 layers, pp2: gradient-errors" in text
    assert "| bf16 mixed: pp2 | 1 | 1 | 0.6% | 2.40 | " in text
    lost = bench.page([set_of(bench, "cp2", None, ("no run: crashed",))])
    assert "nothing measured" in lost
    assert "no run: crashed" in lost


def test_what_is_not_passed_is_outside(bench):
    checks = [{"name": name, "outcome": "PASS", "detail": "d"} for name in bench.CHECKS]
    assert not list(bench._not_passed({"error": None, "checks": checks}))
    for outcome in ("FAIL", "INVALID", "SKIPPED"):
        broken = [{**checks[0], "outcome": outcome}, *checks[1:]]
        found = list(bench._not_passed({"error": None, "checks": broken}))
        assert found == ["reference-sound: d"]
    assert list(bench._not_passed({"error": None, "checks": checks[:3]})) == [
        "frozen-loss: was not asked"
    ]
    assert list(bench._not_passed({"error": "it crashed", "checks": checks})) == [
        "no run: it crashed"
    ]
