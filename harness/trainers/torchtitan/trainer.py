"""torchtitan as a trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from signal import SIGUSR1
from typing import Any

from harness.model import Job, RankError, SetSpec, Surroundings, Technique, Toolchain, TrainerSpec
from harness.trainers.base import Features, Limitation, Start, Trainer, job_document
from harness.trainers.calls import Call, Rendezvous
from harness.trainers.failure import rank_error
from harness.trainers.torchtitan import launching, releases, toolchains

AGENT_MODULE = "harness.rank.agent"
"""torchrun's agent, tied to the life of the harness."""


class Torchtitan(Trainer):
    """torchtitan under torchrun, by rank code of ours."""

    kind = "torchtitan"
    own_rank_code = True
    stack_signal = SIGUSR1

    def identity(self, spec: SetSpec, surroundings: Surroundings) -> Mapping[str, Any]:
        return {}

    def describe(self, spec: SetSpec) -> str:
        return ""

    def find_toolchain(self, name: str, root: Path | None, trainer: TrainerSpec) -> Toolchain:
        return toolchains.find_toolchain(name, root)

    def assume_toolchain(self, name: str, root: Path | None, trainer: TrainerSpec) -> Toolchain:
        return toolchains.assume_toolchain(name, root)

    def features(self, toolchain: Toolchain) -> Features:
        return releases.FEATURES.get(toolchain.dialect, Features())

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
    ) -> dict[str, Any]:
        told = job_document(job, folder, data=data, seed_checkpoint=seed_checkpoint, device=device)
        return {**told}

    def argv(self, job: Job, folder: Path, start: Start) -> tuple[str, ...]:
        return launching.argv(job, folder, start.rank_module, start.call, start.meeting)

    def agent_argv(self, job: Job, folder: Path, start: Start) -> tuple[str, ...]:
        return (
            *(str(start.python or job.toolchain.python), "-m", AGENT_MODULE),
            *launching.torchrun_arguments(
                job, folder, start.rank_module, start.call, start.meeting, start.logs
            ),
        )

    def node_arguments(
        self, job: Job, folder: Path, call: Call, meeting: Rendezvous, rank_module: str
    ) -> tuple[str, ...]:
        return launching.node_arguments(job, folder, call, meeting, rank_module)

    def printable(
        self, job: Job, folder: Path, ranks_per_node: int | None, data: Path | None
    ) -> str:
        return launching.printable_command(job, folder, ranks_per_node)

    def is_offline(self, job: Job) -> bool:
        # Our corpus needs nothing from the network; torchtitan's own datasets (c4) come from it.
        return job.spec.train_config.data is not None

    def error(self, logs: Sequence[Path], failed: Sequence[Path], returncode: int) -> RankError:
        return rank_error(*failed)

    def data_types(self, job: Mapping[str, Any], ran: Mapping[str, Any]) -> set[str]:
        named = {"bfloat16"} if Technique.BF16 in (job.get("techniques") or ()) else set()
        return named | super().data_types(job, ran)


TRAINER = Torchtitan()
