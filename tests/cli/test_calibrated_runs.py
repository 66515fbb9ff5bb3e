"""Real runs: calibrate once, judge by that, and let an anchor catch a wrong control."""

import json
from pathlib import Path

import pytest
from two_layers import with_two_layers
from warm_toolchains import warm_toolchains

from converge_harness.cli import main

ROOT = Path(__file__).parents[2]
DOUBLED = f'inject = "{ROOT}/tests/e2e/injections.py:double_gradients"'

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]

EXPERIMENT = f"""
schema = 1
repeats = ["ulp"]
[trainer]
train_config = "train_configs/llama3_debug.toml"
[trainer.set]
"training.steps" = 2
[anchor]
name = "one_device"
parallelism = {{}}
set = {{ "training.local_batch_size" = 8 }}
[control]
name = "fsdp2"
parallelism.dp_shard = 2
waive = ["control-is-1d-fsdp"]
{DOUBLED}
[[test]]
name = "ddp2"
parallelism.dp_replicate = 2
{DOUBLED}
"""


def verdicts(folder: Path) -> dict[str, str]:
    report = json.loads((folder / "report.json").read_text())
    return {test["name"]: test["verdict"] for test in report["tests"]}


def test_a_wrong_control_passes_its_tests_and_fails_its_anchor(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CONVERGE_TOOLCHAINS", str(warm_toolchains()))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("CONVERGE_STORE", str(tmp_path / "store"))
    with_two_layers(tmp_path)
    experiment, learnt, out = (tmp_path / name for name in ("e.toml", "c.json", "out"))
    experiment.write_text(EXPERIMENT)
    assert main(["calibrate", str(experiment), "--out", str(learnt)]) == 0
    assert f"next: converge run {experiment} --calibration {learnt}" in capsys.readouterr().out

    judge = ["run", str(experiment), "--calibration", str(learnt), "--out", str(out)]
    assert main(judge) == 1
    assert verdicts(out) == {"fsdp2": "FAIL", "ddp2": "PASS"}
    assert json.loads((out / "calibration.json").read_text())["calibrations"][0]["taught_by"] == 1
    assert len(list((tmp_path / "store" / "runs").iterdir())) == 5  # ulp was not run again
    (out / "report.json").unlink()
    assert main(["report", str(out)]) == 1
    assert verdicts(out) == {"fsdp2": "FAIL", "ddp2": "PASS"}

    experiment.write_text(EXPERIMENT.replace("= 2\n[anchor]", "= 3\n[anchor]"))
    capsys.readouterr()
    assert main(judge) == 2
    refused = capsys.readouterr().err
    assert "nothing was launched" in refused
    assert "overrides.training.steps is 3, was 2" in refused
    assert f"converge calibrate {experiment} --out {learnt}" in refused
