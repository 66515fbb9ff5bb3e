"""A set whose verdict is known is stopped, with the verdict that it would have had.

So are the control and its repeats, which nothing reads any more.
"""

import json
import re

import pytest
from real_matrices import INJECTIONS, run
from warm_toolchains import warm_toolchains

MATRIX = f"""
schema = 1
repeats = ["ulp"]
[stop]
when = "settled"
after = 2
[trainer]
train_config = "train_configs/llama3_debug.toml"
cpu_ranks = 4   # the set that is wrong trains beside its control, and is stopped before it ends
[trainer.set]
"training.steps" = 128
"training.seq_len" = 32
[control]
name = "one"
parallelism = {{}}
set = {{ "training.local_batch_size" = 8 }}
[[test]]
name = "doubled"
parallelism = {{}}
set = {{ "training.local_batch_size" = 8 }}
inject = "{INJECTIONS}:double_gradients"
[[test]]
name = "right"
parallelism.dp_replicate = 2
waive = ["same-dp-degree"]
"""

DOUBLED = "gradients are scaled by 2, which equals"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return run(tmp_path_factory.mktemp("stopping"), MATRIX, warm_toolchains())


def recorded(matrix, name):
    (path,) = (matrix.store / "runs").glob(f"{name}-*/record.json")
    return json.loads(path.read_text())


def test_what_is_certain_to_fail_and_what_is_settled_are_stopped(ran):
    matrix, result = ran
    assert result.returncode == 1, result.stdout + result.stderr
    tests = matrix.tests()
    verdicts = {name: test["verdict"] for name, test in tests.items()}
    assert verdicts == {"doubled": "FAIL", "right": "PASS"}
    assert recorded(matrix, "doubled")["status"] == "stopped"
    cause = tests["doubled"]["cause"]
    assert cause.startswith(DOUBLED)
    ending = r"the run then was stopped: its FAIL was certain \(.+\); it ended after step (\d+) of"
    (after,) = re.findall(ending, cause)
    assert 2 <= int(after) < 128


def test_a_settled_set_passes_every_check_at_its_look(ran):
    matrix, result = ran
    assert recorded(matrix, "right")["status"] == "stopped"
    message = recorded(matrix, "right")["error"]["message"]
    assert message.startswith("it was settled at the look after step 64 (loss-equivalent); it")
    (after,) = re.findall(r"ended after step (\d+) of 128$", message)
    assert 64 <= int(after) < 128
    note = "right was stopped after step 64 of 128: by then it was settled that its loss is"
    assert note in " ".join(result.stdout.split())
    checks = {check["name"]: check for check in matrix.tests()["right"]["checks"]}
    assert checks["complete"]["detail"] == "64 of 128 steps: then it was settled"
    assert checks["loss-equivalent"]["outcome"] == "PASS"
    assert "(one of several looks: at a level of 0.0056)" in checks["loss-equivalent"]["detail"]


def test_what_both_are_judged_by_waits_for_them_and_ends_with_them(ran):
    matrix, result = ran
    for name in ("one", "one.ulp"):
        record = recorded(matrix, name)
        assert record["status"] == "stopped"
        assert record["error"]["message"] == (
            "every set that is judged by it was stopped after step 64 at the latest; "
            "it ended after step 64 of 128"
        )
    note = "Of the control one and its repeats (1) the first 64 of 128 steps are used: every set"
    assert note in " ".join(result.stdout.split())
    assert not [*(matrix.store / "calibrations").glob("*")]  # none that is of fewer steps
    checks = {check["name"]: check for check in matrix.tests()["right"]["checks"]}
    assert checks["control-sound"]["detail"].startswith("64 steps")


def test_stopped_runs_are_used_again_while_their_verdicts_are_known(ran):
    matrix, first = ran
    again = matrix.converge("run")
    assert again.returncode == first.returncode
    assert "started on" not in again.stdout
    verdicts = {name: test["verdict"] for name, test in matrix.tests().items()}
    assert verdicts == {"doubled": "FAIL", "right": "PASS"}


def test_who_wants_every_step_gets_them(ran):
    matrix, _ = ran
    stopped = matrix.tests()["doubled"]
    matrix.experiment.write_text(MATRIX.replace("inject =", 'stop = "never"\ninject ='))
    again = matrix.converge("run")
    started = [line for line in again.stdout.splitlines() if "started on" in line]
    assert sorted(line.partition(":")[0] for line in started) == ["doubled", "one", "one.ulp"]
    # What they are judged by trains on where it waited, from the checkpoint that it wrote before,
    # and the set that is settled stays so.
    goes_on = again.stdout.count("from its checkpoint of step 64")
    assert goes_on == 2, again.stdout
    for name in ("doubled", "one", "one.ulp"):
        assert recorded(matrix, name)["status"] == "finished"
    assert recorded(matrix, "right")["status"] == "stopped"
    assert matrix.tests()["right"]["verdict"] == "PASS"
    whole = matrix.tests()["doubled"]
    assert whole["cause"].startswith(DOUBLED)
    assert "stopped" not in whole["cause"]
    assert whole["cause_class"] == stopped["cause_class"]
