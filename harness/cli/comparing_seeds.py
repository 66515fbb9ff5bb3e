"""``converge compare --seeds``: groups of runs of several seeds against each other."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness.cli.compare_forms import columns_of, free_name, margin_of, target_of, with_own_options
from harness.cli.shared import make_console
from harness.cli.showing import show_verdicts
from harness.gate import ExitCode, exit_code
from harness.judge import judge
from harness.model import Ask, Evidence, SeedRuns
from harness.readers import read_curves, read_spec
from harness.report import build_view


def compare_seeds(arguments: argparse.Namespace) -> ExitCode:
    """Judge each group of runs that ``--test`` names against that of ``--control``.

    No run of one side belongs to one of the other, so nothing is compared step by step.
    """
    console = make_console()
    columns, margin = columns_of(arguments), margin_of(arguments)
    ask = Ask(arguments.ask) if arguments.ask else None
    target = target_of(arguments)
    taken: dict[str, Evidence] = {}
    control = _read(arguments.control_seeds, columns, arguments.since, taken)
    control_spec = read_spec(arguments.control_seeds[0])
    verdicts, seeds = [], {}
    for paths in arguments.test_seeds:
        runs = SeedRuns(control, _read(paths, columns, arguments.since, taken))
        verdict = judge(
            runs.test[0],
            control[0],
            spec=read_spec(paths[0]),
            control_spec=control_spec,
            margin=margin,
            ask=ask,
            seeds=runs,
            same_seed=False,
            target=target,
        )
        verdicts.append(with_own_options(verdict, arguments))
        seeds[verdict.name] = runs
    tests = ", ".join(_counted(runs.test) for runs in seeds.values())
    view = build_view(
        title=f"{_counted(control)} and {tests}",
        verdicts=verdicts,
        evidences=taken.values(),
        here=Path.cwd(),
        seeds=seeds,
    )
    show_verdicts(console, view, arguments.out)
    return exit_code(verdicts)


def _counted(runs: Sequence[Evidence]) -> str:
    return f"{runs[0].name} ({len(runs)} seeds)"


def _read(
    paths: Sequence[Path],
    columns: Mapping[str, str],
    since: int | None,
    taken: dict[str, Evidence],
) -> tuple[Evidence, ...]:
    """The runs of one side, each with a name of its own, which is taken then."""
    runs = []
    for path in paths:
        read = read_curves(path, columns, since=since)
        run = replace(read, name=free_name(read, path, taken))
        taken[run.name] = run
        runs.append(run)
    return tuple(runs)
