"""Degrees, kinds of test sets, and the parts of a run in several passes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Parallelism degrees. ``ep`` uses ranks of data parallelism, cp and tp, so it adds none."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def dp(self) -> int:
        """Data-parallel degree: how many ranks read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    def on_nodes(self, nodes: int, most: int) -> Parallelism:
        """What is left of degrees on ``most`` nodes when only ``nodes`` are there.

        A node takes its part of dp_shard with it; where nothing is sharded, its replicas.
        """
        if self.dp_shard > 1:
            return replace(self, dp_shard=self.dp_shard * nodes // most)
        return replace(self, dp_replicate=self.dp_replicate * nodes // most)

    def __str__(self) -> str:
        """Label such as ``FSDP 2 x TP 2``, ``HSDP 2x2``, ``DDP 2``."""
        parts = []
        if self.dp_replicate > 1 and self.dp_shard > 1:
            parts.append(f"HSDP {self.dp_replicate}x{self.dp_shard}")
        elif self.dp_replicate > 1:
            parts.append(f"DDP {self.dp_replicate}")
        elif self.dp_shard > 1:
            parts.append(f"FSDP {self.dp_shard}")
        parts += [
            f"{label} {degree}"
            for label, degree in (
                ("TP", self.tp),
                ("CP", self.cp),
                ("PP", self.pp),
                ("EP", self.ep),
            )
            if degree > 1
        ]
        return " x ".join(parts) or "one rank"


def ranks(world_size: int) -> str:
    """``one rank``, ``4 ranks``: as ``Parallelism`` prints itself."""
    return "one rank" if world_size == 1 else f"{world_size} ranks"


class Kind(StrEnum):
    """What a test set tests."""

    PARALLEL = "parallel"
    """One uninterrupted run with other degrees or techniques."""
    SPACE_TIME = "space_time"
    """The same, generated: data-parallel degree against gradient accumulation, and DDP, HSDP and
    FSDP's ways of sharding.
    """
    ELASTIC = "elastic"
    """A schedule of segments with their own degrees, joined by resharded checkpoints."""
    FAULT = "fault"
    """A run that a script of faults interrupts, and that has to recover."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of an elastic run: from the step after the previous segment to ``until``."""

    until: int
    """Its last step; a checkpoint is written then."""
    parallelism: Parallelism
    local_batch_size: int
    """Gradient accumulation keeps the global batch the same."""
    pipeline_schedule: str | None = None


class FaultKind(StrEnum):
    KILL = "kill"
    """SIGKILL of one rank, in the middle of the step."""
    HANG = "hang"
    """One rank stops answering, in the middle of the step."""
    NAN_BATCH = "nan_batch"
    """The loss of one rank becomes NaN, in this step and this pass only."""
    CKPT_TORN = "ckpt_torn"
    """The checkpoint of the step is torn: the job dies before it is complete, or a shard is cut."""
    DISK_FULL = "disk_full"
    """No space is left (ENOSPC; in programs of one's own EFBIG) for what one rank writes of the
    checkpoint of the step."""
    PREEMPT = "preempt"
    """SIGTERM to the whole job after the step, as on a spot instance."""
    AGENT_LOSS = "agent_loss"
    """One node (torchrun's agent and its workers) is killed after the step."""
    JOIN = "join"
    """A node joins the elastic job after the step."""


class Torn(StrEnum):
    """How a checkpoint is torn."""

    DEATH = "death"
    """Every rank dies after the shards and before the metadata; of a program of one's own, every
    rank that writes, in the middle of a file."""
    TRUNCATED = "truncated"
    """The checkpoint looks complete, but one shard is cut, and the job dies after it."""


GRACE_S = 30.0
"""Seconds from SIGTERM to SIGKILL: the default of torchrun, Slurm and Kubernetes."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of a script of faults. It happens once, however often its step is replayed."""

    kind: FaultKind
    step: int
    rank: int = 0
    """For ``kill hang nan_batch disk_full`` and a truncated shard."""
    node: int = 1
    """For ``agent_loss``: 0 is the node with the rendezvous store."""
    torn: Torn = Torn.DEATH
    grace_s: float = GRACE_S
    """For ``preempt``: seconds from SIGTERM to SIGKILL."""
    saves: bool = False
    """For ``preempt``: the program saves a later step before it stops, or the run is INVALID."""


class RestartOwner(StrEnum):
    TORCHRUN = "torchrun"
    """torchrun restarts its workers in place (``--max-restarts``)."""
    HARNESS = "harness"
    """converge starts torchrun again."""
    CLUSTER = "cluster"
    """The scheduler requeues the job after real faults, which are not in a script."""
    USER = "user"
    """Whoever interrupted the run, or stopped it, starts ``converge run`` again."""

    @property
    def follows_script(self) -> bool:
        """Whether a script of faults interrupts the run, and not what nobody planned."""
        return self in (RestartOwner.TORCHRUN, RestartOwner.HARNESS)


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a ``fault`` set is interrupted, and how it should recover.

    Any other set has one without faults if an interrupted run continues from its newest checkpoint
    (then ``restarts`` is ``CLUSTER`` or ``USER``).
    """

    faults: tuple[Fault, ...]
    """In the order of their steps."""
    checkpoint_every: int
    restarts: RestartOwner = RestartOwner.HARNESS
    max_restarts: int = 3
    within_s: float = 120.0
    """Longest time from a fault to the first step that ends after it."""
    nodes: tuple[int, int] = (1, 1)
    """Least and largest number of nodes; the set's degrees are for the largest
    (``Parallelism.on_nodes``).
    """

    def facts(self) -> dict[str, Any]:
        """As plain values by field name, for ``job.json`` and identities.

        A fault's ``grace_s`` and ``saves`` are absent if they are the default, so runs made before
        these keys existed keep their identities.
        """
        facts = asdict(self)
        for fault in facts["faults"]:
            if fault["grace_s"] == GRACE_S:
                del fault["grace_s"]
            if not fault["saves"]:
                del fault["saves"]
        return facts

    @property
    def first_nodes(self) -> int:
        """Nodes at the start: the largest number, unless one joins before any is lost."""
        kinds = (fault.kind for fault in self.faults)
        first = next((k for k in kinds if k in (FaultKind.JOIN, FaultKind.AGENT_LOSS)), None)
        return self.nodes[0] if first is FaultKind.JOIN else self.nodes[1]
