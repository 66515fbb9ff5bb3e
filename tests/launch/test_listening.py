"""What other users of the machine, and of its network, can reach of a run: nothing but loopback."""

import os
import socket
import subprocess
import time
from dataclasses import replace

import psutil
import pytest
from launch_jobs import ROOT, plan_of
from listening import sampling
from test_command_jobs import command_job

from converge_harness.launch import run_plan
from converge_harness.model import Recovery, RunStatus
from converge_harness.trainers import Rendezvous
from converge_harness.trainers.command import trained_by
from converge_harness.trainers.command.argv import command_of
from converge_harness.trainers.command.settings import RankLauncher


def run(plan, store, options):
    with sampling(psutil.Process()) as sampled:
        records = run_plan(plan, store, options, lambda _: None)
    assert {record.status for record in records} == {RunStatus.FINISHED}, records
    return sampled


def require_private(sampled):
    """That they listened at all, on loopback, and met in folders that are gone by now."""
    assert sampled.on_loopback(), sampled.addresses
    assert set(sampled.folders.values()) == {0o700}
    assert not any(folder.exists() for folder in sampled.folders)


def test_ranks_and_their_agent_listen_on_loopback(tiny, store, cold):
    require_private(run(plan_of(tiny("cold", seconds=0.2)), store, cold))


def test_agents_of_several_nodes_meet_in_a_private_file(tiny, store, cold):
    job = tiny("nodes", steps=4, seconds=0.2)
    recovery = Recovery(faults=(), checkpoint_every=2, nodes=(2, 2))
    job = replace(job, spec=replace(job.spec, recovery=recovery))
    require_private(run(plan_of(job), store, replace(cold, rank_module="tiny_passes")))


def test_torchrun_of_an_environment_without_this_package_listens_on_loopback(
    toolchain, store, cold, monkeypatch
):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    job = command_job(
        "torchrun",
        mode="slow",
        at=3,
        ranks=2,
        launcher=RankLauncher.TORCHRUN,
        python=toolchain.python,
    )
    require_private(run(plan_of(job), store, cold))


def host_name():
    """The machine's own name, where it has an address."""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return "localhost"
    return socket.gethostname()


HOST = host_name()
ALONE = ("{python}", "tiny_trainer.py")
UNDER_TORCHRUN = (
    *("{python}", "-m", "torch.distributed.run", "--nproc-per-node=2"),
    *("--rdzv-backend=c10d", f"--rdzv-endpoint={HOST}:0", "tiny_trainer.py"),
)


@pytest.mark.parametrize("begin", [ALONE, UNDER_TORCHRUN], ids=["alone", "own torchrun"])
def test_stores_of_programs_that_are_only_called_listen_on_loopback(
    toolchain, store, cold, monkeypatch, begin
):
    """Also those of a torchrun, accelerate … that the program's command starts."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    job = command_job("none", mode="meet", ranks=2, python=toolchain.python)
    argv = (*begin, *command_of(job.spec).argv[2:])
    command = replace(command_of(job.spec), argv=argv)
    job = replace(job, spec=replace(job.spec, trainer=trained_by(command)))
    sampled = run(plan_of(job), store, cold)
    assert sampled.on_loopback(), sampled.addresses


def test_a_warm_start_is_as_private(tiny, store, cold):
    job = tiny("warm", seconds=0.2)
    sampled = run(plan_of(job), store, replace(cold, warm=True))
    require_private(sampled)
    assert len(sampled.folders) == 2  # of the server's socket, and of the matrix


def test_the_agent_of_a_cluster_job_of_one_node_is_as_private(toolchain, tmp_path):
    (tmp_path / "program.py").write_text("import time; time.sleep(1)")
    arguments = Rendezvous().arguments()
    node = subprocess.Popen(
        [
            *(
                toolchain.python,
                "-m",
                "converge_harness.rank.start.node",
                "--logs",
                "logs",
                "--call",
                "1",
                "--",
            ),
            *(*arguments, "--nproc-per-node=1", "--redirects=3", "program.py"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(tmp_path)},
    )
    with sampling(psutil.Process(node.pid)) as sampled:
        modes = set()
        while node.poll() is None:
            modes |= {each.stat().st_mode & 0o777 for each in tmp_path.glob("converge-*")}
            time.sleep(0.05)
    assert node.returncode == 0, (tmp_path / "logs" / "call-01" / "torchrun.log").read_text()
    assert sampled.on_loopback(), sampled.addresses
    assert modes == {0o700}
    assert not list(tmp_path.glob("converge-*"))
