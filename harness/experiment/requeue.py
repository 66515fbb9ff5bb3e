"""How a set goes on when a scheduler has interrupted and requeued its job."""

from __future__ import annotations

from harness.errors import Problem
from harness.experiment.cluster import PlacedCluster
from harness.model import Recovery, RestartOwner, SetSpec


def requeued(placed: PlacedCluster, spec: SetSpec, problems: list[Problem]) -> Recovery | None:
    """Its checkpoints, if the cluster asks for them; None: a requeued job starts over.

    Args:
        placed: the cluster, and where its keys are written.
        spec: the set, which has no checkpoints of its own.
        problems: where problems are collected.
    """
    every = placed.cluster.checkpoint_every
    if every is None or not placed.cluster.requeue:
        return None
    steps = spec.setting("training.steps")
    if isinstance(steps, int) and every > steps:
        problems.append(
            Problem(
                placed.where("checkpoint_every"),
                f"{every} comes after the last step of {spec.name!r}: training.steps is {steps}",
                f"at most {steps}, or requeue = false; [cluster] of the experiment may say it",
            )
        )
    return Recovery(
        faults=(), checkpoint_every=every, restarts=RestartOwner.CLUSTER, max_restarts=0
    )
