"""A validated table of a control or test set as a ``SetSpec``, with its defaults filled in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.errors import ConfigError, Problem
from harness.experiment.checkpoint_keys import pass_problems, start_problems
from harness.experiment.cluster import PlacedCluster
from harness.experiment.command import command_of, foreign_problems, set_problems
from harness.experiment.elastic import schedule_of, segments_of, written_degrees
from harness.experiment.kinds import ElasticTable, FaultSetTable, GeneratedTable
from harness.experiment.paths import find_file
from harness.experiment.program_files import interpreter_of, with_files_of
from harness.experiment.read import flatten
from harness.experiment.recovery import recovery_of
from harness.experiment.requeue import requeued
from harness.experiment.space_time import hold_global_batch
from harness.experiment.tables import SetTable, TestTable, show
from harness.experiment.train_config import command_config, load_train_config
from harness.experiment.trainer import CommandTable, TitanTable
from harness.model import (
    SPMD_BACKEND,
    Ask,
    Kind,
    SetSpec,
    Setting,
    Technique,
    TrainConfig,
    TrainerSpec,
)
from harness.trainers.command import trained_by

OWNED = {
    "parallelism.data_parallel_replicate_degree": "parallelism.dp_replicate",
    "parallelism.data_parallel_shard_degree": "parallelism.dp_shard",
    "parallelism.tensor_parallel_degree": "parallelism.tp",
    "parallelism.context_parallel_degree": "parallelism.cp",
    "parallelism.context_parallel_rotate_method": "cp_rotation",
    "parallelism.pipeline_parallel_degree": "parallelism.pp",
    "parallelism.pipeline_parallel_schedule": "pipeline_schedule",
    "parallelism.expert_parallel_degree": "parallelism.ep",
    "parallelism.enable_async_tensor_parallel": 'techniques = ["async_tp"]',
    SPMD_BACKEND: "spmd_backend",
    "compile.enable": 'techniques = ["compile"]',
    "compile.enable_async_tensor_parallel": 'techniques = ["async_tp"]',
    "debug.seed": "seed",
    "training.seed": "seed",
}
"""Trainer keys that the experiment file has its own word for: a ``set`` of one would contradict
what the plan computes from that word."""

INLINE = "[trainer.config]"
"""What the train config in the experiment file itself is called in messages."""
Where = Callable[[str], str]
"""From a key within a table to its place in the file, for messages."""


@dataclass
class SetBuilder:
    """Builds the sets of one file, adding what is wrong to ``problems``."""

    trainer: TitanTable | CommandTable
    where_trainer: Where
    folders: tuple[Path, ...]
    """Where relative paths are looked up; the first match wins."""
    problems: list[Problem]
    cluster: PlacedCluster | None = None
    common: dict[str, Setting] = field(init=False)
    """``[trainer.set]``, dotted."""
    train_configs: dict[str, TrainConfig | None] = field(default_factory=dict)
    """By path as written; None when it could not be read (its problem is known by then)."""
    toolchain: str = field(init=False)
    """Of sets that name none, and whose control names none."""
    trained_by: TrainerSpec = field(init=False, default_factory=TrainerSpec)
    """What trains all sets."""
    inline: TrainConfig | None = field(init=False, default=None)
    """``[trainer.config]``."""

    def __post_init__(self) -> None:
        trainer = self.trainer
        self.common = self._overrides(trainer.overrides, self.where_trainer)
        if trainer.train_config is not None:
            self._read(trainer.train_config, self.where_trainer)
        if isinstance(trainer, TitanTable):
            self.toolchain = trainer.toolchain
            return
        given = (self.where_trainer, self.folders, self.problems)
        self.trained_by = trained_by(command_of(trainer, *given))
        self.toolchain = interpreter_of(trainer, *given)
        self._read_inline(trainer)

    def build(
        self,
        table: SetTable | ElasticTable,
        name: str,
        where: Where,
        *,
        control: SetSpec | None = None,
    ) -> SetSpec | None:
        """The set; None when a problem keeps it from being built.

        A test set takes its train config and toolchain from its control unless it names its own.
        """
        own = self._overrides(table.overrides, where)
        overrides = self.common | own
        inject = self._inject(table.inject, where)
        train_config = self._train_config(table, where, control)
        if train_config is None:
            return None
        parallelism = written_degrees(table.parallelism)
        default_toolchain = control.toolchain if control else self.toolchain
        spec = SetSpec(
            name=name,
            parallelism=parallelism,
            train_config=train_config,
            toolchain=table.toolchain or default_toolchain,
            techniques=tuple(Technique(technique) for technique in table.techniques),
            pipeline_schedule=schedule_of(table.pipeline_schedule, parallelism),
            cp_rotation=table.cp_rotation,
            spmd_backend=table.spmd_backend or self._backend(table, control),
            overrides=overrides,
            tolerances=dict(table.tolerance),
            margin=table.margin,
            ask=Ask(table.ask) if isinstance(table, TestTable) else Ask.SAME,
            own_random_numbers=isinstance(table, TestTable) and table.own_random_numbers,
            waive=tuple(table.waive),
            inject=inject,
            without_fixes=tuple(table.without_fixes),
            control=control.name if control else None,
            note=table.note,
            trainer=self.trained_by,
        )
        if isinstance(self.trainer, CommandTable):
            foreign = list(foreign_problems(table, where))
            self.problems += foreign or set_problems(
                self.trainer, spec, own, where, self.where_trainer
            )
            return replace(spec, trainer=trained_by(with_files_of(spec.trainer.settings, spec)))
        if spec.own_random_numbers:
            self.problems += _undrawable(spec, where)
        return self._with_kind(spec, table, where, control)

    def _backend(self, table: SetTable | ElasticTable, control: SetSpec | None) -> str | None:
        """The SPMD backend of a set that names none: its control's, else the experiment's.

        Not its control's in another toolchain, whose torch may be fit for another.
        """
        same = control is not None and table.toolchain in (None, control.toolchain)
        if control is not None and same:
            return control.spmd_backend
        return self.trainer.spmd_backend if isinstance(self.trainer, TitanTable) else None

    def _with_kind(
        self, spec: SetSpec, table: SetTable | ElasticTable, where: Where, control: SetSpec | None
    ) -> SetSpec:
        """The set with what only its kind has."""
        match table:
            case ElasticTable():
                self.problems += pass_problems(spec, table.overrides, where, self.where_trainer)
                segments = segments_of(table, spec, where, self.problems)
                return replace(spec, kind=Kind.ELASTIC, segments=segments)
            case FaultSetTable():
                self.problems += pass_problems(spec, table.overrides, where, self.where_trainer)
                recovery = recovery_of(table, spec, where, self.problems)
                return replace(spec, kind=Kind.FAULT, recovery=recovery)
            case GeneratedTable() if control is not None:
                overrides = hold_global_batch(table, spec, control, where, self.problems)
                spec = replace(spec, kind=Kind.SPACE_TIME, overrides=overrides)
        return self._requeued(spec, table, where)

    def _requeued(self, spec: SetSpec, table: SetTable | ElasticTable, where: Where) -> SetSpec:
        """The set as a scheduler may interrupt it, if it is to go on from checkpoints then."""
        if self.cluster is None:
            return spec
        recovery = requeued(self.cluster, spec, self.problems)
        if recovery is not None:
            self.problems += pass_problems(spec, table.overrides, where, self.where_trainer)
        return replace(spec, recovery=recovery)

    def _train_config(
        self, table: SetTable | ElasticTable, where: Where, control: SetSpec | None
    ) -> TrainConfig | None:
        if table.train_config is None and control is not None:
            return control.train_config
        written = table.train_config or self.trainer.train_config
        if written is not None:
            return self._read(written, where)
        if self.inline is not None:
            return self.inline
        if not (isinstance(self.trainer, CommandTable) and self.trainer.config is not None):
            tables = " or [trainer.config]" if isinstance(self.trainer, CommandTable) else ""
            self.problems.append(
                Problem(
                    where("train_config"),
                    "is missing",
                    f"set trainer.train_config{tables} for all sets",
                )
            )
        return None

    def _read_inline(self, trainer: CommandTable) -> None:
        if trainer.config is None:
            return
        if trainer.train_config is not None:
            self.problems.append(
                Problem(
                    self.where_trainer("config"),
                    "and train_config are two configs for all sets",
                    "leave one out",
                )
            )
        try:
            self.inline = command_config(trainer.config, INLINE, f"{self.where_trainer('config')}:")
        except ConfigError as error:
            self.problems += error.problems

    def _read(self, written: str, where: Where) -> TrainConfig | None:
        if written not in self.train_configs:
            try:
                found = load_train_config(
                    written,
                    self.folders,
                    where("train_config"),
                    of_command=isinstance(self.trainer, CommandTable),
                )
            except ConfigError as error:
                self.problems += error.problems
                found = None
            self.train_configs[written] = found
        return self.train_configs[written]

    def _overrides(self, table: dict[str, Any], where: Where) -> dict[str, Setting]:
        overrides: dict[str, Setting] = {}
        of_titan = isinstance(self.trainer, TitanTable)
        for key, value in flatten(table):
            place = where(f"set.{key}")
            if of_titan and key in OWNED:
                self.problems.append(Problem(place, "is not set here", f"use {OWNED[key]}"))
            elif not all(part.strip() for part in key.split(".")):
                self.problems.append(Problem(place, f"{key!r} is no dotted key"))
            elif key in overrides:
                self.problems.append(Problem(place, "is set twice"))
            elif isinstance(value, dict):
                self.problems.append(Problem(place, f"must be a value, not {show(value)}"))
            overrides[key] = value
        if of_titan:
            self.problems += start_problems(overrides, where)
        return overrides

    def _inject(self, written: str | None, where: Where) -> str | None:
        """``path:function`` with the path made absolute: ranks start in another folder."""
        if written is None:
            return None
        file, _, function = written.rpartition(":")
        if not file or not function.isidentifier():
            self.problems.append(
                Problem(where("inject"), f"{show(written)} is not written path/to/file.py:function")
            )
            return None
        path = find_file(file, self.folders)
        if path is None:
            looked = ", ".join(str(folder) for folder in self.folders)
            self.problems.append(
                Problem(where("inject"), f"there is no file {file!r}", f"looked in: {looked}")
            )
            return None
        return f"{path.resolve()}:{function}"


def _undrawable(spec: SetSpec, where: Where) -> Iterator[Problem]:
    """Why a set with random numbers of its own cannot be judged in the mean over frozen steps."""
    place = where("own_random_numbers")
    if spec.ask is Ask.NO_WORSE:
        yield Problem(place, f"changes nothing where ask is {spec.ask.value!r}", "leave it out")
    if not spec.train_config.own_loader:
        why = "needs frozen steps, which only converge's own loader makes"
        yield Problem(place, why, 'use loader = "converge" under [converge.data]')
