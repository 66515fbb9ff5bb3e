"""Scripts of pods: golden files, and what bash makes of them in a pod."""

import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from batch_jobs import HOSTILE, SEGMENTS, job, program, requeued_program

from converge_harness.launch.kubernetes.objects import job_set, object_text
from converge_harness.launch.kubernetes.pod_script import pod_script
from converge_harness.launch.scheduler.backend import ScriptRequest
from converge_harness.model import Cluster, Kind, Kubernetes, Role
from converge_harness.rank.start import loopback
from converge_harness.run_folder.layout import NEWEST_CHECKPOINT
from converge_harness.trainers.command import trained_by
from converge_harness.trainers.command.settings import RankLauncher

GOLDEN = Path(__file__).parent / "golden"
FOLDER = Path("/store/runs/run-0123456789ab")
PLAIN = Kubernetes(image="registry.example/torch:2.15", claim="shared", mount=Path("/store"))
EVERYTHING = Cluster(
    ranks_per_node=8,
    time="1-12:00:00",
    cpus_per_rank=12,
    memory_per_node="900G",
    prologue=("ulimit -l unlimited  # for RDMA",),
    environment={"NCCL_SOCKET_IFNAME": "eth0"},
    hardware="H100",
    kubernetes=replace(
        PLAIN,
        namespace="lab",
        queue="training",
        pod={
            "nodeSelector": {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        },
    ),
)
ON_CPUS = Cluster(ranks_per_node=8, device="cpu", kubernetes=PLAIN)
CASES = {
    "one_rank": (job("seed", ranks=1, role=Role.SEED), ON_CPUS),
    "one_pod": (job("fsdp8", ranks=8, note="ZeRO-3 of one node."), replace(ON_CPUS, device="cuda")),
    "four_pods": (job("fsdp32", ranks=32), EVERYTHING),
    "calls": (
        job("shrink and grow", ranks=16, steps=30, kind=Kind.ELASTIC, segments=SEGMENTS),
        replace(ON_CPUS, device="cuda"),
    ),
    "program_by_deepspeed": (program(RankLauncher.DEEPSPEED, ranks=8), ON_CPUS),
    "program_of_curves": (program(RankLauncher.TORCHRUN, probed=False), ON_CPUS),
    "hostile": (
        job("x\ntouch pwned", ranks=16, note=HOSTILE),
        replace(ON_CPUS, environment={"TEXT": HOSTILE}),
    ),
}


def script(name, folder=FOLDER):
    made, cluster = CASES[name]
    experiment = HOSTILE if name == "hostile" else "experiments/llama3_8b.toml"
    text = pod_script(ScriptRequest(made, folder, cluster, experiment=experiment))
    return text.replace(str(Path(loopback.__file__).parent), "/converge")


@pytest.mark.parametrize("name", CASES)
def test_script_and_object_are_the_golden_ones(name):
    made, cluster = CASES[name]
    assert script(name) == (GOLDEN / f"{name}.sh").read_text()
    experiment = HOSTILE if name == "hostile" else "experiments/llama3_8b.toml"
    made = job_set(ScriptRequest(made, FOLDER, cluster, experiment=experiment))
    assert object_text(made) == (GOLDEN / f"{name}.json").read_text()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="there is no shellcheck")
def test_shellcheck_finds_nothing():
    done = subprocess.run(
        # SC2016: what is quoted stays; SC1083: in a program's own arguments
        ["shellcheck", "--exclude=SC2016", *(str(GOLDEN / f"{name}.sh") for name in CASES)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ""


@pytest.mark.parametrize("name", ["one_pod", "four_pods"])
def test_a_pod_runs_the_step_of_a_node_of_slurm(name):
    slurm = Path(__file__).parents[1] / "slurm" / "golden"
    of_node = (slurm / f"{name.replace('pod', 'node')}.sh").read_text()
    for of in (of_node, script(name)):
        assert of.count(" -m converge_harness.rank.start.node ") == 1

    def step(text):
        return text[text.index("/tools/bin/python") :].partition(" &\n")[0].strip()

    assert step(of_node) == step(script(name))


# ------------------------------------------------ what bash makes of a script

PYTHON = """#!/bin/bash
printf '%s\\0' "$@" > "told.argv.$SLURM_NODEID"
/usr/bin/env -0 > "told.environment.$SLURM_NODEID"
[ -z "${SLEEP:-}" ] || sleep "$SLEEP"
exit "${CODE:-0}"
"""


def of_job(name, folder, tools=None):
    """A case's script, with a Python that only notes its arguments; run in the run folder."""
    python = (tools or folder) / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    text = script(name, folder).replace("/tools/bin/python", str(python))
    return f"ulimit() {{ :; }}\n{text}"


def pod(folder, text, *arguments, index=0, **variables):
    """What the script does in a pod of that index."""
    done = subprocess.run(
        ["bash", "-c", text, "job.sh", *arguments],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "JOB_COMPLETION_INDEX": str(index), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    told = folder / f"told.environment.{index}"
    lines = told.read_text().split("\0") if told.exists() else []
    return done, dict(each.split("=", 1) for each in lines if each)


def ended(folder):
    path = folder / "ended.json"
    return json.loads(path.read_text())["returncode"] if path.exists() else None


def others_are_ready(folder, call, *pods):
    for index in pods:
        place = folder / "started" / f"call-{call:02d}.pod-{index}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "ready").touch()


def test_each_pod_is_told_its_place_and_one_meeting_place(tmp_path):
    others_are_ready(tmp_path, 1, 1, 2)
    text = of_job("four_pods", tmp_path)
    text = text.replace("\n            getent", "\n            echo >> looked; true || getent")
    for index, other in ((0, 3), (3, 0)):
        others_are_ready(tmp_path, 1, other)
        shutil.rmtree(tmp_path / "started" / f"call-01.pod-{index}", ignore_errors=True)
        (tmp_path / "ended.json").unlink(missing_ok=True)
        done, told = pod(tmp_path, text, index=index)
        assert done.returncode == 0, done.stderr
        assert (told["SLURM_NODEID"], told["SLURM_STEP_NUM_NODES"]) == (str(index), "4")
        here = f"cv-fsdp32-0123456789ab-call-1-0-{index}.cv-fsdp32-0123456789ab"
        assert told["SLURMD_NODENAME"] == here
        argv = (tmp_path / f"told.argv.{index}").read_text()
        first = "cv-fsdp32-0123456789ab-call-1-0-0.cv-fsdp32-0123456789ab:29500"
        assert f"--rdzv-endpoint={first}" in argv
    assert len((tmp_path / "looked").read_text()) == 8  # each pod for the addresses of all four


def test_nothing_that_a_user_wrote_is_run_or_changed_by_bash(tmp_path):
    folder = tmp_path / "it's $HOME `touch pwned` #1"
    folder.mkdir()
    others_are_ready(folder, 1, 1)
    done, told = pod(folder, of_job("hostile", folder, tmp_path), CONVERGE_HEAD_NODE="127.0.0.1")
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("pwned"))
    assert told["TEXT"] == HOSTILE


@pytest.mark.parametrize("code", [0, 3])
def test_the_first_pod_says_how_the_job_ended(tmp_path, code):
    text = of_job("four_pods", tmp_path)
    meeting = {"CONVERGE_HEAD_NODE": "127.0.0.1", "CODE": str(code)}
    others_are_ready(tmp_path, 1, 0, 2, 3)
    done, _ = pod(tmp_path, text, index=1, **meeting)
    assert (done.returncode, ended(tmp_path)) == (code, None)
    shutil.rmtree(tmp_path / "started" / "call-01.pod-0")
    done, _ = pod(tmp_path, text, **meeting)
    assert (done.returncode, ended(tmp_path)) == (code, code)


def test_only_the_last_call_or_one_that_fails_ends_a_job(tmp_path):
    text = of_job("calls", tmp_path)
    meeting = {"CONVERGE_HEAD_NODE": "127.0.0.1"}
    for number in (1, 3):
        others_are_ready(tmp_path, number, 1)
    for call, after in (("1", None), ("2", None), ("3", 0)):
        done, _ = pod(tmp_path, text, call, **meeting)
        assert (done.returncode, ended(tmp_path)) == (0, after), done.stderr
        assert f"--segment\0{int(call) - 1}" in (tmp_path / "told.argv.0").read_text()
    (tmp_path / "ended.json").unlink()
    shutil.rmtree(tmp_path / "started" / "call-01.pod-0")
    done, _ = pod(tmp_path, text, "1", CODE="1", **meeting)
    assert (done.returncode, ended(tmp_path)) == (1, 1)
    done, _ = pod(tmp_path, text, **meeting)
    assert "which of 3 calls" in done.stderr


@pytest.mark.parametrize("left", ["logs/call-01", "started/call-01.pod-0", "ended.json"])
def test_a_pod_that_started_before_does_not_mix_its_evidence(tmp_path, left):
    text = of_job("one_pod", tmp_path)
    (tmp_path / left).mkdir(parents=True)
    done, told = pod(tmp_path, text)
    assert (done.returncode, told) == (1, {})
    assert not (tmp_path / "ended.json").is_file()
    assert "has files of an earlier start of pod 0 in call 1; let converge submit" in done.stderr


def test_pods_wait_until_all_are_ready(tmp_path):
    text = of_job("four_pods", tmp_path).replace("sleep 2", "echo >> waited; sleep 0.02")
    others_are_ready(tmp_path, 1, 1, 2)
    started = subprocess.Popen(
        ["bash", "-c", text],
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "JOB_COMPLETION_INDEX": "0",
            "CONVERGE_HEAD_NODE": "127.0.0.1",
        },
    )
    wait_for(tmp_path / "waited")
    assert (tmp_path / "started/call-01.pod-0/ready").exists()
    assert not (tmp_path / "told.argv.0").exists()
    others_are_ready(tmp_path, 1, 3)
    assert started.wait(timeout=30) == 0
    assert (tmp_path / "told.argv.0").exists()


def wait_for(path):
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_job_that_continues_has_logs_of_its_own(tmp_path):
    (tmp_path / "logs" / "call-01").mkdir(parents=True)
    made, cluster = CASES["one_pod"]
    text = pod_script(ScriptRequest(made, tmp_path, cluster, experiment="x", continues_after=1))
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    done, _ = pod(tmp_path, text.replace("/tools/bin/python", str(tmp_path / "python")))
    assert (done.returncode, ended(tmp_path)) == (0, 0), done.stderr
    assert "--call\0002" in (tmp_path / "told.argv.0").read_text()


FINDS = f"""#!/bin/bash
case " $* " in
    *" -m converge_harness.rank.start.newest "*) echo "{NEWEST_CHECKPOINT}/x y/4.pt" ;;
esac
printf '%s\\n' "$@" >> told
"""


def test_a_program_that_continues_is_told_its_newest_checkpoint(tmp_path):
    made = requeued_program(ranks=8)
    command = replace(made.spec.trainer.settings, folder=tmp_path)
    made = replace(made, spec=replace(made.spec, trainer=trained_by(command)))
    text = pod_script(ScriptRequest(made, tmp_path, ON_CPUS, experiment="x", continues_after=1))
    (tmp_path / "python").write_text(FINDS)
    (tmp_path / "python").chmod(0o755)
    done, _ = pod(tmp_path, text.replace("'/env s/bin/python'", str(tmp_path / "python")))
    assert done.returncode == 0, done.stderr
    assert "--from=/x y/4.pt\n" in (tmp_path / "told").read_text()


def test_a_script_that_kubernetes_did_not_start_says_so(tmp_path):
    text = of_job("one_pod", tmp_path)
    done = subprocess.run(
        ["bash", "-c", text],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "JOB_COMPLETION_INDEX: is set by Kubernetes in the pods of an Indexed Job" in done.stderr


@pytest.mark.parametrize("of_next_run", [False, True])
def test_a_pod_that_is_deleted_ends_its_ranks_and_says_so(tmp_path, of_next_run):
    text = of_job("one_pod", tmp_path).replace('sleep "$SLEEP"', "exec sleep 60")
    started = subprocess.Popen(
        ["bash", "-c", text],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "JOB_COMPLETION_INDEX": "0", "SLEEP": "60"},
    )
    wait_for(tmp_path / "told.environment.0")
    if of_next_run:  # the job was submitted again while this pod still ended
        (tmp_path / "started/call-01.pod-0/token").write_text("of another pod\n")
    started.send_signal(signal.SIGTERM)  # to the script alone, as Kubernetes does
    assert started.wait(timeout=30) == 143
    assert ended(tmp_path) == (None if of_next_run else 143)
