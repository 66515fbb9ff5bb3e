"""torchtitan's main branch: what it calls differently, and real runs of it that agree.

In the toolchain ``torchtitan-main`` only: ``CONVERGE_CHECKOUT=FOLDER converge toolchain build
torchtitan-main --with pytest pytest-timeout``, then its Python runs this file.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import titan_0_3_jobs as jobs
from run_folders import largest_difference, tensor_differences

from converge_harness.rank.settings import SettingError
from converge_harness.rank.start import entry

BUGS = Path(__file__).with_name("injected_bugs.py")
TITAN = importlib.util.find_spec("torchtitan")
if TITAN is None or not Path(TITAN.origin).parent.joinpath("components/data/loader.py").is_file():
    pytest.skip("needs toolchain torchtitan-main", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def _preloaded():
    jobs.preload()


@pytest.fixture
def build(tmp_path):
    from converge_harness.rank.titan.v0_3.config import build_config

    return lambda **changes: build_config(jobs.job(tmp_path / "run", **changes))


SAID = {
    "training.local_batch_size": 4,
    "training.global_batch_size": 8,
    "training.seq_len": 256,
    "parallelism.pipeline_parallel_microbatch_size": 1,
}


@pytest.mark.parametrize(
    ("changes", "said", "held", "microbatches"),
    [
        ({}, {}, 4 * 256, 1),
        ({"pp": 2, "pipeline_schedule": "1F1B"}, {}, 256, 4),
        (
            {"pp": 2, "pipeline_schedule": "1F1B"},
            {"parallelism.pipeline_parallel_microbatch_size": 2},
            2 * 256,
            2,
        ),
        ({}, {"training.local_batch_size": 2}, 2 * 256, 1),
    ],
)
def test_sizes_in_samples_become_sizes_in_tokens(build, changes, said, held, microbatches):
    built = build(overrides=said, **changes)
    training, parallelism = built.trainer.training, built.trainer.parallelism
    assert training.num_tokens_per_microbatch_per_dp_rank == held
    assert training.num_tokens_per_train_step == 8 * 256
    assert training.max_context_length == 256
    assert parallelism.num_pp_microbatches == microbatches
    assert {key: built.flat[key] for key in SAID} == SAID | said
    assert set(said) <= set(built.declared)
    assert "training.seq_len" not in built.declared
    assert "training.num_tokens_per_train_step" not in built.flat


def test_no_global_batch_means_no_accumulation(build):
    built = build(overrides={"training.global_batch_size": -1})
    assert built.trainer.training.num_tokens_per_train_step == -1
    assert built.flat["training.global_batch_size"] == -1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"overrides": {"training.num_tokens_per_train_step": 2048}},
            r"train_step: follows from the sizes in samples: set .* \(training.global_batch_size\)",
        ),
        (
            {"overrides": {"training.local_batch_size": "4"}},
            "training.local_batch_size: takes a positive integer, not '4'",
        ),
        (
            {
                "pp": 2,
                "pipeline_schedule": "1F1B",
                "overrides": {"parallelism.pipeline_parallel_microbatch_size": 3},
            },
            "a local batch of 4 does not divide into microbatches of 3",
        ),
        (
            {"cp": 2, "spmd_backend": "partial_dtensor"},
            r"partial_dtensor of torchtitan main knows no context parallelism \(CP 2",
        ),
        (
            {"spmd_backend": "full_dtensor"},
            "spmd_backend: takes one of 'partial_dtensor'",
        ),
    ],
)
def test_what_main_does_not_take_is_one_sentence(build, changes, says):
    with pytest.raises(SettingError, match=says) as caught:
        build(**changes)
    assert len(caught.value.problems) == 1


def test_the_check_before_a_run_finds_it_too(tmp_path):
    path = jobs.write_job(tmp_path / "run", cp=2, spmd_backend="partial_dtensor")
    (problem,) = entry.check(str(path))
    assert "knows no context parallelism" in problem.message


# ------------------------------------------------------------------ real runs, seconds each


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return jobs.Runs(tmp_path_factory.mktemp("titan-main"))


@pytest.fixture(scope="module")
def control(runs):
    steps, in_force = runs.run("fsdp2")
    assert in_force["degrees"] == jobs.DEGREES
    assert in_force["attention"] == "DenseFlexAttention"
    assert in_force["spmd_backend"] == "spmd_types"
    assert (in_force["local_batch_size"], in_force["global_batch_size"]) == (4, 8)
    assert in_force["seq_len"] == 256
    return steps


def test_metrics_are_true(control):
    assert [line["step"] for line in control] == [1, 2, 3]
    for line in control:
        assert line["loss"] == pytest.approx(line["loss_recomputed"], rel=1e-6)
        assert line["grad_norm"] == pytest.approx(line["grad_norm_recomputed"], rel=1e-6)
        assert line["batch_agrees"] is True
        assert line["grads_missing"] == 0


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("one_device", {"dp_shard": 1, "overrides": {"training.local_batch_size": 8}}),
        ("accumulated", {"overrides": {"training.local_batch_size": 2}}),
        ("tp2", {"tp": 2}),
        ("pp2", {"pp": 2, "pipeline_schedule": "1F1B"}),
        ("cp2", {"cp": 2}),
        ("tp2_partial_dtensor", {"tp": 2, "spmd_backend": "partial_dtensor"}),
    ],
)
def test_sets_agree_with_fsdp(runs, control, name, changes):
    steps, in_force = runs.run(name, **changes)
    degrees = {key: changes.get(key, default) for key, default in jobs.DEGREES.items()}
    assert in_force["degrees"] == degrees
    assert [line["batch_digest"] for line in steps] == [line["batch_digest"] for line in control]
    assert largest_difference(control, steps, "loss") < 1e-5
    first = tensor_differences(runs.sample("fsdp2", 1), runs.sample(name, 1), "gradients")
    assert max(first.values()) < 1e-4
    assert np.isfinite([*first.values()]).all()


def test_wrong_gradients_and_a_wrong_metric_are_seen(runs, control):
    (first, *_), in_force = runs.run("gradients", inject=f"{BUGS}:double_gradients")
    assert in_force["injected"] == f"{BUGS}:double_gradients"
    assert first["grad_norm_recomputed"] == pytest.approx(2 * control[0]["grad_norm"], rel=1e-6)
    (first, *_), _ = runs.run("metric", inject=f"{BUGS}:double_reported_loss")
    assert first["loss"] == pytest.approx(2 * control[0]["loss"], rel=1e-6)
    assert first["loss_recomputed"] == control[0]["loss_recomputed"]


def test_a_loss_that_is_not_finite_ends_the_step_with_its_evidence(runs):
    script = [{"kind": "nan_batch", "step": 1, "rank": 0}]
    pipeline = {"dp_shard": 1, "pp": 2, "pipeline_schedule": "1F1B"}
    every = {"checkpoint_every": 1, "sample_steps": []}
    done = runs.torchrun("nan", max_restarts=1, faults=script, **pipeline, **every)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Loss or gradient norm is not finite" in done.stderr
    first, second = (
        [line for line in lines if line["kind"] == "step"] for lines in runs.passes("nan")
    )
    # main stops without saying which loss.
    assert [(line["loss"], line["loss_recomputed"]) for line in first] == [(None, "nan")]
    assert [line["step"] for line in second] == [1, 2, 3]
    assert all(isinstance(line["loss"], float) for line in second)


def test_the_stock_loader_reads_the_documents(runs):
    steps, in_force = runs.run("stock", loader="torchtitan")
    assert in_force["config"]["dataloader.shuffle"] is False
    assert in_force["seq_len"] == 256
    assert all(line["batch_agrees"] for line in steps)
    assert len({line["batch_digest"] for line in steps}) == 3


def test_a_run_is_resumed_on_other_degrees(runs, control):
    first = {"until": 1, "parallelism": jobs.DEGREES, "local_batch_size": 4}
    second = {**first, "until": 3, "parallelism": {**jobs.DEGREES, "tp": 2}}
    segments = [{**each, "pipeline_schedule": None} for each in (first, second)]
    elastic = {"segments": segments, "overrides": {"training.global_batch_size": 8}}
    for index in range(2):
        done = runs.torchrun("elastic", segment=index, **elastic)
        assert done.returncode == 0, done.stderr[-4000:]
    steps = [line for lines in runs.passes("elastic") for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert largest_difference(control, steps, "loss") < 1e-5
