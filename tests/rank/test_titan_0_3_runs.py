"""Real torchrun jobs of torchtitan 0.3: what agrees with FSDP, what does not, what really ran.

A job takes about 10 seconds on two idle cores, compile half a minute.
"""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import titan_0_3_jobs as jobs
from run_folders import largest_difference, tensor_differences

jobs.require_titan_0_3()
pytestmark = pytest.mark.slow

BUGS = Path(__file__).with_name("injected_bugs.py")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return jobs.Runs(tmp_path_factory.mktemp("titan-0-3"))


@pytest.fixture(scope="module")
def control(runs):
    steps, in_force = runs.run("fsdp2")
    assert in_force["degrees"] == jobs.DEGREES
    assert in_force["attention"] == "DenseFlexAttention"
    assert in_force["spmd_backend"] == jobs.SPMD_BACKEND
    return steps


@pytest.fixture(scope="module")
def frozen_norms(runs):
    """Norms of the gradients of two frozen steps of the control."""
    runs.run("right_frozen", frozen=2)
    return norms_of_frozen_steps(runs, "right_frozen")


def norms_of_frozen_steps(runs, name):
    with np.load(runs.folder / name / "frozen.npz") as arrays:
        return arrays["gradients_norm"]


def without_measurements(steps):
    return [
        {key: value for key, value in line.items() if key not in ("seconds", "memory_bytes")}
        for line in steps
    ]


def test_the_control_is_complete_and_its_metrics_are_true(control):
    assert [line["step"] for line in control] == [1, 2, 3]
    for line in control:
        assert line["loss"] == pytest.approx(line["loss_recomputed"], rel=1e-6)
        assert line["grad_norm"] == pytest.approx(line["grad_norm_recomputed"], rel=1e-6)
        assert line["batch_agrees"] is True
        assert line["grads_missing"] == 0
    assert len({line["tokens"] for line in control}) > 1  # uneven valid tokens, on purpose
    assert len({line["batch_digest"] for line in control}) == 3


def test_a_rerun_is_bit_identical(runs, control):
    steps, _ = runs.run("rerun", repeat="rerun")
    assert without_measurements(steps) == without_measurements(control)
    first, again = runs.sample("fsdp2", 1), runs.sample("rerun", 1)
    assert first.keys() == again.keys()
    for name, array in first.items():
        assert np.array_equal(array, again[name])


def test_samples_are_those_of_the_whole_model(runs, control):
    """Step 0 is the seed checkpoint; the norms of step 1 make the gradient norm."""
    loaded, first = runs.sample("fsdp2", 0), runs.sample("fsdp2", 1)
    assert loaded["parameters_norm"].sum() > 0
    assert "gradients_norm" not in loaded
    row = loaded["names"].tolist().index("layers.0.attention_norm.weight")
    assert (loaded["sizes"][row], loaded["parameters_norm"][row]) == (64, 8)
    total = np.linalg.norm(first["gradients_norm"])
    assert total == pytest.approx(control[0]["grad_norm_recomputed"], rel=1e-12)
    assert first["gradients_not_finite"].sum() == 0


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fsdp2_frozen", {}),
        (
            "pp2_frozen",
            {"pp": 2, "dp_shard": 1, "overrides": {"training.local_batch_size": 8}},
        ),
    ],
)
def test_frozen_steps_see_the_first_batches_and_change_nothing(runs, control, name, changes):
    plain = control if not changes else runs.run("pp2", **changes)[0]
    steps, _ = runs.run(name, frozen=3, **changes)
    assert without_measurements(steps) == without_measurements(plain)
    with np.load(runs.folder / name / "frozen.npz") as arrays:
        frozen = dict(arrays)
    first = runs.sample(name, 1)
    names = first["names"].tolist()
    assert frozen["names"].tolist() == names
    # The first frozen batch is that of step 1, at the same weights: the same bits.
    for kind in ("sketch", "norm"):
        assert np.array_equal(frozen[f"gradients_{kind}"][0], first[f"gradients_{kind}"])
    # Queries, keys and values, which are one parameter, are measured apart.
    norms = dict(zip(names, first["gradients_norm"], strict=True))
    queries = [each for each in names if ".wq." in each]
    assert len(queries) == jobs.LAYERS
    for each in queries:  # at initial weights attention hardly chooses
        assert norms[each.replace(".wq.", ".wv.")] > 10 * norms[each]
    assert frozen["loss"][0] == steps[0]["loss_recomputed"]
    assert frozen["batch_digests"].tolist() == [line["batch_digest"] for line in steps]
    assert frozen["loss"][1] != steps[1]["loss_recomputed"]  # whose weights have moved
    assert frozen["problems"].size == 0
    # Nothing is drawn, so a second pass over the first batch has the same bits.
    assert np.array_equal(frozen["again_sketch"], frozen["gradients_sketch"][0])


def test_a_second_pass_shows_what_dropout_draws(runs, control):
    dropped = {"inject": f"{BUGS}:dropout"}
    steps, _ = runs.run("dropped_frozen", frozen=2, **dropped)
    plain, _ = runs.run("dropped", **dropped)
    assert without_measurements(steps) == without_measurements(plain)  # random numbers, too
    with np.load(runs.folder / "dropped_frozen" / "frozen.npz") as arrays:
        again, first = arrays["again_sketch"], arrays["gradients_sketch"][0]
        moved = np.linalg.norm(again - first, axis=-1) / arrays["gradients_norm"][0]
        assert arrays["loss"].shape == (2,)
    assert moved.max() > 0.1


def test_gradients_that_no_optimizer_clears_do_not_outlive_frozen_steps(
    runs, control, frozen_norms
):
    """Each frozen step is a first step, also of a trainer that forgets some gradients."""
    forgetful = {"inject": f"{BUGS}:leave_layer_out_of_optimizer"}
    plain, _ = runs.run("forgetful", **forgetful)
    steps, _ = runs.run("forgetful_frozen", frozen=2, **forgetful)
    assert without_measurements(steps) == without_measurements(plain)
    assert steps[1]["grad_norm_recomputed"] > 1.001 * control[1]["grad_norm_recomputed"]
    assert np.array_equal(norms_of_frozen_steps(runs, "forgetful_frozen"), frozen_norms)


def test_weights_that_a_trainer_moves_by_itself_are_put_back_after_every_frozen_step(
    runs, frozen_norms
):
    moved = {"inject": f"{BUGS}:decay_weights_without_the_optimizer"}
    plain, _ = runs.run("moved", **moved)
    steps, _ = runs.run("moved_frozen", frozen=2, **moved)
    assert without_measurements(steps) == without_measurements(plain)
    assert np.array_equal(norms_of_frozen_steps(runs, "moved_frozen"), frozen_norms)


def test_buffers_are_put_back_after_frozen_steps(runs):
    """A mixture of experts counts tokens in buffers, and moves biases by them at each update."""
    moe = tomllib.loads((jobs.ROOT / "train_configs" / "moe_debug.toml").read_text())
    ours = moe.pop("converge")
    config = {
        "path": "train_configs/moe_debug.toml",
        "module": ours["module"],
        "config": ours["config"],
        "model": ours["model"],
        "settings": moe,
        "loader": "converge",
    }
    alike = {"train_config": config, "seed_checkpoint": None}
    plain, _ = runs.run("moe", **alike)
    steps, _ = runs.run("moe_frozen", frozen=2, **alike)
    assert without_measurements(steps) == without_measurements(plain)
    before, after = runs.sample("moe", 1), runs.sample("moe_frozen", 1)
    assert len(before["buffer_names"])
    assert np.array_equal(before["buffer_sketch"], after["buffer_sketch"])


def test_results_rounded_otherwise_are_as_far_off_as_rounding(runs):
    """In mixed precision: a percent of each gradient, and the same again for the same seed."""
    mixed = {"training.mixed_precision_param": "bfloat16"}
    runs.run("mixed", overrides=mixed)
    for name, seed in (("rounding", 1), ("rounding_again", 1), ("rounding_2", 2)):
        runs.run(name, overrides=mixed, repeat="rounding", repeat_seed=seed)
    first, again = runs.sample("rounding", 1), runs.sample("rounding_again", 1)
    assert np.array_equal(first["gradients_sketch"], again["gradients_sketch"])
    for name in ("rounding", "rounding_2"):
        moved = tensor_differences(runs.sample("mixed", 1), runs.sample(name, 1), "gradients")
        assert 1e-3 < np.median(list(moved.values())) < 2e-2
    between = tensor_differences(first, runs.sample("rounding_2", 1), "gradients")
    assert np.median(list(between.values())) > 1e-3
    exact = tensor_differences(runs.sample("mixed", 0), runs.sample("rounding", 0), "parameters")
    assert max(exact.values()) == 0


def test_float8_operands_scaled_otherwise_are_rounded_anew(runs):
    runs.run("float8_control", techniques=["float8"])
    runs.run("float8_rounding", techniques=["float8"], repeat="rounding")
    moved = tensor_differences(
        runs.sample("float8_control", 1), runs.sample("float8_rounding", 1), "gradients"
    )
    assert 1e-2 < np.median(list(moved.values())) < 0.3


def test_weights_moved_by_an_ulp_change_rounding_only(runs, control):
    steps, _ = runs.run("ulp", repeat="ulp")
    assert 0 < largest_difference(control, steps, "loss_recomputed") < 1e-6


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ddp2", {"dp_replicate": 2, "dp_shard": 1}),
        ("hsdp2x2", {"dp_replicate": 2, "overrides": {"training.local_batch_size": 2}}),
        ("accumulation", {"overrides": {"training.local_batch_size": 2}}),
        ("tp2", {"tp": 2}),
        ("cp2", {"cp": 2}),
        ("tp2_pp2", {"tp": 2, "pp": 2, "dp_shard": 1, "pipeline_schedule": "Interleaved1F1B"}),
    ],
)
def test_a_parallelism_differs_from_fsdp_by_rounding_only(runs, control, name, changes):
    if name == "tp2_pp2":  # a data-parallel degree of 1 reads the whole global batch itself
        changes = {**changes, "overrides": {"training.local_batch_size": 8}}
    steps, in_force = runs.run(name, **changes)
    degrees = {key: value for key, value in changes.items() if key in jobs.DEGREES}
    assert in_force["degrees"] == {**jobs.DEGREES, **degrees}
    assert [a["batch_digest"] for a in steps] == [b["batch_digest"] for b in control]
    for signal in ("loss", "grad_norm"):
        assert largest_difference(control, steps, signal) < 1e-6
        assert largest_difference(control, steps, f"{signal}_recomputed") < 1e-7
    for step, kind in ((0, "parameters"), (1, "gradients"), (1, "parameters")):
        differences = tensor_differences(runs.sample("fsdp2", step), runs.sample(name, step), kind)
        assert max(differences.values()) < (1e-14 if step == 0 else 1e-5)
    assert in_force["global_batch_size"] == 8
    assert in_force["cp_rotation"] == ("allgather" if "cp" in changes else None)
    if "pp" in changes:
        assert in_force["pipeline_schedule"] == "ScheduleInterleaved1F1B"
        assert in_force["pipeline_microbatches"] == 8


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"dp_replicate": 2, "dp_shard": 1}, {"cp": 2}])
def test_as_much_is_compared_between_replicas_by_every_spmd_backend(runs, degrees):
    """What a backend does not show as a copy would silently be looked at no more."""
    if jobs.TORCH < (2, 15):
        pytest.skip("needs torchtitan 0.3 on torch 2.15, where spmd_types trains with TP")
    name = "_".join(degrees)
    compared = {}
    for backend in ("spmd_types", "partial_dtensor"):
        run = f"{name}_{backend}"
        _, in_force = runs.run(run, spmd_backend=backend, steps=1, **degrees)
        assert in_force["spmd_backend"] == backend
        lines = (runs.folder / run / "metrics.jsonl").read_text().splitlines()
        found = [line for line in map(json.loads, lines) if line["kind"] == "replicas"]
        assert [line["count"] for line in found] == [0, 0]
        compared[backend] = [line["compared"] for line in found]
        assert runs.sample(run, 1)["parameters_not_finite"].sum() == 0
    assert compared["spmd_types"] == compared["partial_dtensor"]


def test_experts_get_their_tokens_by_every_spmd_backend(runs):
    """gloo takes no lists of tensors of several sizes, which is how spmd_types sends tokens."""
    if jobs.TORCH < (2, 15):
        pytest.skip("needs torchtitan 0.3 on torch 2.15, whose default is spmd_types")
    base = {"base": "moe_debug.toml"}
    assert runs.torchrun("moe", role="seed checkpoint", **base).returncode == 0
    seed = str(runs.folder / "moe" / "checkpoint" / "step-0")
    experts = {**base, "seed_checkpoint": seed, "ep": 2, "steps": 1}
    found = {}
    for backend in ("spmd_types", "partial_dtensor"):
        found[backend], in_force = runs.run(f"ep2_{backend}", spmd_backend=backend, **experts)
        assert in_force["degrees"] == {**jobs.DEGREES, "ep": 2}
    for signal in ("loss_recomputed", "grad_norm_recomputed"):
        assert largest_difference(*found.values(), signal) < 1e-9
    # An ulp of float32 would be lost in the experts' products, which are in bfloat16.
    runs.run("ep2_ulp", spmd_backend="spmd_types", repeat="ulp", **experts)
    moved = tensor_differences(
        runs.sample("ep2_spmd_types", 1), runs.sample("ep2_ulp", 1), "gradients"
    )
    of_experts = [moved[name] for name in moved if ".inner_experts." in name]
    assert of_experts
    assert 1e-3 < min(of_experts) < max(of_experts) < 2e-2


def test_rowwise_float8_is_tensorwise_when_emulated(runs, control):
    """A real bug of torchtitan 0.3.0, which only reading the layers shows."""
    steps, in_force = runs.run("float8", techniques=["float8_rowwise"])
    assert in_force["float8"] == {
        "modules": jobs.LAYERS * 5,
        "recipe": "tensorwise",
        "emulated": True,
        "tp_styles": 0,
    }
    assert 1e-7 < largest_difference(control, steps, "loss_recomputed") < 1e-2


@pytest.mark.longest
def test_compile_is_in_force(runs, control):
    steps, in_force = runs.run("compile", techniques=["compile"])
    assert in_force["compile"]["regions"] == jobs.LAYERS
    assert in_force["compile"]["graphs"] >= 2
    assert largest_difference(control, steps, "grad_norm_recomputed") < 1e-6


def test_bf16_is_in_force(runs, control):
    steps, in_force = runs.run("bf16", techniques=["bf16"])
    assert (in_force["param_dtype"], in_force["mixed_precision_param"]) == ("bfloat16", "bfloat16")
    assert 1e-7 < largest_difference(control, steps, "loss_recomputed") < 2e-2


def test_full_dtensor_reports_twice_the_loss(runs, control):
    """A real bug of torchtitan 0.3.0 on torch 2.13: only the metric is wrong."""
    steps, in_force = runs.run("full", spmd_backend="full_dtensor")
    assert in_force["spmd_backend"] == "full_dtensor"
    factor = 2 if jobs.TORCH < (2, 14) else 1
    for line, right in zip(steps, control, strict=True):
        assert line["loss"] == pytest.approx(factor * right["loss"], rel=1e-6)
        assert line["loss_recomputed"] == pytest.approx(right["loss_recomputed"], rel=1e-7)


def test_injected_gradient_scale_shows_in_both_norms_and_not_in_the_loss(runs, control):
    (first, *_), in_force = runs.run("gradients", inject=f"{BUGS}:double_gradients")
    assert in_force["injected"] == f"{BUGS}:double_gradients"
    for signal in ("grad_norm", "grad_norm_recomputed"):
        assert first[signal] == pytest.approx(2 * control[0][signal], rel=1e-6)
    assert first["loss"] == control[0]["loss"]


def test_an_injected_wrong_metric_leaves_the_recomputed_loss(runs, control):
    (first, *_), _ = runs.run("metric", inject=f"{BUGS}:double_reported_loss")
    assert first["loss"] == pytest.approx(2 * control[0]["loss"], rel=1e-6)
    assert first["loss_recomputed"] == control[0]["loss_recomputed"]


def test_a_parameter_without_gradient_is_named(runs):
    (first, *_), _ = runs.run("lost", inject=f"{BUGS}:lose_embedding_gradient")
    assert first["grads_missing"] == 1
    assert first["grads_missing_names"] == ["tok_embeddings.weight"]
    sample = runs.sample("lost", 1)
    row = sample["names"].tolist().index("tok_embeddings.weight")
    assert not sample["gradients_sketch"][row].any()
    assert sample["gradients_zeros"][row] == sample["sizes"][row]


def test_a_gradient_of_wrong_direction_shows_in_its_sketch_and_nowhere_else(runs, control):
    (first, *_), _ = runs.run("negated", tp=2, inject=f"{BUGS}:negate_one_gradient")
    for signal in ("loss_recomputed", "grad_norm_recomputed"):
        assert first[signal] == pytest.approx(control[0][signal], rel=1e-7)
    differences = tensor_differences(
        runs.sample("fsdp2", 1), runs.sample("negated", 1), "gradients"
    )
    wrong = differences.pop("layers.1.feed_forward.w2.weight")
    assert 1 < wrong < 3  # truly 2, by an estimate
    assert max(differences.values()) < 1e-5


def test_a_run_that_becomes_nan_leaves_that_step(runs):
    done = runs.torchrun(
        "nan",
        pp=2,
        pipeline_schedule="1F1B",
        inject=f"{BUGS}:become_nan_at_step_2",
        sample_steps=[2],
    )
    assert done.returncode != 0
    assert "Loss is not finite" in done.stderr
    part = (runs.folder / "nan" / "metrics.jsonl.part").read_text().splitlines()
    last, replicas = map(json.loads, part[-2:])
    assert (replicas["kind"], replicas["step"]) == ("replicas", 2)
    assert (last["step"], last["loss"], last["loss_recomputed"]) == (2, "nan", "nan")
    assert last["grad_norm"] is None
    sample = runs.sample("nan", 2)
    assert sample["parameters_not_finite"].sum() > 0
    row = sample["names"].tolist().index("layers.1.feed_forward.w2.weight")
    assert np.isnan(sample["gradients_norm"][row])


def test_an_error_names_itself(runs):
    done = runs.torchrun("broken", inject=f"{BUGS}:no_such_function")
    assert done.returncode != 0
    assert "no function 'no_such_function'" in done.stderr
