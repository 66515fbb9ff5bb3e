"""A baseline stands for the control that it is, and for no other."""

import pytest
from baseline_samples import EXPERIMENT, ROUNDING, TRAIN_CONFIG, bless, experiment, plan_of

from converge_harness.baselines import misfits, read_baseline
from converge_harness.errors import ConfigError
from converge_harness.matrix.calibrate import baseline_learnt, read_given
from converge_harness.matrix.run import baseline_record
from converge_harness.matrix.save import SavedMatrix, load_matrix, save_matrix
from converge_harness.model import Across, Role
from converge_harness.store import read_record, write_json

BY_BASELINE = EXPERIMENT.replace("schema = 1", 'schema = 1\nbaseline = "g"')


@pytest.fixture
def path(tmp_path, monkeypatch):
    """An experiment that names a baseline of its own control."""
    monkeypatch.setenv("CONVERGE_TOOLCHAINS", str(tmp_path / "none"))
    path = experiment(tmp_path)
    bless(tmp_path / "baselines" / "g", path)
    path.write_text(BY_BASELINE)
    return path


def problem(path) -> str:
    with pytest.raises(ConfigError) as caught:
        plan_of(path)
    (found,) = caught.value.problems
    return str(found)


def test_neither_the_control_nor_repeats_are_run(path):
    plan = plan_of(path)
    assert [job.role for job in plan.jobs] == [Role.SEED, Role.CONTROL, Role.TEST]
    assert [job.name for job in plan.without_baseline.jobs] == ["seed", "ddp2"]
    control = plan.job("fsdp2")
    assert control.baseline == path.parent / "baselines" / "g"
    assert control.spec.note == "baseline g, blessed by ada on 2026-11-22: why"
    assert baseline_record(control).identity == control.identity
    assert baseline_learnt(plan)["fsdp2"].calibration.identity == control.identity
    assert read_given(plan)["fsdp2"].calibration.control == "fsdp2"


MIXED = 'set = { "training.mixed_precision_param" = "bfloat16" }\n'
LOW = EXPERIMENT.replace("[[test]]", MIXED + "[[test]]") + MIXED


@pytest.fixture
def low(tmp_path, monkeypatch):
    """The same in bf16 mixed precision, whose baseline has its reference."""
    monkeypatch.setenv("CONVERGE_TOOLCHAINS", str(tmp_path / "none"))
    path = experiment(tmp_path, LOW)
    bless(tmp_path / "baselines" / "g", path)
    path.write_text(LOW.replace("schema = 1", 'schema = 1\nbaseline = "g"'))
    return path


def test_a_baseline_of_low_precision_holds_its_reference(low):
    plan = plan_of(low)
    folder = low.parent / "baselines" / "g"
    assert [job.name for job in plan.without_baseline.jobs] == ["seed", "ddp2"]
    reference = plan.job("fsdp2.float32")
    assert reference.baseline == folder / "reference"
    assert baseline_record(reference).identity == reference.identity
    assert list(baseline_learnt(plan)) == ["fsdp2"]
    test = plan.job("ddp2")
    assert (test.matched, test.reference) == ("fsdp2", "fsdp2.float32")
    assert test.frozen == read_baseline(folder).baseline.frozen == 16


@pytest.mark.parametrize("lacks", ["a reference", "as many frozen steps"])
def test_without_what_is_compared_a_baseline_of_low_precision_judges_without_a_reference(
    low, lacks
):
    folder = low.parent / "baselines" / "g"
    if lacks == "a reference":
        low.write_text(LOW.replace("schema = 1", "schema = 1\nreference = false"))
        bless(folder, low, change=ROUNDING)
        low.write_text(LOW.replace("schema = 1", 'schema = 1\nbaseline = "g"'))
    else:
        low.write_text(low.read_text() + "[probe]\nfrozen = 4\n")
    plan = plan_of(low)
    assert [job.name for job in plan.jobs] == ["seed", "fsdp2", "ddp2"]
    assert (plan.job("ddp2").reference, plan.job("ddp2").frozen) == (None, 0)


def test_a_changed_file_of_the_reference_is_refused(low):
    path = low.parent / "baselines" / "g" / "reference" / "frozen.npz"
    path.write_bytes(path.read_bytes() + b" ")
    assert "reference/frozen.npz is not the file that ada blessed" in problem(low)


def test_a_report_judges_by_the_release_that_ran_whatever_the_toolchain_is_by_now(path):
    records = []
    for job in plan_of(path).jobs:
        folder = job.baseline or path.parent / "runs" / job.name
        if job.baseline is None:
            told = {"name": job.name, "identity": job.identity, "status": "finished", "wall_s": 1.0}
            told |= {"argv": [], "error": None, "versions": {"torchtitan": "0.3.0+g0123456789ab"}}
            write_json(folder / "record.json", told)
        records.append(read_record(folder))
    out = path.parent / "out"
    save_matrix(out, SavedMatrix(plan_of(path), tuple(records), {}, None), (), on_gpu=False)
    assert plan_of(path).job("fsdp2").spec.toolchain == "torchtitan-0.3.0"
    then = load_matrix(out).plan
    assert then.job("fsdp2").spec.toolchain == "torchtitan-0.3.0 of g"
    assert then.job("ddp2").spec.toolchain == "torchtitan-0.3.0"


def test_a_baseline_can_be_named_by_its_path(path):
    path.write_text(BY_BASELINE.replace('"g"', f'"{path.parent}/baselines/g"'))
    assert plan_of(path).job("fsdp2").baseline is not None


def test_other_versions_and_rank_code_are_what_a_baseline_is_for(path):
    facts = dict(control_facts(path))
    now = {**facts, "versions": {"torch": "9"}, "rank_code": "other"}
    assert misfits(facts, now).refused == ()


def test_another_training_is_refused_with_every_difference_and_the_next_command(path):
    text = BY_BASELINE.replace("schema = 1", "schema = 1\nseed = 7")
    path.write_text(text.replace('"t.toml"', '"t.toml"\nset = { "training.max_norm" = 2 }'))
    said = problem(path)
    assert "train_config.training.max_norm is 2, was not there; seed is 7, was 42" in said
    assert f"converge bless {path} --name g --out {path.parent}/baselines --author WHO" in said
    assert "baseline_across" not in said


def test_the_same_value_in_set_and_train_config_is_no_difference(path):
    path.write_text(BY_BASELINE.replace('"t.toml"', '"t.toml"\nset = { "training.steps" = 4 }'))
    assert plan_of(path).job("fsdp2").baseline is not None


@pytest.mark.parametrize(
    ("change", "across"),
    [({"hardware": "gpu NVIDIA H200"}, "hardware"), ({"techniques": ["bf16"]}, "dtype")],
)
def test_other_hardware_and_dtype_need_a_word(path, change, across):
    then = dict(control_facts(path))
    now = {**then, **change}
    found = misfits(then, now)
    assert (len(found.refused), found.across) == (1, {Across(across)})
    allowed = misfits(then, now, (Across(across),))
    assert (allowed.refused, len(allowed.named)) == ((), 1)
    assert misfits(then, {**now, "seed": 7}).across == frozenset()


def test_another_dtype_of_the_train_config_is_refused_and_can_be_waived(path):
    (path.parent / "t.toml").write_text(TRAIN_CONFIG.replace("float32", "bfloat16"))
    assert 'if intended, baseline_across = ["dtype"]' in problem(path)
    path.write_text(BY_BASELINE.replace("[trainer]", 'baseline_across = ["dtype"]\n[trainer]'))
    plan = plan_of(path)
    assert any('training.dtype is "bfloat16", was "float32"' in each for each in plan.waived)
    assert plan.job("fsdp2").precision is not plan.job("ddp2").precision


def test_a_baseline_that_is_not_there_says_how_it_is_made(path):
    path.write_text(BY_BASELINE.replace('"g"', '"h"'))
    assert "there is no baseline" in (said := problem(path))
    assert "(there: g)" in said
    assert "make it with: converge bless" in said


def test_a_baseline_named_wrongly_is_looked_for_beside_the_experiments(path):
    root = path.parent
    (root / "experiments").mkdir()
    moved = root / "experiments" / path.name
    moved.write_text(BY_BASELINE.replace('"g"', '"h"').replace('"t.toml"', '"../t.toml"'))
    said = problem(moved)
    assert f"there is no baseline {root / 'baselines' / 'h'} (there: g)" in said
    assert f"--out {root / 'baselines'} " in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('calibration = "c.json"', "calibration: cannot be combined with a baseline"),
        ("anchor.parallelism = {}", "anchor: cannot be combined with a baseline"),
        (
            "controls.b.parallelism = { dp_shard = 2 }",
            "controls: cannot be combined with a baseline",
        ),
        ('baseline_across = ["hardwear"]', "did you mean 'hardware'?"),
    ],
)
def test_what_has_no_meaning_beside_a_baseline_is_refused(path, line, said):
    path.write_text(BY_BASELINE.replace("schema = 1", f"schema = 1\n{line}"))
    assert said in problem(path)


def test_what_a_baseline_may_differ_in_needs_a_baseline(path):
    path.write_text(EXPERIMENT.replace("schema = 1", 'schema = 1\nbaseline_across = ["dtype"]'))
    assert "has no effect without a baseline" in problem(path)


def control_facts(path):
    return read_baseline(path.parent / "baselines" / "g").baseline.facts
