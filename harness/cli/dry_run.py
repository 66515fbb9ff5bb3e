"""``converge plan --dry-run``: whether jobs can be built, their memory and their cost."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from converge_harness.cli.console import error_console, make_console, say
from converge_harness.cli.exit_codes import ExitCode
from converge_harness.cli.options import plan_of
from converge_harness.errors import ConfigError
from converge_harness.launch.dry_run import BUILT_AS_ANOTHER, DryRunResult, parts_of
from converge_harness.matrix.cost import cost_of, gpu_hours
from converge_harness.matrix.dry_run import DryRun, DryRunRow, dry_run
from converge_harness.model import Plan, Role

_UNITS = {2**20: "MiB", 2**30: "GiB"}
NOT_COVERED = (
    "Per rank, for the pipeline rank that needs most. Parameters, gradients and optimizer states "
    "are exact; activations (with gathered parameters and other buffers alive at the peak) were "
    "counted on fake tensors. Not included: the CUDA context, NCCL's and cuBLAS's "
    "buffers, fragmentation, scratch memory inside kernels; compiled blocks usually need less."
)


def show_dry_run(arguments: argparse.Namespace) -> ExitCode:
    """Build every job and print the result.

    Raises ConfigError with all problems of all sets.
    """
    plan = plan_of(arguments).without_baseline
    errors = error_console()
    total, done = len(parts_of(plan.jobs)), 0

    def show_progress(answer: DryRunResult) -> None:
        nonlocal done
        done += 1
        took = answer.found.get("seconds", 0.0)
        errors.print(f"dry run {done}/{total}: {answer.part.title} ({took:.0f} s)", markup=False)

    made = dry_run(
        plan,
        device=arguments.device,
        throughput=arguments.throughput,
        gpu_memory=arguments.gpu_memory,
        on_answer=show_progress,
    )
    if arguments.json:
        print(json.dumps(made.document, indent=2))
    else:
        _print(make_console(), made)
    if made.problems:
        raise ConfigError(made.problems)
    unsupported = any(answer.unsupported for answer in made.answers)
    return ExitCode.UNDECIDED if unsupported else ExitCode.PASS


def _not_called(plan: Plan) -> Iterator[str]:
    """The user's functions that only a real run calls."""
    for job in plan.jobs:
        if job.role in BUILT_AS_ANOTHER:
            continue
        if job.spec.inject:
            yield f"{job.name}: its inject function is not called"
        names = ", ".join(own.name for own in job.spec.own_techniques if own.functions)
        if names:
            yield f"{job.name}: the functions of {names} are not called"


def _print(console: Console, made: DryRun) -> None:
    plan, rows = made.plan, made.rows
    if rows:
        console.print(_table(made))
        console.print(f"\n{NOT_COVERED}", soft_wrap=True)
    for line in (*_too_large(rows, made.gpu_memory), *_estimates(rows)):
        say(console, line)
    for sentence in _stand_ins(rows):
        say(console, f"replaced: {sentence}")
    for sentence in _not_called(plan):
        console.print(sentence, markup=False)
    for answer in made.answers:
        if answer.unsupported:
            say(
                console,
                f"{answer.part.title}: not supported for toolchain "
                f"{answer.part.job.toolchain.name}: {answer.unsupported}",
                "yellow",
            )
    repeats = [job.name for job in plan.jobs if job.role is Role.REPEAT]
    if repeats:
        console.print(f"built as their controls: {', '.join(repeats)}", markup=False)
    if others := [job.name for job in plan.jobs if job.role is Role.OTHER_SEED]:
        console.print(f"built as for the first seed: {', '.join(others)}", markup=False)
    say(console, _cost(plan, made.throughput))
    console.print(f"device: {made.device}; the dry run took {made.wall_s:.0f} s", markup=False)


def _table(made: DryRun) -> Table:
    rows, throughput, gpu_memory = made.rows, made.throughput, made.gpu_memory
    unit = _unit(rows)
    table = Table(
        title=escape(f"{made.plan.experiment.path}: {_UNITS[unit]} per rank"),
        title_justify="left",
        show_edge=False,
    )
    table.add_column("set", overflow="fold")
    table.add_column("degrees", overflow="fold")
    titles = ["ranks", "pp rank", "params", "grads", "optim", "activ", "peak"]
    titles += [f"of {gpu_memory:g} GB"] if gpu_memory else []
    titles += ["GPU-h"] if throughput else []
    for title in (*titles, "s", "RSS GB"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, _cells(row, unit, throughput, gpu_memory)))
    return table


def _unit(rows: Iterable[DryRunRow]) -> int:
    """Bytes per unit: in GiB, a debug model's numbers would all be zero."""
    largest = max(row.largest.peak_bytes for row in rows)
    return max((unit for unit in _UNITS if unit <= largest), default=min(_UNITS))


def _cells(
    row: DryRunRow, unit: int, throughput: float | None, gpu_memory: float | None
) -> Iterable[str]:
    found, part = row.largest.found, row.largest.part
    degrees = row.job.spec.parallelism
    yield row.name
    yield str(degrees)
    yield str(degrees.world_size)
    yield f"{part.stage} of {degrees.pp}" if degrees.pp > 1 else "-"
    activations = found["activations"]
    for kind in (found["parameters"], found["gradients"], found["optimizer_states"]):
        yield f"{kind['bytes'] / unit:.2f}"
    exact = activations["how"].startswith("traced")
    yield f"{'' if exact else '~'}{activations['bytes'] / unit:.2f}"
    yield f"{found['peak_bytes'] / unit:.1f}"
    if gpu_memory:
        share = found["peak_bytes"] / (gpu_memory * 1e9)
        yield f"{share:.0%}" + (" !" if share > 1 else "")
    if throughput:
        yield f"{gpu_hours(row.job, throughput):,.1f}"
    yield f"{row.seconds:.0f}"
    yield f"{row.rss_bytes / 1e9:.1f}"


def _too_large(rows: Iterable[DryRunRow], gpu_memory: float | None) -> Iterable[str]:
    """Sets whose peak exceeds a GPU's memory."""
    for row in rows:
        needed = row.largest.peak_bytes / 1e9
        if gpu_memory and needed > gpu_memory:
            yield f"! {row.name}: a peak of {needed:.1f} GB does not fit {gpu_memory:g} GB"


def _estimates(rows: Iterable[DryRunRow]) -> Iterable[str]:
    """Sets whose activations could not be counted."""
    for row in rows:
        how = row.largest.found["activations"]["how"]
        if not how.startswith("traced"):
            yield f"{row.name}: ~ activations {how}"


def _stand_ins(rows: Iterable[DryRunRow]) -> Iterable[str]:
    return dict.fromkeys(each for row in rows for each in row.largest.found["stand_ins"])


def _cost(plan: Plan, throughput: float | None) -> str:
    if not throughput:
        return (
            f"{cost_of(plan).sentence(None)}; for GPU-hours, state tokens per second and GPU: "
            "--throughput TOKENS, or tokens_per_gpu_second under [trainer]"
        )
    repeats = sum(gpu_hours(job, throughput) for job in plan.jobs if job.role is Role.REPEAT)
    return (
        f"{cost_of(plan).sentence(throughput)}; of the whole, {repeats:,.1f} are for repeats of "
        "controls (a seed checkpoint trains no step)"
    )
