"""The forms that ``converge compare`` may be given, and what both of them read from arguments."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from harness.cli.shared import names
from harness.errors import ConfigError, Problem
from harness.model import Ask, Evidence, Verdict
from harness.readers import same_path

T = TypeVar("T")

PAIRS = "converge compare CONTROL TEST"
SEEDS = "converge compare --seeds --control A1 A2 A3 --test B1 B2 B3"
SUBMISSION = "converge compare --rcp rcps_BENCHMARK.json --test result_*.txt"


def check_form(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for a mixture of forms, with the command that would do."""
    form = _of_submissions if arguments.rcp else _of_seeds if arguments.seeds else _of_pairs
    problems = list(form(arguments))
    if problems:
        raise ConfigError(problems)


def _of_pairs(arguments: argparse.Namespace) -> Iterator[Problem]:
    if arguments.target is not None:
        yield Problem(f"--target {arguments.target}", "is asked of seeds", f"write {SEEDS}")
    for option, given in (("--control", arguments.control_seeds), ("--test", arguments.test_seeds)):
        if given:
            yield Problem(option, "names runs of several seeds", f"write {SEEDS}")
            return
    if arguments.control is None or not arguments.tests:
        missing = "no CONTROL" if arguments.control is None else "no TEST"
        yield Problem("compare", f"is given {missing}", f"write {PAIRS}, or {SEEDS}")
    if arguments.ask == Ask.NO_WORSE.value:
        asking = f'--ask "{arguments.ask}"'
        yield from _unused(arguments, f"{asking} looks at the mean loss alone")


def _of_seeds(arguments: argparse.Namespace) -> Iterator[Problem]:
    stray = [path for path in (arguments.control, *arguments.tests) if path is not None]
    if stray:
        which = " ".join(map(str, stray))
        yield Problem(which, "belongs to neither side of --seeds", f"write {SEEDS}")
    for option, given in (("--control", arguments.control_seeds), ("--test", arguments.test_seeds)):
        if not given:
            yield Problem("--seeds", f"is given without {option}", f"write {SEEDS}")
    yield from _unused(arguments, "--seeds compares groups, not single steps")
    yield from _twice([*arguments.control_seeds, *map(Path, names(arguments.test_seeds))])


def _of_submissions(arguments: argparse.Namespace) -> Iterator[Problem]:
    table = f"--rcp {arguments.rcp}"
    stray = [path for path in (arguments.control, *arguments.tests) if path is not None]
    stray += arguments.control_seeds
    if stray:
        which = " ".join(map(str, stray))
        yield Problem(which, f"is no run of a submission: {table} is the control", SUBMISSION)
    if not arguments.test_seeds:
        yield Problem(table, "is given without --test", f"write {SUBMISSION}")
    for option, value in (
        ("--seeds", arguments.seeds),
        ("--target", arguments.target),
        ("--ask", arguments.ask),
        ("--columns", arguments.columns),
        ("--from", arguments.since),
    ):
        if value:
            yield Problem(
                option, f"changes nothing: {table} asks when targets are reached", "leave it out"
            )
    yield from _unused(arguments, f"{table} asks when targets are reached")
    yield from _twice([*map(Path, names(arguments.test_seeds))])


def _twice(paths: Sequence[Path]) -> Iterator[Problem]:
    for index, path in enumerate(paths):
        if any(same_path(path, before) for before in paths[:index]):
            yield Problem(str(path), "is given twice", "each run counts once, on one side")


def _unused(arguments: argparse.Namespace, why: str) -> Iterator[Problem]:
    """Options that would be passed over."""
    for option, value in (
        ("--repeat", arguments.repeat),
        ("--calibration", arguments.calibration),
        ("--tolerance", arguments.tolerance),
    ):
        if value:
            yield Problem(option, f"changes nothing: {why}", "leave it out; --margin is the limit")


def target_of(arguments: argparse.Namespace) -> float | None:
    """``--target``; raises ConfigError for one that is no loss, or that has no margin."""
    if arguments.target is None:
        return None
    place = f"--target {arguments.target}"
    name, _, value = arguments.target.partition("=")
    try:
        target = float(value) if name == "loss" else math.nan
    except ValueError:
        target = math.nan
    if not math.isfinite(target):
        raise ConfigError(Problem(place, "is no target loss", "as in loss=2.5"))
    if arguments.margin is None:
        raise ConfigError(
            Problem(place, "needs a margin", "--margin 0.05 allows 5% more steps than the control")
        )
    if arguments.ask == Ask.SAME.value:
        raise ConfigError(
            Problem(place, "asks for no more steps, not for the same", 'leave --ask "same" out')
        )
    return target


def margin_of(arguments: argparse.Namespace) -> float | None:
    """``--margin``; raises ConfigError for one that is none."""
    margin: float | None = arguments.margin
    if margin is not None and not 0 < margin < 1:
        raise ConfigError(
            Problem(f"--margin {margin}", "is no relative difference", "as in 0.005 for 0.5%")
        )
    return margin


def columns_of(arguments: argparse.Namespace) -> dict[str, str]:
    """``--columns`` by signal; raises ConfigError for one that is not ``SIGNAL=COLUMN``."""
    return named_options(names(arguments.columns), "--columns", _column)


def with_own_options(verdict: Verdict, arguments: argparse.Namespace) -> Verdict:
    """The next command of a verdict with the options that its curves were read and judged by."""
    command = verdict.next_command
    if not command.startswith("converge compare "):
        return verdict
    more = [
        *(f" --tolerance {shlex.quote(each)}" for each in arguments.tolerance),
        f" --margin {arguments.margin:g}" if arguments.margin is not None else "",
        f" --from {arguments.since}" if arguments.since is not None else "",
        " --columns " + shlex.join(names(arguments.columns)) if arguments.columns else "",
    ]
    missing = (each for each in more if each and each.split()[0] not in command.split())
    return replace(verdict, next_command=command + "".join(missing))


def free_name(test: Evidence, path: Path, taken: Iterable[str]) -> str:
    """A name that no other curve has: its own, else its path, else that with a number."""
    tries = [test.name, str(path), *(f"{path} ({count})" for count in range(2, 1000))]
    return next(name for name in tries if name not in taken)


def named_options(
    written: Sequence[str], option: str, parse: Callable[[str, str, str], T | Problem]
) -> dict[str, T]:
    """``NAME=VALUE`` arguments by name; what is wrong with any of them in one ConfigError."""
    parsed: dict[str, T] = {}
    problems = []
    for text in written:
        name, _, value = text.partition("=")
        result = parse(f"{option} {text}", name, value)
        if isinstance(result, Problem):
            problems.append(result)
        elif name in parsed:
            problems.append(Problem(f"{option} {text}", f"{name} is given twice"))
        else:
            parsed[name] = result
    if problems:
        raise ConfigError(problems)
    return parsed


def _column(place: str, signal: str, column: str) -> str | Problem:
    """``loss=lm loss`` to the column's name; which signals there are, the readers say."""
    if signal and column:
        return column
    return Problem(place, "is not written SIGNAL=COLUMN", 'as in step=iteration loss="lm loss"')
