"""What must hold for a job to run as named on the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Iterator

from harness.model import FaultKind, Kind, RestartOwner
from harness.rules.rule import Case, Finding, necessity

OF_THE_HARNESS = (FaultKind.PREEMPT, FaultKind.AGENT_LOSS, FaultKind.JOIN)
"""Faults that the harness makes beside the ranks, on the machine where it runs."""
HERE = 'run it here, with launcher = "local"'


@necessity
def nodes_filled(case: Case) -> Iterator[Finding]:
    """A job's ranks fill whole nodes of a cluster, or fit on one."""
    if case.experiment.cluster is None:
        return
    ranks, per_node = case.job.world_size, case.experiment.cluster.ranks_per_node
    if ranks > per_node and ranks % per_node:
        yield Finding(
            "parallelism",
            f"{ranks} ranks do not fill nodes of {per_node}",
            f"cluster.ranks_per_node is {per_node}: up to {per_node} ranks, or a multiple",
        )


@necessity
def faults_on_a_cluster(case: Case) -> Iterator[Finding]:
    """On a cluster the ranks make all faults of a script, and torchrun restarts them."""
    recovery = case.job.spec.recovery
    if case.experiment.cluster is None or case.job.spec.kind is not Kind.FAULT or recovery is None:
        return
    if recovery.restarts is RestartOwner.HARNESS:
        yield Finding(
            "restarts",
            "no harness stands beside the ranks of a cluster to restart them",
            f'restarts = "torchrun", or {HERE}',
        )
    for index, fault in enumerate(recovery.faults):
        if fault.kind in OF_THE_HARNESS:
            yield Finding(
                f"faults[{index}].kind",
                f"{fault.kind.value} is made by the harness beside the ranks, which a cluster has "
                "not",
                HERE,
            )
    if recovery.nodes[1] > 1:
        yield Finding(
            "nodes", "a scheduler decides on the nodes: they do not change during a job", HERE
        )
