"""What ``converge plan`` prints of runs in several passes."""

import json
from pathlib import Path

import pytest
from light_toolchain import light_environment

from converge_harness.cli import main
from converge_harness.toolchains.find import STAMP

EXPERIMENTS = Path(__file__).parents[2] / "experiments"

TRAIN_CONFIG = """
[training]
steps = 12
local_batch_size = 4
global_batch_size = 8
seq_len = 256
mixed_precision_param = "float32"
[converge.data]
"""
EXPERIMENT = """
schema = 1
[trainer]
train_config = "t.toml"
[control]
parallelism.dp_shard = 2
[[test]]
name = "resized"
kind = "elastic"
segments = [
  { until = 4, dp_shard = 2 },
  { until = 8, dp_shard = 1 },
  { until = 12, dp_shard = 4, local_batch_size = 2 },
]
[[test]]
name = "killed"
kind = "fault"
parallelism.dp_shard = 2
checkpoint_every = 4
faults = [{ kind = "kill", step = 6, rank = 1 }]
"""


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CONVERGE_TOOLCHAINS", str(tmp_path / "none"))
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "t.toml").write_text(TRAIN_CONFIG)
    (tmp_path / "e.toml").write_text(EXPERIMENT)
    assert main(["plan", str(tmp_path / "e.toml"), "--store", str(tmp_path)]) == 0
    return capsys.readouterr().out


def test_a_toolchain_that_is_not_built_is_reported_with_the_command_that_builds_it(printed):
    (line,) = (line for line in printed.splitlines() if line.startswith("toolchain "))
    assert line.endswith(
        " is not built yet; build it with: converge toolchain build torchtitan-0.3.0"
    )


def test_every_segment_has_its_own_way_to_the_global_batch(printed):
    rows = {line.split()[0]: line for line in printed.splitlines() if "│" in line}
    assert " 8 = 2x4, 1x4x2, 4x2 " in rows["resized"]
    assert " 8 = 2x4 " in rows["killed"]


def test_a_script_of_faults_is_printed_with_its_checkpoints_and_restarts(printed):
    assert "faults: kill of rank 1 at step 6\n" in printed
    assert (
        "a checkpoint every 4 steps; restarts by harness, at most 3, each within 120 s" in printed
    )


def test_nothing_holds_a_program_without_the_probe_at_the_step_of_a_fault(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("CONVERGE_TOOLCHAINS", str(tmp_path / "none"))
    path = EXPERIMENTS / "recoverable_by_curves.toml"
    assert main(["plan", str(path), "--store", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for fault in ("kill of rank 1", "hang of rank 1", "preempt (it has to save)"):
        assert f"faults: {fault} at or after step 6\n" in printed


def test_a_plan_begins_with_a_toolchain_that_a_run_refuses(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CONVERGE_TOOLCHAINS", str(tmp_path))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    light_environment(tmp_path)
    (tmp_path / "t.toml").write_text(TRAIN_CONFIG)
    (tmp_path / "e.toml").write_text(EXPERIMENT)
    plan = ["plan", str(tmp_path / "e.toml"), "--store", str(tmp_path)]
    assert main(plan) == 0
    assert "refuses" not in capsys.readouterr().out
    stamp = tmp_path / "torchtitan-0.3.0" / STAMP
    stamp.write_text(json.dumps({"converge": "0.0.9 abc"}))
    assert main(plan) == 2
    line, *others = capsys.readouterr().out.splitlines()
    assert not any("refuses" in other for other in others)
    assert line.startswith("`converge run` refuses this: toolchain 'torchtitan-0.3.0' in ")
    assert "another converge in it (0.0.9 abc)" in line
    assert line.endswith("with: converge toolchain build torchtitan-0.3.0")
    assert main([*plan, "--json"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["sets"]
    assert printed.err.startswith("`converge run` refuses this")
    assert main(["run", *plan[1:]]) == 2
