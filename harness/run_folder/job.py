"""``job.json``: everything that ranks need to know, some of which converge reads, too.

The ``…Document`` types are the file as written, key by key; ``RankJob`` is a rank's parsed form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, cast

from converge_harness.run_folder.checkpoints import OUR_FORM, CheckpointForm
from converge_harness.run_folder.documents import SCHEMA, SchemaError, upgraded
from converge_harness.run_folder.layout import JOB
from converge_harness.run_folder.shapes import (
    COUNT,
    COUNTS,
    FLAG,
    OBJECT,
    OBJECTS,
    STEPS,
    TEXT,
    TEXTS,
    Shape,
)
from converge_harness.run_folder.weight_mapping import (
    WeightMapping,
    WeightMappingDocument,
    weight_mapping_of,
)

SEED_ROLE = "seed checkpoint"

# --------------------------------------------------------------------- the file


class TrainConfigDocument(TypedDict, total=False):
    """The trusted base config."""

    path: str
    module: str | None
    config: str | None
    arguments: dict[str, Any]
    import_from: str
    model: dict[str, int]
    settings: dict[str, Any]
    loader: str


class OwnTechniqueDocument(TypedDict, total=False):
    """A technique of the experiment file."""

    name: str
    what: str
    set: dict[str, Any]
    apply: str | None
    place: str | None
    in_force: str | None
    folder: str


class DataDocument(TypedDict):
    """The synthetic corpus."""

    folder: str
    digest: str


class SegmentDocument(TypedDict, total=False):
    """A part of an elastic run."""

    until: int
    parallelism: dict[str, int]
    local_batch_size: int
    pipeline_schedule: str | None


class FaultDocument(TypedDict, total=False):
    """One entry of the script of faults."""

    kind: str
    step: int
    rank: int
    node: int
    torn: str
    grace_s: float
    """Absent: 30."""
    saves: bool
    """Absent: false."""


class RecoveryDocument(TypedDict, total=False):
    """How a run is interrupted, and has to recover."""

    faults: list[FaultDocument]
    checkpoint_every: int
    restarts: str
    max_restarts: int
    within_s: float
    nodes: list[int]


class CheckpointsDocument(TypedDict):
    """What the checkpoints of a user's program look like (``CheckpointForm``)."""

    name: str
    last_file: str | None


class CommandDocument(TypedDict, total=False):
    """How a user's program is called, with placeholders filled in."""

    argv: list[str]
    launcher: str
    probed: bool
    """Only in older files; see ``JobDocument``."""
    curves: str | None
    columns: dict[str, str]
    mean_over: int
    """Only where the curve's loss is a mean over several steps; 0: since the row before."""
    environment: dict[str, str]
    folder: str
    checkpoints: CheckpointsDocument
    """Only in older files; see ``JobDocument``."""


class JobDocument(TypedDict, total=False):
    """The file without its schema version; files of older releases lack some keys."""

    name: str
    role: str
    identity: str
    dialect: str
    run_folder: str
    seed: int
    steps: int
    parallelism: dict[str, int]
    techniques: list[str]
    own_techniques: list[OwnTechniqueDocument]
    """Only where there are any."""
    pipeline_schedule: str | None
    cp_rotation: str | None
    spmd_backend: str | None
    train_config: TrainConfigDocument
    overrides: dict[str, Any]
    data: DataDocument | None
    seed_checkpoint: str | None
    sample_steps: list[int]
    frozen: int
    segments: list[SegmentDocument]
    checkpoint_every: int | None
    faults: list[FaultDocument]
    elastic_nodes: bool
    recovery: RecoveryDocument | None
    repeat: str | None
    repeat_seed: int
    inject: str | None
    without_fixes: list[str]
    deterministic: bool
    """Only where it is false."""
    device: str
    operations_of: str
    """Only in reruns of a failed set: the module whose operations are recorded."""
    code: dict[str, str]
    """Only if its version does not identify torchtitan's code: SHA-256 of torchtitan's files when
    the job was planned, by path such as ``torchtitan/trainer.py``."""
    command: CommandDocument
    """Only if a user's program trains."""
    trainer: str
    """The trainer's kind, unless it is torchtitan or a user's program."""
    probed: bool
    """Only if False: the job leaves nothing but a curve of its own."""
    checkpoints: CheckpointsDocument
    """What checkpoints look like, in jobs of several passes; only if not as those of our ranks."""
    weights: WeightMappingDocument
    """Only if the seed checkpoint is another trainer's: its names for the parameters."""


SHAPES: Mapping[str, Shape] = {
    "name": TEXT,
    "identity": TEXT,
    "steps": COUNT,
    "parallelism": COUNTS,
    "techniques": TEXTS,
    "own_techniques": OBJECTS,
    "overrides": OBJECT,
    "without_fixes": TEXTS,
    "deterministic": FLAG,
    "pipeline_schedule": TEXT,
    "cp_rotation": TEXT,
    "spmd_backend": TEXT,
    "repeat": TEXT,
    "sample_steps": STEPS,
    "segments": OBJECTS,
    "checkpoint_every": COUNT,
    "faults": OBJECTS,
    "elastic_nodes": FLAG,
    "recovery": OBJECT,
    "code": OBJECT,
    "command": OBJECT,
    "command.argv": TEXTS,
    "command.launcher": TEXT,
    "command.probed": FLAG,
    "command.curves": TEXT,
    "command.columns": OBJECT,
    "command.mean_over": COUNT,
    "command.environment": OBJECT,
    "command.folder": TEXT,
    "command.checkpoints": OBJECT,
    "probed": FLAG,
    "checkpoints": OBJECT,
}
"""Types of the values that converge reads."""


def is_probed(job: JobDocument) -> bool:
    """False for a job that leaves nothing but a curve of its own."""
    return job.get("probed", _older(job).get("probed")) is not False


def checkpoint_form_of(job: JobDocument) -> CheckpointForm:
    """What the job's checkpoints look like; those of our ranks if it names none."""
    return named_checkpoint_form(job) or OUR_FORM


def named_checkpoint_form(job: JobDocument) -> CheckpointForm | None:
    """What the job says of its checkpoints; None: nothing."""
    written = job.get("checkpoints") or _older(job).get("checkpoints")
    return CheckpointForm(written["name"], written.get("last_file")) if written else None


def _older(job: JobDocument) -> CommandDocument:
    """Where older files have what now is a key of every job's."""
    return job.get("command") or {}


def recovery_of(job: JobDocument) -> RecoveryDocument | None:
    """How the run is interrupted and has to recover; None if nothing interrupts it.

    Older files name the faults and the checkpoint interval, but not who restarts the run, how soon
    it has to recover, and how many nodes may leave or join: two then stand for several.
    """
    recovery = job.get("recovery")
    every = job.get("checkpoint_every")
    if recovery is not None or every is None:
        return recovery
    nodes = [1, 2] if job.get("elastic_nodes") else [1, 1]
    return {"faults": job.get("faults") or [], "checkpoint_every": every, "nodes": nodes}


def moved_with(folder: Path, path: str, run_folder: str) -> Path:
    """A path of a job whose run folder was ``run_folder`` and may have been moved since.

    Raises ValueError for a path outside of the run folder, which may belong to another run.
    """
    return folder / Path(path).relative_to(run_folder)


# --------------------------------------------------------------------- parsed by a rank


class JobError(Exception):
    """``job.json`` cannot be read, lacks the segment, or does not fit the world size."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Parallelism degrees, as in ``model.Parallelism`` (which ranks cannot import)."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1


@dataclass(frozen=True, slots=True)
class BaseConfig:
    """The train config: the trainer's own keys in ``settings``, ``[converge]``'s as fields."""

    path: str
    module: str | None = None
    config: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the config function."""
    import_from: Path | None = None
    """The user's folder that has the module; None: an installed one."""
    model: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    loader: str = "converge"
    """The loader of the corpus, as in ``model.Loader``: ``converge``, ``torchtitan`` (its
    stock text loader) or ``streaming`` (MosaicML Streaming)."""


@dataclass(frozen=True, slots=True)
class RankOwnTechnique:
    """A technique of the experiment file, as in ``converge_harness.model.OwnTechnique``."""

    name: str
    set: Mapping[str, Any] = field(default_factory=dict)
    """Its keys, which are among the job's ``overrides``."""
    apply: str | None = None
    """``/abs/file.py:function``"""
    place: str | None = None
    """Where ``apply`` is called: ``config``, ``model``, ``parallel_model`` or ``trainer``."""
    in_force: str | None = None
    """``/abs/file.py:function``, called with the trainer after the first step."""
    folder: str = ""
    """Where modules that ``set`` names may be imported from; empty: nowhere else than usual."""


@dataclass(frozen=True, slots=True)
class RankSegment:
    """A part of an elastic run with its own degrees."""

    until: int
    """Its last step; a checkpoint is written then."""
    parallelism: Degrees
    local_batch_size: int
    pipeline_schedule: str | None = None


@dataclass(frozen=True, slots=True)
class RankFault:
    """One entry of the script of faults, as in ``converge_harness.model.Fault``."""

    kind: str
    step: int
    rank: int = 0
    node: int = 1
    torn: str = "death"
    """``death`` or ``truncated``."""
    grace_s: float = 30.0
    """For converge, which ends the ranks."""
    saves: bool = False
    """For converge, which judges what was saved."""


@dataclass(frozen=True, slots=True)
class RankJob:
    """One call as its ranks see it; the fields are those of ``job.json``.

    A job of several segments has several calls, each with a ``RankJob`` of one segment
    (``read_job``).
    """

    name: str
    role: str
    identity: str
    dialect: str
    run_folder: Path
    seed: int
    steps: int
    parallelism: Degrees
    train_config: BaseConfig
    techniques: tuple[str, ...] = ()
    own_techniques: tuple[RankOwnTechnique, ...] = ()
    pipeline_schedule: str | None = None
    cp_rotation: str | None = None
    spmd_backend: str | None = None
    """``spmd_types``, ``partial_dtensor`` or ``full_dtensor``; None: that of the train config, or
    torchtitan's default."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    data_folder: Path | None = None
    """Folder with ``corpus.json`` and ``tokens.npy``; None: torchtitan's own dataset."""
    seed_checkpoint: Path | None = None
    """``.../checkpoint/step-0`` to start from; None: the trainer's own initial weights."""
    sample_steps: tuple[int, ...] = ()
    """Steps at which per-tensor evidence is written; 0 is before the first step."""
    frozen: int = 0
    """Number of frozen steps: forward and backward passes at the initial weights, before
    training."""
    repeat: str | None = None
    """``rerun``, ``ulp``, ``rounding``, ``permute`` or None."""
    repeat_seed: int = 1
    """Seed for the directions of ``ulp`` and ``rounding``, and for the order of ``permute``."""
    inject: str | None = None
    """``/abs/path.py:function``, which is called with the built trainer."""
    without_fixes: tuple[str, ...] = ()
    deterministic: bool = True
    """Whether torch uses deterministic algorithms only."""
    operations_of: str = ""
    """The module whose operations are recorded (``operations.py``); empty: none."""
    segments: tuple[RankSegment, ...] = ()
    """The segments of an elastic set, in order."""
    segment: int | None = None
    """Index of the segment that this call runs; None for other sets."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; None: no checkpoints, or only at the ends of segments."""
    saves_after: frozenset[int] = frozenset()
    """Further steps at the end of which a checkpoint is written: those after which it waits."""
    waited: bool = False
    """Whether it writes, or has written, such checkpoints."""
    faults: tuple[RankFault, ...] = ()
    """The faults of the script, in the order of their steps."""
    elastic_nodes: bool = False
    """Whether nodes may leave and join: dp_shard then follows from the world size."""
    checkpoints: CheckpointForm = OUR_FORM
    """What the checkpoints between its passes look like."""
    device: str = "cpu"
    is_probed: bool = True
    """False for a user's program that only writes a curve of its own."""
    weights: WeightMapping | None = None
    """Names of the parameters in the seed checkpoint, if that is another trainer's."""

    @property
    def resumes(self) -> bool:
        """Whether the run has several passes, joined by checkpoints."""
        return bool(self.segments) or self.checkpoint_every is not None or self.waited

    @property
    def may_continue(self) -> bool:
        """Whether it continues from its checkpoints after interruptions that are in no script."""
        return self.resumes and not self.segments and not self.faults

    @property
    def last_step(self) -> int:
        """The last step that this call has to reach."""
        return self.steps if self.segment is None else self.segments[self.segment].until

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is written at the end of a step; never after the run's last step."""
        if step == self.steps:
            return False
        if self.checkpoint_every is not None and step % self.checkpoint_every == 0:
            return True
        if step in self.saves_after:
            return True
        return bool(self.segments) and step == self.last_step

    def on_world(self, world_size: int) -> RankJob:
        """The job for a world of this size, from which dp_shard follows.

        Raises JobError when the other degrees do not divide it.
        """
        if not self.elastic_nodes:
            return self
        degrees = self.parallelism
        others = degrees.dp_replicate * degrees.tp * degrees.cp * degrees.pp
        if world_size % others:
            raise JobError(
                f"{self.name}: {world_size} ranks are not a multiple of {others}, the product of "
                f"the degrees that do not change (dp_replicate, tp, cp, pp)"
            )
        return replace(self, parallelism=replace(degrees, dp_shard=world_size // others))

    @property
    def makes_seed_checkpoint(self) -> bool:
        return self.role == SEED_ROLE

    @property
    def order_seed(self) -> int | None:
        """Seed for a repeat's order of samples in each global batch; None: the usual order."""
        return self.repeat_seed if self.repeat == "permute" else None


def read_document(path: str | Path) -> JobDocument:
    """The content of a file, with values unchecked. Raises JobError as ``read_job`` does."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise JobError(f"{path}: cannot be read as a job: {error}") from error
    if not isinstance(raw, dict):
        raise JobError(
            f"{path}: job schema is {type(raw).__name__!r}, this rank code reads {SCHEMA}"
        )
    try:
        return cast("JobDocument", upgraded(JOB, raw))
    except SchemaError:
        raise JobError(
            f"{path}: job schema is {raw.get('schema')!r}, this rank code reads {SCHEMA}"
        ) from None


def read_job(path: str | Path, segment: int | None = None) -> RankJob:
    """The job in a file; with the index of a segment, the job of that segment's call.

    Raises JobError when the file cannot be read as a job of this schema, and when it has no such
    segment.
    """
    try:
        job = _job(read_document(path))
    except (KeyError, TypeError) as error:
        raise JobError(f"{path}: not a complete job: {error!r}") from error
    if segment is None:
        return job
    if not 0 <= segment < len(job.segments):
        raise JobError(f"{path}: has no segment {segment}, there are {len(job.segments)}")
    return _of_segment(job, segment)


def _of_segment(job: RankJob, index: int) -> RankJob:
    segment = job.segments[index]
    return replace(
        job,
        segment=index,
        parallelism=segment.parallelism,
        pipeline_schedule=segment.pipeline_schedule,
        overrides={**job.overrides, "training.local_batch_size": segment.local_batch_size},
    )


def _job(raw: JobDocument) -> RankJob:
    base = raw["train_config"]
    data = raw.get("data")
    checkpoint = raw.get("seed_checkpoint")
    return RankJob(
        name=raw["name"],
        role=raw["role"],
        identity=raw["identity"],
        dialect=raw["dialect"],
        run_folder=Path(raw["run_folder"]),
        seed=raw["seed"],
        steps=raw["steps"],
        parallelism=Degrees(**raw["parallelism"]),
        train_config=BaseConfig(
            path=base["path"],
            module=base.get("module"),
            config=base.get("config"),
            arguments=base.get("arguments") or {},
            import_from=Path(base["import_from"]) if base.get("import_from") else None,
            model=base.get("model") or {},
            settings=base.get("settings") or {},
            loader=base.get("loader") or "converge",
        ),
        techniques=tuple(raw.get("techniques") or ()),
        own_techniques=tuple(
            RankOwnTechnique(
                name=own["name"],
                set=own.get("set") or {},
                apply=own.get("apply"),
                place=own.get("place"),
                in_force=own.get("in_force"),
                folder=own.get("folder") or "",
            )
            for own in raw.get("own_techniques") or ()
        ),
        pipeline_schedule=raw.get("pipeline_schedule"),
        cp_rotation=raw.get("cp_rotation"),
        spmd_backend=raw.get("spmd_backend"),
        overrides=raw.get("overrides") or {},
        data_folder=Path(data["folder"]) if data else None,
        seed_checkpoint=Path(checkpoint) if checkpoint else None,
        sample_steps=tuple(raw.get("sample_steps") or ()),
        frozen=raw.get("frozen") or 0,
        repeat=raw.get("repeat"),
        repeat_seed=raw.get("repeat_seed") or 1,
        inject=raw.get("inject"),
        without_fixes=tuple(raw.get("without_fixes") or ()),
        deterministic=raw.get("deterministic", True),
        operations_of=raw.get("operations_of") or "",
        is_probed=is_probed(raw),
        segments=tuple(
            RankSegment(
                until=segment["until"],
                parallelism=Degrees(**segment["parallelism"]),
                local_batch_size=segment["local_batch_size"],
                pipeline_schedule=segment.get("pipeline_schedule"),
            )
            for segment in raw.get("segments") or ()
        ),
        checkpoint_every=raw.get("checkpoint_every"),
        faults=tuple(RankFault(**fault) for fault in raw.get("faults") or ()),
        elastic_nodes=bool(raw.get("elastic_nodes")),
        checkpoints=checkpoint_form_of(raw),
        device=raw.get("device", "cpu"),
        weights=weight_mapping_of(raw.get("weights")),
    )
