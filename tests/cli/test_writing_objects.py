"""``converge submit --launcher kubernetes`` and what follows, with pods that bash stands for.

There is no Kubernetes: what it would run in a pod is run here, with the variable that it would set.
Jobs take no time and train nothing (``tiny_node.py``), so no verdict is a PASS.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from light_toolchain import light_environment

from converge_harness.cli import main

pytest.importorskip("kubeflow_trainer_api")

EXPERIMENT = """
schema = 1
name = "tiny"
repeats = ["ulp"]
[cluster]
ranks_per_node = 2
device = "cpu"
hardware = "tiny"
[cluster.kubernetes]
image = "registry.example/torch:2.15"
claim = "shared"
mount = "MOUNT"
namespace = "lab"
[trainer]
train_config = "t.toml"
[control]
name = "fsdp2"
parallelism.dp_shard = 2
[[test]]
name = "ddp2"
parallelism.dp_replicate = 2
[[test]]
name = "crashes"
parallelism.dp_replicate = 2
set = { "tiny.mode" = "crash", "tiny.at" = 2 }
"""
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


@pytest.fixture
def converge(tmp_path, monkeypatch, capsys):
    """Runs a command on the experiment, each as from a new shell; its exit code and words."""
    light_environment(tmp_path / "toolchains")
    monkeypatch.setenv("CONVERGE_TOOLCHAINS", str(tmp_path / "toolchains"))
    monkeypatch.setenv("CONVERGE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.delenv("CONVERGE_CLUSTER", raising=False)
    (tmp_path / "t.toml").write_text(TRAIN_CONFIG)
    (tmp_path / "e.toml").write_text(EXPERIMENT.replace("MOUNT", str(tmp_path)))
    monkeypatch.chdir(tmp_path)

    def run(command, *options, launcher="kubernetes"):
        code = main([command, "e.toml", *options, "--launcher", launcher])
        said = capsys.readouterr()
        return code, " ".join((said.out + said.err).split())

    return run


def objects(folder="kubernetes/tiny"):
    """Every object by the name of its job, in the order of the folders that have to be created."""
    paths = sorted(Path(folder).glob("*/*.json"))
    made = {path: json.loads(path.read_text()) for path in paths}
    return {each["metadata"]["annotations"]["converge/job"]: each for each in made.values()}


def create(made):
    """Do what the only pod of an object does; no name may be created twice, nor one be deleted."""
    known = Path("created")
    names = known.read_text().split() if known.exists() else []
    assert made["metadata"]["name"] not in names, "AlreadyExists"
    known.write_text(" ".join((*names, made["metadata"]["name"])))
    pod = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    return subprocess.run(
        container["command"],
        cwd=container["workingDir"],
        env={"PATH": os.environ["PATH"], "JOB_COMPLETION_INDEX": "0"},
        capture_output=True,
        check=False,
        timeout=60,
    ).returncode


def delete(said):
    """Do what the first printed command does, if it deletes."""
    words = said.partition("next: kubectl delete jobset ")[2].partition(" && ")[0].split()
    assert words[:3] == ["--namespace=lab", "--cascade=foreground", "--ignore-not-found"]
    known = Path("created")
    names = known.read_text().split() if known.exists() else []
    known.write_text(" ".join(set(names) - set(words)))
    return words[3:]


def test_a_plan_from_objects_to_judgement(converge):
    code, said = converge("status")
    assert (code, "5 not submitted" in said) == (0, True)
    code, said = converge("submit")
    assert code == 0
    assert "crashes: written as JobSet cv-crashes-" in said
    assert "jobs: 5 written next: kubectl create -f kubernetes/tiny/1-seed-checkpoints; " in said
    assert "kubectl wait --for=condition=Completed --timeout=24h -f kubernetes/tiny/1-seed" in said
    assert "&& kubectl create -f kubernetes/tiny/2-runs then: converge collect e.toml" in said
    first = list(Path("kubernetes/tiny/1-seed-checkpoints").iterdir())
    made = objects()
    assert (len(first), len(made)) == (1, 5)
    assert {each["metadata"]["namespace"] for each in made.values()} == {"lab"}

    code, said = converge("submit")
    assert (code, "jobs: 0 written, 5 written before, and not over" in said) == (0, True)
    code, said = converge("collect")
    assert code == 3
    assert "5 jobs have not ended" in said
    assert "pending as job cv-" in said

    ends = {name: create(each) for name, each in made.items()}
    crashed = ends.pop("crashes")
    assert (crashed, set(ends.values())) == (1, {0})
    code, said = converge("status")
    assert "4 finished, 1 crashed next: converge collect" in said
    code, said = converge("collect", "--out", "out")
    assert code == 3
    report = json.loads(Path("out/report.json").read_text())
    assert any(note.startswith("Run by kubernetes") for note in report["notes"])
    record = json.loads(next(Path("store/runs").glob("ddp2-*/record.json")).read_text())
    assert record["status"] == "finished"
    assert record["argv"][:3] == ["kubectl", "create", "-f"]

    code, said = converge("submit")  # finished ones must not start again, failed ones have to
    assert "jobs: 1 written, 4 already finished" in said
    assert list(objects()) == ["crashes"]
    assert delete(said) == [objects()["crashes"]["metadata"]["name"]]
    assert create(objects()["crashes"]) == 1
    code, said = converge("submit", "--fresh")
    assert set(delete(said)) == {each["metadata"]["name"] for each in objects().values()}
    assert len(objects()) == 5


def test_jobs_whose_pods_say_nothing_are_over_by_a_persons_word(converge):
    converge("submit", "--objects", "o b")
    made = objects("o b")
    code, said = converge("cancel", "--only", "ddp2")
    name = made["ddp2"]["metadata"]["name"]
    command = "kubectl delete jobset --namespace=lab --cascade=foreground --ignore-not-found"
    assert code == 3
    assert f"next: {command} {name} then: converge cancel e.toml --only ddp2" in said
    code, said = converge("cancel", "--only", "ddp2", "--deleted")
    assert (code, "ddp2: cancelled" in said) == (0, True)
    assert create(made["ddp2"]) != 0  # nobody has deleted it, after all
    code, said = converge("cancel", "--only", "ddp2")
    assert "none of its jobs is in the queue" in said
    code, said = converge("submit", "--objects", "o b")
    assert "runs again: ddp2 (cancelled before)" in said
    assert "kubectl create -f 'o b/1-seed-checkpoints'" in said


def test_an_interrupted_submission_is_repeated(converge):
    converge("submit")
    (path,) = Path("store/runs").glob("ddp2-*/submission.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"job_id": None}))
    for options in ([], ["--deleted"]):
        code, said = converge("cancel", "--only", "ddp2", *options)
        assert code == 3
        assert "ddp2: its submission was interrupted; to repeat it: converge submit e.toml" in said
    code, said = converge("submit")
    assert "jobs: 1 written, 4 written before, and not over" in said
    assert delete(said) == [objects()["ddp2"]["metadata"]["name"]]


@pytest.mark.parametrize("command", ["run", "calibrate"])
def test_nothing_waits_for_objects(converge, command):
    code, said = converge(command)
    assert code == 2
    assert "converge only writes objects" in said
    assert "`converge submit e.toml`" in said
    assert not Path("store/runs").exists()


def test_options_of_kubernetes_are_not_of_slurm(converge):
    code, said = converge("submit", "--objects", "o", launcher="slurm")
    assert (code, "--objects o: has no effect: Slurm gets batch scripts" in said) == (2, True)
    code, said = converge("cancel", "--deleted", launcher="slurm")
    assert (code, "--deleted: has no effect" in said) == (2, True)


def test_objects_that_kubernetes_would_not_take_are_never_written(converge):
    text = Path("e.toml").read_text().replace('namespace = "lab"', "pod.nodeSelectr = { a = 'b' }")
    Path("e.toml").write_text(text)
    code, said = converge("submit")
    assert code == 2
    assert "nodeSelectr: Kubernetes has no such field" in said
    assert not Path("kubernetes").exists()
    assert not Path("store/runs").exists()


def test_the_client_that_checks_objects_has_to_be_installed(converge, monkeypatch):
    module = "kubeflow_trainer_api.models.jobset_v1alpha2_job_set"
    monkeypatch.setitem(sys.modules, module, None)  # as Python notes a failed import
    code, said = converge("submit")
    assert code == 2
    assert "pip install 'converge-harness[kubernetes]'" in said


def test_a_plan_shows_the_script(converge):
    code, said = converge("plan")
    assert (code, "are written by `converge submit`" in said) == (0, True)
    code, said = converge("plan", "--script", "ddp2")
    assert (code, "JOB_COMPLETION_INDEX" in said) == (0, True)
