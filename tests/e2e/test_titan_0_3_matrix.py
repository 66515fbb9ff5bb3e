"""A cut-down matrix of real torchtitan 0.3: its verdicts, and what is done with them later."""

import shlex
import time

import pytest
from real_matrices import INJECTIONS, Matrix, run
from warm_toolchains import warm_toolchains

TITAN_03 = f"""
schema = 1
name = "e2e 0.3 <b>"
repeats = ["rerun", "ulp", "ulp.2", "permute"]
[trainer]
train_config = "train_configs/llama3_debug.toml"
[trainer.set]
"training.steps" = 4
[anchor]
name = "one device"
parallelism.dp_shard = 1
set = {{ "training.local_batch_size" = 8 }}
[control]
name = "fsdp2"
parallelism.dp_shard = 2
[[test]]
name = "tp/2 ünd 'more' <script>alert(1)</script>"
parallelism = {{ dp_shard = 2, tp = 2 }}
[[test]]
name = "doubled"
parallelism.dp_shard = 2
inject = "{INJECTIONS}:double_gradients"
[[test]]
name = "one matrix scaled"
parallelism.dp_shard = 2
inject = "{INJECTIONS}:scale_one_matrix"
[[test]]
name = "one matrix frozen"
parallelism.dp_shard = 2
inject = "{INJECTIONS}:freeze_one_matrix"
[[test]]
name = "one rank clips"
parallelism.dp_replicate = 2
inject = "{INJECTIONS}:clip_on_one_rank"
[[test]]
name = "crashing"
parallelism.dp_shard = 2
inject = "{INJECTIONS}:crash_at_step_2"
[[test]]
name = "loss reported twice"
parallelism.dp_shard = 2
inject = "{INJECTIONS}:report_twice_the_loss"
[[test]]
name = "full_dtensor"
parallelism.dp_shard = 2
spmd_backend = "full_dtensor"
"""


@pytest.fixture(scope="module")
def titan_03(tmp_path_factory):
    """Run as users do; later commands find toolchains whose ranks have torchtitan imported."""
    matrix, result = run(tmp_path_factory.mktemp("titan 03 é"), TITAN_03)
    return matrix._replace(toolchains=warm_toolchains()), result


def test_verdicts_of_0_3(titan_03):
    matrix, result = titan_03
    assert result.returncode == 1, result.stdout + result.stderr
    verdicts = {name: test["verdict"] for name, test in matrix.tests().items()}
    assert verdicts == {
        "fsdp2": "PASS",  # against its anchor
        "tp/2 ünd 'more' <script>alert(1)</script>": "PASS",
        "doubled": "FAIL",
        "one matrix scaled": "FAIL",
        "one matrix frozen": "FAIL",
        "one rank clips": "FAIL",
        "crashing": "ERROR",
        "loss reported twice": "FAIL",
        "full_dtensor": "PASS",  # torch 2.13 multiplies its reported loss (known_bugs.toml)
    }


def test_causes_of_0_3_are_named(titan_03):
    tests = titan_03[0].tests()
    classes = {name: test["cause_class"] for name, test in tests.items() if test["cause_class"]}
    assert classes == {
        "doubled": "gradient scale",
        "one matrix scaled": "gradient scale of a group",
        "one matrix frozen": "parameters do not move",
        "one rank clips": "replicas differ",
        "loss reported twice": "metric only",
    }
    assert {tests[name]["onset_step"] for name in classes} == {1}
    assert "layers.1.feed_forward.w2" in tests["one matrix scaled"]["cause"]
    assert "1.5" in tests["one matrix scaled"]["cause"]
    assert "layers.0.feed_forward.w1" in tests["one matrix frozen"]["cause"]
    assert "the disk of rank 1 is on fire" in tests["crashing"]["cause"]


def test_a_calibration_in_a_file_gives_the_same_verdicts_and_is_refused_elsewhere(titan_03):
    matrix, _ = titan_03
    file = matrix.out / "kept.json"
    calibrated = matrix.converge("calibrate", "--out", str(file))
    assert calibrated.returncode == 0, calibrated.stdout + calibrated.stderr
    assert "started on" not in calibrated.stdout
    before = {name: test["verdict"] for name, test in matrix.tests().items()}
    matrix.converge("run", "--calibration", str(file))
    assert {name: test["verdict"] for name, test in matrix.tests().items()} == before
    longer = matrix.experiment.with_name("longer.toml")
    longer.write_text(TITAN_03.replace('"training.steps" = 4', '"training.steps" = 5'))
    refused = matrix._replace(experiment=longer).converge("run", "--calibration", str(file))
    assert refused.returncode == 2, refused.stdout
    assert f"converge calibrate {shlex.quote(str(longer))}" in refused.stderr
    matrix.converge("run")


def test_loss_alone_would_have_passed_doubled_gradients(titan_03):
    checks = {check["name"]: check for check in titan_03[0].tests()["doubled"]["checks"]}
    assert checks["loss-first-step"]["outcome"] == "PASS"
    assert checks["loss-envelope"]["measured"] < 0.01


def test_hostile_names_reach_no_file_name(titan_03):
    matrix, _ = titan_03
    names = [path.name for path in (matrix.store / "runs").iterdir()]
    assert not [name for name in names if set(name) & set("<>'/ ü")]


def test_every_report_is_there(titan_03):
    matrix, _ = titan_03
    for name in ("report.html", "report.md", "report.json", "junit.xml", "plots"):
        assert (matrix.out / name).exists()


def test_a_second_run_launches_only_what_had_not_finished(titan_03):
    matrix, _ = titan_03
    result = matrix.converge("run", "--only", "doubled", "full_dtensor")
    assert result.returncode == 1
    assert "started on" not in result.stdout
    assert result.stdout.count("reused") >= 5


def test_report_and_compare_judge_again_without_training(titan_03):
    matrix, _ = titan_03
    begun = time.time()
    assert matrix.converge("run", "--only", "doubled").returncode == 1
    assert matrix.converge("report").returncode == 1
    runs = matrix.store / "runs"
    control = next(path for path in runs.iterdir() if path.name.startswith("fsdp2-"))
    doubled = next(path for path in runs.iterdir() if path.name.startswith("doubled-"))
    repeat = next(path for path in runs.iterdir() if path.name.startswith("fsdp2.rerun-"))
    same = matrix.converge("compare", str(control), str(repeat))
    assert same.returncode == 0, same.stdout + same.stderr
    assert matrix.converge("compare", str(control), str(doubled)).returncode == 1
    assert not [path for path in runs.glob("*/metrics.jsonl") if path.stat().st_mtime > begun]


def test_an_unknown_key_is_refused_before_anything_runs(titan_03, tmp_path):
    experiment = tmp_path / "typo.toml"
    experiment.write_text(
        TITAN_03.replace("training.local_batch_size", "training.local_batch_sise")
    )
    matrix = Matrix(experiment, tmp_path / "store", tmp_path / "report", warm_toolchains())
    result = matrix.converge("run")
    assert result.returncode == 2
    assert "training.local_batch_size" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list((tmp_path / "store").glob("runs/*/metrics.jsonl*"))
