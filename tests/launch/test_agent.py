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
from harness.rank import agent

class Handler:
    def _record(self):
        return dynamic_rendezvous.get_method_name()

    def join(self):
        return self._record()

told = [Handler().join()]
agent._quicken_rendezvous()
inspect.stack = None
print([*told, Handler().join()])
"""


def test_agents_that_start_together_wait_for_each_other(toolchain, tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    agent = subprocess.Popen(
        [toolchain.python, "-m", "harness.rank.agent", "--help"],
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
    told = subprocess.run(
        [toolchain.python, "-c", NAMED], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == "['join', 'join']"
