"""The tables of an experiment file, as pydantic models.

A model checks one table by itself. Checks across tables (a test's control, unique names) and of
files are in ``load.py``, those that need batch sizes and toolchains in ``harness/plan/rules``. Each
trainer defines its own ``[trainer]`` table.

Kinds of ``[[test]]`` other than ``parallel``::

    [[test]]
    kind = "elastic"                # a run that is resized
    name = "resized"
    segments = [                    # `until` is a segment's last step; the last one ends the run
      { until = 4, dp_shard = 2 },  # local_batch_size: by default the set's
      { until = 12, dp_shard = 2, pp = 2, local_batch_size = 2, pipeline_schedule = "1F1B" },
    ]

    [[test]]
    kind = "fault"                  # a run that is interrupted and has to recover
    name = "killed"
    parallelism = { dp_shard = 2 }
    checkpoint_every = 4            # steps
    faults = [{ kind = "kill", step = 6, rank = 1 }]
    restarts = "torchrun"           # in place; or "harness" (the default): a new call
    max_restarts = 3                # the default
    recover_within_s = 120          # the default: from a fault to the first step that ends after it
    nodes = [1, 2]                  # least and most; the default is [1, 1]

    [[test]]
    kind = "space_time"             # sets of equal product: see harness/experiment/space_time.py
    name = "st"
    product = 4                     # dp x gradient accumulation
    pp = [1, 2]

Keys of all kinds: ``name kind control techniques set tolerance margin waive toolchain
train_config inject without_fixes note``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PlainValidator,
)
from pydantic_core import PydanticCustomError, PydanticKnownError

from converge_harness.errors import Problem
from converge_harness.model import (
    CADENCE_OFF,
    DEFAULT_REPEATS,
    FROZEN_STEPS,
    JUDGED_SIGNALS,
    POWERS_OF_TWO,
    SPMD_BACKENDS,
    STOP_AFTER,
    Across,
    Ask,
    Cadence,
    FaultKind,
    Kind,
    Launcher,
    Repeat,
    RepeatKind,
    RestartOwner,
    Stop,
    Torn,
)
from converge_harness.toml import (
    Environment,
    FilePath,
    Name,
    SchemaVersion,
    Seconds,
    T,
    Table,
    Words,
    no_repetition,
    one_of,
    validate,
)

LARGEST_SEED = 2**32 - 1
MOST_FROZEN = 1024
PIPELINE_SCHEDULES = (
    "1F1B",
    "GPipe",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
"""The concrete schedules of ``torch.distributed.pipelining.schedules.get_schedule_class``."""
CP_ROTATIONS = ("allgather", "alltoall")
# ------------------------------------------------------------- kinds of value


_SEEDED = re.compile(r"(?P<kind>[^.]*)\.(?P<seed>.*)", re.DOTALL)
_REPEAT_KINDS = tuple(kind.value for kind in RepeatKind)
_REPEAT_SEED = re.compile(r"[1-9][0-9]{0,5}")
_CADENCES = (POWERS_OF_TWO, CADENCE_OFF)
MAX_STEP = 2**53


def repeat_of(written: object) -> Repeat:
    """``"ulp"`` or ``"ulp.2"`` (KIND.SEED, seed >= 1) as a ``Repeat``.

    Raises pydantic's errors, which become problems of the file.
    """
    if not isinstance(written, str):
        raise PydanticKnownError("string_type")
    seeded = _SEEDED.fullmatch(written)
    kind, seed = (seeded["kind"], seeded["seed"]) if seeded else (written, "1")
    if kind not in _REPEAT_KINDS:
        raise PydanticCustomError("choice", "is not known", {"valid": _REPEAT_KINDS})
    if not _REPEAT_SEED.fullmatch(seed):
        raise PydanticCustomError(
            "seed",
            "must end in a seed from 1 to 999999, such as {example}",
            {"example": f"{kind}.2"},
        )
    return Repeat(RepeatKind(kind), int(seed))


def cadence_of(written: object) -> Cadence:
    """The steps of per-tensor evidence, as a ``Cadence``.

    Raises pydantic's errors, which become problems of the file.
    """
    if isinstance(written, str):
        if written not in _CADENCES:
            raise PydanticCustomError("choice", "is not known", {"valid": _CADENCES})
        return written
    if isinstance(written, int) and not isinstance(written, bool):
        if written < 1:
            raise PydanticCustomError("cadence", 'must be 1 or more ("off" for none)')
        return written
    if isinstance(written, list) and written:
        return _listed(written)
    raise PydanticCustomError(
        "cadence",
        'must be "{words}", a number of steps or a list of steps',
        {"words": '", "'.join(_CADENCES)},
    )


def _listed(written: list[object]) -> tuple[int, ...]:
    steps = [step for step in written if isinstance(step, int) and not isinstance(step, bool)]
    if len(steps) < len(written) or not all(0 <= step <= MAX_STEP for step in steps):
        raise PydanticCustomError("cadence", "must be steps, whole numbers from 0 up")
    if len(set(steps)) < len(steps):
        raise PydanticCustomError("repetition", "names something twice")
    return tuple(sorted(steps))


Degree = Annotated[int, Field(ge=1, le=65_536)]
Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Margin = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
"""Relative: a value of 1 or more is probably meant as a percentage, and would let everything
pass.
"""
Repeats = Annotated[
    list[Annotated[Repeat, PlainValidator(repeat_of)]], AfterValidator(no_repetition)
]
Schedule = Annotated[str, one_of(PIPELINE_SCHEDULES)]
Rotation = Annotated[str, one_of(CP_ROTATIONS)]
SpmdBackend = Annotated[str, one_of(SPMD_BACKENDS)]
Techniques = Annotated[list[str], AfterValidator(no_repetition)]
"""A name may be one of the file's own techniques, so ``sets.py`` checks it."""
KindWord = Annotated[str, one_of(Kind)]
AskWord = Annotated[str, one_of(Ask)]
StopWord = Annotated[str, one_of(Stop)]
# --------------------------------------------------------------------- tables


class ParallelismTable(Table):
    dp_replicate: Degree = 1
    dp_shard: Degree = 1
    tp: Degree = 1
    cp: Degree = 1
    pp: Degree = 1
    ep: Degree = 1


class FixedTable(Table):
    """Keys of a control, a test and a matrix with a single value."""

    overrides: dict[str, Any] = Field(default={}, alias="set")
    tolerance: dict[Annotated[str, one_of(JUDGED_SIGNALS)], Tolerance] = Field(default={})
    margin: Margin | None = None
    waive: Words = Field(default=[])
    toolchain: Environment | None = None
    train_config: FilePath | None = None
    inject: FilePath | None = None
    without_fixes: Words = Field(default=[])
    note: Annotated[str, Field(max_length=2000)] = ""


class SetTable(FixedTable):
    """The keys that a control and a test have in common."""

    parallelism: Annotated[
        ParallelismTable,
        Field(description="name its degrees, as { dp_replicate = 2 }; {} is one rank"),
    ]
    techniques: Techniques = Field(default=[])
    pipeline_schedule: Schedule | None = None
    cp_rotation: Rotation | None = None
    spmd_backend: SpmdBackend | None = None


class ControlTable(SetTable):
    name: Name = "control"


class AnchorTable(SetTable):
    name: Name = "anchor"


class TestTable(SetTable):
    """A test set with its own degrees; tables of other kinds are below."""

    name: Name
    kind: KindWord = Kind.PARALLEL
    control: Name | None = None
    trainer: Name | None = None
    ask: AskWord = Ask.SAME
    own_random_numbers: bool = False
    stop: StopWord | None = None

    __test__ = False  # pytest: this is not a test class


class ProbeTable(Table):
    cadence: Annotated[Cadence, PlainValidator(cadence_of)] = POWERS_OF_TWO
    frozen: Annotated[int, Field(ge=0, le=MOST_FROZEN)] = FROZEN_STEPS


class StopTable(Table):
    when: StopWord = Stop.FAIL
    after: Annotated[int, Field(ge=1)] = STOP_AFTER
    waiting_ranks: Annotated[int, Field(ge=0, le=65_536)] | None = None


class FileTable(Table):
    """The top level of the file.

    Its tables are validated separately, so that an invalid table does not hide problems of another.
    """

    schema_version: SchemaVersion = Field(alias="schema")
    name: Name | None = None
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 42
    seeds: dict[str, Any] | None = None
    repeats: Repeats = Field(default=list(DEFAULT_REPEATS))
    calibration: FilePath | None = None
    reference: bool = True
    baseline: FilePath | None = None
    baseline_across: Annotated[
        list[Annotated[str, one_of(Across)]], AfterValidator(no_repetition)
    ] = Field(default=[])
    launcher: Annotated[str, one_of(Launcher)] = Launcher.LOCAL
    checkpoint_every: Annotated[int, Field(ge=1)] | None = None
    cluster: dict[str, Any] = Field(default={})
    probe: dict[str, Any] = Field(default={})
    stop: dict[str, Any] = Field(default={})
    trainer: dict[str, Any] = Field(default={})
    trainers: dict[str, dict[str, Any]] = Field(default={})
    technique: dict[str, dict[str, Any]] = Field(default={})
    anchor: dict[str, Any] | None = None
    control: Annotated[
        dict[str, Any],
        Field(description="add a [control] table, the set-up that is believed correct"),
    ]
    controls: dict[str, dict[str, Any]] = Field(default={})
    test: list[dict[str, Any]] = Field(default=[])
    matrix: dict[str, Any] | None = None


FEWEST_SEGMENTS = 2
FEWEST_AND_MOST = 2
MAX_NODES = 4096
MAX_PRODUCT = 4096
RESTARTS = (RestartOwner.TORCHRUN, RestartOwner.HARNESS)
"""What may restart a fault set. A cluster only reacts to real faults, not to those of a script."""


def _several_segments(segments: list[T]) -> list[T]:
    if len(segments) < FEWEST_SEGMENTS:
        raise PydanticCustomError(
            "segments", "must be two or more segments: the resumes between them are tested"
        )
    return segments


def _some_fault(faults: list[T]) -> list[T]:
    if not faults:
        raise PydanticCustomError(
            "faults", "must name a fault, such as [{kind = 'kill', step = 6}]"
        )
    return faults


def _fewest_and_most(nodes: list[int]) -> list[int]:
    if len(nodes) != FEWEST_AND_MOST:
        raise PydanticCustomError(
            "nodes", "must be the least and the largest number of nodes, such as [1, 2]"
        )
    if nodes[0] > nodes[1]:
        raise PydanticCustomError("nodes", "must have the smaller number first")
    return nodes


StepNumber = Annotated[int, Field(ge=1)]
Rank = Annotated[int, Field(ge=0)]
Product = Annotated[int, Field(ge=2, le=MAX_PRODUCT)]


class SegmentTable(ParallelismTable):
    """One segment of an elastic set: its last step and its degrees."""

    until: StepNumber
    local_batch_size: StepNumber | None = None
    pipeline_schedule: Schedule | None = None


class ElasticTable(FixedTable):
    """``kind = "elastic"``. Its segments have the degrees and the schedule."""

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
    """One entry of a script of faults. None: not given."""

    kind: Annotated[str, one_of(FaultKind)]
    step: StepNumber
    rank: Rank | None = None
    node: Rank | None = None
    torn: Annotated[str, one_of(Torn)] | None = None
    grace_s: Seconds | None = None
    saves: bool | None = None


class FaultSetTable(TestTable):
    """``kind = "fault"``."""

    kind: KindWord = Kind.FAULT
    ask: Annotated[str, one_of((Ask.SAME,))] = Ask.SAME
    own_random_numbers: Literal[False] = False
    checkpoint_every: StepNumber
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
    local_batch_size: StepNumber | None = None
    pp: Annotated[list[Degree], Field(min_length=1)] = Field(default=[1])


class GeneratedTable(TestTable):
    """One set generated from a space_time table."""

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
"""The TOML keys of every kind."""
ELSEWHERE = {
    (Kind.ELASTIC, "parallelism"): "every segment has its own degrees",
    (Kind.ELASTIC, "pipeline_schedule"): "every segment has its own",
    (Kind.SPACE_TIME, "parallelism"): "its degrees are made of product and pp",
}
"""What to write in a kind that does not have this key."""


class _KindOnly(Table):
    model_config = ConfigDict(extra="ignore")

    kind: KindWord = Kind.PARALLEL


def read_test(
    table: dict[str, Any], where: Callable[[str], str], problems: list[Problem]
) -> KindTable | None:
    """A ``[[test]]`` as the table of its kind; None if anything is wrong with it."""
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
