"""A regime is put over matrices as they are written, and what it cannot have is told."""

from pathlib import Path

import prove
import pytest
import tomli
from proof.catalogue import read_catalogue
from proof.parts import SEEDS, Extent, folder_of, part_of
from proof.regimes import Regime, home_of, regime_of

from converge_harness.errors import ConfigError
from converge_harness.experiment import load_experiment
from converge_harness.model import DEFAULT_REPEATS, Precision, Repeat, RepeatKind
from converge_harness.plan.sizes import precision_of

ROOT = Path(__file__).parents[2]
BUGS = '''\
def doubled(trainer):
    """Gradients are summed where an average was meant.

    Reference: torchtune issue 2172
    Class: C1
    Technique: FSDP 2
    First step: 1
    Signature: every gradient twice the control's
    Cause: gradient scale
    """


def cast(trainer):
    """A module hands on bfloat16.

    Reference: torchtitan issue 1
    Class: C4
    Technique: FSDP 2
    First step: 1
    Signature: loss off
    Cause: forward or objective
    Regimes: fp32 | float8 (in bfloat16 the
        module does so anyway)
    """
'''
MATRIX = f"""\
schema = 1
repeats = ["ulp"]
[trainer]
train_config = "{ROOT}/train_configs/llama3_debug.toml"
[trainer.set]
"training.steps" = 16
[control]
parallelism.dp_shard = 2
[controls.coarse]
parallelism.dp_shard = 2
techniques = ["bf16"]
waive = ["control-is-1d-fsdp"]
"""
DOUBLED = """
[[test]]
name = "doubled"
parallelism.dp_shard = 2
set = { "training.local_batch_size" = 2 }
inject = "c1_scale.py:doubled"
[[test]]
name = "cast"
parallelism.dp_shard = 2
inject = "c1_scale.py:cast"
"""
RIGHT = """
[[test]]
name = "ddp2"
parallelism.dp_replicate = 2
[[test]]
name = "compiled"
parallelism.dp_shard = 2
techniques = ["compile"]
[[test]]
name = "bf16_tp2"
control = "coarse"
parallelism.tp = 2
techniques = ["bf16"]
set = { "training.local_batch_size" = 8 }
waive = ["same-dp-degree"]
[[test]]
name = "bf16_of_fp32"
parallelism.dp_shard = 2
techniques = ["bf16"]
"""
SEEDED = """
[[test]]
name = "seeds_ddp2"
parallelism.dp_replicate = 2
"""


@pytest.fixture
def folder(tmp_path):
    bugs = tmp_path / "my_bugs"
    bugs.mkdir()
    (bugs / "c1_scale.py").write_text(BUGS)
    (bugs / "c1.toml").write_text(MATRIX + DOUBLED)
    (bugs / "correct.toml").write_text(MATRIX + RIGHT)
    (bugs / "correct_seeds.toml").write_text(MATRIX + SEEDED)
    return bugs


def part(folder: Path, regime: Regime, **extent):
    return part_of(read_catalogue(folder), regime, folder.parent / "out", Extent(**extent))


def run_by(part) -> dict[str, set[str]]:
    return {matrix.name: set(matrix.sets) for matrix in part.catalogue.matrices}


def seeded(*seeds: int) -> dict[str, set[str]]:
    return {f"correct_seeds.{seed}": {f"seeds_ddp2_seed{seed}"} for seed in seeds}


@pytest.mark.parametrize(
    ("regime", "sets", "left_out"),
    [
        (
            Regime.FP32,
            {"c1": {"doubled", "cast"}, "correct": {"ddp2", "compiled", "bf16_of_fp32"}},
            {"bf16_tp2": "it names a precision of its own, and is run with bf16 parameters"},
        ),
        (
            Regime.MIXED,
            {"c1": {"doubled"}, "correct": {"ddp2", "compiled"}},
            {
                "cast": "in bfloat16 the module does so anyway",
                "bf16_tp2": "it names a precision of its own, and is run with bf16 parameters",
                "bf16_of_fp32": "it compares bf16 parameters with fp32, and is run with fp32",
            },
        ),
        (
            Regime.BF16,
            {"c1": {"doubled"}, "correct": {"ddp2", "compiled", "bf16_tp2"}},
            {
                "cast": "in bfloat16 the module does so anyway",
                "bf16_of_fp32": "it compares bf16 parameters with fp32, and is run with fp32",
            },
        ),
        (
            Regime.FLOAT8,
            {"c1": {"doubled", "cast"}, "correct": {"ddp2"}},
            {
                "compiled": "torchtitan 0.3 emulates Float8 on a CPU, and only without compile",
                "bf16_tp2": "it names a precision of its own, and is run with bf16 parameters",
                "bf16_of_fp32": "it compares bf16 parameters with fp32, and is run with fp32",
            },
        ),
    ],
)
def test_what_a_regime_runs_and_what_not_and_why(folder, regime, sets, left_out):
    given = part(folder, regime)
    assert run_by(given) == {**sets, **seeded(*SEEDS)}
    assert {each.name: each.why for each in given.left_out} == left_out
    assert {bug.id for bug in given.catalogue.bugs} == sets["c1"]


@pytest.mark.parametrize("regime", Regime)
def test_control_and_test_sets_are_of_the_regime(folder, regime):
    for matrix in part(folder, regime).catalogue.matrices:
        experiment = load_experiment(matrix.path)
        controls = {spec.name: spec for spec in experiment.controls}
        for spec in experiment.tests:
            if spec.name in matrix.sets and home_of(spec, controls[spec.control]) is None:
                assert regime_of(spec) is regime_of(controls[spec.control]) is regime
    # Sets keep their own settings, and their injection is found from wherever the copy lies.
    (doubled, _) = load_experiment(part(folder, regime).catalogue.matrices[0].path).tests
    assert doubled.setting("training.local_batch_size") == 2
    assert doubled.inject == f"{folder / 'c1_scale.py'}:doubled"
    expected = {Regime.FP32: Precision.FP32, Regime.FLOAT8: Precision.FLOAT8}
    assert precision_of(doubled) is expected.get(regime, Precision.BF16)


def test_low_precision_gets_the_repeats_that_users_get(folder):
    def repeats(regime: Regime) -> tuple[Repeat, ...]:
        return load_experiment(part(folder, regime).catalogue.matrices[0].path).repeats

    assert repeats(Regime.FP32) == (Repeat(RepeatKind.ULP),)
    assert repeats(Regime.MIXED) == DEFAULT_REPEATS


def test_in_fp32_a_matrix_is_run_as_it_is_written(folder):
    paths = {matrix.name: matrix.path for matrix in part(folder, Regime.FP32).catalogue.matrices}
    assert paths["c1"] == folder / "c1.toml"
    assert paths["correct_seeds.43"].is_relative_to(folder.parent / "out")


def test_seeds_are_the_file_s_own(folder):
    for matrix in part(folder, Regime.BF16).catalogue.matrices:
        seed = int(matrix.name.partition(".")[2] or 42)
        experiment = load_experiment(matrix.path)
        assert (experiment.seed, set(matrix.sets) <= {s.name for s in experiment.tests}) == (
            seed,
            True,
        )


def test_fewer_steps_are_trained_by_every_set(folder):
    for matrix in part(folder, Regime.MIXED, steps=3).catalogue.matrices:
        assert {s.setting("training.steps") for s in load_experiment(matrix.path).tests} == {3}
    text = (folder / "c1.toml").read_text()
    (folder / "c1.toml").write_text(text.replace('"training.steps"', "training.steps"))
    (nested, *_) = part(folder, Regime.FP32, steps=4).catalogue.matrices
    assert {s.setting("training.steps") for s in load_experiment(nested.path).tests} == {4}
    (folder / "c1.toml").write_text(text.replace("training.steps", "x"))
    with pytest.raises(ConfigError, match=r"trainer\.set: has no 'training\.steps'"):
        part(folder, Regime.FP32, steps=3)


def test_a_night_has_each_second_set_and_one_seed(folder):
    nightly = run_by(part(folder, Regime.FP32, nightly=True))
    expected = {"c1": {"doubled"}, "correct": {"ddp2", "bf16_of_fp32"}}
    assert nightly == {**expected, **seeded(SEEDS[0])}


def test_reports_of_regimes_lie_apart():
    folders = {folder_of(Path("out"), regime) for regime in Regime}
    assert folders == {
        Path("out/bugs"),
        *(Path(f"out/bugs/{name}") for name in ("mixed", "bf16", "float8")),
    }


def test_a_product_of_sets_is_refused_where_it_would_have_to_be_rewritten(folder):
    product = "[matrix]\nparallelism = { dp_shard = [2], tp = [1, 2] }\n"
    (folder / "correct_more.toml").write_text(MATRIX + product)
    assert "correct_more" in run_by(part(folder, Regime.FP32))
    with pytest.raises(ConfigError, match="matrix: cannot be put into regime float8"):
        part(folder, Regime.FLOAT8)


@pytest.mark.parametrize("regime", [Regime.FP32, Regime.BF16])
def test_megatron_has_its_bugs_and_right_layouts_in_two_precisions(tmp_path, regime):
    of_megatron = prove.OF_MEGATRON
    experiments = ROOT / of_megatron.bugs
    correct = [ROOT / each for each in of_megatron.correct]
    given = part_of(read_catalogue(experiments, correct=correct), regime, tmp_path, Extent())
    assert regime in of_megatron.regimes
    assert len(given.catalogue.bugs) >= 16
    assert {bug.kind for bug in given.catalogue.bugs} == {f"C{number}" for number in range(1, 8)}
    assert all(bug.place for bug in given.catalogue.bugs)
    (_, right) = given.catalogue.matrices
    assert len(right.sets) >= 20
    for matrix in given.catalogue.matrices:
        experiment = load_experiment(matrix.path)
        anchors = [experiment.anchor] if experiment.anchor else []
        for spec in (*anchors, *experiment.tests):
            if spec.name in (*matrix.sets, "one_rank"):
                assert regime_of(spec) is regime


def test_megatron_has_no_other_precisions(tmp_path):
    catalogue = read_catalogue(ROOT / prove.OF_MEGATRON.bugs)
    for regime in (Regime.MIXED, Regime.FLOAT8):
        given = part_of(catalogue, regime, tmp_path, Extent())
        assert not given.catalogue.matrices
        assert {each.why for each in given.left_out} == {"Megatron-Core is run in fp32 and in bf16"}


@pytest.mark.parametrize("regime", Regime)
def test_the_benchmark_is_as_large_in_every_regime_as_it_claims(tmp_path, regime):
    catalogue = read_catalogue(ROOT / "benchmarks" / "bugs")
    given = part_of(catalogue, regime, tmp_path, Extent())
    correct = [m for m in given.catalogue.matrices if m.correct]
    assert sum(len(matrix.sets) for matrix in correct) >= 60
    assert {load_experiment(matrix.path).seed for matrix in correct} >= {42, *SEEDS}
    certain = [bug for bug in given.catalogue.bugs if bug.magnitude is None and bug.kind != "C7"]
    assert len(certain) >= 120
    tomls = [tomli.loads(matrix.path.read_text()) for matrix in given.catalogue.matrices]
    for data in tomls if regime is not Regime.FP32 else ():
        assert "repeats" not in data
    told = {each.name for each in given.left_out}
    every = {name for matrix in catalogue.matrices for name in matrix.sets}
    runs = {n.partition("_seed4")[0] for m in given.catalogue.matrices for n in m.sets}
    assert told | runs == every
    assert all(each.why for each in given.left_out)


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        ("fp32 | float9 (as it is)", "Regimes: there is no 'float9' (did you mean 'float8'?"),
        ("fp32", "Regimes: name them, and why not the others (write fp32 | float8 (the reason))"),
        ("(as it is)", "Regimes: name them, and why not the others"),
    ],
)
def test_a_bug_says_in_which_regimes_it_exists_and_why(folder, field, problem):
    head, _, _ = BUGS.partition("    Regimes:")
    (folder / "c1_scale.py").write_text(f'{head}    Regimes: {field}\n    """\n')
    with pytest.raises(ConfigError) as raised:
        read_catalogue(folder)
    assert any(problem in str(each) for each in raised.value.problems)


def test_each_goal_about_a_limit_has_its_rungs():
    from proof.goals import TARGETS

    bugs = read_catalogue(ROOT / "benchmarks" / "bugs").bugs
    for regime, targets in TARGETS.items():
        for ladder, limit in targets.limits.items():
            sizes = [
                bug.magnitude
                for bug in bugs
                if bug.id.startswith(f"{ladder}_") and bug.magnitude and regime in bug.regimes
            ]
            assert limit in sizes
            assert min(sizes) < limit < max(sizes), (regime, ladder)


def proven(folder: Path, *options: str) -> prove.Exit:
    where = ("--bugs", str(folder), "--out", str(folder.parent / "out"))
    return prove.main(["--dry-run", *where, *options])


def test_a_dry_run_says_what_each_regime_runs_and_what_not(folder, capsys):
    assert proven(folder, "--regime", "all") is prove.Exit.MET
    said = capsys.readouterr().out
    assert "fp32: 2 bugs, 0 rungs of ladders, 7 correct set-ups; not run: 1" in said
    assert "bf16 mixed: 1 bugs" in said
    assert "  1 in bfloat16 the module does so anyway: cast\n" in said
    assert "only without compile: compiled\n" in said
    assert proven(folder) is prove.Exit.MET
    said = capsys.readouterr().out
    assert [word in said for word in ("fp32: ", "bf16 mixed: ")] == [True, False]


def test_what_no_chosen_regime_can_have_is_refused_with_the_reason(folder, capsys):
    assert proven(folder, "--regime", "mixed", "--only", "cast") is prove.Exit.USAGE
    said = capsys.readouterr().err
    assert "cast in mixed: is not run: in bfloat16 the module does so anyway" in said
    assert proven(folder, "--regime", "float8", "--only", "cast") is prove.Exit.MET


@pytest.mark.parametrize(
    ("benchmark", "asked", "seed", "regimes", "command"),
    [
        (prove.OF_TORCHTITAN, [], None, ["fp32"], "nox -s prove"),
        (prove.OF_TORCHTITAN, ["bf16"], None, ["bf16"], "nox -s prove -- --regime bf16"),
        (prove.OF_TORCHTITAN, [], 7, ["fp32"], "nox -s prove -- --seed 7"),
        (prove.OF_MEGATRON, [], None, ["fp32", "bf16"], "nox -s prove -- --megatron"),
        (
            prove.OF_MEGATRON,
            ["fp32"],
            0,
            ["fp32"],
            "nox -s prove -- --megatron --regime fp32 --seed 0",
        ),
    ],
)
def test_the_page_names_the_command_of_its_regimes(benchmark, asked, seed, regimes, command):
    assert prove.regimes_of(asked, benchmark) == regimes
    assert prove.command_of(benchmark, asked, seed) == command


def test_the_page_of_a_part_names_the_command_of_that_part():
    command = prove.command_of(prove.OF_TORCHTITAN, ["bf16"], None, ["clipped_twice", "C3"])
    assert command == "nox -s prove -- --only clipped_twice C3 --regime bf16"


@pytest.mark.parametrize("regime", [Regime.FP32, Regime.BF16])
def test_a_seed_is_that_of_every_matrix_but_those_of_several_seeds(folder, regime):
    (one,) = [m for m in part(folder, regime, seed=45).catalogue.matrices if m.name == "c1"]
    assert load_experiment(one.path).seed == 45
    assert {"doubled"} <= set(one.sets)
    assert run_by(part(folder, regime, seed=45)) == run_by(part(folder, regime))


def test_held_out_bugs_come_in_the_same_regimes(folder, capsys):
    hidden = folder.parent / "hidden"
    hidden.mkdir()
    (hidden / "c1_scale.py").write_text(BUGS.replace("doubled", "tripled").replace("cast", "lost"))
    hidden_sets = DOUBLED.replace("doubled", "tripled").replace("cast", "lost")
    (hidden / "c1_hidden.toml").write_text(MATRIX + hidden_sets)
    assert proven(folder, "--regime", "bf16", "--held-out", str(hidden)) is prove.Exit.MET
    assert (folder.parent / "out/bugs/bf16/c1_hidden/c1_hidden.toml").is_file()
