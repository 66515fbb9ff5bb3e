"""A set that is certain to FAIL is stopped, with the verdict that it would have had."""

import json
import re

import pytest
from real_matrices import INJECTIONS, run
from warm_toolchains import warm_toolchains

MATRIX = f"""
schema = 1
repeats = ["ulp"]
[stop]
after = 2
[trainer]
train_config = "train_configs/llama3_debug.toml"
cpu_ranks = 2   # one after the other: the control and its repeat have ended
[trainer.set]
"training.steps" = 32
[control]
name = "fsdp2"
parallelism.dp_shard = 2
[[test]]
name = "doubled"
parallelism.dp_shard = 2
inject = "{INJECTIONS}:double_gradients"
[[test]]
name = "right"
parallelism.dp_replicate = 2
"""

DOUBLED = "gradients are scaled by 2, which equals"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return run(tmp_path_factory.mktemp("stopping"), MATRIX, warm_toolchains())


def recorded(matrix, name):
    (path,) = (matrix.store / "runs").glob(f"{name}-*/record.json")
    return json.loads(path.read_text())


def test_only_what_is_certain_to_fail_is_stopped(ran):
    matrix, result = ran
    assert result.returncode == 1, result.stdout + result.stderr
    tests = matrix.tests()
    verdicts = {name: test["verdict"] for name, test in tests.items()}
    assert verdicts == {"doubled": "FAIL", "right": "PASS"}
    assert recorded(matrix, "doubled")["status"] == "stopped"
    cause = tests["doubled"]["cause"]
    assert cause.startswith(DOUBLED)
    ending = r"; the run then was stopped: its FAIL was certain \(.+\), after step (\d+) of 32$"
    (after,) = re.findall(ending, cause)
    assert 2 <= int(after) < 32


def test_a_stopped_run_is_used_again_while_it_is_certain_to_fail(ran):
    matrix, first = ran
    again = matrix.converge("run")
    assert again.returncode == first.returncode
    assert "started on" not in again.stdout
    assert matrix.tests()["doubled"]["verdict"] == "FAIL"


def test_who_wants_every_step_gets_them(ran):
    matrix, _ = ran
    stopped = matrix.tests()["doubled"]
    matrix.experiment.write_text(MATRIX.replace("inject =", "stop = false\ninject ="))
    again = matrix.converge("run")
    assert [line for line in again.stdout.splitlines() if "started on" in line] == [
        "doubled: started on 2 ranks"
    ]
    assert recorded(matrix, "doubled")["status"] == "finished"
    whole = matrix.tests()["doubled"]
    assert whole["cause"].startswith(DOUBLED)
    assert "stopped" not in whole["cause"]
    assert whole["cause_class"] == stopped["cause_class"]
