"""Megatron-Core as a trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from packaging.version import Version

from converge_harness.errors import Problem, ToolchainError
from converge_harness.model import (
    DATA_TYPE_KEYS,
    Capabilities,
    ConfigKeys,
    InForce,
    Job,
    Repeat,
    RepeatKind,
    SetSpec,
    Surroundings,
    Technique,
    Toolchain,
    TrainConfig,
    TrainerSpec,
)
from converge_harness.run_folder.job import JobDocument
from converge_harness.run_folder.weight_mapping import (
    WeightMapping,
    weight_mapping_of,
)
from converge_harness.toml import Where
from converge_harness.toolchains.find import assume_environment, build_hint, find_environment
from converge_harness.toolchains.recipes import has_recipe, recipe_of
from converge_harness.trainers.base import OfMicrobatch
from converge_harness.trainers.config_audit import ConfigAudit
from converge_harness.trainers.mapping import read_mapping
from converge_harness.trainers.megatron.mapping import name_problems
from converge_harness.trainers.megatron.table import (
    DEFAULT_TOOLCHAIN,
    MODEL_KEYS,
    OWNED,
    MegatronTable,
    has_auxiliary_loss,
    megatron_train_config,
    refused_settings,
    set_problems,
)
from converge_harness.trainers.table import TrainerOfFile, environment_of
from converge_harness.trainers.torchrun import TorchrunTrainer

DISTRIBUTION = "megatron-core"
FIRST, MAIN = "0.16", "0.20"
"""The oldest series that the dialect drives, and that of Megatron-LM's main branch."""
DIALECT = "megatron_0_16"
AUXILIARY_LOSS = OfMicrobatch(
    "the auxiliary loss", "use a per-sample loss (seq_aux_loss) in both sets"
)
WARMUP_STEPS = "lr_scheduler.lr_warmup_steps"
MEGATRON = TrainerSpec(
    "megatron",
    Capabilities(
        probed=True,
        all_signals=True,
        counts_tokens=True,
        shares_initial_weights=True,
        techniques=True,
        references=True,
        frozen_steps=True,
        checks_config=True,
        warm_start=True,
        repeatable_argv=True,
    ),
    defaults=MappingProxyType({**dict.fromkeys(DATA_TYPE_KEYS, "float32"), WARMUP_STEPS: 0}),
    keys=ConfigKeys(
        max_norm="optimizer.clip_grad",
        gradients_in_float32="ddp.grad_reduce_in_fp32",
        warmup_steps=WARMUP_STEPS,
    ),
    audit=ConfigAudit(
        named_by=MappingProxyType({Technique.BF16: (("training.dtype", "bfloat16"),)})
    ),
)


class Megatron(TorchrunTrainer):
    """Megatron-Core's GPT under torchrun."""

    kind = "megatron"
    table = MegatronTable
    imports = ("torch", "megatron.core")
    owned_keys = OWNED
    model_keys = MODEL_KEYS
    mapping_key = "weights"

    def default_spec(self) -> TrainerSpec:
        return MEGATRON

    def of_file(
        self, table: MegatronTable, where: Where, folders: Sequence[Path], problems: list[Problem]
    ) -> TrainerOfFile:
        toolchain = environment_of(table.toolchain, where, folders, problems)
        if table.weights is None:
            return TrainerOfFile(MEGATRON, toolchain)
        mapping = read_mapping(table.weights, folders, where, problems, name_problems)
        return TrainerOfFile(replace(MEGATRON, settings=mapping), toolchain, maps_weights=True)

    def train_config(self, tables: Mapping[str, Any], path: str, place: str) -> TrainConfig:
        return megatron_train_config(tables, path, place)

    def override_problems(self, overrides: Mapping[str, Any], where: Where) -> Iterable[Problem]:
        return refused_settings(overrides, lambda key: where(f"set.{key}"))

    def set_problems(
        self,
        table: MegatronTable,
        spec: SetSpec,
        own: Mapping[str, Any],
        where: Where,
        whole: Where,
    ) -> Iterable[Problem]:
        return set_problems(spec, where)

    def unmakeable(
        self, repeat: Repeat, trainer: TrainerSpec, controls: Sequence[SetSpec]
    ) -> tuple[str, str]:
        """Its batches come from converge's own loader, which can distribute them otherwise."""
        if repeat.kind is not RepeatKind.PERMUTE:
            return super().unmakeable(repeat, trainer, controls)
        others = [spec.name for spec in controls if self.of_microbatch(spec)]
        if not others:
            return "", ""
        why = (
            f"is not possible for {', '.join(map(repr, others))}: its auxiliary loss is per "
            "microbatch, so other samples in one make it a different objective"
        )
        return why, "leave it out, or use rerun and ulp repeats"

    def of_microbatch(self, spec: SetSpec) -> OfMicrobatch | None:
        return AUXILIARY_LOSS if has_auxiliary_loss(spec) else None

    def identity(self, spec: SetSpec, surroundings: Surroundings) -> Mapping[str, Any]:
        return {"trainer": self.kind, **_weights(spec)}

    def describe(self, spec: SetSpec) -> str:
        return "Megatron-Core"

    def find_toolchain(self, name: str, root: Path | None, trainer: TrainerSpec) -> Toolchain:
        """The toolchain, if it has a Megatron-Core of the series that the dialect drives."""
        found = find_environment(name, root, DIALECT)
        version = self.release(found)
        if version is None:
            other = has_recipe(name) and DISTRIBUTION not in recipe_of(name).recipe.alone
            hint = f"name toolchain = {DEFAULT_TOOLCHAIN!r}" if other else build_hint(name)
            raise ToolchainError(f"{found.python} has no {DISTRIBUTION}; {hint}")
        if not Version(FIRST).release <= Version(version).release[:2] <= Version(MAIN).release:
            raise ToolchainError(
                f"{found.python} has {DISTRIBUTION} {version}; converge's rank code is written for "
                f"{FIRST} to 0.19 and main ({MAIN}): name toolchain = {DEFAULT_TOOLCHAIN!r}"
            )
        return found

    def assume_toolchain(self, name: str, root: Path | None, trainer: TrainerSpec) -> Toolchain:
        found = assume_environment(name, root, DIALECT)
        return self.find_toolchain(name, root, trainer) if found.versions else found

    def release(self, toolchain: Toolchain) -> str | None:
        return toolchain.versions.get(DISTRIBUTION)

    def toolchain_for(self, config: TrainConfig | None = None) -> str:
        return DEFAULT_TOOLCHAIN

    def job_payload(
        self,
        job: Job,
        folder: Path,
        *,
        data: Path | None,
        seed_checkpoint: Path | None,
        device: str,
    ) -> JobDocument:
        payload = super().job_payload(
            job, folder, data=data, seed_checkpoint=seed_checkpoint, device=device
        )
        return {**payload, **_weights(job.spec)}

    def is_offline(self, job: Job) -> bool:
        return True

    def spec_of(self, job: Mapping[str, Any]) -> TrainerSpec:
        return replace(MEGATRON, settings=weight_mapping_of(job.get("weights")))

    def data_types(self, job: Mapping[str, Any], ran: InForce) -> set[str]:
        """bfloat16 if it is named or in force."""
        named = {"bfloat16"} if Technique.BF16 in (job.get("techniques") or ()) else set()
        return named | {str(ran.param_dtype)}


def _weights(spec: SetSpec) -> JobDocument:
    """The names of another trainer's checkpoint, if a set starts from one."""
    mapping: WeightMapping | None = spec.trainer.settings
    return {"weights": mapping.document()} if mapping else {}


TRAINER = Megatron()
