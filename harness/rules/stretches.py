"""The stretches of a job: parts of it in which its degrees stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from harness.model import Job


class Stretch(NamedTuple):
    """A part of a job, as a job."""

    name: str
    """As messages name it: ``segments[1]``, ``on 1 of 2 nodes``; empty: the job itself."""
    job: Job


def stretches(job: Job) -> Iterator[Stretch]:
    """The segments of an elastic job; a fault job on every number of nodes that it may have.

    Any other job is its only stretch.
    """
    segments, recovery = job.spec.segments, job.spec.recovery
    if segments:
        for index, segment in enumerate(segments):
            yield Stretch(f"segments[{index}]", job.in_segment(segment))
        return
    yield Stretch("", job)
    if recovery is not None:
        fewest, most = recovery.nodes
        for nodes in range(most - 1, fewest - 1, -1):
            yield Stretch(f"on {nodes} of {most} nodes", _on(job, nodes, most))


def _on(job: Job, nodes: int, most: int) -> Job:
    """The job with fewer nodes: each that is gone has taken its part of dp_shard with it."""
    degrees = job.spec.parallelism
    left = replace(degrees, dp_shard=degrees.dp_shard * nodes // most)
    return replace(job, spec=replace(job.spec, parallelism=left))
