"""``converge run``: run every job of a matrix, calibrate, judge, report."""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from converge_harness.cli.exit_codes import EXIT_CODES, GIT_BISECT, ExitCode, exit_code
from converge_harness.cli.leaving import leaving_when_interrupted
from converge_harness.cli.options import (
    add_calibration,
    add_cluster,
    add_experiment,
    add_history_file,
    add_reports,
    add_running,
    add_slots,
    history_of,
    names,
    plan_of,
    positive,
    report_folder,
    store_of,
)

if TYPE_CHECKING:
    from rich.console import Console

    from converge_harness.matrix.against import BaseRevision
    from converge_harness.matrix.judge import Judged
    from converge_harness.matrix.load import Finder
    from converge_harness.matrix.run import Ran
    from converge_harness.model import Plan
    from converge_harness.store import Store

HELP = "run an experiment matrix and judge it"
DESCRIPTION = "Run every job of an experiment that has not run yet, judge, and report."
EPILOG = f"example: converge run experiments/smoke.toml --only fsdp2_tp2\n\n{EXIT_CODES}"
NOT_DONE = ", nothing was launched"

BASE = "base"
"""Folder of the reports of ``--against``'s revision, inside the matrix's."""
EXPLAIN_MINUTES = 30
FLOAT32 = "float32"
"""Folder of the report of ``--explain``, inside the matrix's."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    add_experiment(parser)
    add_slots(parser)
    add_reports(parser)
    parser.add_argument(
        "--explain",
        action="store_true",
        help="run sets that failed in lower precision again in float32, and say whether the "
        "difference comes from rounding; look into the first wrong module of every set that failed "
        "otherwise, in a short rerun, for the operation to blame; then shrink those with several "
        "techniques or degrees, as `converge shrink` does",
    )
    parser.add_argument(
        "--explain-minutes",
        type=positive,
        default=EXPLAIN_MINUTES,
        metavar="M",
        help="with --explain: look into and shrink no more sets after M minutes "
        f"({EXPLAIN_MINUTES})",
    )
    parser.add_argument(
        "--against",
        metavar="REV",
        help="also run everything with the code of this git revision of your fork (the checkout "
        "from which the experiment's Python imports torchtitan, or that has the experiment's own "
        "code), and report for every set whether it is bitwise the same, the same within rounding, "
        "or different; exit code 0 if none is different and no verdict got worse, else 1",
    )
    parser.add_argument(
        GIT_BISECT,
        action="store_true",
        help="exit codes for `git bisect run`: 0 if every set passes, 1 if one fails, 125 (skip "
        "this commit) for everything else; `converge bisect` searches by itself",
    )
    add_history_file(parser)
    add_cluster(parser)
    add_calibration(parser)
    add_running(parser)
    parser.add_argument(
        "--build",
        action="store_true",
        help="build the toolchains that are missing or out of date first (`converge toolchain "
        "build`)",
    )


def run(arguments: argparse.Namespace) -> ExitCode:
    """Exit code by the verdicts."""
    with leaving_when_interrupted():
        from converge_harness.cli.console import make_console
        from converge_harness.cli.plan_table import print_left_out
        from converge_harness.cli.progress import run_shown
        from converge_harness.matrix.against import compare_with_base, shown_with, write_against
        from converge_harness.matrix.calibrate import read_given
        from converge_harness.matrix.conclude import conclude
        from converge_harness.matrix.operations import write_findings
        from converge_harness.store import require_writable
    console = make_console()
    begun = time.monotonic()
    plan = plan_of(arguments, find=_building(console) if arguments.build else None)
    print_left_out(console, plan)
    if arguments.against:  # every step of both sides is compared
        plan = replace(plan, experiment=replace(plan.experiment, stop_after=None))
    given = read_given(plan)
    store = store_of(arguments)
    store.require_writable()
    folder = report_folder(arguments, plan.experiment)
    require_writable(folder)  # now, not after an hour of training
    with ExitStack() as used:
        base = _base(plan, arguments.against, used, console) if arguments.against else None
        ran_before = run_shown(base.plan, store, arguments, console) if base else None
        ran = run_shown(plan, store, arguments, console)
        history = history_of(arguments)
        judged = conclude(
            plan,
            ran,
            folder,
            store=store,
            given=given,
            selected=names(arguments.only),
            wall_s=time.monotonic() - begun,
        )
        against = None
        if base and ran_before:
            before = _conclude_base(base, ran_before, folder / BASE, store)
            against = compare_with_base(base, (ran_before, before), plan, (ran, judged))
    write_against(folder, against)
    write_findings(folder, {})
    # Imported here: a command that is refused draws nothing and need not pay for it.
    from converge_harness.cli.verdicts import add_night, show_verdicts

    view = shown_with(judged.view, plan, against)
    show_verdicts(console, view, folder)
    add_night(
        console,
        history,
        plan,
        ran.records,
        judged.verdicts,
        folder=folder,
        wall_s=judged.wall_s,
    )
    if arguments.explain:
        _explain(console, plan, replace(judged, view=view), folder, store, arguments)
    return exit_code(judged.verdicts, against)


def _base(plan: Plan, revision: str, used: ExitStack, console: Console) -> BaseRevision:
    """The plan with the code of a revision, checked out until ``used`` is closed."""
    from converge_harness.checkout import described
    from converge_harness.cli.console import say
    from converge_harness.matrix.against import base_of, fork_of

    fork = fork_of(plan, revision)
    say(
        console,
        f"{fork.checkout} at {described(fork.checkout)} is tested against {fork.title}, which runs "
        "first",
    )
    return used.enter_context(base_of(plan, fork))


def _conclude_base(base: BaseRevision, ran: Ran, folder: Path, store: Store) -> Judged:
    """Judge the base by itself; its reports go to a folder of their own."""
    from converge_harness.matrix.conclude import conclude
    from converge_harness.report import write_reports

    judged = conclude(base.plan, ran, folder, store=store, save=False)
    write_reports(judged.view, folder)
    return judged


def _building(console: Console) -> Finder:
    from converge_harness.cli.building import building

    return building(console)


def _explain(
    console: Console,
    plan: Plan,
    judged: Judged,
    folder: Path,
    store: Store,
    arguments: argparse.Namespace,
) -> None:
    """Run what failed in low precision again in float32, look into and shrink the rest.

    What that shows is printed; operations are added to the reports.
    """
    from converge_harness.cli.console import say
    from converge_harness.cli.progress import run_shown
    from converge_harness.cli.shrinking import shrink_set, shrunk_folder
    from converge_harness.matrix.explain import explain, not_rounded, to_shrink
    from converge_harness.report import write_reports
    from converge_harness.store import require_writable

    verdicts = judged.verdicts
    until = time.monotonic() + 60.0 * arguments.explain_minutes
    explained = explain(
        plan,
        verdicts,
        lambda made: run_shown(made, store, arguments, console),
        arguments.slots,
    )
    if explained is None:
        say(console, "no set failed in low precision: nothing to run again in float32")
    else:
        paths = write_reports(explained.judged.view, folder / FLOAT32)
        console.print()
        for sentence in explained.explanations:
            say(console, sentence)
        say(console, f"report in float32: {paths[0]}")
    failed = replace(judged, verdicts=not_rounded(verdicts, explained))
    _find_operations(console, plan, failed, folder, store, arguments, until)
    for name in to_shrink(plan, verdicts, explained):
        console.print()
        if time.monotonic() < until:
            out = shrunk_folder(name)
            require_writable(out)
            code = shrink_set(console, plan.experiment, name, out, store, arguments, until=until)
            if code is ExitCode.INTERRUPTED:
                raise KeyboardInterrupt
        else:
            say(console, f"{name}: not shrunk, {_over(arguments)}")


def _find_operations(
    console: Console,
    plan: Plan,
    judged: Judged,
    folder: Path,
    store: Store,
    arguments: argparse.Namespace,
    until: float,
) -> None:
    """Say which operation of the first wrong modules is to blame, also in the reports.

    No rerun begins after ``until`` on the monotonic clock.
    """
    from converge_harness.cli.console import say
    from converge_harness.cli.quiet import RunningQuietly
    from converge_harness.matrix.operations import (
        find_operation,
        to_look_into,
        with_findings,
        write_findings,
    )
    from converge_harness.report import write_reports

    findings = {}
    for verdict in to_look_into(judged.verdicts):
        console.print()
        if time.monotonic() >= until:
            say(console, f"{verdict.name}: not looked into, {_over(arguments)}")
            continue
        say(console, f"{verdict.name}: looking into {verdict.module}, by a short rerun")
        run = RunningQuietly(console, store, arguments)
        findings[verdict.name] = find_operation(plan.experiment, verdict, run, arguments.slots)
        say(console, findings[verdict.name].sentence)
        write_findings(folder, findings)
    if findings:
        write_reports(with_findings(judged.view, findings), folder)


def _over(arguments: argparse.Namespace) -> str:
    return f"because the {arguments.explain_minutes} --explain-minutes are over"
