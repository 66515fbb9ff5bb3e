"""Turns a validated table of a control or test set into a ``SetSpec``, with defaults."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from converge_harness.errors import ConfigError, Problem, suggest
from converge_harness.experiment.cluster import PlacedCluster
from converge_harness.experiment.own_techniques import function_path
from converge_harness.experiment.recovery import (
    recovery_of,
    unmakeable_fault,
    unrunnable_on_cluster,
)
from converge_harness.experiment.space_time import hold_global_batch
from converge_harness.experiment.tables import (
    ElasticTable,
    FaultSetTable,
    GeneratedTable,
    ParallelismTable,
    SetTable,
    TestTable,
)
from converge_harness.model import (
    LOCAL_BATCH,
    TRAINING_STEPS,
    Ask,
    Kind,
    LeftOut,
    OwnTechnique,
    Parallelism,
    Recovery,
    RestartOwner,
    Segment,
    SetSpec,
    Setting,
    Stop,
    Technique,
    TrainConfig,
    TrainerSpec,
)
from converge_harness.toml import Where, flatten, show
from converge_harness.trainers import (
    InlineTable,
    Trainer,
    TrainerOfFile,
    TrainerTable,
    environment_of,
    trainer_of_kind,
)

INLINE = "[trainer.config]"
"""Name of a train config inside the experiment file, in messages."""
CHECKPOINT_EVERY = "checkpoint_every"
TECHNIQUES = (
    *("techniques", "pipeline_schedule", "cp_rotation", "spmd_backend"),
    *("inject", "without_fixes"),
)
"""Keys of a set that only our own rank code understands."""


@dataclass
class SetBuilder:
    """Builds the sets that one trainer of a file trains, and adds what is wrong to ``problems``."""

    table: TrainerTable
    """``[trainer]``, or ``[trainers.NAME]``."""
    where_file: Where
    where_trainer: Where
    folders: tuple[Path, ...]
    """Where relative paths are resolved; the first match wins."""
    problems: list[Problem]
    key: str = "trainer"
    """Dotted key of the table."""
    cluster: PlacedCluster | None = None
    checkpoint_every: int | None = None
    """Steps between checkpoints from which interrupted runs continue; ``[cluster]`` has its own."""
    stop: Stop = Stop.FAIL
    """Of test sets that do not say it."""
    own_techniques: Mapping[str, OwnTechnique] = field(default_factory=dict)
    """``[technique.NAME]``, by name."""
    technique_names: Collection[str] = ()
    """Of all of them, also of those with a problem, which was already reported."""
    common: dict[str, Setting] = field(init=False)
    """``[trainer.set]``, dotted."""
    left_out: dict[str, LeftOut] = field(default_factory=dict)
    """By name, the sets that are not built: their trainer, or the cluster, cannot run them."""
    lacks: list[Problem] = field(default_factory=list)
    """What is lacking for those of them that the file names itself."""
    train_configs: dict[str, TrainConfig | None] = field(default_factory=dict)
    """By path as written; None if it could not be read, which was already reported."""
    trainer: Trainer = field(init=False)
    of_file: TrainerOfFile = field(init=False)
    """``[trainer]``, for all sets."""
    inline: TrainConfig | None = field(init=False, default=None)
    """``[trainer.config]``."""

    def __post_init__(self) -> None:
        self.trainer = trainer_of_kind(self.table.kind)
        self.common = self.overrides_of(self.table.overrides, self.where_trainer)
        if self.table.train_config is not None:
            self._read(self.table.train_config, self.where_trainer)
        self.of_file = self.trainer.of_file(
            self.table, self.where_trainer, self.folders, self.problems
        )
        if isinstance(self.table, InlineTable):
            self._read_inline(self.table)

    def build(
        self,
        table: SetTable | ElasticTable,
        name: str,
        where: Where,
        *,
        control: SetSpec | None = None,
        of_other_trainer: bool = False,
    ) -> SetSpec | None:
        """The set; None if a problem prevents it, or it is ``left_out``.

        A test set takes its train config and toolchain from its control unless it names its own, or
        its control is ``of_other_trainer``.
        """
        like = None if of_other_trainer else control
        own = self.overrides_of(table.overrides, where)
        techniques, own_techniques = self._techniques(table.techniques, own, where)
        # A key of a technique replaces the file's own for all sets.
        of_techniques = {k: v for each in own_techniques for k, v in each.overrides.items()}
        overrides = self.common | of_techniques | own
        inject = self._inject(table.inject, where)
        train_config = self._train_config(table, where, like)
        if train_config is None:
            return None
        parallelism = written_degrees(table.parallelism)
        toolchain = like.toolchain if like else self.of_file.toolchain
        if table.toolchain is not None:
            toolchain = environment_of(table.toolchain, where, self.folders, self.problems)
        spec = SetSpec(
            name=name,
            parallelism=parallelism,
            train_config=train_config,
            toolchain=toolchain,
            techniques=techniques,
            own_techniques=own_techniques,
            pipeline_schedule=schedule_of(
                table.pipeline_schedule, parallelism, self.of_file.trainer
            ),
            cp_rotation=table.cp_rotation,
            spmd_backend=table.spmd_backend or self._backend(toolchain, like),
            overrides=overrides,
            tolerances=dict(table.tolerance),
            margin=table.margin,
            ask=Ask(table.ask) if isinstance(table, TestTable) else Ask.SAME,
            own_random_numbers=isinstance(table, TestTable) and table.own_random_numbers,
            stop=self._stop(table),
            waive=tuple(table.waive),
            inject=inject,
            without_fixes=tuple(table.without_fixes),
            deterministic=self.of_file.deterministic,
            control=control.name if control else None,
            note=table.note,
            trainer=self.of_file.trainer,
            starts_from_control=of_other_trainer,
        )
        if isinstance(table, GeneratedTable) and control is not None:
            accumulated = table.product // parallelism.dp
            if why := self.trainer.why_left_out(spec, control, accumulated):
                self.left_out[name] = LeftOut(why, Kind.SPACE_TIME, control.name)
                return None
        refused = list(_refused(table, spec, where))
        kind = Kind(getattr(table, "kind", Kind.PARALLEL))
        lack = self._lack(kind, table, spec, where)
        left_out = lack is not None and kind in self.trainer.leaves_out
        if lack is not None and not left_out:
            refused.append(lack)
        self.problems += refused or self.trainer.set_problems(
            self.table, spec, own, where, self.where_trainer
        )
        if lack is not None and left_out and control is not None:
            self.lacks.append(lack)
            why = f"{lack.message} ({lack.hint})" if lack.hint else lack.message
            self.left_out[name] = LeftOut(why, kind, control.name)
            return None
        spec = self.trainer.completed(spec)
        if refused:
            return spec
        if spec.own_random_numbers:
            self.problems += _undrawable(spec, where)
        return self._with_kind(spec, table, where, control)

    def _lack(
        self, kind: Kind, table: SetTable | ElasticTable, spec: SetSpec, where: Where
    ) -> Problem | None:
        """Why a set of this kind cannot run, by its trainer or on the cluster."""
        if kind not in spec.trainer.can.kinds:
            return Problem(where("kind"), *self.trainer.why_not(kind, spec.trainer))
        if isinstance(table, FaultSetTable) and (lack := unmakeable_fault(table, spec, where)):
            return lack
        if self.cluster is None or not isinstance(table, ElasticTable | FaultSetTable):
            return None
        return unrunnable_on_cluster(table, spec, where)

    def _stop(self, table: SetTable | ElasticTable) -> Stop:
        """When the run may end early: only a test set's, for others are judged by the rest."""
        if not isinstance(table, TestTable):
            return Stop.NEVER
        return self.stop if table.stop is None else Stop(table.stop)

    def _backend(self, toolchain: str, control: SetSpec | None) -> str | None:
        """The SPMD backend of a set that names none: its control's, else the experiment's.

        Not its control's if it has another toolchain, whose torch may need another backend.
        """
        if control is not None and toolchain == control.toolchain:
            return control.spmd_backend
        return self.of_file.spmd_backend

    def _with_kind(
        self, spec: SetSpec, table: SetTable | ElasticTable, where: Where, control: SetSpec | None
    ) -> SetSpec:
        """The set with the attributes of its kind."""
        match table:
            case ElasticTable():
                segments = segments_of(table, spec, where, self.problems)
                spec = replace(spec, kind=Kind.ELASTIC, segments=segments)
                self.problems += self._pass_problems(spec, table, where)
                return spec
            case FaultSetTable():
                recovery = recovery_of(table, spec, where, self.problems)
                spec = replace(spec, kind=Kind.FAULT, recovery=recovery)
                self.problems += self._pass_problems(spec, table, where)
                return spec
            case GeneratedTable() if control is not None:
                overrides = hold_global_batch(table, spec, control, where, self.problems)
                spec = replace(spec, kind=Kind.SPACE_TIME, overrides=overrides)
        return self._continuing(spec, table, where)

    def _continuing(self, spec: SetSpec, table: SetTable | ElasticTable, where: Where) -> SetSpec:
        """The set with checkpoints from which an interrupted run continues, if there are any."""
        if not spec.trainer.can.continues:  # the user's own cluster file may say how others do
            return spec
        here = self.checkpoint_every
        recovery = continuing(here, self.cluster, spec, self.where_file, self.problems)
        spec = replace(spec, recovery=recovery)
        if recovery is not None:
            self.problems += self._pass_problems(spec, table, where)
        return spec

    def _pass_problems(
        self, spec: SetSpec, table: SetTable | ElasticTable, where: Where
    ) -> Iterable[Problem]:
        return self.trainer.pass_problems(spec, table.overrides, where, self.where_trainer)

    def _train_config(
        self, table: SetTable | ElasticTable, where: Where, control: SetSpec | None
    ) -> TrainConfig | None:
        if table.train_config is None and control is not None:
            return control.train_config
        written = table.train_config or self.table.train_config
        if written is not None:
            return self._read(written, where)
        if self.inline is not None:
            return self.inline
        inline = isinstance(self.table, InlineTable)
        if not (isinstance(self.table, InlineTable) and self.table.config is not None):
            tables = f" or {INLINE}" if inline else ""
            self.problems.append(
                Problem(
                    where("train_config"),
                    "is missing",
                    f"set {self.key}.train_config{tables} for all sets",
                )
            )
        return None

    def _read_inline(self, table: InlineTable) -> None:
        if table.config is None:
            return
        where = self.where_trainer("config")
        if table.train_config is not None:
            self.problems.append(
                Problem(where, "and train_config are two configs for all sets", "leave one out")
            )
        try:
            found = self.trainer.train_config(table.config, INLINE, f"{where}:")
            self.inline = self.trainer.placed(found, self.folders, f"{where}:")
        except ConfigError as error:
            self.problems += error.problems

    def _read(self, written: str, where: Where) -> TrainConfig | None:
        if written not in self.train_configs:
            try:
                found = self.trainer.load_train_config(written, self.folders, where("train_config"))
            except ConfigError as error:
                self.problems += error.problems
                found = None
            self.train_configs[written] = found
        return self.train_configs[written]

    def overrides_of(self, table: dict[str, Any], where: Where) -> dict[str, Setting]:
        """A table ``set`` by dotted keys."""
        overrides: dict[str, Setting] = {}
        for key, value in flatten(table):
            place = where(f"set.{key}")
            if owner := self.trainer.owned_keys.get(key):
                self.problems.append(Problem(place, "cannot be set here", f"use {owner}"))
            elif not all(part.strip() for part in key.split(".")):
                self.problems.append(Problem(place, f"{key!r} is not a dotted key"))
            elif key in overrides:
                self.problems.append(Problem(place, "is set twice"))
            elif isinstance(value, dict):
                self.problems.append(Problem(place, f"must be a value, not {show(value)}"))
            overrides[key] = value
        self.problems += self.trainer.override_problems(overrides, where)
        return overrides

    def unknown_techniques(self, names: Iterable[str], where: Where) -> Iterator[Problem]:
        """Names of techniques that are neither built in nor the file's own."""
        known = [*map(str, Technique), *self.technique_names]
        for index, name in enumerate(names):
            if name not in known:
                place = where(f"techniques[{index}]")
                yield Problem(place, f"{show(name)} is not known", suggest(name, known))

    def _techniques(
        self, names: Sequence[str], own: Mapping[str, Setting], where: Where
    ) -> tuple[tuple[Technique, ...], tuple[OwnTechnique, ...]]:
        """The built-in techniques that a set names, and the file's own.

        ``own`` are the keys of the set itself, which may not contradict those of a technique.
        """
        self.problems += self.unknown_techniques(names, where)
        found = tuple(self.own_techniques[name] for name in names if name in self.own_techniques)
        setters: dict[str, str] = dict.fromkeys(own, "the set itself")
        for each in found:
            for key in each.overrides:
                if key in setters:
                    self.problems.append(
                        Problem(
                            where(f"set.{key}"),
                            f"is set by technique {each.name} and by {setters[key]}",
                            "leave out one",
                        )
                    )
                setters[key] = f"technique {each.name}"
        built_in = tuple(Technique(name) for name in names if name in set(Technique))
        return built_in, found

    def _inject(self, written: str | None, where: Where) -> str | None:
        """``path:function`` with an absolute path, because ranks start in another folder."""
        if written is None:
            return None
        path = function_path(written, self.folders, where("inject"), self.problems)
        return f"{path}:{written.rpartition(':')[2]}" if path else None


def _refused(table: SetTable | ElasticTable, spec: SetSpec, where: Where) -> Iterator[Problem]:
    """Settings of a set that its trainer cannot do."""
    can, who = spec.trainer.can, f"a {spec.trainer.kind} trainer"
    for key in () if can.techniques else TECHNIQUES:
        if getattr(table, key, None):
            yield Problem(
                where(key),
                f"is not possible: all settings of {who} are in its config",
                "put it into trainer.config, and set it by `set`",
            )
    if spec.own_random_numbers and not can.frozen_steps:
        yield Problem(
            where("own_random_numbers"),
            f"needs frozen steps, which {who} does not make",
            'leave it out; ask = "no worse" compares the loss alone',
        )


def _undrawable(spec: SetSpec, where: Where) -> Iterator[Problem]:
    """Why a set with ``own_random_numbers`` cannot be judged by the mean over frozen steps."""
    place = where("own_random_numbers")
    if spec.ask is Ask.NO_WORSE:
        yield Problem(place, f"has no effect if ask is {spec.ask.value!r}", "leave it out")
    if not spec.train_config.own_loader:
        why = "needs frozen steps, which only converge's own loader makes"
        yield Problem(place, why, 'use loader = "converge" under [converge.data]')


def written_degrees(table: ParallelismTable) -> Parallelism:
    """The degrees in a table that may have further keys."""
    return Parallelism(**{name: getattr(table, name) for name in ParallelismTable.model_fields})


def schedule_of(written: str | None, degrees: Parallelism, trainer: TrainerSpec) -> str | None:
    """The pipeline schedule; by default 1F1B, where converge chooses it."""
    return written or ("1F1B" if degrees.pp > 1 and trainer.can.techniques else None)


def segments_of(
    table: ElasticTable, spec: SetSpec, where: Callable[[str], str], problems: list[Problem]
) -> tuple[Segment, ...]:
    """The segments in order; a gap or overlap is added to ``problems``.

    Args:
        table: the set as written.
        spec: the set without its segments, for the number of steps and the local batch.
        where: from a key of the table to its place.
        problems: where problems are collected.
    """
    before = 0
    for index, segment in enumerate(table.segments):
        if segment.until <= before:
            problems.append(
                Problem(
                    where(f"segments[{index}].until"),
                    f"{segment.until} is not after the last step of the segment before, {before}: "
                    "segments would overlap or be empty",
                )
            )
        before = segment.until
    steps = spec.setting(TRAINING_STEPS)
    if isinstance(steps, int) and before != steps:
        problems.append(
            Problem(
                where(f"segments[{len(table.segments) - 1}].until"),
                f"the last segment ends with step {before}, and training.steps is {steps}",
                "the segments cover all steps, because steps shape the lr schedule",
            )
        )
    # A value that is not a number is refused with the sizes of the set (harness/plan).
    local = spec.setting(LOCAL_BATCH)
    default = local if isinstance(local, int) else 1
    degrees = [written_degrees(segment) for segment in table.segments]
    return tuple(
        Segment(
            until=segment.until,
            parallelism=degree,
            local_batch_size=segment.local_batch_size or default,
            pipeline_schedule=schedule_of(segment.pipeline_schedule, degree, spec.trainer),
        )
        for segment, degree in zip(table.segments, degrees, strict=True)
    )


def continuing(
    every: int | None,
    placed: PlacedCluster | None,
    spec: SetSpec,
    where: Where,
    problems: list[Problem],
) -> Recovery | None:
    """The checkpoints from which an interrupted run of a set continues; None: it starts over.

    Args:
        every: steps between them, of the whole file.
        placed: the cluster, which may have a number of its own; None: this machine.
        spec: a set without its own checkpoints.
        where: maps a top-level key of the file to its place.
        problems: where problems are collected.
    """
    owner, place = RestartOwner.USER, where(CHECKPOINT_EVERY)
    hint = ""
    if placed is not None:
        if not placed.cluster.requeue:
            return None
        owner, hint = RestartOwner.CLUSTER, ", or requeue = false"
        if placed.cluster.checkpoint_every is not None:
            every, place = placed.cluster.checkpoint_every, placed.where(CHECKPOINT_EVERY)
            hint += "; [cluster] of the experiment may set it"
    if every is None:
        return None
    steps = spec.setting(TRAINING_STEPS)
    if isinstance(steps, int) and every > steps:
        why = f"{every} comes after the last step of {spec.name!r}: training.steps is {steps}"
        problems.append(Problem(place, why, f"at most {steps}{hint}"))
    return Recovery(faults=(), checkpoint_every=every, restarts=owner, max_restarts=0)
