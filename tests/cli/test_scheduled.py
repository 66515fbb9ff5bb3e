"""``converge submit``, ``status``, ``collect``, ``cancel``, and ``run`` on a real Slurm.

Jobs take no time and train nothing (``tiny_node.py``), so no verdict is a PASS.
"""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from light_toolchain import light_environment

from converge_harness.cli import main
from converge_harness.cli.scheduled import mend

pytestmark = pytest.mark.timeout(300)
TRAIN_CONFIG = """
[training]
steps = 3
local_batch_size = 4
global_batch_size = 8
seq_len = 256
mixed_precision_param = "float32"
[converge.data]
tokens = 20_000
"""
EXPERIMENT = """
schema = 1
name = "tiny"
repeats = ["ulp"]
[cluster]
ranks_per_node = 2
device = "cpu"
gpus_per_node = false
poll_s = 0.2
sbatch = ["--overcommit"]
[trainer]
train_config = "t.toml"
[trainer.set]
"tiny.seconds" = 0.5   # longer than between two looks at the queue
[control]
name = "fsdp2"
parallelism.dp_shard = 2
[[test]]
name = "ddp2"
parallelism.dp_replicate = 2
[[test]]
name = "slow"
parallelism.dp_replicate = 2
set = { "tiny.mode" = "hang", "tiny.at" = 2 }
"""


@pytest.fixture
def converge(tmp_path, monkeypatch, capsys):
    """Runs a command on the experiment, each as from a new shell; its exit code and words."""
    light_environment(tmp_path / "toolchains")
    monkeypatch.setenv("CONVERGE_TOOLCHAINS", str(tmp_path / "toolchains"))
    monkeypatch.setenv("CONVERGE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.delenv("CONVERGE_CLUSTER", raising=False)
    (tmp_path / "t.toml").write_text(TRAIN_CONFIG)
    (tmp_path / "e.toml").write_text(EXPERIMENT)
    monkeypatch.chdir(tmp_path)

    def run(command, *options):
        code = main([command, "e.toml", *options])
        said = capsys.readouterr()
        return code, " ".join((said.out + said.err).split())

    return run


@pytest.fixture
def queued(converge, slurm, monkeypatch):
    """The same, where there is a Slurm."""
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    monkeypatch.setenv("PATH", slurm.environment["PATH"])
    yield lambda command, *options: converge(command, *options, "--launcher", "slurm")
    slurm.ask("scancel", "--user=root", "--quiet")
    slurm.wait_until_idle()


def until(queued, *words):
    """Ask for the status until it has these words."""
    deadline = time.monotonic() + 60
    while True:
        code, said = queued("status")
        assert code == 0
        if all(word in said for word in words):
            return said
        assert time.monotonic() < deadline, said
        time.sleep(0.2)


def test_a_plan_from_submission_to_judgement(queued, slurm):
    code, said = queued("status")
    assert (code, "5 not submitted" in said) == (0, True)
    code, said = queued("submit")
    assert code == 0
    assert "slow: submitted as job" in said
    assert "jobs: 5 submitted next: converge status e.toml --launcher slurm" in said
    said = until(queued, "1 running", "4 finished")
    assert "slow" in said
    assert "1/3" in said
    assert "finished, not collected" in said

    code, said = queued("collect")
    assert code == 3
    assert "1 job has not ended: slow: running as job" in said
    assert "report:" not in said
    assert not list(Path("reports").glob("*/report.json"))
    code, said = queued("collect", "--partial")
    assert code == 3
    assert "not ended: running as job" in Path("reports/tiny/report.json").read_text()

    code, said = queued("cancel", "--only", "slow")
    assert code == 0
    assert "slow: cancelled" in said
    assert "after step 1 of 3 1 job cancelled" in said
    assert not slurm.ask("squeue", "--noheader")
    code, said = queued("collect", "--out", "out")
    assert code == 3
    assert json.loads(Path("out/matrix.json").read_text())["launcher"] == "slurm"
    told = json.loads(Path("out/report.json").read_text())
    assert any(note.startswith("Run by slurm") for note in told["notes"])
    assert told["wall_s"] is None  # of collecting alone, it would say nothing
    assert main(["report", "out"]) == 3

    code, said = queued("submit")
    assert code == 0
    assert "runs again: slow (cancelled before)" in said
    assert "jobs: 1 submitted, 4 already finished" in said


def test_a_job_that_means_something_else_by_now_is_named(queued):
    assert queued("submit")[0] == 0
    until(queued, "1 running", "4 finished")
    Path("t.toml").write_text(TRAIN_CONFIG.replace("steps = 3", "steps = 4"))
    _, said = queued("status")
    assert "5 not submitted" in said
    assert said.count("of this name belongs to another") == 5
    assert "any more: scancel" in said


def test_run_is_attached_and_says_where_jobs_are(queued):
    code, said = queued("run", "--only", "ddp2")
    assert code == 3
    assert "ddp2: submitted as job" in said
    assert "ddp2: started on 2 ranks of node" in said
    assert "ddp2: finished in" in said
    code, said = queued("run", "--only", "ddp2")
    assert "submitted" not in said
    assert "ddp2: reused" in said


def test_a_job_that_slurm_never_takes(queued):
    Path("e.toml").write_text(EXPERIMENT.replace("[trainer]", 'constraint = "none"\n[trainer]'))
    code, said = queued("submit", "--only", "ddp2")
    assert code == 3
    assert "seed: refused: Batch job submission failed: Invalid feature specification" in said
    assert "Invalid feature specification ([cluster] constraint)" in said
    assert "ddp2: skipped: not started: seed, whose weights it needs, was refused: Batch" in said
    assert "jobs: 0 submitted, 4 refused or skipped" in said
    mend = "next: fix [cluster] of e.toml, or your own cluster file, then: converge submit e.toml"
    assert mend in said
    code, said = queued("status", "--only", "ddp2")
    assert (code, "1 refused, 3 skipped" in said) == (0, True)
    assert mend in said
    code, said = queued("collect", "--only", "ddp2")
    assert code == 3
    assert "report: " in said
    report = Path("reports/tiny/only/ddp2/report.json").read_text()
    assert "was skipped before its first step: not started: seed, whose weights" in report
    assert "Invalid feature specification ([cluster] constraint)" in report


def test_cancel_suggests_a_set_that_is_there(queued):
    code, said = queued("cancel", "--only", "slo")
    assert (code, "'slow'" in said) == (2, True)
    assert "1 problem, nothing was cancelled: e.toml: no job or set 'slo'" in said
    code, said = queued("cancel", "--only", "nosuch")
    assert code == 2
    assert "no job or set 'nosuch' (valid: seed, fsdp2, fsdp2.ulp, ddp2, slow)" in said
    code, said = queued("cancel")
    assert (code, "none of its jobs is in the queue" in said) == (0, True)


def test_what_was_cancelled_is_to_be_submitted_again(queued):
    assert queued("submit", "--only", "slow")[0] == 0
    until(queued, "1 running", "finished")
    assert queued("cancel", "--only", "seed", "fsdp2", "fsdp2.ulp", "slow")[0] == 0
    _, said = queued("status", "--only", "slow")
    assert "1 cancelled" in said
    assert "next, to run the rest: converge submit e.toml --only slow --launcher slurm" in said
    assert "or to judge what has finished: converge collect e.toml --only slow" in said


def test_a_configuration_of_slurm_that_is_not_there_is_said_at_once(queued, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", "/no/slurm.conf")
    code, said = queued("submit")
    assert code == 2
    assert "SLURM_CONF is /no/slurm.conf, but there is no such file" in said


@pytest.mark.parametrize("command", ["submit", "status", "collect", "cancel"])
def test_a_launcher_without_a_queue_is_refused(converge, command):
    code, said = converge(command)
    assert code == 2
    assert f"launcher: is local, and `converge {command}`" in said
    assert "--launcher slurm" in said
    assert "converge run e.toml" in said


BY_MPIRUN = """
schema = 1
repeats = []
[trainer]
kind = "command"
launcher = "mpirun"
toolchain = "torchtitan-0.3.0"
command = ["{python}", "train.py", "--steps", "{steps}", "--batch", "{local_batch_size}"]
probe = false
curves = "{output}/loss.csv"
[trainer.config]
training = { steps = 3, local_batch_size = 4, global_batch_size = 8 }
[control]
name = "two"
parallelism = { dp_replicate = 2 }
waive = ["control-is-repeated"]
[[test]]
name = "four"
parallelism = { dp_replicate = 4 }
set = { training.local_batch_size = 2 }
"""


def test_a_program_by_mpirun_is_not_for_a_queue(converge):
    Path("e.toml").write_text(BY_MPIRUN)
    Path("train.py").touch()
    code, said = converge("submit")
    assert code == 2
    assert "launcher: has to be 'slurm' for `converge submit`, where srun starts the ranks" in said
    assert "not mpirun (trainer.launcher = 'srun'; on this machine: converge run e.toml)" in said


def test_what_to_do_after_a_refusal_is_what_can_help():
    plan = SimpleNamespace(experiment=SimpleNamespace(path="e.toml"))
    held = "was requeued 6 times, more often than the cluster allows (JobHoldMaxRequeue): find out"
    assert "find out why Slurm requeues the job" in mend(plan, [held])
    unlaunched = "requeued it and holds it (launch failed requeued held): find out"
    assert "find out why the node cannot launch the job" in mend(plan, iter([unlaunched]))
    assert "fix [cluster] of e.toml" in mend(plan, ["Invalid qos specification"])
    assert "fix [cluster] of e.toml" in mend(plan, ["Invalid qos specification", held])


@pytest.mark.parametrize("command", ["run", "submit"])
def test_slurm_without_a_cluster_is_refused(converge, command):
    Path("e.toml").write_text(EXPERIMENT.replace("[cluster]", "[probe]\n[ignored]"))
    text = EXPERIMENT[: EXPERIMENT.index("[cluster]")] + EXPERIMENT[EXPERIMENT.index("[trainer]") :]
    Path("e.toml").write_text(text)
    code, said = converge(command, "--launcher", "slurm")
    assert code == 2
    assert "[cluster]" in said
    assert "ranks_per_node" in said


@pytest.mark.parametrize("command", ["run", "submit", "status", "collect", "cancel"])
def test_a_machine_without_slurm_is_refused(converge, monkeypatch, tmp_path, command):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, said = converge(command, "--launcher", "slurm")
    assert code == 2
    assert "sbatch is not on the PATH" in said
    assert not Path("store/runs").exists()
