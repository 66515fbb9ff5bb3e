"""The scheduler of each cluster: the one place that knows all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from converge_harness.launch.kubernetes.written import WrittenObjects
from converge_harness.launch.scheduler.backend import Backend
from converge_harness.launch.slurm.commands import Slurm
from converge_harness.model import Cluster
from converge_harness.store import Store


def backend_of(
    cluster: Cluster,
    store: Store,
    *,
    objects: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Backend:
    """The scheduler that a cluster has; it is not asked anything yet.

    ``objects`` is the folder into which objects of Kubernetes are written; None where nothing is
    submitted. ``say`` is called if Slurm is slow to answer.
    """
    if cluster.kubernetes is not None:
        return WrittenObjects(store, objects)
    return Slurm(say=say)
