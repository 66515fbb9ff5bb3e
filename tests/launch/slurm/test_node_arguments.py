"""What the agents of a job's nodes are told apart by, and what one life of a job from the next."""

from pathlib import Path

import pytest

from converge_harness.rank.start.node import node_arguments
from converge_harness.run_folder.layout import call_logs

LOGS = Path("/run/logs/call-02")
ALONE = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}


def told(option, **slurm):
    given = [word.partition("=") for word in node_arguments({**ALONE, **slurm}, LOGS, 2)]
    return {name: value for name, _, value in given}.get(option)


def test_each_start_of_a_job_has_its_own_rendezvous_and_logs():
    first, second = (node_arguments(ALONE, call_logs(LOGS, call, 0), call) for call in (1, 2))
    assert not set(first) & set(second)
    assert told("--rdzv-id") == "7.2"


def test_each_node_has_logs_of_its_own():
    assert call_logs(Path("logs"), 1, 0) == Path("logs/call-01")
    assert call_logs(Path("logs"), 12, 3) == Path("logs/call-12.node-3")


@pytest.mark.parametrize(("node", "is_host"), [("0", "is_host=1"), ("1", "is_host=0")])
def test_the_first_node_of_several_has_the_store(node, is_host):
    assert told("--rdzv-conf", SLURM_STEP_NUM_NODES="2", SLURM_NODEID=node).startswith(is_host)
    assert told("--rdzv-conf") is None


def test_ranks_meet_under_slurms_name_of_a_node_where_it_means_something():
    several = {"SLURM_STEP_NUM_NODES": "2"}
    assert told("--local-addr", SLURMD_NODENAME="localhost", **several) == "localhost"
    assert told("--local-addr", SLURMD_NODENAME="nowhere.invalid", **several) is None
    assert told("--local-addr", SLURMD_NODENAME="localhost") is None
