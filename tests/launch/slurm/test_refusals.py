"""Slurm's refusals are told with the keys of ``[cluster]`` that may be behind them."""

import pytest

from converge_harness.launch.slurm.commands import with_keys
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
