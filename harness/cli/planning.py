"""``converge plan``: what would run, for people and for programs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.cli import covering, matrix
from harness.cli.shared import make_console, names, store_of
from harness.errors import ConfigError, Problem
from harness.gate import ExitCode
from harness.model import Fault, FaultKind, Plan, Role, Torn
from harness.plan import PlanRow, describe
from harness.surroundings import gpu_models
from harness.toolchain import assume_toolchain
from harness.trainers import printable_command


def plan(arguments: argparse.Namespace) -> ExitCode:
    """``converge plan``: what would run, or with ``--cover`` what could."""
    if arguments.cover is not None:
        return covering.cover(arguments)
    covering.require_cover(arguments)
    made = matrix.load_plan(
        arguments.experiment,
        names(arguments.only),
        on_gpu=bool(gpu_models()),
        slots=arguments.slots,
        calibration=arguments.calibration,
        launcher=arguments.launcher,
        cluster=arguments.cluster,
        find=assume_toolchain,
    )
    store = store_of(arguments)
    described = describe(made)
    per_node = arguments.ranks_per_node
    _check_nodes(made, per_node)
    commands = {
        job.name: printable_command(job, store.run_folder(job.name, job.identity), per_node)
        for job in made.jobs
    }
    if arguments.json:
        print(json.dumps(_plan_document(made, described, commands), indent=2))
        return ExitCode.PASS
    console = make_console()
    console.print(_plan_table(made, described))
    for row in described:
        _print_set(console, row, commands[row.name])
    besides = [job.name for job in made.jobs if job.role in (Role.SEED, Role.REPEAT)]
    console.print(
        f"\nbesides, for initial weights and tolerances: {', '.join(besides)}",
        markup=False,
        soft_wrap=True,
    )
    if made.experiment.calibration is not None:
        if not made.experiment.calibration.is_file():
            again = f"make it with: converge calibrate {arguments.experiment}"
            raise ConfigError(
                Problem(f"calibration {made.experiment.calibration}", f"is not there; {again}")
            )
        console.print(
            f"tolerances learnt before: {made.experiment.calibration}", markup=False, soft_wrap=True
        )
    console.print(f"per-tensor evidence: {_sampled(made)}", markup=False, soft_wrap=True)
    return ExitCode.PASS


def _check_nodes(made: Plan, per_node: int | None) -> None:
    """Refuse nodes that a set's ranks would not fill."""
    if per_node is None:
        return
    option = f"--ranks-per-node {per_node}"
    uneven = [job for job in made.jobs if job.world_size > per_node and job.world_size % per_node]
    if uneven:
        raise ConfigError(
            [
                Problem(option, f"the {job.world_size} ranks of {job.name!r} do not fill nodes")
                for job in uneven
            ]
        )


def _plan_table(made: Plan, described: Sequence[PlanRow]) -> Table:
    table = Table(title=escape(str(made.experiment.path)), title_justify="left", show_edge=False)
    for title in ("set", "degrees"):
        table.add_column(title, overflow="fold")
    for title in ("ranks", "steps", "batch", "tokens/step"):
        # Of a run in segments, each has its own way to the same batch.
        table.add_column(title, justify="right", no_wrap=title != "batch", overflow="fold")
    for row in described:
        table.add_row(
            escape(row.name),
            ", ".join(map(str, (each.parallelism for each in row.segments)))
            or str(row.parallelism),
            str(row.world_size),
            str(row.steps),
            _batch(row),
            f"{row.tokens_per_step:,}",
        )
    return table


def _batch(row: PlanRow) -> str:
    """Global batch as dp ranks x local batch (x accumulation): ``32 = 8x4``.

    Of a run in segments those of each: ``8 = 2x4, 1x4x2``.
    """
    parts = [(each.parallelism.dp, each.local_batch_size) for each in row.segments]
    made = (
        _product(row.global_batch_size, dp, local)
        for dp, local in parts or [(row.parallelism.dp, row.local_batch_size)]
    )
    return f"{row.global_batch_size} = {', '.join(made)}"


def _product(samples: int, dp: int, local: int) -> str:
    accumulated = samples // (dp * local)
    return f"{dp}x{local}" + (f"x{accumulated}" if accumulated > 1 else "")


def _sampled(made: Plan) -> str:
    """The sampled steps, those of the longest job."""
    steps = max((job.sample_steps for job in made.jobs), key=len)
    return f"at steps {', '.join(map(str, steps))}" if steps else "none (probe.cadence is off)"


def _print_set(console: Console, row: PlanRow, command: str) -> None:
    console.print(f"\n[bold]{escape(row.name)}[/bold]  {escape(row.serves)}", soft_wrap=True)
    on = f"{_ranks(row.world_size)} (one GPU each, where there are GPUs), {row.toolchain}"
    techniques = ", ".join(row.techniques) or "no technique"
    console.print(f"  {techniques}; {on}", markup=False, soft_wrap=True)
    for line in _kind_lines(row):
        console.print(f"  {line}", markup=False, soft_wrap=True)
    if row.note:
        console.print(f"  {row.note}", markup=False, soft_wrap=True)
    for rule in row.waives:
        console.print(f"  waives the rule {escape(rule)}", style="yellow", soft_wrap=True)
    console.print(f"  {command}", style="dim", markup=False, soft_wrap=True)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"


def _kind_lines(row: PlanRow) -> Iterator[str]:
    """Segments of an elastic set, or the script of a fault set."""
    first = 1
    for segment in row.segments:
        degrees, schedule = segment.parallelism, segment.pipeline_schedule
        samples = degrees.dp * segment.local_batch_size
        yield (
            f"steps {first}-{segment.until}: {degrees}{f' {schedule}' if schedule else ''}, "
            f"{_ranks(degrees.world_size)}, local batch {segment.local_batch_size}, "
            f"{row.global_batch_size // samples} x accumulated"
        )
        first = segment.until + 1
    recovery = row.recovery
    if recovery is not None:
        yield f"faults: {'; '.join(map(_fault, recovery.faults))}"
        fewest, most = recovery.nodes
        nodes = f", {fewest} to {most} nodes (first {recovery.first_nodes})" if most > 1 else ""
        yield (
            f"a checkpoint every {recovery.checkpoint_every} steps; restarts by "
            f"{recovery.restarts.value}, at most {recovery.max_restarts}, each within "
            f"{recovery.within_s:g} s{nodes}"
        )
    if row.passes > 1:
        yield f"{row.passes} passes"


def _fault(fault: Fault) -> str:
    """``kill of rank 1 at step 6``."""
    of = ""
    if fault.kind is FaultKind.CKPT_TORN:
        rank = f" of rank {fault.rank}" if fault.torn is Torn.TRUNCATED else ""
        of = f"{rank} ({fault.torn.value})"
    elif fault.kind is FaultKind.AGENT_LOSS:
        of = f" of node {fault.node}"
    elif fault.kind not in (FaultKind.PREEMPT, FaultKind.JOIN):
        of = f" of rank {fault.rank}"
    return f"{fault.kind.value}{of} at step {fault.step}"


def _plan_document(
    made: Plan, described: Sequence[PlanRow], commands: dict[str, str]
) -> dict[str, object]:
    return {
        "schema": 1,
        "experiment": str(made.experiment.path),
        "waived": list(made.waived),
        "sets": [{**asdict(row), "command": commands[row.name]} for row in described],
        "jobs": [
            {
                "name": job.name,
                "role": job.role.value,
                "identity": job.identity,
                "world_size": job.world_size,
                "sample_steps": list(job.sample_steps),
                "toolchain": job.toolchain.name,
                "python": str(job.toolchain.python),
                "command": commands[job.name],
            }
            for job in made.jobs
        ],
    }
