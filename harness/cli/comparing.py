"""``converge compare``: judge finished runs, or curves from anywhere, without training."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from harness.cli.compare_forms import (
    check_form,
    columns_of,
    free_name,
    margin_of,
    named_options,
    with_own_options,
)
from harness.cli.comparing_seeds import compare_seeds
from harness.cli.comparing_submissions import compare_submissions
from harness.cli.learnt import read_for_curves, timestamp
from harness.cli.shared import make_console, say
from harness.cli.showing import show_verdicts
from harness.errors import ConfigError, Problem, suggest
from harness.gate import ExitCode, exit_code
from harness.judge import JUDGED_SIGNALS, calibrate, judge, limits
from harness.model import Ask, Calibration, Evidence, Verdict
from harness.readers import read_curves, read_spec, same_path
from harness.references import CALIBRATION_FILE, StoredCalibration, write_calibrations
from harness.report import build_view


def compare(arguments: argparse.Namespace) -> ExitCode:
    """``converge compare``: judge runs or curves from anywhere."""
    check_form(arguments)
    if arguments.rcp:
        return compare_submissions(arguments)
    if arguments.seeds:
        return compare_seeds(arguments)
    console = make_console()
    tolerances = named_options(arguments.tolerance, "--tolerance", _tolerance)
    columns = columns_of(arguments)
    margin = margin_of(arguments)
    ask = Ask(arguments.ask) if arguments.ask else None
    _require_own_repeats(arguments)
    control = read_curves(arguments.control, columns, since=arguments.since)
    control_spec = read_spec(arguments.control)
    calibration = _calibration(arguments, control, columns, console)
    verdicts = []
    envelopes = {}
    evidences = {control.name: control}
    for path in arguments.tests:
        test = read_curves(path, columns, since=arguments.since)
        test = replace(test, name=free_name(test, path, evidences))
        evidences[test.name] = test
        spec = read_spec(path)
        allowed = {**(spec.tolerances if spec else {}), **tolerances}
        verdict = judge(
            test,
            control,
            calibration,
            spec=spec,
            control_spec=control_spec,
            tolerances=allowed,
            margin=margin,
            ask=ask,
            one_path=same_path(path, arguments.control),
        )
        verdict = with_own_options(verdict, arguments)
        plain = spec is None or verdict.not_asked
        verdicts.append(verdict if plain else _with_what_helps(verdict, arguments.out))
        if not verdict.not_asked:
            envelopes[test.name] = limits(test, control, calibration, allowed)
    view = build_view(
        title=f"{control.name} and {', '.join(name for name in evidences if name != control.name)}",
        verdicts=verdicts,
        evidences=evidences.values(),
        envelopes=envelopes,
        calibrations={control.name: calibration} if calibration else {},
        here=Path.cwd(),
    )
    show_verdicts(console, view, arguments.out)
    return exit_code(verdicts)


def _require_own_repeats(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for a repeat that is also what it is to judge, or that is given twice.

    A test set that teaches the limits it is judged by is inside of them, whatever it did; and one
    repeat counted as two makes limits too sharp.
    """
    judged = {"CONTROL": arguments.control, **{f"TEST {path}": path for path in arguments.tests}}
    problems = [
        Problem(
            f"--repeat {repeat}",
            f"is {what} itself",
            "give another run of the control, made for this",
        )
        for repeat in arguments.repeat
        for what, path in judged.items()
        if same_path(repeat, path)
    ]
    problems += [
        Problem(f"--repeat {repeat}", "is given twice", "each repeat counts once")
        for index, repeat in enumerate(arguments.repeat)
        if any(same_path(repeat, before) for before in arguments.repeat[:index])
    ]
    if problems:
        raise ConfigError(problems)


def _with_what_helps(verdict: Verdict, out: Path | None) -> Verdict:
    """For run folders: not this command again, but for the report, which has every parameter."""
    if not verdict.next_command.startswith("converge compare "):
        return verdict
    more = "" if out is not None else f"{verdict.next_command} --out report"
    return replace(verdict, next_command=more)


def _calibration(
    arguments: argparse.Namespace,
    control: Evidence,
    columns: Mapping[str, str],
    console: Console,
) -> Calibration | None:
    """From a file, or from the repeats that are given; None when there is neither.

    What given repeats teach is written beside the reports, for a later ``--calibration``.
    """
    if arguments.calibration is not None:
        if arguments.repeat:
            raise ConfigError(
                Problem("--calibration and --repeat", "are two sources of one thing: give one")
            )
        read, note = read_for_curves(arguments.calibration, control)
        if note:
            say(console, f"note: {note}", "yellow")
        return read
    if not arguments.repeat:
        return None
    repeats = [read_curves(path, columns, since=arguments.since) for path in arguments.repeat]
    learnt = calibrate(control, repeats)
    if arguments.out is not None:
        known = {repeat.name: repeat.identity for repeat in repeats}
        write_calibrations(
            arguments.out / CALIBRATION_FILE, [StoredCalibration(learnt, known, {}, timestamp())]
        )
    return learnt


def _tolerance(place: str, signal: str, value: str) -> float | Problem:
    """``loss=1e-3`` to its number."""
    if signal not in JUDGED_SIGNALS:
        return Problem(place, f"there is no signal {signal!r}", suggest(signal, JUDGED_SIGNALS))
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not (math.isfinite(limit) and limit >= 0):
        return Problem(place, f"{value!r} is no relative difference", "as in loss=1e-3")
    return limit
