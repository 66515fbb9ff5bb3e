"""Slurm's words for refusals and ends: the keys behind them, and what they mean for a job."""

import pytest

from converge_harness.launch.scheduler.backend import JobEnd, NeverStarts, Phase
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


def in_the_queue(word, reason=""):
    """What a line of squeue on a job says."""
    values = ("7", word, "6", "0", "0:00", reason, "", "cv-x")
    widths = [int(each.rpartition(":")[2]) for each in SQUEUE_FORMAT.split(",")]
    line = "".join(value.ljust(width) for value, width in zip(values, widths, strict=True))
    return read_squeue(line)["7"]


@pytest.mark.parametrize(
    ("reason", "never"),
    [
        ("JobHoldMaxRequeue", NeverStarts.REQUEUES),
        ("launch failed requeued held", NeverStarts.LAUNCH),  # Slurm 22.05
        ("launch_failed_requeued_held", NeverStarts.LAUNCH),  # later ones
        ("DependencyNeverSatisfied", NeverStarts.NEEDED),
        ("QOSMinGRES", NeverStarts.REQUEST),
        ("JobHeldUser", None),
        ("BeginTime", None),
    ],
)
def test_a_job_that_slurm_will_never_start_is_told_from_one_that_waits(reason, never):
    state = in_the_queue("PENDING", reason)
    assert (state.phase, state.restarts, state.never) == (Phase.PENDING, 6, never)


@pytest.mark.parametrize(
    ("word", "reason", "end"),
    [
        ("COMPLETED", "None", JobEnd.BY_CODE),
        ("FAILED", "NonZeroExitCode", JobEnd.FAILED),
        ("LAUNCH_FAILED", "", JobEnd.FAILED),
        ("DEADLINE", "", JobEnd.TIME_IS_UP),
        ("PREEMPTED", "", JobEnd.TAKEN_AWAY),
        ("CANCELLED", "", JobEnd.CANCELLED),
        ("CANCELLED", "DependencyNeverSatisfied", JobEnd.NEEDED),
    ],
)
def test_slurms_word_says_how_a_job_ended(word, reason, end):
    state = in_the_queue(word, reason)
    assert (state.phase, state.end, state.never) == (Phase.ENDED, end, None)


@pytest.mark.parametrize(
    ("word", "paused"), [("RUNNING", False), ("SUSPENDED", True), ("COMPLETING", True)]
)
def test_a_job_whose_ranks_are_stopped_need_make_no_steps(word, paused):
    state = in_the_queue(word)
    assert (state.phase, state.paused) == (Phase.RUNNING, paused)
