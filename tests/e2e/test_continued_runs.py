"""A set that was stopped trains its further steps from a checkpoint, and is judged as a whole."""

import json

import pytest
from real_matrices import run
from warm_toolchains import warm_toolchains

MATRIX = """
schema = 1
repeats = ["ulp"]
checkpoint_every = 30
[stop]
when = "settled"
waiting_ranks = 0   # a run that waits has a checkpoint of its look, so it trains no step again
[trainer]
train_config = "train_configs/llama3_debug.toml"
[trainer.set]
"training.steps" = 256  # looks after 64 and 128: time to be judged in, however busy the machine is
"training.seq_len" = 32
[control]
name = "one"
parallelism = {}
set = { "training.local_batch_size" = 8 }
[[test]]
name = "right"
parallelism.dp_replicate = 2
waive = ["same-dp-degree"]
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    return run(tmp_path_factory.mktemp("continuing"), MATRIX, warm_toolchains())


def test_its_later_steps_are_trained_from_its_newest_checkpoint(stopped):
    matrix, first = stopped
    assert first.returncode == 0, first.stdout + first.stderr
    (path,) = (matrix.store / "runs").glob("right-*/record.json")
    assert json.loads(path.read_text())["status"] == "stopped"
    checks = {check["name"]: check for check in matrix.tests()["right"]["checks"]}
    assert checks["loss-equivalent"]["outcome"] == "PASS"
    assert checks["passes-continuous"]["outcome"] == "PASS"
    assert "nothing interrupted the run" in checks["faults-struck"]["detail"]

    matrix.experiment.write_text(MATRIX.replace('when = "settled"', 'when = "never"'))
    all_steps = matrix.converge("run")
    assert all_steps.returncode == 0, all_steps.stdout + all_steps.stderr
    assert "right: continues: from its checkpoint of step " in " ".join(all_steps.stdout.split())
    right = matrix.tests()["right"]
    first_pass, second_pass = right["passes"]
    assert first_pass["steps"][0] == 1
    assert second_pass["steps"] == [second_pass["loaded_step"] + 1, 256]
    assert second_pass["loaded_step"] >= 60  # the look that settled it came after step 64
    checks = {check["name"]: check for check in right["checks"]}
    for name in ("passes-continuous", "state-restored", "data-resumed", "replays-agree"):
        assert checks[name]["outcome"] == "PASS", checks[name]
