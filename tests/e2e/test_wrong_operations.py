"""``converge run --explain`` names the operation inside of a wrong module, where it can be told."""

import pytest
from real_matrices import INJECTIONS, ROOT, run
from warm_toolchains import warm_toolchains

NORMS = ROOT / "experiments" / "own_technique" / "norms.py"
MATRIX = f"""
schema = 1
name = "operations"
repeats = ["ulp"]
[trainer]
train_config = "train_configs/llama3_debug.toml"
[trainer.set]
"training.steps" = 4
"training.seq_len" = 64
[control]
name = "fsdp2"
parallelism.dp_shard = 2
[technique.fused_norm]
what = "RMSNorm written out"
apply = "{NORMS}:use_fused_norm"
[technique.wrong_norm]
what = "RMSNorm with eps outside of the root"
apply = "{NORMS}:use_wrong_norm"
[[test]]
name = "right"
parallelism.dp_shard = 2
techniques = ["fused_norm"]
[[test]]
name = "wrong_norm"
parallelism.dp_shard = 2
techniques = ["wrong_norm"]
[[test]]
name = "wrong_norm_tp2"
parallelism = {{ dp_shard = 2, tp = 2 }}
techniques = ["wrong_norm"]
[[test]]
name = "other_gate"
parallelism.dp_replicate = 2
inject = "{INJECTIONS}:gate_with_gelu"
[[test]]
name = "wrong_gradients"
parallelism.dp_shard = 2
inject = "{INJECTIONS}:double_gradients"
"""

SCRIPT = ROOT / "experiments" / "tutorial" / "train_probed.py"
PROBED = """
schema = 1
name = "probed"
repeats = ["ulp"]
[trainer]
kind = "command"
toolchain = "torchtitan-0.3.0"
command = [
    "{config.script}", "--steps", "{steps}", "--seed", "{seed}",
    "--global-batch", "{global_batch_size}", "--micro-batch", "{local_batch_size}",
    "--out", "{output}",
]
[trainer.config]
script = "train.py"
training = { steps = 3, global_batch_size = 16, local_batch_size = 8 }
[control]
name = "ddp2"
parallelism.dp_replicate = 2
[[test]]
name = "tanh"
parallelism.dp_replicate = 2
set = { script = "train_tanh.py" }
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("operations")
    matrix, done = run(folder, MATRIX, warm_toolchains(), "--explain", "--explain-minutes", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    return matrix, " ".join(done.stdout.split())


def test_the_operations_between_right_tensors_and_the_wrong_output_are_named(matrix):
    found, said = matrix
    told = (
        "inside layers.0.attention_norm, after aten.mean.dim (operation 2 of 6), which agrees, the "
        "test set runs aten.sqrt.default (float32), aten.add.Tensor (float32), aten.div.Tensor "
        "(float32) where the control runs aten.add_.Scalar (float32), aten.rsqrt.default (float32)"
        ", aten.mul.Tensor (float32); what the module returns is off by "
    )
    assert told in said
    verdict = found.tests()["wrong_norm"]
    assert (verdict["verdict"], verdict["module"]) == ("FAIL", "layers.0.attention_norm")
    assert told in verdict["first_wrong"]
    assert "the test set runs aten.sqrt.default" in (found.out / "report.md").read_text()


def test_replicas_compare_with_shards_and_the_module_inside_is_named(matrix):
    verdict = matrix[0].tests()["other_gate"]
    assert verdict["module"] == "layers.1.feed_forward"
    assert (
        "in layers.1.feed_forward.w1), which agrees, the test set runs aten.gelu.default (float32) "
        "where the control runs aten.silu.default (float32)"
    ) in verdict["first_wrong"]


def test_where_ranks_hold_other_parts_it_cannot_be_told(matrix):
    verdict = matrix[0].tests()["wrong_norm_tp2"]
    assert verdict["first_wrong"].endswith(
        "; the wrong operation inside layers.0.attention_norm is unknown: on rank 0, it "
        "gets float32[4, 32, 64], and in the control float32[4, 64, 64]; operations are compared "
        "where a rank of each gets the same"
    )


def test_sets_that_pass_or_have_right_modules_are_not_looked_into(matrix):
    found, said = matrix
    tests = found.tests()
    assert (tests["right"]["verdict"], tests["wrong_gradients"]["verdict"]) == ("PASS", "FAIL")
    for name in ("right", "wrong_gradients"):
        assert f"{name}: looking into" not in said
        assert "operation" not in tests[name]["first_wrong"]


def test_judging_again_keeps_what_was_told(matrix):
    found, _ = matrix
    before = {name: test["first_wrong"] for name, test in found.tests().items()}
    again = found.converge("report")
    assert again.returncode == 1, again.stdout + again.stderr
    assert {name: test["first_wrong"] for name, test in found.tests().items()} == before


def test_a_program_with_the_probe_is_looked_into_as_well(tmp_path):
    script = SCRIPT.read_text()
    assert script.count("nn.GELU()") == 1
    (tmp_path / "train.py").write_text(script)
    tanh = script.replace("nn.GELU()", 'nn.GELU(approximate="tanh")')
    (tmp_path / "train_tanh.py").write_text(tanh)
    more = ("--explain", "--explain-minutes", "1")
    matrix, done = run(tmp_path, PROBED, warm_toolchains(), *more)
    assert done.returncode == 1, done.stdout + done.stderr
    verdict = matrix.tests()["tanh"]
    assert verdict["module"] == "2"
    assert "; inside 2, aten.gelu.default (operation 1 of 1) is off by " in verdict["first_wrong"]
    assert verdict["first_wrong"].endswith(
        "; besides tensors it gets approximate=tanh, in the control nothing"
    )
