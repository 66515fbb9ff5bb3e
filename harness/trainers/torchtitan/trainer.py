"""torchtitan as a trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from converge_harness.errors import Problem
from converge_harness.model import (
    DATA_TYPE_KEYS,
    Capabilities,
    ConfigKeys,
    FaultKind,
    InForce,
    Job,
    Kind,
    Repeat,
    RepeatKind,
    ResumeAdvice,
    SetSpec,
    Surroundings,
    Technique,
    Toolchain,
    TrainConfig,
    TrainerSpec,
)
from converge_harness.run_folder.job import JobDocument
from converge_harness.toml import Where
from converge_harness.trainers.base import (
    Features,
    Limitation,
    SourceFile,
    job_document,
)
from converge_harness.trainers.table import TrainerOfFile, environment_of
from converge_harness.trainers.torchrun import TorchrunTrainer
from converge_harness.trainers.torchtitan import releases, stages
from converge_harness.trainers.torchtitan.audit import AUDIT
from converge_harness.trainers.torchtitan.table import (
    ASYNC_MODE,
    OWNED,
    TitanTable,
    find_seed_checkpoint,
    pass_problems,
    placed_train_config,
    start_problems,
    titan_train_config,
)
from converge_harness.trainers.torchtitan.user_python import toolchain_of_python

KEYS = ConfigKeys(
    async_checkpoints=ASYNC_MODE,
    collective_timeout="comm.train_timeout_seconds",
    pipeline_microbatch_size="parallelism.pipeline_parallel_microbatch_size",
    of_repeats=frozenset(
        {
            "dataloader.order_seed",  # of ``permute`` in torchtitan 0.3; other repeats change none
            # One may have written checkpoints because it waited for others, and the other not
            # (``checkpoint_settings`` of the ranks). When they are written changes no step.
            "checkpoint.enable",
            "checkpoint.load_only",
            "checkpoint.folder",
            "checkpoint.interval",
            "checkpoint.keep_latest_k",
        }
    ),
    max_norm="training.max_norm",
    warmup_steps="lr_scheduler.warmup_steps",
    not_loaded="checkpoint.exclude_from_loading",
)
ADVICE = ResumeAdvice(
    data=(
        "the dataloader's state_dict and load_state_dict: torchtitan's (components/dataloader.py) "
        "keeps a state per data-parallel rank, which another degree cannot use; whether "
        "dataloader is in checkpoint.exclude_from_loading; our own loader "
        "([converge.data] loader) counts samples instead"
    ),
    chosen=(
        "which checkpoint a start chooses (checkpoint.load_step, the newest folder with .metadata)"
    ),
    counted="and what train_state holds: the trainer's state_dict and load_state_dict",
    nothing_whole=(
        "what a restart loads while no checkpoint is whole: checkpoint.initial_load_path, which "
        "torchtitan 0.2.2 reads only while the checkpoint folder does not exist "
        "(components/checkpoint.py, load), and what that folder (checkpoint.folder) holds"
    ),
    torn=(
        "how a complete checkpoint is told from a torn one: torchtitan takes the newest folder "
        "that has .metadata, which is written last, and does not look at the shards"
    ),
    loaded=(
        "what the checkpoint holds and what is loaded of it: checkpoint.exclude_from_loading and "
        "load_only, the names that each rank asks for after a change of degrees, and whatever sets "
        "parameters, optimizer state or lr after the load"
    ),
    saved=(
        "when the trainer saves: checkpoint.enable and checkpoint.interval, and what calls the "
        "checkpointer's save after a step"
    ),
    generators=f"{ResumeAdvice().generators} (torchtitan saves none of them)",
    tokens=(
        "what train_state holds: torchtitan's Trainer.state_dict saves ntokens_seen, which is "
        "a count of one rank, and every rank loads it as its own"
    ),
)
TORCHTITAN = TrainerSpec(
    "torchtitan",
    Capabilities(
        probed=True,
        all_signals=True,
        counts_tokens=True,
        shares_initial_weights=True,
        techniques=True,
        guided=True,
        references=True,
        rounds_otherwise=True,
        frozen_steps=True,
        kinds=frozenset(Kind),
        faults=frozenset(FaultKind),
        continues=True,
        checks_config=True,
        dry_run=True,
        warm_start=True,
        under_scheduler=True,
        baselines=True,
        repeatable_argv=True,
    ),
    defaults=MappingProxyType(dict(zip(DATA_TYPE_KEYS, ("float32", "bfloat16"), strict=True))),
    keys=KEYS,
    audit=AUDIT,
    advice=ADVICE,
)


class Torchtitan(TorchrunTrainer):
    """torchtitan under torchrun, with converge's rank code."""

    kind = TORCHTITAN.kind
    table = TitanTable
    imports = ("torch", "torchtitan")
    owned_keys = OWNED

    def default_spec(self) -> TrainerSpec:
        return TORCHTITAN

    def of_file(
        self, table: TitanTable, where: Where, folders: Sequence[Path], problems: list[Problem]
    ) -> TrainerOfFile:
        return TrainerOfFile(
            trainer=TORCHTITAN,
            toolchain=environment_of(table.toolchain, where, folders, problems),
            spmd_backend=table.spmd_backend,
            seed_checkpoint=find_seed_checkpoint(table.seed_checkpoint, folders, where, problems),
            names_weights=table.seed_checkpoint is not None,
            tokens_per_gpu_second=table.tokens_per_gpu_second,
            deterministic=table.deterministic,
        )

    def train_config(self, tables: Mapping[str, Any], path: str, place: str) -> TrainConfig:
        return titan_train_config(tables, path, place)

    def placed(self, config: TrainConfig, folders: Sequence[Path], place: str) -> TrainConfig:
        return placed_train_config(config, folders, place)

    def override_problems(self, overrides: Mapping[str, Any], where: Where) -> Iterable[Problem]:
        return start_problems(overrides, where)

    def pass_problems(
        self, spec: SetSpec, own: Mapping[str, Any], where: Where, whole: Where
    ) -> Iterable[Problem]:
        return pass_problems(spec, own, where, whole)

    def unmakeable(
        self, repeat: Repeat, trainer: TrainerSpec, controls: Sequence[SetSpec]
    ) -> tuple[str, str]:
        """Only our own loader can distribute a global batch in another order."""
        others = [spec.name for spec in controls if not spec.train_config.own_loader]
        if not others or repeat.kind is not RepeatKind.PERMUTE:
            return "", ""
        why = (
            f"is not possible for {', '.join(map(repr, others))}: its train config has no "
            "[converge.data] for converge's own loader, and only that can distribute the samples "
            "of a batch in another order"
        )
        return why, "leave it out, or use rerun and ulp repeats"

    def identity(self, spec: SetSpec, surroundings: Surroundings) -> Mapping[str, Any]:
        return {}

    def describe(self, spec: SetSpec) -> str:
        return ""

    def sources(self, spec: SetSpec) -> Iterable[SourceFile]:
        config = spec.train_config
        if config.code is not None and config.import_from is not None:
            yield SourceFile(config.code, config.import_from, "train_config")

    def find_toolchain(self, name: str, root: Path | None, trainer: TrainerSpec) -> Toolchain:
        return releases.find_toolchain(name, root)

    def with_code(
        self, toolchain: Toolchain, first: tuple[Path, ...], trainer: TrainerSpec
    ) -> Toolchain:
        return toolchain_of_python(toolchain.name, first)

    def assume_toolchain(self, name: str, root: Path | None, trainer: TrainerSpec) -> Toolchain:
        return releases.assume_toolchain(name, root)

    def release(self, toolchain: Toolchain) -> str | None:
        return toolchain.versions.get("torchtitan")

    def toolchain_for(self, config: TrainConfig | None = None) -> str:
        return releases.toolchain_for(config)

    def features(self, toolchain: Toolchain) -> Features:
        return releases.features(toolchain)

    def pipeline_stages(self, job: Job) -> int:
        return stages.pipeline_stages(job)

    def layers_to_cut(self, job: Job) -> int | None:
        return stages.layers_to_cut(job)

    def limitations(self, spec: SetSpec, toolchain: Toolchain) -> Iterable[Limitation]:
        return releases.limitations(spec, toolchain.dialect)

    def warnings(self, toolchain: Toolchain, words: set[str]) -> Iterable[str]:
        return releases.warnings(toolchain.dialect, words)

    def job_payload(
        self,
        job: Job,
        folder: Path,
        *,
        data: Path | None,
        seed_checkpoint: Path | None,
        device: str,
    ) -> JobDocument:
        common = job_document(
            job, folder, data=data, seed_checkpoint=seed_checkpoint, device=device
        )
        # Absent where it goes without saying, as in files of older releases.
        return {**common, **({} if job.spec.deterministic else {"deterministic": False})}

    def is_offline(self, job: Job) -> bool:
        # Our corpus needs no network; torchtitan's own datasets (c4) do.
        return job.spec.train_config.data is not None

    def data_types(self, job: Mapping[str, Any], ran: InForce) -> set[str]:
        named = {"bfloat16"} if Technique.BF16 in (job.get("techniques") or ()) else set()
        return named | super().data_types(job, ran)


TRAINER = Torchtitan()
