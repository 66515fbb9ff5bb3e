"""``converge export``: the curves of a finished matrix for other tools."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.cli.commands import judge_again
from harness.cli.matrix import Judged
from harness.errors import ConfigError, Problem
from harness.export import ExportedRun, Points, exported, write_tensorboard, write_wandb
from harness.gate import ExitCode
from harness.model import Evidence, Job, Plan, Role
from harness.report.passes import degrees_of
from harness.report.sanitize import plain
from harness.report.view import Comparison


def export(arguments: argparse.Namespace) -> ExitCode:
    """``converge export``: write TensorBoard or Weights & Biases runs; nothing is gated."""
    if arguments.tensorboard is None and not arguments.wandb:
        raise ConfigError(
            Problem("converge export", "is told no format", "add --tensorboard OUT, or --wandb")
        )
    if arguments.offline and not arguments.wandb:
        raise ConfigError(Problem("--offline", "is about Weights & Biases", "add --wandb"))
    folder: Path = arguments.folder
    finished, evidences, judged = judge_again(folder)
    runs = tuple(_runs(finished.plan, evidences, judged))
    if arguments.tensorboard is not None:
        write_tensorboard(runs, arguments.tensorboard)
        print(f"{len(runs)} runs; look at them with: tensorboard --logdir {arguments.tensorboard}")
    if arguments.wandb:
        made = write_wandb(
            runs,
            folder,
            project=arguments.project,
            group=judged.view.title,
            offline=arguments.offline,
        )
        for path in made:
            print(path)
        if arguments.offline:
            print(f"{len(made)} runs; send them with: wandb sync {folder}/wandb/offline-run-*")
    return ExitCode.PASS


def _runs(plan: Plan, evidences: Mapping[str, Evidence], judged: Judged) -> Iterator[ExportedRun]:
    """Every run that left a step, in the plan's order."""
    compared: dict[str, Mapping[str, Comparison]] = {
        repeat.run.name: repeat.comparisons for repeat in judged.view.repeats
    } | {test.run.name: test.comparisons for test in judged.view.tests}
    facts: dict[str, dict[str, str | int | None]] = {
        verdict.name: {
            "against": verdict.control,
            "verdict": verdict.judgement.value,
            "cause": verdict.cause,
            "onset_step": verdict.onset_step,
        }
        for verdict in judged.verdicts
    }
    for job in plan.jobs:
        if job.role is not Role.SEED and evidences[job.name].steps.size:
            comparisons = compared.get(plain(job.name), {})
            yield exported(
                evidences[job.name],
                job.role,
                differences={
                    signal: Points(each.difference.steps, each.difference.values)
                    for signal, each in comparisons.items()
                },
                limits={
                    signal: Points(each.limit.steps, each.limit.values)
                    for signal, each in comparisons.items()
                },
                facts=_facts(job) | facts.get(job.name, {}),
            )


def _facts(job: Job) -> dict[str, str | int | None]:
    """What a list of runs is sorted and filtered by."""
    return {
        "role": job.role.value,
        "identity": job.identity,
        "degrees": degrees_of(job),
        "world_size": job.world_size,
        "techniques": ", ".join(sorted(job.spec.techniques)),
        "toolchain": job.toolchain.name,
        "precision": job.precision.value,
        "seed": job.seed,
        "steps": job.steps,
        "global_batch_size": job.global_batch_size,
        "seq_len": job.seq_len,
    }
