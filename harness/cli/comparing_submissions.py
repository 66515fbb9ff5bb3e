"""``converge compare --rcp``: submissions to MLPerf Training against their reference points."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.cli.compare_forms import margin_of
from harness.cli.shared import make_console
from harness.cli.showing import show_verdicts
from harness.gate import ExitCode, exit_code
from harness.judge import Submission, judge_submission
from harness.model import Verdict
from harness.readers import read_convergence, read_reference_points
from harness.report import build_view


def compare_submissions(arguments: argparse.Namespace) -> ExitCode:
    """Judge each group of logs that ``--test`` names by the points of one table."""
    console = make_console()
    margin = margin_of(arguments)
    points = read_reference_points(arguments.rcp)
    verdicts: list[Verdict] = []
    for paths in arguments.test_seeds:
        runs = tuple(map(read_convergence, paths))
        name = _name(paths, {each.name for each in verdicts})
        verdicts.append(
            judge_submission(name, arguments.rcp.stem, Submission(points, runs, margin))
        )
    view = build_view(
        title=f"{arguments.rcp.stem} and {', '.join(each.name for each in verdicts)}",
        verdicts=verdicts,
        here=Path.cwd(),
    )
    show_verdicts(console, view, arguments.out)
    return exit_code(verdicts)


def _name(paths: list[Path], taken: set[str]) -> str:
    """The folder that holds the logs, as in a submission; else the first of them."""
    tries = (paths[0].resolve().parent.name, str(paths[0].parent), str(paths[0]))
    return next((name for name in tries if name and name not in taken), str(paths[0]))
