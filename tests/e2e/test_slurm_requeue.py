"""Real jobs on a real Slurm that lose their place in the middle, and are judged all the same.

Every job holds at its sixth step until its node dies or it is requeued, so that nothing depends on
the machine's speed. Ranks are forks of one server, as in ``test_slurm_runs.py``.
"""

import json
import subprocess
import sys
import time

import pytest
from real_matrices import INJECTIONS, ROOT, Matrix
from two_layers import with_two_layers
from warm_toolchains import warm_toolchains

pytestmark = pytest.mark.slow

EXPERIMENT = f"""
schema = 1
repeats = ["ulp"]
launcher = "slurm"
[cluster]
ranks_per_node = 2
device = "cpu"
gpus_per_node = false
checkpoint_every = 2
poll_s = 1
environment = {{ GLOO_SOCKET_IFNAME = "lo" }}
[trainer]
train_config = "train_configs/llama3_debug.toml"
[trainer.set]
"training.steps" = 8
"training.local_batch_size" = 4
"training.global_batch_size" = 8
[probe]
cadence = [1, 2, 3, 6, 8]
[control]
name = "fsdp2"
waive = ["control-is-1d-fsdp"]
parallelism.dp_shard = 2
inject = "{INJECTIONS}:hold_in_the_first_life"
[[test]]
name = "ddp2"
parallelism.dp_replicate = 2
inject = "{INJECTIONS}:hold_in_the_first_life"
[[test]]
name = "forgetful"
parallelism.dp_shard = 2
set = {{ "checkpoint.exclude_from_loading" = ["optimizer"] }}
inject = "{INJECTIONS}:hold_in_the_first_life"
"""
BY_HAND = ("fsdp2", "fsdp2.ulp", "forgetful")
TIMEOUT_S = 600


def wait_for(matrix, name, left, process):
    """The run folder of a job, once it has left a file; fails when converge ends."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        found = sorted((matrix.store / "runs").glob(f"{name}-*/{left}"))
        if found:
            return found[0].parent
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{name} never left {left}"
        time.sleep(0.2)


def job_id(run):
    return json.loads((run / "submission.json").read_text())["job_id"]


def node_of(slurm, run):
    return slurm.ask("squeue", "--noheader", f"--jobs={job_id(run)}", "-o", "%N").strip()


@pytest.fixture(scope="module")
def requeued(tmp_path_factory, slurm):
    """A set loses its node; its control, a repeat and a forgetful set are requeued by hand."""
    folder = with_two_layers(tmp_path_factory.mktemp("requeued"))
    (folder / "matrix.toml").write_text(EXPERIMENT)
    matrix = Matrix(folder / "matrix.toml", folder / "store", folder / "report")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "converge_harness", "run", str(matrix.experiment)),
            *("--store", str(matrix.store), "--out", str(matrix.out)),
        ],
        cwd=ROOT,
        env={**slurm.environment, "CONVERGE_TOOLCHAINS": str(warm_toolchains())},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        for name in BY_HAND:
            run = wait_for(matrix, name, "holding", process)
            slurm.ask("scontrol", "requeue", job_id(run))
        for name in BY_HAND:  # so that none of them meets the dead node
            wait_for(matrix, name, "record.json", process)
        lost = node_of(slurm, wait_for(matrix, "ddp2", "holding", process))
        slurm.kill(lost)
        slurm.down(lost)
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    return matrix, process.returncode, output


def outcomes(test):
    return {check["name"]: check["outcome"] for check in test["checks"]}


def test_what_a_requeue_kept_passes_and_what_it_lost_fails(requeued):
    matrix, returncode, output = requeued
    assert returncode == 1, output
    tests = matrix.tests()
    assert {name: test["verdict"] for name, test in tests.items()} == {
        "ddp2": "PASS",
        "forgetful": "FAIL",
    }
    asked = ("passes-continuous", "state-restored", "data-resumed", "replays-agree")
    found = outcomes(tests["ddp2"])
    assert {name: found[name] for name in asked} == dict.fromkeys(asked, "PASS")
    for test in tests.values():
        passes = [(each["steps"], each["loaded_step"], each["ended"]) for each in test["passes"]]
        assert passes == [([1, 5], 0, "interrupted"), ([5, 8], 4, "ended")]


def test_state_that_the_resume_left_out_is_the_cause(requeued):
    test = requeued[0].tests()["forgetful"]
    assert test["cause_class"] == "state lost"
    assert "exp_avg" in test["cause"]
    assert "interrupted and continued" in test["cause"]
    assert test["onset_step"] == 5


def test_the_control_and_its_repeat_were_requeued_too_and_serve_all_the_same(requeued):
    matrix, _, _ = requeued
    report = json.loads((matrix.out / "report.json").read_text())
    assert [control["requeues"] for control in report["controls"]] == [1]
    (calibration,) = report["calibration"]
    assert calibration["taught_by"] == 1
    assert outcomes(matrix.tests()["ddp2"])["repeats-sound"] == "PASS"
    for path in (matrix.store / "runs").glob("*/record.json"):
        record = json.loads(path.read_text())
        assert record["status"] == "finished"
        assert record["cluster"]["restarts"] == int(record["name"] != "seed"), record["name"]
