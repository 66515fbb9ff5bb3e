"""Sets that draw random numbers of their own: dropout of real torchtitan under TP."""

import pytest
from real_matrices import INJECTIONS, run
from warm_toolchains import warm_toolchains

pytestmark = pytest.mark.slow

DROPOUT = f"""
schema = 1
repeats = ["rerun"]
[trainer]
train_config = "train_configs/llama3_debug.toml"
[trainer.set]
"training.steps" = 16
[probe]
frozen = 8
[control]
name = "fsdp2"
parallelism.dp_shard = 2
inject = "{INJECTIONS}:dropout"
waive = ["control-is-1d-fsdp"]
[[test]]
name = "other masks"
parallelism.tp = 2
set = {{ "training.local_batch_size" = 8 }}
waive = ["same-dp-degree"]
inject = "{INJECTIONS}:dropout"
own_random_numbers = true
margin = 0.01
[[test]]
name = "one matrix scaled"
parallelism.tp = 2
set = {{ "training.local_batch_size" = 8 }}
waive = ["same-dp-degree"]
inject = "{INJECTIONS}:dropout_and_scaled_matrix"
own_random_numbers = true
margin = 0.01
"""


def test_dropout_of_other_degrees_is_judged_in_the_mean(tmp_path):
    matrix, result = run(tmp_path, DROPOUT, warm_toolchains())
    assert result.returncode == 1, result.stdout + result.stderr
    tests = matrix.tests()
    assert {name: test["verdict"] for name, test in tests.items()} == {
        "other masks": "PASS",
        "one matrix scaled": "FAIL",
    }
    assert "layers.1.feed_forward.w2" in tests["one matrix scaled"]["cause"]
    assert "gradients-first-steps" in tests["other masks"]["not_asked"]
