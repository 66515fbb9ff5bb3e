"""Techniques of one's own through real torchtitan 0.3: a right one, and four that are not."""

import json

import pytest
from real_matrices import ROOT, run
from warm_toolchains import warm_toolchains

pytestmark = pytest.mark.slow

FOLDER = ROOT / "experiments" / "own_technique"
FEATURES = """
def idle(model): ...

def raises(trainer):
    raise ValueError("no kernel for this machine")

def nothing(trainer): ...
"""
SET = """
[[test]]
name = "{0}"
parallelism.dp_shard = 2
techniques = ["{0}"]
"""
EXPERIMENT = f"""
schema = 1
repeats = ["rerun", "ulp", "ulp.2"]
[trainer]
train_config = "train_configs/llama3_debug.toml"
[trainer.set]
"training.steps" = 4
[control]
name = "fsdp2"
parallelism.dp_shard = 2
[technique.fused_norm]
what = "RMSNorm written out in float32"
apply = "{FOLDER}/norms.py:use_fused_norm"
in_force = "{FOLDER}/norms.py:count_fused_norms"
[technique.wrong_norm]
what = "RMSNorm with eps outside of the root"
apply = "{FOLDER}/norms.py:use_wrong_norm"
[technique.idle]
what = "Does nothing"
apply = "features.py:idle"
[technique.raising]
what = "Cannot start"
apply = "features.py:raises"
[technique.uncounted]
what = "Counts nothing"
apply = "{FOLDER}/norms.py:use_fused_norm"
in_force = "features.py:nothing"
""" + "".join(map(SET.format, ("fused_norm", "wrong_norm", "idle", "raising", "uncounted")))


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "features.py").write_text(FEATURES)
    matrix, done = run(folder, EXPERIMENT, warm_toolchains())
    assert done.returncode == 1, done.stdout + done.stderr
    return matrix, done


def test_verdicts(matrix):
    verdicts = {name: test["verdict"] for name, test in matrix[0].tests().items()}
    assert verdicts == {
        "fused_norm": "PASS",
        "wrong_norm": "FAIL",
        "idle": "INVALID",
        "raising": "ERROR",
        "uncounted": "ERROR",
    }


def test_the_wrong_norm_is_named_from_the_first_step(matrix):
    wrong = matrix[0].tests()["wrong_norm"]
    assert wrong["onset_step"] == 1
    assert "norm" in wrong["cause"]
    assert "wrong_norm" in wrong["cause"]


def test_causes_say_which_technique_and_what_it_did(matrix):
    tests = matrix[0].tests()
    assert "idle is named but changed nothing" in tests["idle"]["cause"]
    for name, said in {
        "raising": "raises ValueError: no kernel for this machine",
        "uncounted": "returns None; return a count, or True or False",
    }.items():
        assert said in json.dumps(tests[name]["error"]), name
        assert f"technique.{name}." in json.dumps(tests[name]["error"]), name


def test_a_technique_is_shown_everywhere_with_its_sentence(matrix):
    found, done = matrix
    right = found.tests()["fused_norm"]
    assert right["techniques"] == ["fused_norm"]
    assert right["own_techniques"] == {"fused_norm": "RMSNorm written out in float32"}
    assert "fused_norm: RMSNorm written out in float32" in done.stdout
    for name in ("report.html", "report.md", "junit.xml"):
        assert "RMSNorm written out in float32" in (found.out / name).read_text(), name
