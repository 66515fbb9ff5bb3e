"""Matrices of real torchtitan on a real Slurm of four nodes, through the real command line.

Ranks are forks of one server on this machine, because importing torchtitan on each node takes most
of the time of a cold start.
"""

import json
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from real_matrices import INJECTIONS, ROOT, TOOLCHAINS
from slurm_daemons import SlurmDaemons, slurm_daemons
from two_layers import with_two_layers
from warm_converge import warm_python
from warm_toolchains import warm_toolchains

pytestmark = pytest.mark.slow

HEAD = """
schema = 1
name = "four nodes"
launcher = "slurm"
repeats = []
[cluster]
ranks_per_node = 1
device = "cpu"
time = "MINUTES"
poll_s = 0.5
# Every node is this machine; elsewhere the first one's name leads to it.
environment = { GLOO_SOCKET_IFNAME = "lo", CONVERGE_HEAD_NODE = "127.0.0.1" }
[trainer]
train_config = "train_configs/llama3_debug.toml"
[trainer.set]
"training.steps" = 4
[control]
name = "fsdp2"
parallelism.dp_shard = 2
waive = ["control-is-repeated"]
"""
MATRIX = f"""
{HEAD.replace("MINUTES", "10")}
[[test]]
name = "fsdp2_tp2"
parallelism = {{ dp_shard = 2, tp = 2 }}
[[test]]
name = "doubled"
parallelism.dp_shard = 2
inject = "{INJECTIONS}:double_gradients"
[[test]]
name = "crashing"
parallelism.dp_shard = 2
inject = "{INJECTIONS}:crash_at_step_2"
[[test]]
name = "eight_nodes"
parallelism = {{ dp_shard = 2, tp = 2, pp = 2 }}
pipeline_schedule = "1F1B"
"""
LATE = f"""
{HEAD.replace("MINUTES", "1")}
[[test]]
name = "asleep"
parallelism.dp_shard = 2
inject = "{INJECTIONS}:sleep_at_step_2"
"""
VERDICTS = {"fsdp2_tp2": "PASS", "doubled": "FAIL", "crashing": "ERROR", "eight_nodes": "ERROR"}
OF_THE_MACHINE = {"seconds", "memory_bytes"}
"""What a step says, and is no part of the training."""


class Site(NamedTuple):
    """A matrix, and the cluster that it is for."""

    cluster: SlurmDaemons
    experiment: Path
    store: Path
    out: Path
    toolchains: Path

    def start(self, command: str, *more: str) -> subprocess.Popen[str]:
        out = ("--out", str(self.out)) if command in ("run", "collect") else ()
        where = (str(self.experiment), "--store", str(self.store), *out)
        return subprocess.Popen(
            [warm_python(), "-m", "converge_harness", command, *where, *more],
            cwd=ROOT,
            env={
                **self.cluster.environment,
                "CONVERGE_TOOLCHAINS": str(self.toolchains),
                "XDG_CONFIG_HOME": str(self.experiment.parent),  # no cluster file of a person
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def converge(self, command: str, *more: str) -> tuple[int, str]:
        """Exit code, and all that was printed."""
        return ended(self.start(command, *more))

    def tests(self) -> dict[str, dict]:
        report = json.loads((self.out / "report.json").read_text())
        return {test["name"]: test for test in report["tests"]}

    def verdicts(self) -> dict[str, str]:
        return {name: test["verdict"] for name, test in self.tests().items()}

    def run_folder(self, name: str, launcher: str = "slurm") -> Path:
        folders = [each for each in (self.store / "runs").iterdir() if "-" in each.name]
        (folder,) = (
            each
            for each in folders
            if each.name.rpartition("-")[0] == name
            and (each / "job.sh").exists() == (launcher == "slurm")
        )
        return folder

    def jobs(self, *options: str) -> list[str]:
        """Ids and names of jobs that Slurm has, by default of those that are over as well.

        In the order of the ids: by itself squeue lists them by their states, which change.
        """
        options = options or ("--states=all",)
        asked = ("--noheader", "--sort=i", "--format=%i %j")
        return self.cluster.ask("squeue", *asked, *options).splitlines()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        printed, _ = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        process.kill()
        printed, _ = process.communicate()
    return process.returncode, printed


@pytest.fixture(scope="module")
def cluster(slurm_installed):
    with slurm_daemons(nodes=4) as running:
        yield running


@pytest.fixture(scope="module")
def attached(cluster, tmp_path_factory):
    """The matrix, run while converge waits."""
    folder = with_two_layers(tmp_path_factory.mktemp("attached é"))
    (folder / "matrix.toml").write_text(MATRIX)
    places = (folder / "matrix.toml", folder / "store", folder / "report")
    site = Site(cluster, *places, warm_toolchains())
    return site, *site.converge("run")


@pytest.fixture(scope="module")
def late(attached):
    """A run into its time limit, of a minute, beside what else is tested."""
    site, code, printed = attached
    assert code == 1, printed
    experiment = site.experiment.with_name("late.toml")
    experiment.write_text(LATE)
    site = site._replace(experiment=experiment, out=site.out.with_name("late"))
    process = site.start("run")
    # From here on, only what the tests submit changes the list of jobs.
    while not any("asleep" in job for job in site.jobs()):
        assert process.poll() is None, ended(process)
        time.sleep(0.1)
    yield site, process
    if process.poll() is None:
        process.terminate()
        ended(process)


@pytest.fixture(scope="module")
def detached(attached, late, tmp_path_factory):
    """The matrix again in another store, submitted by a process that ends."""
    folder = tmp_path_factory.mktemp("detached")
    site = attached[0]._replace(store=folder / "store", out=folder / "report")
    return site, *site.converge("submit")


def test_sets_on_several_nodes_are_judged(attached):
    site, code, printed = attached
    assert code == 1, printed
    assert site.verdicts() == VERDICTS
    nodes = json.loads((site.run_folder("fsdp2_tp2") / "record.json").read_text())["host"]
    assert nodes == "node[1-4]"


def test_what_went_wrong_is_reported_in_the_words_of_whoever_knows(attached):
    tests = attached[0].tests()
    assert "gradients are scaled by 2" in tests["doubled"]["cause"]
    assert "the disk of rank 1 is on fire" in tests["crashing"]["cause"]
    assert "Node count specification invalid" in tests["eight_nodes"]["cause"]  # sbatch's


def test_what_is_submitted_can_be_seen_and_is_not_submitted_again(detached):
    site, code, printed = detached
    assert code == 3, printed  # one is refused
    assert "5 submitted, 1 refused" in printed
    jobs = site.jobs()
    code, printed = site.converge("status")
    assert code == 0, printed
    assert "refused" in printed
    # Without the set that crashes: once it has, it is submitted again.
    code, printed = site.converge("submit", "--only", "fsdp2_tp2", "doubled", "eight_nodes")
    assert (code, site.jobs()) == (3, jobs), printed


def test_what_is_collected_is_judged_as_if_converge_had_waited(attached, detached):
    site, _, _ = detached
    deadline = time.monotonic() + 600
    states = ("--states=PENDING,RUNNING,COMPLETING",)
    while any("asleep" not in job for job in site.jobs(*states)):
        assert time.monotonic() < deadline, site.jobs(*states)
        time.sleep(0.2)
    code, printed = site.converge("collect")
    assert code == 1, printed
    assert site.verdicts() == VERDICTS
    before, after = attached[0].tests(), site.tests()
    assert {name: test["cause"] for name, test in before.items()} == {
        name: test["cause"] for name, test in after.items()
    }
    jobs = site.jobs()
    code, printed = site.converge("submit", "--only", "fsdp2_tp2", "doubled")
    assert (code, site.jobs()) == (0, jobs), printed


def test_numbers_on_several_nodes_are_those_of_this_machine(attached):
    cold = {"out": attached[0].out.with_name("local"), "toolchains": TOOLCHAINS}
    site = attached[0]._replace(**cold)
    code, printed = site.converge("run", "--launcher", "local", "--only", "fsdp2_tp2")
    assert code == 0, printed
    for name in ("fsdp2", "fsdp2_tp2"):
        slurm, local = site.run_folder(name), site.run_folder(name, "local")
        assert training(slurm) == training(local)
        samples = sorted(path.name for path in (slurm / "tensors").iterdir())
        assert samples == sorted(path.name for path in (local / "tensors").iterdir())
        for sample in samples:
            assert_same_arrays(slurm / "tensors" / sample, local / "tensors" / sample)


def test_a_time_limit_is_reported_as_one(late):
    site, process = late
    code, printed = ended(process)
    assert code == 3, printed
    test = site.tests()["asleep"]
    assert test["verdict"] == "ERROR"
    assert "time limit of 1" in test["cause"]


def training(run: Path) -> list[dict]:
    """What the steps of a run say of the training, bit for bit."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] in ("step", "replicas")]
    assert len(steps) > 4
    return [{k: v for k, v in line.items() if k not in OF_THE_MACHINE} for line in steps]


def assert_same_arrays(one: Path, other: Path) -> None:
    with np.load(one) as ours, np.load(other) as theirs:
        assert sorted(ours) == sorted(theirs)
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name])
