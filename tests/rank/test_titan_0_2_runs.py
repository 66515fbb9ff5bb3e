"""Real torchrun jobs of torchtitan 0.2: what agrees with FSDP, what does not, and what really ran.

A job takes 10 to 20 seconds on two idle cores, one that compiles about a minute.
"""

import numpy as np
import pytest
import titan_0_2_jobs as jobs
from run_folders import largest_difference, tensor_differences

jobs.require_titan_0_2()
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return jobs.Runs(tmp_path_factory.mktemp("titan-0-2"))


@pytest.fixture(scope="module")
def control(runs):
    steps, in_force = runs.run("fsdp2")
    assert in_force["degrees"] == jobs.DEGREES
    return steps


def test_the_control_is_complete_and_its_metrics_are_true(control):
    assert [line["step"] for line in control] == [1, 2, 3]
    for line in control:
        assert line["loss"] == pytest.approx(line["loss_recomputed"], rel=1e-6)
        assert line["grad_norm"] == pytest.approx(line["grad_norm_recomputed"], rel=1e-6)
        assert line["batch_agrees"] is True
        assert line["grads_missing"] == 0


def assert_every_gradient_is_scaled(runs, name, factor):
    """Against the control, at step 1, and nothing else: divided by the factor they are the same."""
    control, test = runs.sample("fsdp2", 1), runs.sample(name, 1)
    test["gradients_sketch"] /= factor
    assert max(tensor_differences(control, test, "gradients").values()) < 1e-5


def assert_same_samples(runs, name):
    for step, kind in ((0, "parameters"), (1, "gradients"), (1, "parameters")):
        differences = tensor_differences(runs.sample("fsdp2", step), runs.sample(name, step), kind)
        assert max(differences.values()) < (1e-14 if step == 0 else 1e-5)


def test_frozen_steps_see_the_first_batches_and_change_nothing(runs, control):
    steps, _ = runs.run("frozen", frozen=2)
    measured = [
        {key: value for key, value in line.items() if key not in ("seconds", "memory_bytes")}
        for line in (*steps, *control)
    ]
    assert measured[: len(steps)] == measured[len(steps) :]
    with np.load(runs.folder / "frozen" / "frozen.npz") as arrays:
        assert arrays["loss"][0] == steps[0]["loss_recomputed"]
        assert arrays["batch_digests"].tolist() == [line["batch_digest"] for line in steps[:2]]
        first = runs.sample("frozen", 1)
        assert np.array_equal(arrays["gradients_sketch"][0], first["gradients_sketch"])


def test_results_rounded_otherwise_are_as_far_off_as_rounding(runs, control):
    mixed = {"training.mixed_precision_param": "bfloat16"}
    runs.run("mixed", overrides=mixed)
    runs.run("rounding", overrides=mixed, repeat="rounding")
    moved = tensor_differences(runs.sample("mixed", 1), runs.sample("rounding", 1), "gradients")
    assert 1e-3 < np.median(list(moved.values())) < 2e-2


def test_weights_moved_by_an_ulp_change_rounding_only(runs, control):
    steps, _ = runs.run("ulp", repeat="ulp")
    assert 0 < largest_difference(control, steps, "loss_recomputed") < 1e-6


def test_gradient_accumulation_reads_the_same_batches(runs, control):
    steps, in_force = runs.run("accumulation", overrides={"training.local_batch_size": 2})
    assert in_force["gradient_accumulation_steps"] == 2
    assert in_force["global_batch_size"] == 8
    assert [a["batch_digest"] for a in steps] == [b["batch_digest"] for b in control]
    assert largest_difference(control, steps, "grad_norm_recomputed") < 1e-6
    assert_same_samples(runs, "accumulation")


def test_context_parallel_rotates_as_configured_only_with_its_fix(runs, control):
    for name, without_fixes, rotation in (
        ("cp2", [], "alltoall"),
        ("cp2-unfixed", ["cp-rotation"], "allgather"),
    ):
        steps, in_force = runs.run(name, cp=2, cp_rotation="alltoall", without_fixes=without_fixes)
        assert in_force["cp_rotation"] == rotation
        assert in_force["without_fixes"] == without_fixes
        assert in_force["degrees"] == {**jobs.DEGREES, "cp": 2}
        assert largest_difference(control, steps, "loss_recomputed") < 1e-6
        assert largest_difference(control, steps, "grad_norm_recomputed") < 1e-6


def test_tensor_parallelism_leaves_the_same_samples(runs, control):
    runs.run("tp2", tp=2)
    assert_same_samples(runs, "tp2")


def test_float8_tp_styles_are_in_force_only_with_their_fix(runs, control):
    for name, without_fixes, styles in (
        ("float8", [], jobs.LAYERS * 9),
        ("float8-unfixed", ["float8-tp"], 0),
    ):
        steps, in_force = runs.run(
            name, tp=2, techniques=["float8", "float8_tp"], without_fixes=without_fixes
        )
        assert in_force["float8"] == {
            "modules": jobs.LAYERS * 7,
            "recipe": "tensorwise",
            "emulated": False,
            "tp_styles": styles,
        }
        assert in_force["without_fixes"] == without_fixes
        assert 1e-7 < largest_difference(control, steps, "loss_recomputed") < 2e-3


def test_pipeline_gradients_are_too_large_by_the_tokens_of_a_batch(runs, control):
    """torchtitan issue 2972: the loss is right, so only the gradient norm shows it."""
    steps, in_force = runs.run("pp2", pp=2, pipeline_schedule="Interleaved1F1B")
    assert in_force["pipeline_schedule"] == "ScheduleInterleaved1F1B"
    assert in_force["pipeline_microbatches"] == 4
    assert in_force["degrees"] == {**jobs.DEGREES, "pp": 2}
    assert largest_difference(control, steps, "loss_recomputed") < 1e-6
    ratio = steps[0]["grad_norm_recomputed"] / control[0]["grad_norm_recomputed"]
    assert ratio == pytest.approx(control[0]["tokens"], rel=1e-6)
    assert_every_gradient_is_scaled(runs, "pp2", control[0]["tokens"])


def test_ddp_gradients_are_too_small_by_the_replicate_degree(runs, control):
    """torchtitan issue 2318."""
    steps, in_force = runs.run("ddp2", dp_replicate=2, dp_shard=1)
    assert in_force["degrees"] == {**jobs.DEGREES, "dp_replicate": 2, "dp_shard": 1}
    ratio = steps[0]["grad_norm_recomputed"] / control[0]["grad_norm_recomputed"]
    assert ratio == pytest.approx(0.5, rel=1e-6)
    assert_every_gradient_is_scaled(runs, "ddp2", 0.5)


@pytest.mark.longest
def test_compiled_async_tp_neither_fuses_nor_trains_the_embedding_without_its_fixes(runs, control):
    """Two bugs in one job; with the fixes: ``tests/e2e/test_titan_0_2_matrix.py``."""
    techniques = ["compile", "async_tp"]
    steps, in_force = runs.run(
        "async-tp-unfixed", tp=2, techniques=techniques, without_fixes=["symm-mem", "act-grad"]
    )
    assert in_force["async_tp"]["fused_nodes"] == {}
    assert steps[0]["grads_missing_names"] == ["tok_embeddings.weight"]
    assert largest_difference(control, steps, "grad_norm_recomputed") > 1e-4
