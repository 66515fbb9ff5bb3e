"""``converge notify``: what a person is told of a night, if anything."""

from __future__ import annotations

import argparse

from harness.cli.nights import history_of
from harness.errors import HistoryError
from harness.gate import ExitCode
from harness.history import Filter
from harness.night import body, night
from harness.store import atomic_write


def notify(arguments: argparse.Namespace) -> ExitCode:
    """``converge notify``: write a body on the first bad night, and no file on others."""
    history = history_of(arguments)
    report = str(arguments.folder.resolve())
    results = history.listing(Filter())
    found = next((entry for entry in results if entry.report == report), None)
    if found is None:
        raise HistoryError(
            f"{history.path}: no night was reported to {report}; give the --out folder of a "
            "`converge run`, or its history with --history"
        )
    of_experiment = [entry for entry in results if entry.experiment == found.experiment]
    told = night(of_experiment, found.night)
    text = body(told)
    arguments.body.unlink(missing_ok=True)
    if text is None:
        again = f"; {len(told.bad)} still bad, told of before" if told.bad else ""
        print(f"nothing new to tell of {found.experiment}{again}")
    else:
        atomic_write(arguments.body, text.encode())
        print(f"{len(told.news)} bad for the first time: {arguments.body}")
    return ExitCode.PASS
