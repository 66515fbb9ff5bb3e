"""A cut-down matrix of real torchtitan 0.2.2, bugs of its own among the sets."""

import pytest
from real_matrices import ROOT, run
from warm_toolchains import warm_toolchains

REPAIRS = ROOT / "experiments" / "repairs_of_0_2_2.py"
TITAN_02 = f"""
schema = 1
[trainer]
train_config = "train_configs/llama3_debug_titan02.toml"
toolchain = "torchtitan-0.2.2"
startup_timeout_s = 900
[trainer.set]
"training.steps" = 4
[control]
name = "fsdp2"
parallelism.dp_shard = 2
[[test]]
name = "pp2"
parallelism = {{ dp_shard = 2, pp = 2 }}
[[test]]
name = "ddp2"
parallelism.dp_replicate = 2
[[test]]
name = "cp2"
parallelism = {{ dp_shard = 2, cp = 2 }}
cp_rotation = "alltoall"
[[test]]
name = "cp2_rotation_ignored"
parallelism = {{ dp_shard = 2, cp = 2 }}
cp_rotation = "alltoall"
without_fixes = ["cp-rotation"]
[[test]]
name = "async_tp"
parallelism = {{ dp_shard = 2, tp = 2 }}
techniques = ["compile", "async_tp"]
[technique.divided]
what = "Issue 2972 repaired"
apply = "{REPAIRS}:divide_pipeline_gradients"
in_force = "{REPAIRS}:was_repaired"
[technique.summed]
what = "Issue 2318 repaired"
apply = "{REPAIRS}:sum_replicas_gradients"
in_force = "{REPAIRS}:was_repaired"
[[test]]
name = "pp2_repaired"
parallelism = {{ dp_shard = 2, pp = 2 }}
techniques = ["divided"]
[[test]]
name = "ddp2_repaired"
parallelism.dp_replicate = 2
techniques = ["summed"]
"""


@pytest.fixture(scope="module")
def titan_02(tmp_path_factory):
    return run(tmp_path_factory.mktemp("titan02"), TITAN_02, warm_toolchains("torchtitan-0.2.2"))


def test_known_bugs_of_0_2_2_do_not_pass(titan_02):
    matrix, result = titan_02
    assert result.returncode == 1, result.stdout + result.stderr
    tests = matrix.tests()
    verdicts = {name: test["verdict"] for name, test in tests.items()}
    assert verdicts == {
        "pp2": "FAIL",
        "ddp2": "FAIL",
        "cp2": "PASS",
        "cp2_rotation_ignored": "INVALID",
        "async_tp": "PASS",
        "pp2_repaired": "PASS",
        "ddp2_repaired": "PASS",
    }
    classes = {tests[name]["cause_class"] for name in ("pp2", "ddp2")}
    assert classes == {"gradient scale"}
    assert "valid tokens" in tests["pp2"]["cause"]
    assert "replicate degree" in tests["ddp2"]["cause"]
    assert tests["pp2"]["onset_step"] == 1
    assert tests["ddp2"]["onset_step"] == 1
    assert "rotation" in tests["cp2_rotation_ignored"]["cause"]
