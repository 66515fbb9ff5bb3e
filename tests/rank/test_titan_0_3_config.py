"""A job as torchtitan 0.3's own config, and what ``--check`` says of a bad one."""

import json
from pathlib import Path

import pytest
import titan_0_3_jobs as jobs

from converge_harness.rank import __main__ as command
from converge_harness.rank.settings import SettingError
from converge_harness.rank.start import entry

jobs.require_titan_0_3()

BUGS = Path(__file__).with_name("injected_bugs.py")


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    jobs.preload()


@pytest.fixture
def build(tmp_path):
    from converge_harness.rank.titan.v0_3.config import build_config

    return lambda **changes: build_config(jobs.job(tmp_path / "run", **changes))


def test_the_config_holds_what_the_job_says(build, tmp_path):
    built = build(
        tp=2, pp=2, pipeline_schedule="Interleaved1F1B", data=tmp_path, seed_checkpoint="/s/step-0"
    )
    expected = {
        "parallelism.data_parallel_shard_degree": 2,
        "parallelism.tensor_parallel_degree": 2,
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.pipeline_parallel_schedule": "Interleaved1F1B",
        "parallelism.spmd_backend": jobs.SPMD_BACKEND,
        "training.steps": 3,
        "training.disable_cuda_graphs": True,
        "debug.seed": 42,
        "metrics.log_freq": 1,
        "dump_folder": str(tmp_path / "run"),
        "dataloader.folder": str(tmp_path),
        "dataloader.global_batch_size": 8,
        "checkpoint.load_only": True,
        "checkpoint.initial_load_path": "/s/step-0",
    }
    assert {key: built.flat[key] for key in expected} == expected
    assert set(expected) <= set(built.declared)
    assert "training.seq_len" not in built.declared


def test_a_job_is_deterministic_unless_it_says_otherwise(build):
    assert build().flat["debug.deterministic"] is True
    chosen = build(deterministic=False)
    assert chosen.flat["debug.deterministic"] is False
    assert "debug.deterministic" in chosen.declared


def test_a_job_names_its_spmd_backend_or_leaves_the_train_configs(build):
    named = build(spmd_backend="full_dtensor")
    assert named.flat["parallelism.spmd_backend"] == "full_dtensor"
    assert "parallelism.spmd_backend" in named.declared
    older = build(spmd_backend=None)
    assert older.flat["parallelism.spmd_backend"] == "spmd_types"  # torchtitan's own default
    assert "parallelism.spmd_backend" not in older.declared


def test_spmd_types_is_refused_on_a_torch_that_cannot_shard_its_parameters(build):
    if jobs.TORCH >= (2, 15):
        assert build(spmd_backend="spmd_types").flat["parallelism.spmd_backend"] == "spmd_types"
        return
    with pytest.raises(SettingError) as caught:
        build(spmd_backend="spmd_types")
    (problem,) = caught.value.problems
    assert "torch can since 2.15, and this toolchain has torch 2.13" in problem.message
    assert (problem.key, problem.valid) == ("parallelism.spmd_backend", ("partial_dtensor",))


def test_a_commit_is_of_the_series_that_its_keys_tell(build):
    from converge_harness.rank.titan.v0_3.series import SERIES, series_of

    assert SERIES.name == "0.3"
    grain = "torchtitan.components.data.loader"
    tokens, samples = {"steps", "num_tokens_per_microbatch_per_dp_rank"}, {"local_batch_size"}
    assert series_of(tokens, {grain}.__contains__).name == "main"
    assert series_of(samples, {grain}.__contains__).grain
    assert not series_of(samples, {"torchtitan.components.dataloader"}.__contains__).grain
    with pytest.raises(ImportError, match=r"has neither training\.local_batch_size .* nor train"):
        series_of({"steps", "batch"}, {grain}.__contains__)


def test_the_model_has_the_shape_of_the_train_config(build):
    flat = build().flat
    assert flat["model_spec.model.dim"] == 64
    assert flat["model_spec.model.layers[1].attention.n_heads"] == 4
    assert flat["model_spec.model.layers[1].attention.n_kv_heads"] == 2
    assert "model_spec.model.layers[2].attention.n_heads" not in flat
    assert flat["loss.loss_fn.global_vocab_size"] == 512


def test_the_train_config_alone_leaves_torchtitans_shape(build):
    assert build(model={}).flat["model_spec.model.dim"] == 256


def _base(module, config, model):
    """A train config that says nothing but which model, and its shape."""
    return {"path": "", "module": module, "config": config, "model": model, "settings": {}}


def test_a_mixture_of_experts_has_the_shape_of_the_train_config(build):
    shape = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16}
    shape |= {"moe_hidden_dim": 96, "num_experts": 4, "top_k": 2, "vocab_size": 512}
    flat = build(train_config=_base("qwen3", "qwen3_moe_debug", shape)).flat
    layer = "model_spec.model.layers[1]."
    assert flat[f"{layer}attention.wo.in_features"] == 4 * 16
    assert flat[f"{layer}attention.rope.dim"] == 16
    assert flat[f"{layer}moe.router.gate.out_features"] == 4
    assert flat[f"{layer}moe.router.top_k"] == 2
    assert flat[f"{layer}moe.routed_experts.inner_experts.hidden_dim"] == 96
    assert flat[f"{layer}moe.routed_experts.token_dispatcher.top_k"] == 2
    assert f"{layer.replace('1', '2')}attention.rope.dim" not in flat
    assert flat["loss.loss_fn.global_vocab_size"] == 512


@pytest.mark.parametrize("config", ["qwen3_debugmodel", "qwen3_moe_debug"])
def test_a_qwen3_of_its_own_shape_is_torchtitans_own(build, config):
    own, reshaped = (build(train_config=_base("qwen3", config, m)) for m in ({}, {"dim": 256}))
    assert reshaped.flat == own.flat


def test_the_experiments_settings_win_and_are_declared(build):
    built = build(
        overrides={
            "training.local_batch_size": 2,
            "parallelism.spmd_backend": "full_dtensor",
            "optimizer.param_groups[0].optimizer_kwargs.lr": 0.5,
        }
    )
    assert built.flat["training.local_batch_size"] == 2
    assert built.flat["parallelism.spmd_backend"] == "full_dtensor"
    assert built.flat["optimizer.param_groups[0].optimizer_kwargs.lr"] == 0.5
    assert "training.local_batch_size" in built.declared


def test_two_builds_give_the_same_flat_config(build):
    """No address of a function, nothing of the moment: configs of two runs are compared."""
    assert build().flat == build().flat
    json.dumps(dict(build().flat))


def test_techniques_become_torchtitans_settings(build):
    flat = build(techniques=["compile", "bf16"]).flat
    assert flat["compile.enable"] is True
    assert (flat["training.dtype"], flat["training.mixed_precision_param"]) == (
        "bfloat16",
        "bfloat16",
    )


def float8_layers(built):
    from torchtitan.components.quantization.float8 import Float8Linear

    return [fqn for fqn, *_ in built.trainer.model_spec.model.traverse(Float8Linear.Config)]


def test_float8_converts_all_linear_layers_but_the_output_projection(build):
    layers = float8_layers(build(techniques=["float8"]))
    assert len(layers) == jobs.LAYERS * 5
    assert "lm_head" not in layers
    assert float8_layers(build()) == []


def test_a_seed_checkpoint_knows_no_parallelism_and_no_technique(build):
    built = build(
        role="seed checkpoint", tp=2, pp=2, pipeline_schedule="1F1B", techniques=["float8", "bf16"]
    )
    assert built.flat["checkpoint.create_seed_checkpoint"] is True
    assert built.flat["parallelism.tensor_parallel_degree"] == 1
    assert built.flat["training.dtype"] == "float32"
    assert float8_layers(built) == []


@pytest.mark.parametrize(("mode", "name"), [("full", "FullAC"), ("selective", "SelectiveAC")])
def test_activation_checkpointing_is_picked_by_its_mode(build, mode, name):
    built = build(overrides={"activation_checkpoint.mode": mode})
    assert name in type(built.trainer.activation_checkpoint).__qualname__
    tables = {key.partition(".")[0] for key in built.declared}
    assert "activation_checkpoint" in tables
    assert [key for key in built.flat if "activation_checkpoint" in key] == [
        key for key in built.declared if "activation_checkpoint" in key
    ]


def test_the_debug_config_recomputes_nothing(build):
    assert build().trainer.activation_checkpoint is None


@pytest.mark.parametrize(
    ("changes", "key", "valid"),
    [
        ({"overrides": {"training.seq_lem": 1}}, "training.seq_lem", "training.seq_len"),
        ({"overrides": {"training.dtype": "fp8"}}, "training.dtype", "'bfloat16'"),
        ({"overrides": {"activation_checkpoint.mode": "some"}}, None, "'none'"),
        ({"techniques": ["float8_tp"]}, "techniques", "async_tp"),
        ({"techniques": ["async_tp", "compile"]}, "techniques", None),
        ({"without_fixes": ["act-grad"]}, "without_fixes", None),
        ({"repeat": "permute"}, "repeats", "ulp"),  # without data of ours
        ({"repeat": "twice"}, "repeats", "permute"),
        ({"overrides": {"compile.components": ["modell"]}}, "compile.components", "model"),
        ({"inject": f"{BUGS}:double_gradient"}, "inject", "double_gradients"),
        ({"techniques": ["float8", "compile"]}, "techniques", None),
        ({"cp": 2, "cp_rotation": "alltoall"}, "cp_rotation", "allgather"),
        ({"model": {"dims": 3}}, "converge.model.dims", "dim"),
        ({"model": {"top_k": 3}}, "converge.model.top_k", "dim"),
    ],
)
def test_what_torchtitan_does_not_take_is_named_with_what_it_takes(tmp_path, changes, key, valid):
    (problem,) = entry.check(str(jobs.write_job(tmp_path / "run", **changes)))
    assert problem.key == (key or next(iter(changes["overrides"])))
    assert valid is None or valid in problem.valid


def test_all_wrong_keys_of_a_job_are_named_at_once(build):
    with pytest.raises(SettingError) as caught:
        build(overrides={"training.steps": "x", "trainng.seq_len": 1, "debug.seed": 7})
    assert [problem.key for problem in caught.value.problems] == [
        "training.steps",
        "trainng.seq_len",
    ]


def test_torchtitans_own_refusals_are_problems_too(tmp_path):
    changes = {"pp": 2, "overrides": {"parallelism.pipeline_parallel_microbatch_size": 3}}
    (problem,) = entry.check(str(jobs.write_job(tmp_path / "run", **changes)))
    assert "must be evenly divisible" in problem.message


def test_check_prints_one_json_object_for_all_jobs(tmp_path, capfd):
    good = jobs.write_job(tmp_path / "good")
    bad = jobs.write_job(tmp_path / "bad", overrides={"training.stepz": 1})
    none = tmp_path / "none.json"
    assert command.main(["--check", str(good), str(bad), str(none)]) == 0
    problems = json.loads(capfd.readouterr().out)["problems"]
    assert [(problem["job"], problem["key"]) for problem in problems] == [
        (str(bad), "training.stepz"),
        (str(none), ""),
    ]
    assert problems[0]["valid"][0] == "training.steps"


def test_check_looks_at_every_segment_and_says_in_which_the_problem_is(tmp_path):
    one = dict.fromkeys(jobs.DEGREES, 1)
    segments = [
        {"until": 2, "parallelism": {**one, "dp_shard": 2}, "local_batch_size": 4},
        {"until": 3, "parallelism": {**one, "pp": 2}, "local_batch_size": 4},
    ]
    wrong = {
        "training.stepz": 1,
        "parallelism.pipeline_parallel_microbatch_size": 3,
    }
    path = jobs.write_job(tmp_path / "run", segments=segments, overrides=wrong)
    (common,) = entry.check(str(path))
    assert common.key == "training.stepz"
    assert "segment" not in common.message
    del wrong["training.stepz"]
    path = jobs.write_job(tmp_path / "run", segments=segments, overrides=wrong)
    (problem,) = entry.check(str(path))
    assert problem.message.startswith("in segment 1 (until step 3): ")


def test_a_run_in_several_passes_saves_and_resumes_in_its_own_folder(build):
    plain = build(seed_checkpoint="/s/step-0").flat
    resumed = build(seed_checkpoint="/s/step-0", checkpoint_every=2)
    expected = {
        "checkpoint.enable": True,
        "checkpoint.load_only": False,
        "checkpoint.folder": "checkpoint",
        "checkpoint.interval": 1,  # which of them are written is decided at each step
        "checkpoint.async_mode": "disabled",
        "checkpoint.keep_latest_k": 0,
        "checkpoint.initial_load_path": "/s/step-0",
    }
    assert {key: resumed.flat[key] for key in expected} == expected
    assert set(expected) <= set(resumed.declared)
    later = build(checkpoint_every=2, overrides={"checkpoint.async_mode": "async"})
    assert later.flat["checkpoint.async_mode"] == "async"
    changed = {key for key, value in resumed.flat.items() if plain[key] != value}
    assert changed <= set(expected)
