"""Kinds of ``[[test]]`` other than ``parallel``, and what can be said in each.

As TOML::

    [[test]]
    kind = "elastic"                # a run resized on its way
    name = "resized"
    segments = [                    # `until` is a segment's last step, that of the last all steps;
      { until = 4, dp_shard = 2 },  # local_batch_size: default that of the set
      { until = 12, dp_shard = 2, pp = 2, local_batch_size = 2, pipeline_schedule = "1F1B" },
    ]

    [[test]]
    kind = "fault"                  # a run that is broken and has to recover
    name = "killed"
    parallelism = { dp_shard = 2 }
    checkpoint_every = 4            # steps
    faults = [{ kind = "kill", step = 6, rank = 1 }]
    restarts = "torchrun"           # in place; or "harness" (the default): another torchrun call
    max_restarts = 3                # the default
    recover_within_s = 120          # the default: from a fault to the first step that ends after it
    nodes = [1, 2]                  # fewest and most; the default is [1, 1]

    [[test]]
    kind = "space_time"             # sets of equal product: see harness/experiment/space_time.py
    name = "st"
    product = 4                     # dp x gradient accumulation
    pp = [1, 2]

Keys that every kind has: ``name kind control techniques set tolerance margin waive toolchain
train_config inject without_fixes note``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from harness.errors import Problem
from harness.experiment.tables import (
    Degree,
    FixedTable,
    KindWord,
    Name,
    ParallelismTable,
    Rotation,
    Schedule,
    Seconds,
    SpmdBackend,
    Table,
    Techniques,
    TestTable,
    one_of,
    validate,
)
from harness.model import Ask, FaultKind, Kind, RestartOwner, Torn

FEWEST_SEGMENTS = 2
FEWEST_AND_MOST = 2
MAX_NODES = 4096
MAX_PRODUCT = 4096
RESTARTS = (RestartOwner.TORCHRUN, RestartOwner.HARNESS)
"""Who may restart a fault set: a cluster answers to faults that no script names."""
T = TypeVar("T")


def _several_segments(segments: list[T]) -> list[T]:
    if len(segments) < FEWEST_SEGMENTS:
        raise PydanticCustomError(
            "segments", "must be two segments or more: it is their borders that are tested"
        )
    return segments


def _some_fault(faults: list[T]) -> list[T]:
    if not faults:
        raise PydanticCustomError("faults", "must name a fault, as [{kind = 'kill', step = 6}]")
    return faults


def _fewest_and_most(nodes: list[int]) -> list[int]:
    if len(nodes) != FEWEST_AND_MOST:
        raise PydanticCustomError("nodes", "must be the fewest and the most nodes, as [1, 2]")
    if nodes[0] > nodes[1]:
        raise PydanticCustomError("nodes", "must have the fewest nodes first")
    return nodes


Step = Annotated[int, Field(ge=1)]
Rank = Annotated[int, Field(ge=0)]
Product = Annotated[int, Field(ge=2, le=MAX_PRODUCT)]


class SegmentTable(ParallelismTable):
    """One segment of an elastic set: its degrees beside its last step."""

    until: Step
    local_batch_size: Step | None = None
    pipeline_schedule: Schedule | None = None


class ElasticTable(FixedTable):
    """``kind = "elastic"``. Degrees and schedule are those of its segments."""

    name: Name
    kind: KindWord = Kind.ELASTIC
    control: Name | None = None
    techniques: Techniques = Field(default=[])
    cp_rotation: Rotation | None = None
    spmd_backend: SpmdBackend | None = None
    segments: Annotated[list[SegmentTable], AfterValidator(_several_segments)]

    @property
    def parallelism(self) -> ParallelismTable:
        return self.segments[0]

    @property
    def pipeline_schedule(self) -> str | None:
        return self.segments[0].pipeline_schedule


class FaultTable(Table):
    """One entry of a script of faults. None: not written."""

    kind: Annotated[str, one_of(FaultKind)]
    step: Step
    rank: Rank | None = None
    node: Rank | None = None
    torn: Annotated[str, one_of(Torn)] | None = None


class FaultSetTable(TestTable):
    """``kind = "fault"``."""

    kind: KindWord = Kind.FAULT
    ask: Annotated[str, one_of((Ask.SAME,))] = Ask.SAME
    own_random_numbers: Literal[False] = False
    checkpoint_every: Step
    faults: Annotated[list[FaultTable], AfterValidator(_some_fault)]
    restarts: Annotated[str, one_of(RESTARTS)] = RestartOwner.HARNESS
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    recover_within_s: Seconds = 120.0
    nodes: Annotated[
        list[Annotated[int, Field(ge=1, le=MAX_NODES)]], AfterValidator(_fewest_and_most)
    ] = Field(default=[1, 1])


class SpaceTimeTable(FixedTable):
    """``kind = "space_time"``: several sets in one table."""

    name: Name
    kind: KindWord = Kind.SPACE_TIME
    control: Name | None = None
    techniques: Techniques = Field(default=[])
    pipeline_schedule: Schedule | None = None
    spmd_backend: SpmdBackend | None = None
    product: Product
    local_batch_size: Step | None = None
    pp: Annotated[list[Degree], Field(min_length=1)] = Field(default=[1])


class GeneratedTable(TestTable):
    """One set that a space_time table stands for."""

    kind: KindWord = Kind.SPACE_TIME
    product: Product


KindTable: TypeAlias = TestTable | ElasticTable | FaultSetTable | SpaceTimeTable
TABLES: dict[Kind, type[TestTable | ElasticTable | SpaceTimeTable]] = {
    Kind.PARALLEL: TestTable,
    Kind.ELASTIC: ElasticTable,
    Kind.FAULT: FaultSetTable,
    Kind.SPACE_TIME: SpaceTimeTable,
}
KEYS = {
    kind: {field.alias or name for name, field in model.model_fields.items()}
    for kind, model in TABLES.items()
}
"""The keys of every kind, as TOML has them."""
ELSEWHERE = {
    (Kind.ELASTIC, "parallelism"): "every segment has its own degrees",
    (Kind.ELASTIC, "pipeline_schedule"): "every segment has its own",
    (Kind.SPACE_TIME, "parallelism"): "its degrees are made of product and pp",
}
"""Where a kind says what others say by this key."""


class _KindOnly(Table):
    model_config = ConfigDict(extra="ignore")

    kind: KindWord = Kind.PARALLEL


def read_test(
    table: dict[str, Any], where: Callable[[str], str], problems: list[Problem]
) -> KindTable | None:
    """A ``[[test]]`` as the table of its kind; None when anything is wrong with it."""
    only = validate(_KindOnly, table, where, problems)
    if only is None:
        return None
    kind = Kind(only.kind)
    foreign = {key: owners for key in table if (owners := _owners(key)) and kind not in owners}
    problems += [
        Problem(
            where(key),
            f"is a key of kind {' and '.join(repr(owner.value) for owner in owners)}; "
            f"this set is of kind {kind.value!r}",
            ELSEWHERE.get((kind, key), ""),
        )
        for key, owners in foreign.items()
    ]
    rest = {key: value for key, value in table.items() if key not in foreign}
    read = validate(TABLES[kind], rest, where, problems)
    return None if foreign else read


def _owners(key: str) -> list[Kind]:
    """Kinds that have a key."""
    return [kind for kind, keys in KEYS.items() if key in keys]
