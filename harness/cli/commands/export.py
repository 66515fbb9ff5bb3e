"""``converge export``: the curves of a finished matrix for other tools."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from converge_harness.cli.exit_codes import ExitCode
from converge_harness.cli.leaving import leaving_when_interrupted
from converge_harness.errors import ConfigError, Problem
from converge_harness.model import Role

if TYPE_CHECKING:
    from converge_harness.export import ExportedRun
    from converge_harness.matrix.judge import Judged
    from converge_harness.model import Evidence, Job, Plan
    from converge_harness.report.view.curves import Comparison

HELP = "write a finished matrix for TensorBoard or Weights & Biases"
DESCRIPTION = """\
Write a finished matrix for TensorBoard or Weights & Biases: every control, repeat and test set is a
run, with its loss, grad_norm, lr and the other signals under those names, and, as difference/SIGNAL
and limit/SIGNAL, its relative difference from the control and the limit. The matrix is judged again
for that, but verdicts do not change the exit code."""
EPILOG = """\
examples:
  converge export reports/smoke --tensorboard runs/smoke && tensorboard --logdir runs/smoke
  converge export reports/smoke --wandb --offline && wandb sync reports/smoke/wandb/offline-run-*"""
NOT_DONE = ""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="the --out folder of a run")
    parser.add_argument(
        "--tensorboard",
        type=Path,
        metavar="OUT",
        help="a folder for tensorboard --logdir; runs that an earlier export wrote are replaced",
    )
    parser.add_argument(
        "--wandb", action="store_true", help="log to Weights & Biases, as a group of new runs"
    )
    parser.add_argument(
        "--project",
        default="converge",
        metavar="NAME",
        help="of Weights & Biases (default: %(default)s)",
    )
    parser.add_argument(
        "--offline",
        action="store_true",
        help="with --wandb: write to DIR/wandb, send nothing",
    )


def run(arguments: argparse.Namespace) -> ExitCode:
    """Write TensorBoard or Weights & Biases runs; verdicts do not change the exit code."""
    with leaving_when_interrupted():
        from converge_harness.export import write_tensorboard, write_wandb
        from converge_harness.matrix.conclude import conclude_again
    if arguments.tensorboard is None and not arguments.wandb:
        raise ConfigError(
            Problem("converge export", "needs a format", "add --tensorboard OUT, or --wandb")
        )
    if arguments.offline and not arguments.wandb:
        raise ConfigError(Problem("--offline", "applies to Weights & Biases only", "add --wandb"))
    folder: Path = arguments.folder
    finished, evidences, judged = conclude_again(folder)
    runs = tuple(_runs(finished.plan, evidences, judged))
    if arguments.tensorboard is not None:
        write_tensorboard(runs, arguments.tensorboard)
        print(f"{len(runs)} runs; view them with: tensorboard --logdir {arguments.tensorboard}")
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
    """Every run with at least one step, in the plan's order."""
    from converge_harness.export import ExportedPoints, exported
    from converge_harness.report.sanitize import plain

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
                    signal: ExportedPoints(each.difference.steps, each.difference.values)
                    for signal, each in comparisons.items()
                },
                limits={
                    signal: ExportedPoints(each.limit.steps, each.limit.values)
                    for signal, each in comparisons.items()
                },
                facts=_facts(job) | facts.get(job.name, {}),
            )


def _facts(job: Job) -> dict[str, str | int | None]:
    """The fields by which a list of runs is sorted and filtered."""
    from converge_harness.report.view.resumed_run import degrees_of

    return {
        "role": job.role.value,
        "identity": job.identity,
        "degrees": degrees_of(job),
        "world_size": job.world_size,
        "techniques": ", ".join(sorted(job.spec.technique_names)),
        "toolchain": job.toolchain.name,
        "precision": job.precision.value,
        "seed": job.seed,
        "steps": job.steps,
        "global_batch_size": job.global_batch_size,
        "seq_len": job.seq_len,
    }
