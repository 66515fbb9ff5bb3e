"""``converge calibrate``: run controls and their repeats, and keep what they teach."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.cli import matrix
from harness.cli.learnt import keep, learn
from harness.cli.running import gpu_ids, run_jobs
from harness.cli.shared import make_console, names, say, store_of
from harness.errors import ConfigError, Problem, StoreError
from harness.gate import ExitCode
from harness.model import Plan, Role, SignalScale
from harness.plan import select_controls
from harness.references import StoredCalibration, read_calibrations, write_calibrations
from harness.store import require_writable


def calibrate(arguments: argparse.Namespace) -> ExitCode:
    """``converge calibrate``: controls and repeats to calibrations.

    Exit code 3 when the repeats of some control teach nothing that may be judged by; sound
    calibrations of the others are kept then, but no ``--out`` file is written.
    """
    console = make_console()
    on_gpu = bool(gpu_ids())
    whole = matrix.load(arguments.experiment, arguments.launcher, arguments.cluster)
    experiment = select_controls(whole, names(arguments.only))
    out = arguments.out or whole.calibration
    _require_file(out)
    plan = matrix.plan_experiment(experiment, on_gpu=on_gpu, slots=arguments.slots)
    # Now: the plan's identities are made of them, and code may be edited while jobs run.
    surroundings = matrix.surroundings_of(experiment, on_gpu=on_gpu)
    _require_repeats(plan)
    store = store_of(arguments)
    store.require_writable()
    if out is not None:
        require_writable(out.parent)
    ran = run_jobs(plan, store, arguments, console)
    evidences = matrix.read_evidence(plan, ran.records)
    learnt = tuple(learn(plan, evidences, surroundings).values())
    problems = [problem for each in learnt for problem in each.calibration.problems]
    paths = keep(store, learnt)
    if out is not None and not problems:
        fresh = [each.calibration.control for each in learnt]
        others = _others(out, fresh) if arguments.only and out.is_file() else []
        write_calibrations(out, [*others, *learnt])
        paths = [out]
    _show(console, learnt)
    _conclude(console, paths, problems, _next(arguments))
    return ExitCode.UNDECIDED if problems else ExitCode.PASS


def _require_file(out: Path | None) -> None:
    """Refuse a folder now, not after an hour of training."""
    if out is not None and out.is_dir():
        raise ConfigError(
            Problem(f"--out {out}", "is a folder", f"name a file, as {out / 'calibration.json'}")
        )


def _others(out: Path, controls: Collection[str]) -> list[StoredCalibration]:
    """What a file holds of other controls, for a part that is calibrated alone.

    Whether that still fits its control is asked when it is used. A damaged file is made anew.
    """
    try:
        known = read_calibrations(out)
    except StoreError:
        return []
    return [each for each in known if each.calibration.control not in controls]


def _require_repeats(plan: Plan) -> None:
    controls = [job for job in plan.jobs if job.role is Role.CONTROL]
    problems = [
        Problem(
            f"{plan.experiment.path}: control {job.name!r}",
            "has no repeats to learn from",
            'name some, as repeats = ["rerun", "ulp", "ulp.2"]',
        )
        for job in controls
        if not matrix.repeats_of(plan, job)
    ]
    if problems:
        raise ConfigError(problems)


def _next(arguments: argparse.Namespace) -> str:
    words = ["converge", "run", str(arguments.experiment)]
    if arguments.out is not None:
        words += ["--calibration", str(arguments.out)]
    return shlex.join(words)


def _show(console: Console, learnt: Sequence[StoredCalibration]) -> None:
    """A table: per control and signal, how far its repeats lie from it, and how that grows."""
    table = Table(
        title="relative differences of the repeats (root mean square)",
        title_justify="left",
        show_edge=False,
    )
    for title in ("control", "signal"):
        table.add_column(title, overflow="fold")
    for title in ("first step", "middle", "last", "growth"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in learnt:
        calibration = each.calibration
        name = escape(calibration.control)
        for signal, scale in calibration.signals.items():
            table.add_row(name, signal, *_cells(scale))
            name = ""
        if not calibration.signals:
            table.add_row(name, "no repeat differs", "", "", "", "")
    console.print()
    console.print(table)
    for each in learnt:
        calibration = each.calibration
        say(
            console,
            f"{calibration.control}: {calibration.precision}, {calibration.taught_by} of "
            f"{len(calibration.repeats)} repeats differ from it: {', '.join(calibration.repeats)}",
        )


def _conclude(
    console: Console, paths: Sequence[Path], problems: Sequence[str], command: str
) -> None:
    for problem in problems:
        say(console, f"\nproblem: {problem}", "bold red")
    for path in paths:
        say(console, f"calibration: {path}")
    if problems:
        console.print("nothing may pass by such repeats: repair the control, then calibrate again")
    else:
        say(console, f"next: {command}")


def _cells(scale: SignalScale) -> Iterator[str]:
    last = scale.steps.size - 1
    for index in (0, last // 2, last):
        yield f"{scale.scale[index]:.2g} (step {scale.steps[index]})"
    if scale.doubling_steps is not None:
        yield f"doubles every {scale.doubling_steps:.3g} steps"
    else:
        yield f"step^{scale.growth:.2g}"
