"""A job becomes torchtitan 0.2's own config, and every problem of it has a name."""

import subprocess
import sys

import pytest
import titan_0_2_jobs as jobs

from converge_harness.rank.settings import SettingError

jobs.require_titan_0_2()


@pytest.fixture(scope="module")
def build():
    jobs.preload()
    from converge_harness.rank.titan.v0_2.config import build_config

    return build_config


def refused(build, job):
    """The problems of a job's config."""
    with pytest.raises(SettingError) as caught:
        build(job)
    return caught.value.problems


def test_the_shipped_train_config_has_no_problem(build, tmp_path):
    built = build(jobs.job(tmp_path))
    assert built.config.training.seq_len == 256
    assert built.config.optimizer.implementation == "foreach"


def test_a_job_may_train_by_the_kernels_of_production(build, tmp_path):
    built = build(jobs.job(tmp_path, deterministic=False))
    assert built.config.debug.deterministic is False


def test_what_the_harness_implies_is_set_and_declared(build, tmp_path):
    built = build(
        jobs.job(
            tmp_path,
            tp=2,
            pp=2,
            pipeline_schedule="Interleaved1F1B",
            seed_checkpoint="/seed/step-0",
            data=tmp_path,
        )
    )
    config = built.config
    assert config.parallelism.tensor_parallel_degree == 2
    assert config.parallelism.pipeline_parallel_schedule == "Interleaved1F1B"
    assert (config.training.steps, config.debug.seed, config.debug.deterministic) == (3, 42, True)
    assert config.checkpoint.load_only
    assert config.checkpoint.initial_load_path == "/seed/step-0"
    assert config.model.hf_assets_path == str(tmp_path)
    assert {"parallelism.tensor_parallel_degree", "debug.seed", "model.hf_assets_path"} <= set(
        built.declared
    )
    assert "training.seq_len" not in built.declared


def test_a_seed_checkpoint_is_made_without_techniques(build, tmp_path):
    config = build(jobs.job(tmp_path, role="seed checkpoint", techniques=["float8"])).config
    assert config.checkpoint.create_seed_checkpoint
    assert config.model.converters == []


@pytest.mark.parametrize(
    ("techniques", "key", "value"),
    [
        (["compile"], ("compile", "enable"), True),
        (["async_tp"], ("parallelism", "enable_async_tensor_parallel"), True),
        (["float8"], ("model", "converters"), ["quantize.linear.float8"]),
        (["float8", "float8_tp"], ("model", "converters"), ["float8"]),
        (["bf16"], ("training", "dtype"), "bfloat16"),
    ],
)
def test_a_technique_sets_its_keys(build, tmp_path, techniques, key, value):
    section, name = key
    built = build(jobs.job(tmp_path, techniques=techniques))
    assert getattr(getattr(built.config, section), name) == value
    assert f"{section}.{name}" in built.declared


def test_float8_rowwise_names_its_recipe_and_leaves_the_output_alone(build, tmp_path):
    float8 = build(jobs.job(tmp_path, techniques=["float8_rowwise"])).config.quantize.linear.float8
    assert (float8.recipe_name, float8.filter_fqns) == ("rowwise", ["output"])


def test_without_its_fix_float8_tp_is_asked_for_under_the_registered_name(build, tmp_path):
    built = build(
        jobs.job(tmp_path, techniques=["float8", "float8_tp"], without_fixes=["float8-tp"])
    )
    assert built.config.model.converters == ["quantize.linear.float8"]


def test_set_goes_over_everything_else(build, tmp_path):
    built = build(jobs.job(tmp_path, overrides={"training.steps": 7, "training.seq_len": 128}))
    assert (built.config.training.steps, built.config.training.seq_len) == (7, 128)
    assert "training.seq_len" in built.declared


def test_all_problems_of_a_job_are_found_together(build, tmp_path):
    overrides = {
        "training.seqlen": 128,
        "training.steps": "many",
        "compile.components": ["modell"],
        "parallelism.context_parallel_rotate_method": "ring",
    }
    found = refused(
        build,
        jobs.job(
            tmp_path,
            overrides=overrides,
            without_fixes=["act-gradient"],
            techniques=["float9"],
            repeat="permute",
        ),
    )
    problems = {problem.key: problem for problem in found}
    assert set(problems) == {*overrides, "without_fixes", "techniques", "repeats"}
    assert "torchtitan's dataset" in problems["repeats"].message
    assert problems["training.seqlen"].valid[0] == "training.seq_len"
    assert "alltoall" in problems["parallelism.context_parallel_rotate_method"].message
    assert "act-grad" in problems["without_fixes"].valid
    assert problems["compile.components"].valid == ("loss", "model")


@pytest.mark.parametrize(
    ("overrides", "key", "valid"),
    [
        ({"model.name": "llama33"}, "model.name", "llama3"),
        ({"model.flavor": "9B"}, "model.flavor", "8B"),
    ],
)
def test_a_model_that_torchtitan_lacks_is_a_problem(build, tmp_path, overrides, key, valid):
    (problem,) = refused(build, jobs.job(tmp_path, overrides=overrides))
    assert problem.key == key
    assert valid in problem.valid


def test_a_shape_that_the_model_has_no_field_for_is_a_problem(build, tmp_path):
    raw = jobs.raw_job(tmp_path)["train_config"]
    (problem,) = refused(
        build, jobs.job(tmp_path, train_config={**raw, "model": {"dim": 64, "heads": 4}})
    )
    assert problem.key == "converge.model.heads"
    assert "n_heads" in problem.valid


def test_names_of_fixes_are_known_without_torch():
    program = (
        "import sys; from converge_harness.rank.titan.v0_2.fixes import FIXES; "
        "assert 'torch' not in sys.modules; print(*sorted(FIXES))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=jobs.ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [
        *("act-grad", "cp-rotation", "float8-tp", "initial-load", "rs-scatter", "symm-mem"),
    ]
