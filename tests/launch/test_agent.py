"""torchrun's agent of one node among several: when it enters the rendezvous, and how quickly."""

import json
import os
import subprocess
import time

import pytest
from launch_jobs import ROOT

pytestmark = pytest.mark.timeout(300)

NAMED = """
import inspect
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from converge_harness.rank.start import agent

class Handler:
    def _record(self):
        return dynamic_rendezvous.get_method_name()

    def join(self):
        return self._record()

names = [Handler().join()]
agent._quicken_rendezvous()
inspect.stack = None
print([*names, Handler().join()])
"""

STARTED_AGAIN = """
import os, signal, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist

rank, again = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
if again and rank == int(sys.argv[1]):
    time.sleep(2)
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
sum_of_ones = torch.ones(1)
dist.all_reduce(sum_of_ones)
if rank == 1 and not again:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(sum_of_ones)
# Else gloo's threads may abort an interpreter that ends (converge_harness.probe.leaving).
dist.destroy_process_group()
"""

ENDED_WHILE_WRITING = """
import os, signal, sys, time

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    written = sys.argv[1] + "/written"
    if os.environ["RANK"] == "0":
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as stream:
            stream.write(sys.argv[2])
        os.mkdir(written)
        time.sleep(60)
    while not os.path.exists(written):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_agents_that_start_together_wait_for_each_other(toolchain, tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    agent = subprocess.Popen(
        [toolchain.python, "-m", "converge_harness.rank.start.agent", "--help"],
        env={**os.environ, "CONVERGE_TOGETHER": json.dumps([str(own), str(other)])},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    while not own.exists():
        assert agent.poll() is None
        time.sleep(0.01)
    assert agent.poll() is None
    other.touch()
    output, _ = agent.communicate(timeout=60)
    assert "--rdzv-endpoint" in output
    assert agent.returncode == 0


def test_rendezvous_actions_keep_their_names_without_looking_through_all_modules(toolchain):
    named = subprocess.run(
        [toolchain.python, "-c", NAMED], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert named.stdout.strip() == "['join', 'join']"


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_ranks_that_are_started_again_find_each_other_whoever_comes_first(
    toolchain, tmp_path, late
):
    agent = run_restarted(toolchain, tmp_path, STARTED_AGAIN, str(late))
    assert agent.returncode == 0, agent.stderr


@pytest.mark.slow
@pytest.mark.parametrize("written", ["", '{"message": {"mess'])
def test_ranks_are_started_again_though_one_was_ended_while_it_wrote_its_error(
    toolchain, tmp_path, written
):
    agent = run_restarted(toolchain, tmp_path, ENDED_WHILE_WRITING, str(tmp_path), written)
    assert agent.returncode == 0, agent.stderr


def run_restarted(toolchain, folder, program, *arguments):
    """What is left of torchrun's agent with two ranks of a program, which may restart once."""
    (folder / "program.py").write_text(program)
    return subprocess.run(
        [
            *(toolchain.python, "-m", "converge_harness.rank.start.agent", "--nproc-per-node=2"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={folder}/rendezvous"),
            *("--rdzv-conf=store_type=file", "--local-addr=127.0.0.1", "--max-restarts=1"),
            *("program.py", *arguments),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": "lo"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
