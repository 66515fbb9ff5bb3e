"""``converge calibrate``: run controls and repeats, store the limits learnt."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from converge_harness.cli.exit_codes import ExitCode
from converge_harness.cli.leaving import leaving_when_interrupted
from converge_harness.cli.options import (
    add_cluster,
    add_experiment,
    add_running,
    add_slots,
    names,
    store_of,
)
from converge_harness.errors import ConfigError, Problem, StoreError
from converge_harness.model import Role

if TYPE_CHECKING:
    from rich.console import Console

    from converge_harness.calibrations import StoredCalibration
    from converge_harness.model import Plan, SignalScale

HELP = "repeat the controls and learn how much correct runs differ"
DESCRIPTION = """\
Run every control of an experiment and its A/A repeats (plain reruns, initial weights moved by one
ulp, the samples of a batch distributed to the ranks in another order), learn how much correct
runs of it differ at every step, and store that. `converge run` does the same by itself; with a
calibration stored in a file, later runs need no repeats. It is refused as soon as it no longer
matches the control."""
EPILOG = """\
examples:
  converge calibrate experiments/smoke.toml
  converge calibrate experiments/llama3_8b.toml --out calibrations/llama3_8b.json
  converge run experiments/llama3_8b.toml --calibration calibrations/llama3_8b.json"""
NOT_DONE = ", nothing was launched"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    add_experiment(parser, only="only these controls")
    add_slots(parser)
    add_cluster(parser)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="one file for all controls (default: the experiment's `calibration`, else "
        "STORE/calibrations/IDENTITY.json for each)",
    )
    add_running(parser)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Run controls and repeats, and write calibrations.

    Exit code 3 when the repeats of some control are too unsound to judge by; the calibrations of
    the other controls are stored then, but no ``--out`` file is written.
    """
    with leaving_when_interrupted():
        from converge_harness.calibrations import write_calibrations
        from converge_harness.cli.console import make_console
        from converge_harness.cli.progress import run_shown
        from converge_harness.matrix.calibrate import learn, store_calibrations
        from converge_harness.matrix.judge import read_evidence
        from converge_harness.matrix.load import load_with_cluster, plan_experiment
        from converge_harness.matrix.run import gpu_ids
        from converge_harness.plan import select_controls
        from converge_harness.store import require_writable
    console = make_console()
    whole = load_with_cluster(arguments.experiment, arguments.launcher, arguments.cluster)
    experiment = select_controls(whole, names(arguments.only))
    out = arguments.out or whole.calibration
    _require_file(out)
    plan = plan_experiment(experiment, on_gpu=bool(gpu_ids()), slots=arguments.slots)
    _require_repeats(plan)
    store = store_of(arguments)
    store.require_writable()
    if out is not None:
        require_writable(out.parent)
    ran = run_shown(plan, store, arguments, console)
    evidences = read_evidence(plan, ran.records, ran.kept)
    learnt = tuple(learn(plan, evidences).values())
    problems = [problem for each in learnt for problem in each.calibration.problems]
    paths = store_calibrations(store, learnt)
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
    """A file's calibrations of other controls, which ``--only`` leaves as they are.

    Whether they still match their controls is checked on use. A damaged file is replaced.
    """
    from converge_harness.calibrations import read_calibrations

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
        if not plan.repeats_of(job)
    ]
    if problems:
        raise ConfigError(problems)


def _next(arguments: argparse.Namespace) -> str:
    command = ["converge", "run", str(arguments.experiment)]
    if arguments.out is not None:
        command += ["--calibration", str(arguments.out)]
    return shlex.join(command)


def _show(console: Console, learnt: Sequence[StoredCalibration]) -> None:
    """Print per control and signal how much its repeats differ from it, and how that grows."""
    from rich.markup import escape
    from rich.table import Table

    from converge_harness.cli.console import say

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
    from converge_harness.cli.console import say

    for problem in problems:
        say(console, f"\nproblem: {problem}", "bold red")
    for path in paths:
        say(console, f"calibration: {path}")
    if problems:
        console.print(
            "no test set can PASS with such repeats: fix the control, then calibrate again"
        )
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
