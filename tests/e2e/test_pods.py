"""Objects of Kubernetes: what their pods would run is run here, and judged.

By real torchtitan, and by programs of one's own with the probe.

There is no Kubernetes. A test does what JobSet's controller does with an object (pods of a call at
the same time, calls one after another, none after a failure), with containers as processes.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from held_program import HELD, TRAINERS
from real_matrices import INJECTIONS, ROOT
from two_layers import with_two_layers
from warm_converge import warm_python
from warm_toolchains import warm_toolchains, warm_torch

pytest.importorskip("kubeflow_trainer_api")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CLUSTER = """
schema = 1
launcher = "kubernetes"
repeats = []
[cluster]
ranks_per_node = 2
device = "cpu"
hardware = "this machine"
time = "10"
# Every pod is this machine; elsewhere the service's names lead to them.
environment = { GLOO_SOCKET_IFNAME = "lo", CONVERGE_HEAD_NODE = "127.0.0.1" }
"""
CLAIM = """
[cluster.kubernetes]
image = "none"
claim = "shared"
mount = "/"
"""
TITAN = f"""
{CLUSTER}
{CLAIM}
[trainer]
train_config = "train_configs/llama3_debug.toml"
[trainer.set]
"training.steps" = 4
[control]
name = "fsdp2"
parallelism.dp_shard = 2
waive = ["control-is-repeated"]
[[test]]
name = "two_pods"
parallelism = {{ dp_shard = 2, tp = 2 }}
[[test]]
name = "doubled"
parallelism.dp_shard = 2
inject = "{INJECTIONS}:double_gradients"
[[test]]
name = "grown"
kind = "elastic"
segments = [{{ until = 2, dp_shard = 2 }}, {{ until = 4, dp_shard = 2, tp = 2 }}]
"""
PROGRAM = f"""
{CLUSTER}
{CLAIM}
[trainer]
kind = "command"
command = [
    "{TRAINERS}/probed_trainer.py", "--steps", "{{steps}}", "--seed", "{{seed}}",
    "--batch", "{{local_batch_size}}", "--bug", "{{config.bug}}",
]
launcher = "torchrun"
toolchain = "torchtitan-0.3.0"
[trainer.config]
bug = "none"
training = {{ steps = 4, local_batch_size = 2, global_batch_size = 4, seq_len = 16 }}
[control]
name = "ddp2"
parallelism = {{ dp_replicate = 2 }}
waive = ["control-is-repeated"]
[[test]]
name = "two_pods"
parallelism = {{ dp_replicate = 4 }}
set = {{ training.local_batch_size = 1 }}
[[test]]
name = "no averaging"
parallelism = {{ dp_replicate = 2 }}
set = {{ bug = "no averaging" }}
[[test]]
name = "no averaging in two pods"
parallelism = {{ dp_replicate = 4 }}
set = {{ training.local_batch_size = 1, bug = "no averaging" }}
"""
STOPPED = f"""
{CLUSTER}
checkpoint_every = 4
{CLAIM}
{HELD}[[test]]
name = "two_pods"
parallelism = {{ dp_replicate = 4 }}
set = {{ hold = "6", training.local_batch_size = 2 }}
[[test]]
name = "forgetful"
parallelism = {{ dp_replicate = 2 }}
set = {{ hold = "6", mistake = "optimizer_not_saved" }}
"""


def started(call: dict) -> list[subprocess.Popen[bytes]]:
    """The pods of a JobSet's call, as processes."""
    job = call["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    return [
        subprocess.Popen(
            container["command"],
            cwd=container["workingDir"],
            env={"PATH": os.environ["PATH"], "JOB_COMPLETION_INDEX": str(index)},
        )
        for index in range(job["parallelism"])
    ]


def run_object(made: dict) -> bool:
    """Whether all calls of a JobSet succeed."""
    for call in made["spec"]["replicatedJobs"]:
        codes = [pod.wait(timeout=600) for pod in started(call)]
        if any(codes):
            return False
    return True


class Pods(NamedTuple):
    """An experiment, and where its objects and runs are."""

    folder: Path
    toolchains: Path

    def converge(self, command: str, *more: str) -> tuple[int, str]:
        """Exit code, and all that was printed."""
        done = subprocess.run(
            [
                *(warm_python(), "-m", "converge_harness", command),
                *(str(self.folder / "matrix.toml"), "--store", str(self.folder / "store"), *more),
            ],
            cwd=ROOT,
            env={
                **os.environ,
                "CONVERGE_TOOLCHAINS": str(self.toolchains),
                "XDG_CONFIG_HOME": str(self.folder),  # no cluster file of a person
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    def submit(self) -> list[dict]:
        """Let converge write objects; all of those that are to be created now."""
        code, printed = self.converge("submit", "--objects", str(self.folder / "objects"))
        assert code == 0, printed
        found = sorted((self.folder / "objects").glob("*/*.json"))
        return [json.loads(path.read_text()) for path in found]

    def collect(self) -> tuple[int, str]:
        return self.converge("collect", "--out", str(self.folder / "out"))

    def tests(self) -> dict[str, dict]:
        """Of the report, by name."""
        report = json.loads((self.folder / "out" / "report.json").read_text())
        return {test["name"]: test for test in report["tests"]}

    def run_folder(self, name: str) -> Path:
        (found,) = (self.folder / "store" / "runs").glob(f"{name}-*")
        return found


def ran_in_pods(folder: Path, text: str, toolchains: Path) -> tuple[int, str, Pods]:
    """Exit code and words of ``converge collect`` once all pods have ended."""
    (folder / "matrix.toml").write_text(text)
    pods = Pods(folder, toolchains)
    results = {made["metadata"]["name"]: run_object(made) for made in pods.submit()}
    assert all(results.values()), results
    return *pods.collect(), pods


@pytest.fixture(scope="module")
def of_torchtitan(tmp_path_factory):
    folder = with_two_layers(tmp_path_factory.mktemp("pods é"))
    return ran_in_pods(folder, TITAN, warm_toolchains())


def test_what_ran_in_pods_is_judged(of_torchtitan):
    code, printed, pods = of_torchtitan
    assert code == 1, printed
    tests = pods.tests()
    verdicts = {name: test["verdict"] for name, test in tests.items()}
    assert verdicts == {"two_pods": "PASS", "doubled": "FAIL", "grown": "PASS"}
    assert "gradients are scaled by 2" in tests["doubled"]["cause"]


def has_a_rank_in_each_of_two_pods(run: Path) -> bool:
    logs = sorted(path.name for path in (run / "logs").iterdir())
    return logs == ["call-01", "call-01.node-1"]


def test_each_pod_had_a_rank_of_its_own(of_torchtitan):
    _, _, pods = of_torchtitan
    run = pods.run_folder("two_pods")
    assert has_a_rank_in_each_of_two_pods(run)
    record = json.loads((run / "record.json").read_text())
    assert record["status"] == "finished"
    assert record["wall_s"] > 0


def test_a_program_of_ones_own_is_judged_in_one_pod_and_in_two(tmp_path):
    code, printed, pods = ran_in_pods(tmp_path, PROGRAM, warm_torch())
    assert code == 1, printed
    tests = pods.tests()
    assert tests.pop("two_pods")["verdict"] == "PASS", printed
    assert has_a_rank_in_each_of_two_pods(pods.run_folder("two_pods"))
    assert set(tests) == {"no averaging", "no averaging in two pods"}
    for name, test in tests.items():
        assert test["verdict"] == "FAIL", name
        assert "a reduction of these gradients over dp_replicate is missing" in test["cause"]


def wait_or_end(running: list[subprocess.Popen[bytes]], path: Path) -> None:
    """Until a file exists; if it never does, no pod stays behind."""
    deadline = time.monotonic() + 300
    while not path.exists():
        if time.monotonic() > deadline:
            for pod in running:
                pod.send_signal(signal.SIGTERM)
            pytest.fail(f"there is no {path}")
        time.sleep(0.2)


def test_a_program_whose_pods_were_ended_goes_on_from_its_own_checkpoint(tmp_path):
    (tmp_path / "matrix.toml").write_text(STOPPED)
    pods = Pods(tmp_path, warm_torch())
    for made in pods.submit():
        (call,) = made["spec"]["replicatedJobs"]
        running = started(call)
        name = made["metadata"]["annotations"]["converge/job"]
        if name != "ddp2":
            wait_or_end(running, pods.run_folder(name) / "holding")
            for pod in running:  # as kubelet does when a JobSet is deleted
                pod.send_signal(signal.SIGTERM)
        codes = [pod.wait(timeout=300) for pod in running]
        assert codes == [0 if name == "ddp2" else 143] * len(running), name
    again = pods.submit()
    assert len(again) == 3  # not the control's, which has finished
    assert all(map(run_object, again))
    code, printed = pods.collect()
    assert code == 1, printed
    tests = pods.tests()
    for name, test in tests.items():
        passes = [(each["steps"], each["loaded_step"], each["ended"]) for each in test["passes"]]
        assert passes == [([1, 5], 0, "interrupted"), ([5, 8], 4, "ended")], name
    asked = ("passes-continuous", "state-restored", "data-resumed", "replays-agree")
    for name in ("right", "two_pods"):
        assert tests[name]["verdict"] == "PASS", tests[name]["cause"]
        found = {check["name"]: check["outcome"] for check in tests[name]["checks"]}
        assert {each: found[each] for each in asked} == dict.fromkeys(asked, "PASS")
    assert tests["forgetful"]["verdict"] == "FAIL"
    lost = "optimizer state (exp_avg, exp_avg_sq) and the learning rate lost"
    assert lost in tests["forgetful"]["cause"]
