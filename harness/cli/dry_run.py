"""``converge plan --dry-run``: whether jobs build, what memory they take, what they cost."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.cli import matrix
from harness.cli.console import PlainConsole
from harness.cli.shared import make_console, names, say
from harness.errors import ConfigError, Problem
from harness.gate import ExitCode
from harness.launch import RunOptions
from harness.launch.dry_run import BUILT_AS_ANOTHER, Answer, dry_run, parts_of, problems_of
from harness.launch.interruption import interruptible
from harness.model import Job, Plan, Role
from harness.surroundings import gpu_models

_UNITS = {2**20: "MiB", 2**30: "GiB"}
_MEMORY = ("parameters", "gradients", "optimizer_states", "activations")
NOT_COVERED = (
    "Per rank, of the pipeline rank with the most. Parameters, gradients and optimizer states are "
    "exact; activations (with gathered parameters and other buffers, as far as they are alive at "
    "the peak) were counted on fake tensors. Not in it: the CUDA context, NCCL's and cuBLAS's "
    "buffers, fragmentation, scratch memory inside kernels; compiled blocks usually need less."
)


@dataclass(frozen=True, slots=True)
class Row:
    """One set, or one segment of an elastic set, of the table."""

    name: str
    job: Job
    largest: Answer
    """Of the pipeline rank with the highest peak."""
    seconds: float
    """That the dry runs of all its stages took together."""
    rss_bytes: int
    """Highest of a process that dry-ran it."""


def show_dry_run(arguments: argparse.Namespace) -> ExitCode:
    """``converge plan --dry-run``.

    Raises ConfigError with all problems of all sets.
    """
    plan = matrix.load_plan(
        arguments.experiment,
        names(arguments.only),
        on_gpu=bool(gpu_models()),
        slots=arguments.slots,
        calibration=arguments.calibration,
        launcher=arguments.launcher,
        cluster=arguments.cluster,
    ).without_golden
    _require_torchtitan(plan)
    device = arguments.device or device_of(plan)
    errors = PlainConsole(stderr=True, highlight=False, soft_wrap=True)
    total, done = len(parts_of(plan.jobs)), 0
    begun = time.monotonic()

    def tell(answer: Answer) -> None:
        nonlocal done
        done += 1
        took = answer.found.get("seconds", 0.0)
        errors.print(f"dry run {done}/{total}: {answer.part.title} ({took:.0f} s)", markup=False)

    with interruptible() as stop:
        answers = dry_run(plan.jobs, device, RunOptions(), os.environ, stop, on_answer=tell)
    wall_s = time.monotonic() - begun
    problems = problems_of(answers)
    throughput = arguments.throughput or plan.experiment.tokens_per_gpu_second
    if arguments.json:
        document = {
            **_document(plan, answers, device, throughput, arguments.gpu_memory),
            "problems": [str(problem) for problem in problems],
            "wall_s": round(wall_s, 1),
        }
        print(json.dumps(document, indent=2))
    else:
        _print(make_console(), plan, answers, device, throughput, arguments.gpu_memory, wall_s)
    if problems:
        raise ConfigError(problems)
    unsupported = any(answer.unsupported for answer in answers)
    return ExitCode.UNDECIDED if unsupported else ExitCode.PASS


def _require_torchtitan(plan: Plan) -> None:
    """Refuse sets that another program trains: nobody but it builds their models."""
    if not all(job.spec.trainer.can.dry_run for job in plan.jobs):
        raise ConfigError(
            Problem(
                f"{plan.experiment.path}: trainer.kind",
                f"is {plan.jobs[0].spec.trainer.kind!r}: a dry run builds torchtitan's models only",
                "leave --dry-run out",
            )
        )


def device_of(plan: Plan) -> str:
    """Where the experiment is meant to run: what ``[cluster]`` says, else by its data.

    Our synthetic corpus is made for laptops: ``cpu``; other data sets: ``cuda``.
    """
    cluster = plan.experiment.cluster
    if cluster is not None:
        return cluster.device
    synthetic = any(job.spec.train_config.data is not None for job in plan.jobs)
    return "cpu" if synthetic else "cuda"


def rows_of(answers: Sequence[Answer]) -> tuple[Row, ...]:
    """The sets that were built, in the plan's order."""
    by_set: dict[tuple[str, int | None], list[Answer]] = {}
    for answer in answers:
        if "peak_bytes" in answer.found:
            by_set.setdefault((answer.part.job.name, answer.part.segment), []).append(answer)
    return tuple(
        Row(
            name if segment is None else f"{name}, segment {segment}",
            each[0].part.job,
            max(each, key=lambda answer: answer.peak_bytes),
            sum(answer.found["seconds"] for answer in each),
            max(answer.found["peak_rss_bytes"] for answer in each),
        )
        for (name, segment), each in by_set.items()
    )


def gpu_hours(job: Job, throughput: float) -> float:
    """Of a job's run at a throughput in tokens per GPU and second; a seed checkpoint trains none.

    The number of GPUs cancels out: half as long on twice as many. A frozen step costs as much as
    any: what it lacks, the update, is the least of it.
    """
    if job.role is Role.SEED:
        return 0.0
    return (job.steps + job.frozen) * job.tokens_per_step / throughput / 3600


def _print(
    console: Console,
    plan: Plan,
    answers: Sequence[Answer],
    device: str,
    throughput: float | None,
    gpu_memory: float | None,
    wall_s: float,
) -> None:
    rows = rows_of(answers)
    if rows:
        console.print(_table(plan, rows, throughput, gpu_memory))
        console.print(f"\n{NOT_COVERED}", soft_wrap=True)
    for line in (*_too_large(rows, gpu_memory), *_estimates(rows)):
        say(console, line)
    for sentence in _stand_ins(rows):
        say(console, f"stands in: {sentence}")
    for job in plan.jobs:
        if job.spec.inject and job.role not in BUILT_AS_ANOTHER:
            console.print(f"{job.name}: its inject function is not called", markup=False)
    for answer in answers:
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
        console.print(f"built as with the first seed: {', '.join(others)}", markup=False)
    say(console, _cost(plan, throughput))
    console.print(f"device: {device}; the dry run took {wall_s:.0f} s", markup=False)


def _table(
    plan: Plan, rows: Sequence[Row], throughput: float | None, gpu_memory: float | None
) -> Table:
    unit = _unit(rows)
    table = Table(
        title=escape(f"{plan.experiment.path}: {_UNITS[unit]} per rank"),
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


def _unit(rows: Iterable[Row]) -> int:
    """In bytes: a debug model would be all zeros in GiB."""
    largest = max(row.largest.peak_bytes for row in rows)
    return max((unit for unit in _UNITS if unit <= largest), default=min(_UNITS))


def _cells(
    row: Row, unit: int, throughput: float | None, gpu_memory: float | None
) -> Iterable[str]:
    found, part = row.largest.found, row.largest.part
    degrees = row.job.spec.parallelism
    yield row.name
    yield str(degrees)
    yield str(degrees.world_size)
    yield f"{part.stage} of {degrees.pp}" if degrees.pp > 1 else "-"
    for kind in _MEMORY:
        exact = kind != "activations" or found[kind]["how"].startswith("traced")
        yield f"{'' if exact else '~'}{found[kind]['bytes'] / unit:.2f}"
    yield f"{found['peak_bytes'] / unit:.1f}"
    if gpu_memory:
        share = found["peak_bytes"] / (gpu_memory * 1e9)
        yield f"{share:.0%}" + (" !" if share > 1 else "")
    if throughput:
        yield f"{gpu_hours(row.job, throughput):,.1f}"
    yield f"{row.seconds:.0f}"
    yield f"{row.rss_bytes / 1e9:.1f}"


def _too_large(rows: Iterable[Row], gpu_memory: float | None) -> Iterable[str]:
    """Sets whose peak alone is more than a GPU has."""
    for row in rows:
        needed = row.largest.peak_bytes / 1e9
        if gpu_memory and needed > gpu_memory:
            yield f"! {row.name}: a peak of {needed:.1f} GB does not fit {gpu_memory:g} GB"


def _estimates(rows: Iterable[Row]) -> Iterable[str]:
    """Sets whose activations could not be counted."""
    for row in rows:
        how = row.largest.found["activations"]["how"]
        if not how.startswith("traced"):
            yield f"{row.name}: ~ activations {how}"


def _stand_ins(rows: Iterable[Row]) -> Iterable[str]:
    return dict.fromkeys(each for row in rows for each in row.largest.found["stand_ins"])


def _cost(plan: Plan, throughput: float | None) -> str:
    if not throughput:
        return (
            "cost: to be told GPU-hours, state tokens per second and GPU: --throughput TOKENS, or "
            "tokens_per_gpu_second under [trainer]"
        )
    total = sum(gpu_hours(job, throughput) for job in plan.jobs)
    repeats = sum(gpu_hours(job, throughput) for job in plan.jobs if job.role is Role.REPEAT)
    return (
        f"cost at {throughput:g} tokens per second and GPU: {total:,.1f} GPU-hours in all, "
        f"{repeats:,.1f} of them for repeats of controls (a seed checkpoint trains no step)"
    )


def _document(
    plan: Plan,
    answers: Sequence[Answer],
    device: str,
    throughput: float | None,
    gpu_memory: float | None,
) -> Mapping[str, Any]:
    def hours(jobs: Iterable[Job]) -> float | None:
        return sum(gpu_hours(job, throughput) for job in jobs) if throughput else None

    largest = [row.largest for row in rows_of(answers)]
    return {
        "schema": 1,
        "experiment": str(plan.experiment.path),
        "device": device,
        "gpu_memory_gb": gpu_memory,
        "tokens_per_gpu_second": throughput,
        "gpu_hours": {
            "total": hours(plan.jobs),
            "jobs": {job.name: hours([job]) for job in plan.jobs},
        },
        "parts": [
            {
                "set": answer.part.job.name,
                "segment": answer.part.segment,
                "pipeline_rank": answer.part.stage,
                "largest": any(answer is each for each in largest),
                "toolchain": answer.part.job.toolchain.name,
                **answer.found,
            }
            for answer in answers
        ],
    }
