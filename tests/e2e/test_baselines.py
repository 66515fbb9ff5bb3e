"""Baselines by the real command line: blessed, judged against, outgrown, blessed again."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from real_matrices import INJECTIONS, ROOT
from two_layers import with_two_layers
from warm_converge import warm_python
from warm_toolchains import warm_toolchains

from converge_harness.baselines import read_baseline

pytestmark = pytest.mark.slow

BLESSED = f"""
schema = 1
repeats = ["rerun", "ulp"]
[trainer]
train_config = "train_configs/llama3_debug.toml"
[trainer.set]
"training.steps" = 4
[control]
name = "fsdp2"
parallelism.dp_shard = 2
[[test]]
name = "ddp2"
parallelism.dp_replicate = 2
[[test]]
name = "doubled"
parallelism.dp_shard = 2
inject = "{INJECTIONS}:double_gradients"
"""
BY_BASELINE = BLESSED.replace("schema = 1", 'schema = 1\nbaseline = "night"')
OTHERWISE = BLESSED.replace(
    "[[test]]",
    f"""
inject = "{INJECTIONS}:scale_one_matrix"
waive = ["control-is-1d-fsdp"]
[[test]]""",
    1,
)


def converge(*words: object, store: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm_python(), "-m", "converge_harness", *map(str, words), "--store", str(store)],
        cwd=ROOT,
        env={**os.environ, "CONVERGE_TOOLCHAINS": str(warm_toolchains())},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def bless(folder: Path, text: str, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "e.toml").write_text(text)
    words = ("bless", folder / "e.toml", "--name", "night", "--author", "ada", "--reason", "sound")
    return converge(*words, *more, store=folder / "store")


@pytest.fixture(scope="module")
def blessed(tmp_path_factory):
    """A folder with a baseline of a real control."""
    folder = with_two_layers(tmp_path_factory.mktemp("baselines"))
    result = bless(folder, BLESSED)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_sets_are_judged_against_it_without_the_control(blessed, tmp_path):
    (blessed / "by.toml").write_text(BY_BASELINE)
    out = tmp_path / "out"
    result = converge("run", blessed / "by.toml", "--out", out, store=tmp_path / "fresh")
    assert result.returncode == 1, result.stdout + result.stderr
    tests = {test["name"]: test for test in json.loads((out / "report.json").read_text())["tests"]}
    assert {name: test["verdict"] for name, test in tests.items()} == {
        "ddp2": "PASS",
        "doubled": "FAIL",
    }
    checks = {check["name"]: check for check in tests["ddp2"]["checks"]}
    assert "initial parameters" in checks["starts-as-the-control"]["detail"]
    ran = {path.name.rpartition("-")[0] for path in (tmp_path / "fresh" / "runs").iterdir()}
    assert ran == {"seed", "ddp2", "doubled"}


def test_a_baseline_that_fits_is_bitwise_the_same_and_stays(blessed):
    result = bless(blessed, BLESSED)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the control is bitwise the same" in result.stdout
    assert not (blessed / "baselines" / "night" / "previous").exists()


def test_another_training_has_to_be_accepted(blessed):
    baseline = blessed / "baselines" / "night"
    refused = bless(blessed, OTHERWISE)
    assert refused.returncode == 1, refused.stdout + refused.stderr
    assert "the control is different" in refused.stdout
    assert "off by more than rounding from step 1 on" in refused.stdout
    assert "--accept-different" in refused.stdout
    assert read_baseline(baseline).replaces is None
    accepted = bless(blessed, OTHERWISE, "--accept-different")
    assert accepted.returncode == 0, accepted.stdout + accepted.stderr
    assert read_baseline(baseline).replaces.change.kind == "different"
    assert read_baseline(baseline / "previous" / "1").replaces is None
