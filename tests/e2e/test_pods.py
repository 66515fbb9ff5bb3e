"""Objects of Kubernetes with real torchtitan: what their pods would run is run here, and judged.

There is no Kubernetes. A test does what JobSet's controller does with an object (pods of a call at
the same time, calls one after another, none after a failure), with containers as processes.
"""

import json
import os
import subprocess

import pytest
from real_matrices import INJECTIONS, ROOT
from two_layers import with_two_layers
from warm_converge import warm_python
from warm_toolchains import warm_toolchains

pytest.importorskip("kubeflow_trainer_api")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

MATRIX = f"""
schema = 1
name = "pods"
launcher = "kubernetes"
repeats = []
[cluster]
ranks_per_node = 2
device = "cpu"
hardware = "this machine"
time = "10"
# Every pod is this machine; elsewhere the service's names lead to them.
environment = {{ GLOO_SOCKET_IFNAME = "lo", CONVERGE_HEAD_NODE = "127.0.0.1" }}
[cluster.kubernetes]
image = "none"
claim = "shared"
mount = "/"
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


def run_object(made: dict) -> bool:
    """Whether all calls of a JobSet succeed."""
    for call in made["spec"]["replicatedJobs"]:
        job = call["template"]["spec"]
        (container,) = job["template"]["spec"]["containers"]
        pods = [
            subprocess.Popen(
                container["command"],
                cwd=container["workingDir"],
                env={"PATH": os.environ["PATH"], "JOB_COMPLETION_INDEX": str(index)},
            )
            for index in range(job["parallelism"])
        ]
        codes = [pod.wait(timeout=600) for pod in pods]
        if any(codes):
            return False
    return True


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """Exit code and words of ``converge collect``, and the folder of the reports."""
    folder = with_two_layers(tmp_path_factory.mktemp("pods é"))
    (folder / "matrix.toml").write_text(MATRIX)
    toolchains = warm_toolchains()

    def converge(command: str, *more: str) -> tuple[int, str]:
        done = subprocess.run(
            [
                *(warm_python(), "-m", "converge_harness", command, str(folder / "matrix.toml")),
                *("--store", str(folder / "store"), *more),
            ],
            cwd=ROOT,
            env={
                **os.environ,
                "CONVERGE_TOOLCHAINS": str(toolchains),
                "XDG_CONFIG_HOME": str(folder),  # no cluster file of a person
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    code, printed = converge("submit", "--objects", str(folder / "objects"))
    assert code == 0, printed
    for path in sorted((folder / "objects").glob("*/*.json")):
        assert run_object(json.loads(path.read_text())), path
    return *converge("collect", "--out", str(folder / "out")), folder


def test_what_ran_in_pods_is_judged(collected):
    code, printed, folder = collected
    assert code == 1, printed
    report = json.loads((folder / "out" / "report.json").read_text())
    verdicts = {test["name"]: test["verdict"] for test in report["tests"]}
    assert verdicts == {"two_pods": "PASS", "doubled": "FAIL", "grown": "PASS"}
    (doubled,) = (test for test in report["tests"] if test["name"] == "doubled")
    assert "gradients are scaled by 2" in doubled["cause"]


def test_each_pod_had_a_rank_of_its_own(collected):
    _, _, folder = collected
    (run,) = (folder / "store" / "runs").glob("two_pods-*")
    logs = sorted(path.name for path in (run / "logs").iterdir())
    assert logs == ["call-01", "call-01.node-1"]
    record = json.loads((run / "record.json").read_text())
    assert record["status"] == "finished"
    assert record["wall_s"] > 0
