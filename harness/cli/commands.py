"""The commands that judge: arguments in, printed verdicts and an exit code out."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness import corpus
from harness.cli import matrix
from harness.cli.display import Display
from harness.cli.saved import SavedMatrix, load_matrix, save_matrix
from harness.cli.shared import WIDE, make_console, names, store_of
from harness.errors import ConfigError, Problem, suggest
from harness.experiment import load_experiment
from harness.gate import ExitCode, exit_code
from harness.judge import JUDGED_SIGNALS, judge, limits
from harness.launch import RunOptions, run_plan
from harness.launch.events import Preparing
from harness.model import Judgement, Plan, SyntheticData
from harness.readers import read_curves, read_spec
from harness.report import HEADER, ReportView, build_view, rows, write_reports
from harness.store import require_writable, slug
from harness.surroundings import gpu_models

STYLES = {
    Judgement.PASS: "bold green",
    Judgement.FAIL: "bold red",
    Judgement.INVALID: "bold magenta",
    Judgement.ERROR: "bold yellow",
    Judgement.INCONCLUSIVE: "bold cyan",
}


def run(arguments: argparse.Namespace) -> ExitCode:
    """``converge run``: bring every job to a record, judge, report."""
    console = make_console()
    begun = time.monotonic()
    gpus = tuple(range(len(gpu_models())))
    only = names(arguments.only)
    plan = matrix.load_plan(arguments.experiment, only, on_gpu=bool(gpus), slots=arguments.slots)
    store = store_of(arguments)
    store.require_writable()
    folder = arguments.out or Path("reports") / slug(plan.experiment.name)
    require_writable(folder)  # now, not after an hour of training
    with Display(console) as display:
        display(Preparing(time.time(), f"{plan.experiment.name}: {len(plan.jobs)} jobs"))
        data = matrix.prepare_data(plan, store)
        options = RunOptions(
            data={values: prepared.folder for values, prepared in data.items()},
            gpus=gpus,
            fresh=arguments.fresh,
            warm=not arguments.cold,
        )
        records = run_plan(plan, store, options, display)
    finished = SavedMatrix(plan, records, matrix.versions_of(plan), _entropy_floor(plan, data))
    save_matrix(folder, finished, only, on_gpu=bool(gpus))
    judged = _judge(finished, wall_s=time.monotonic() - begun)
    _show(console, judged.view, folder)
    return exit_code(judged.verdicts)


def report(arguments: argparse.Namespace) -> ExitCode:
    """``converge report``: judge a finished matrix again."""
    judged = _judge(load_matrix(arguments.folder))
    _show(make_console(), judged.view, arguments.folder)
    return exit_code(judged.verdicts)


def compare(arguments: argparse.Namespace) -> ExitCode:
    """``converge compare``: judge runs or curves from anywhere."""
    tolerances = dict(_tolerance(text) for text in arguments.tolerance)
    control = read_curves(arguments.control)
    control_spec = read_spec(arguments.control)
    repeats = [read_curves(path) for path in arguments.repeat]
    verdicts = []
    envelopes = {}
    evidences = {control.name: control}
    for path in arguments.tests:
        test = read_curves(path)
        if test.name in evidences:
            test = replace(test, name=str(path))
        evidences[test.name] = test
        spec = read_spec(path)
        allowed = {**(spec.tolerances if spec else {}), **tolerances}
        verdicts.append(
            judge(
                test,
                control,
                repeats,
                spec=spec,
                control_spec=control_spec,
                tolerances=allowed,
            )
        )
        envelopes[test.name] = limits(test, control, repeats, allowed)
    view = build_view(
        title=f"{control.name} and {', '.join(name for name in evidences if name != control.name)}",
        verdicts=verdicts,
        evidences=evidences.values(),
        envelopes=envelopes,
    )
    _show(make_console(), view, arguments.out)
    return exit_code(verdicts)


def toolchains(arguments: argparse.Namespace) -> ExitCode:
    """``converge toolchains``: the environments that an experiment needs."""
    for name in matrix.toolchain_names(load_experiment(arguments.experiment)):
        print(name)
    return ExitCode.PASS


def _tolerance(text: str) -> tuple[str, float]:
    """``loss=1e-3`` to its parts."""
    signal, _, value = text.partition("=")
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    problems = []
    if signal not in JUDGED_SIGNALS:
        problems.append(
            Problem(
                f"--tolerance {text}",
                f"there is no signal {signal!r}",
                suggest(signal, JUDGED_SIGNALS),
            )
        )
    if not (math.isfinite(limit) and limit >= 0):
        problems.append(
            Problem(
                f"--tolerance {text}", f"{value!r} is no relative difference", "as in loss=1e-3"
            )
        )
    if problems:
        raise ConfigError(problems)
    return signal, limit


def _judge(finished: SavedMatrix, wall_s: float | None = None) -> matrix.Judged:
    return matrix.judge_matrix(
        finished.plan,
        finished.records,
        versions=finished.versions,
        entropy_floor=finished.entropy_floor,
        wall_s=wall_s,
    )


def _entropy_floor(plan: Plan, data: Mapping[SyntheticData, corpus.PreparedData]) -> float | None:
    """Floor of the corpus that all jobs read; None when they read several, or a real one."""
    used = {job.spec.train_config.data for job in plan.jobs}
    (only, *others) = used
    return None if others or only is None else data[only].entropy_nats_per_token


def _show(console: Console, view: ReportView, folder: Path | None) -> None:
    """Write the reports, then end with the verdict table, as the reports begin with it."""
    paths = write_reports(view, folder) if folder else []
    shown = _columns(console.width)
    table = Table(title=escape(view.title), title_justify="left", show_edge=False)
    for title in shown:
        table.add_column(title, overflow="fold", no_wrap=title == "verdict")
    for row in rows(view):
        cells = dict(zip(HEADER, (row.judgement.value, *map(escape, row[1:])), strict=True))
        cells["verdict"] = _styled(row.judgement)
        table.add_row(*(cells[title] for title in shown))
    console.print()
    console.print(table)
    for row in rows(view):
        if row.cause:
            console.print(f"\n{_styled(row.judgement)} [bold]{escape(row.name)}[/]:", end=" ")
            console.print(row.cause, markup=False, soft_wrap=True)
    console.print(f"\n{escape(view.headline)}", style="bold")
    if paths:
        console.print(f"report: {paths[0]}", markup=False, soft_wrap=True)


def _styled(judgement: Judgement) -> str:
    return f"[{STYLES[judgement]}]{judgement.value}[/]"


def _columns(width: int) -> tuple[str, ...]:
    """The columns of the verdict table that fit; the reports have them all.

    Causes are sentences: they follow the table.
    """
    wide = width >= WIDE
    return tuple(
        title
        for title in HEADER
        if title != "cause" and (wide or title not in ("techniques", "wall"))
    )
