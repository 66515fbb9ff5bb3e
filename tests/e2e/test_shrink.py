"""``converge shrink`` by real runs: what a failure needs, and an experiment that shows it."""

import pytest
from real_matrices import INJECTIONS, Matrix
from warm_toolchains import warm_toolchains

MATRIX = f"""
schema = 1
name = "wrong"
repeats = ["ulp"]
[trainer]
train_config = "train_configs/llama3_debug.toml"
[trainer.set]
"training.steps" = 8
"training.seq_len" = 32
[control]
name = "fsdp2"
parallelism.dp_shard = 2
[[test]]
name = "fsdp2_tp2"
parallelism = {{ dp_shard = 2, tp = 2 }}
inject = "{INJECTIONS}:double_gradients_under_tp"
[[test]]
name = "right"
parallelism.dp_replicate = 2
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shrinking")
    (folder / "matrix.toml").write_text(MATRIX)
    return Matrix(folder / "matrix.toml", folder / "store", folder / "report", warm_toolchains())


def shrink(matrix, name, *more):
    out = ("--out", str(matrix.out), "--store", str(matrix.store))
    return matrix.converge("shrink", str(matrix.experiment), "--set", name, *out, *more)


def test_a_failure_is_shrunk_to_the_part_that_it_needs(matrix):
    done = shrink(matrix, "fsdp2_tp2", "--trials", "3")
    assert done.returncode == 3, done.stdout + done.stderr  # the budget ended
    said = " ".join(done.stdout.split())
    assert "gradients are scaled by 2" in said
    assert "1 2 steps instead of 8: fails the same way" in said
    assert "2 tp 1 instead of 2: passes" in said
    assert "3 dp_shard 1 instead of 2: fails the same way" in said
    assert "smallest set-up (the search did not end): tp 2 against dp_shard 2, 2 steps" in said
    assert "needs tp 2: without it, it passes" in said
    assert "does not need dp_shard 2" in said

    smallest = matrix._replace(experiment=matrix.out / "experiment.toml")
    again = smallest.converge("run")
    assert again.returncode == 1, again.stdout + again.stderr
    assert again.stdout.count("reused") >= 3  # the very runs of the search
    (verdict,) = smallest.tests().values()
    assert (verdict["verdict"], verdict["cause_class"]) == ("FAIL", "gradient scale")


def test_a_set_that_passes_is_not_shrunk(matrix):
    done = shrink(matrix, "right")
    assert done.returncode in (2, 3)
    assert "'right' is PASS, not FAIL (only a set that fails can be shrunk)" in " ".join(
        done.stderr.split()
    )
