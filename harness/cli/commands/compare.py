"""``converge compare``: judge finished runs, or curves from anywhere, without training."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from converge_harness.cli.exit_codes import EXIT_CODES, ExitCode, exit_code
from converge_harness.cli.leaving import leaving_when_interrupted
from converge_harness.cli.options import names
from converge_harness.errors import ConfigError, Problem, suggest
from converge_harness.model import Ask

if TYPE_CHECKING:
    from rich.console import Console

    from converge_harness.matrix.compare import Reading
    from converge_harness.matrix.judge import Judged
    from converge_harness.model import Calibration, Evidence, Verdict

T = TypeVar("T")

HELP = "judge finished runs, or curves from anywhere, against a control"
DESCRIPTION = """\
Judge finished run folders, or curves from anywhere, against a control, without training. Readable:
our run folders, TensorBoard folders, JSONL, CSV, torchtitan's console logs, "step loss" texts,
Hugging Face trainer_state.json, logs of MLPerf Training, Weights & Biases offline runs, Megatron-LM
golden values. Curves are judged on what they hold, and what had no evidence is said. Limits come
from repeats of the control (--repeat, --calibration). Curves without any PASS within rounding, or
within a --margin or --tolerance that you set, FAIL where they differ grossly, and are else
INCONCLUSIVE. A --tolerance is of single steps; whether the mean loss is the same is asked beside
it, within 0.1% or your --margin. Curves of other seeds (--seeds) are compared as two groups, by the
mean loss of their second halves; a change that is meant to change numbers (--ask "no worse")
by its loss alone."""
EXAMPLES = """\
examples:
  two runs of ours, by the repeats of the first:
    converge compare .converge/runs/fsdp2-… .converge/runs/fsdp2_tp2-… \\
      --repeat .converge/runs/fsdp2.ulp-… --repeat .converge/runs/fsdp2.ulp.2-…
  several curves against one, with a tolerance somebody chose:
    converge compare main.csv branch.csv nightly.jsonl --tolerance loss=1e-3
  names that are not the usual ones:
    converge compare a.csv b.csv --columns step=iteration loss="lm loss"
  a resumed run, from the step at which it was resumed:
    converge compare whole.csv resumed.csv --from 51
  long noisy curves: is the mean loss the same within 0.5%?
    converge compare a.jsonl b.jsonl --margin 0.005 --out report
  runs of other seeds: two groups, of which no run belongs to one of the other:
    converge compare --seeds --control a1.csv a2.csv a3.csv --test b1.csv b2.csv b3.csv \\
      --margin 0.005
  another optimizer: is its loss no higher than the control's by more than 1%?
    converge compare --seeds --control adamw-*.csv --test muon-*.csv \\
      --ask "no worse" --margin 0.01
  does it reach a loss of 2.5 in no more than 5% more steps?
    converge compare --seeds --control adamw-*.csv --test muon-*.csv --target loss=2.5 \\
      --margin 0.05
  a submission to MLPerf Training: neither faster nor later than its reference?
    converge compare --rcp rcps_llama31_8b.json --test result_*.txt --margin 0.05"""
EPILOG = f"{EXAMPLES}\n\n{EXIT_CODES}"
UNDONE = ""

PAIRS = "converge compare CONTROL TEST"
SEEDS = "converge compare --seeds --control A1 A2 A3 --test B1 B2 B3"
SUBMISSION = "converge compare --rcp rcps_BENCHMARK.json --test result_*.txt"
"""The three forms."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """What it takes."""
    parser.add_argument(
        "control", type=Path, nargs="?", metavar="CONTROL", help="run folder or curve file"
    )
    parser.add_argument(
        "tests", type=Path, nargs="*", metavar="TEST", help="run folders or curve files to judge"
    )
    parser.add_argument(
        "--seeds",
        action="store_true",
        help="compare groups of runs of several seeds, which --control and --test name instead of "
        "CONTROL and TEST",
    )
    parser.add_argument(
        "--control",
        dest="control_seeds",
        type=Path,
        nargs="+",
        default=[],
        metavar="RUN",
        help="with --seeds: the control's runs, one per seed, at least two",
    )
    parser.add_argument(
        "--test",
        dest="test_seeds",
        type=Path,
        nargs="+",
        action="append",
        default=[],
        metavar="RUN",
        help="with --seeds or --rcp: the runs of one test set, one per seed, at least two (may be "
        "given again for another set)",
    )
    parser.add_argument(
        "--ask",
        choices=[each.value for each in Ask],
        metavar="QUESTION",
        help='what a test set has to show: "same" as the control (default), or "no worse": whole '
        "runs, and a loss that is no higher by more than the margin",
    )
    parser.add_argument(
        "--target",
        metavar="loss=VALUE",
        help="with --seeds: ask whether a loss of VALUE is reached in no more steps than the "
        "control needs, by more than --margin, which is then relative to those steps",
    )
    parser.add_argument(
        "--rcp",
        type=Path,
        metavar="TABLE",
        help="hold the MLPerf Training logs of --test against a table of reference convergence "
        "points (rcps_BENCHMARK.json): by MLPerf's rule, not faster beyond chance; with --margin "
        "no later, too",
    )
    parser.add_argument(
        "--repeat",
        type=Path,
        action="append",
        default=[],
        metavar="RUN",
        help="an A/A repeat of the control, to learn the envelope from (may be given again)",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="what repeats of the control taught before, instead of --repeat: a file of `converge "
        "calibrate --out`, or the calibration.json of a report folder",
    )
    parser.add_argument(
        "--columns",
        action="append",
        nargs="+",
        default=[],
        metavar="SIGNAL=COLUMN",
        help="what the curve files call step, loss, grad_norm, lr … where it is another name",
    )
    parser.add_argument(
        "--tolerance",
        action="append",
        default=[],
        metavar="SIGNAL=RELATIVE",
        help="largest allowed relative difference of a signal at any step, as loss=1e-3: replaces "
        "what was learnt",
    )
    parser.add_argument(
        "--margin",
        type=_fraction,
        metavar="RELATIVE",
        help="largest relative difference of the mean loss that still counts as equivalent, as "
        "0.005 for 0.5%% (default: by the precision of the runs)",
    )
    parser.add_argument(
        "--from",
        dest="since",
        type=_step,
        metavar="STEP",
        help="compare the curves from this step on, as where one of them is of a run that was "
        "resumed there (default: all steps)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write reports here as well")


def _step(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no step: write a whole number, as 51")
    return int(text)


def _fraction(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number: write 0.01 for 1%") from None


def run(arguments: argparse.Namespace) -> ExitCode:
    """Exit code by the verdicts."""
    with leaving_when_interrupted():
        from converge_harness.cli.console import make_console
        from converge_harness.cli.verdicts import show_verdicts
        from converge_harness.matrix.compare import (
            CurveQuestion,
            Reading,
            compare_seeds,
            compare_submissions,
        )
    _check_form(arguments)
    console = make_console()
    if arguments.rcp:
        judged = compare_submissions(arguments.rcp, arguments.test_seeds, _margin_of(arguments))
    elif arguments.seeds:
        reading = Reading(_columns_of(arguments), arguments.since)
        question = CurveQuestion(
            margin=_margin_of(arguments), ask=_ask_of(arguments), target=_target_of(arguments)
        )

        def advise(verdict: Verdict, *, of_run: bool) -> Verdict:  # noqa: ARG001 - as Advise
            return _with_own_options(verdict, arguments)

        judged = compare_seeds(
            arguments.control_seeds, arguments.test_seeds, reading, question, advise
        )
    else:
        judged = _compare_pairs(arguments, console)
    show_verdicts(console, judged.view, arguments.out)
    return exit_code(judged.verdicts)


def _compare_pairs(arguments: argparse.Namespace, console: Console) -> Judged:
    """Judge each TEST against CONTROL, step by step."""
    from converge_harness.matrix.compare import (
        CurveQuestion,
        Given,
        Reading,
        compare_curves,
        read_tests,
    )

    tolerances = _named_options(arguments.tolerance, "--tolerance", _tolerance)
    reading = Reading(_columns_of(arguments), arguments.since)
    question = CurveQuestion(_ask_of(arguments), _margin_of(arguments), tolerances)
    _require_own_repeats(arguments)
    control = reading.read(arguments.control)
    calibration = _calibration(arguments, control, reading, console)

    def advise(verdict: Verdict, *, of_run: bool) -> Verdict:
        verdict = _with_own_options(verdict, arguments)
        if of_run and not verdict.not_asked:
            return _with_what_helps(verdict, arguments.out)
        return verdict

    return compare_curves(
        Given(control, arguments.control),
        read_tests(control, arguments.tests, reading),
        question,
        calibration,
        advise,
        here=Path.cwd(),
    )


def _calibration(
    arguments: argparse.Namespace, control: Evidence, reading: Reading, console: Console
) -> Calibration | None:
    """From a file, or from the repeats that are given; None when there is neither.

    What given repeats teach is written beside the reports, for a later ``--calibration``.
    """
    from converge_harness.cli.console import say
    from converge_harness.matrix.calibrate import read_for_curves
    from converge_harness.matrix.compare import learn_from_repeats

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
    return learn_from_repeats(control, arguments.repeat, reading, arguments.out)


def _require_own_repeats(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for a repeat that is also what it is to judge, or that is given twice.

    A test set that teaches the limits it is judged by is inside of them, whatever it did; and one
    repeat counted as two makes limits too sharp.
    """
    from converge_harness.readers import same_path

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


# ------------------------------------------------------------------ forms, and what options say


def _check_form(arguments: argparse.Namespace) -> None:
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
    from converge_harness.readers import same_path

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


def _target_of(arguments: argparse.Namespace) -> float | None:
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


def _margin_of(arguments: argparse.Namespace) -> float | None:
    """``--margin``; raises ConfigError for a value that is no margin."""
    margin: float | None = arguments.margin
    if margin is not None and not 0 < margin < 1:
        raise ConfigError(
            Problem(f"--margin {margin}", "is no relative difference", "as in 0.005 for 0.5%")
        )
    return margin


def _ask_of(arguments: argparse.Namespace) -> Ask | None:
    """``--ask``."""
    return Ask(arguments.ask) if arguments.ask else None


def _columns_of(arguments: argparse.Namespace) -> dict[str, str]:
    """``--columns`` by signal; raises ConfigError for one that is not ``SIGNAL=COLUMN``."""
    return _named_options(names(arguments.columns), "--columns", _column)


def _with_own_options(verdict: Verdict, arguments: argparse.Namespace) -> Verdict:
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


def _named_options(
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


def _tolerance(place: str, signal: str, value: str) -> float | Problem:
    """``loss=1e-3`` to its number."""
    from converge_harness.judge import JUDGED_SIGNALS

    if signal not in JUDGED_SIGNALS:
        return Problem(place, f"there is no signal {signal!r}", suggest(signal, JUDGED_SIGNALS))
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not (math.isfinite(limit) and limit >= 0):
        return Problem(place, f"{value!r} is no relative difference", "as in loss=1e-3")
    return limit
