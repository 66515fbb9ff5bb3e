"""Slurm's refusals are told with the keys of ``[cluster]`` that may be behind them."""

import pytest

from converge_harness.launch.scheduler.backend import Phase
from converge_harness.launch.slurm.commands import SQUEUE_FORMAT, read_squeue, with_keys
from converge_harness.model import Cluster

CLUSTER = Cluster(ranks_per_node=8, partition="p", account="a", qos="q", time="1", constraint="c")


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("invalid partition specified: p; Invalid partition name specified", "partition"),
        ("Invalid account or account/partition combination specified", "account, partition"),
        ("Invalid qos specification", "qos"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "time"),
        ("PartitionTimeLimit", "time"),
        ("Invalid generic resource (gres) specification", "gpus_per_node"),
        ("Invalid feature specification", "constraint"),
        ("Job violates accounting/QOS policy (job submit limit, …)", "time, qos, account"),
        (
            "Requested node configuration is not available",
            "ranks_per_node, gpus_per_node, constraint",
        ),
    ],
)
def test_a_refusal_names_the_keys_that_are_set(words, keys):
    assert with_keys(words, CLUSTER) == f"{words} ([cluster] {keys})"


@pytest.mark.parametrize("words", ["Access denied", "Memory specification can not be satisfied"])
def test_words_of_nothing_that_is_set_stay_as_they_are(words):
    assert with_keys(words, CLUSTER) == words


@pytest.mark.parametrize(
    ("reason", "never"),
    [("JobHoldMaxRequeue", True), ("JobHeldUser", False), ("BeginTime", False)],
)
def test_a_job_that_was_requeued_too_often_never_starts_by_itself(reason, never):
    values = ("7", "PENDING", "6", "0", "0:00", reason, "", "cv-x")
    widths = [int(each.rpartition(":")[2]) for each in SQUEUE_FORMAT.split(",")]
    line = "".join(value.ljust(width) for value, width in zip(values, widths, strict=True))
    state = read_squeue(line)["7"]
    assert (state.phase, state.restarts, state.never) == (Phase.PENDING, 6, never)
