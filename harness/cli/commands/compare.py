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
our run folders, TensorBoard folders, JSONL, CSV, console logs of torchtitan and Megatron-LM, "step
loss" texts, Hugging Face trainer_state.json, logs of MLPerf Training, Weights & Biases offline
runs, Megatron-LM golden values. Curves are judged by the signals they hold; the report says which
checks had no evidence. Limits come from repeats of the control (--repeat, --calibration). Without
any, curves PASS within rounding, or within a --margin or --tolerance that you set, FAIL where they
differ grossly, and are INCONCLUSIVE otherwise. A --tolerance applies to single steps; the mean loss
is tested as well, within 0.1% or your --margin. Runs with several seeds (--seeds) are compared as
two groups, by the mean loss of their second halves; a change that is meant to change numbers (--ask
"no worse") is judged by its loss alone."""
EXAMPLES = """\
examples:
  two runs of converge, by the repeats of the first:
    converge compare .converge/runs/fsdp2-… .converge/runs/fsdp2_tp2-… \\
      --repeat .converge/runs/fsdp2.ulp-… --repeat .converge/runs/fsdp2.ulp.2-…
  several curves against one, with a tolerance of your own:
    converge compare main.csv branch.csv nightly.jsonl --tolerance loss=1e-3
  columns with unusual names:
    converge compare a.csv b.csv --columns step=iteration loss="lm loss"
  only one of them logged the grad norm: the loss alone
    converge compare a.csv b.csv --without grad_norm
  a resumed run, from the step at which it was resumed:
    converge compare whole.csv resumed.csv --from 51
  long noisy curves: is the mean loss the same within 0.5%?
    converge compare a.jsonl b.jsonl --margin 0.005 --out report
  several seeds: two groups, whose runs do not come in pairs:
    converge compare --seeds --control a1.csv a2.csv a3.csv --test b1.csv b2.csv b3.csv \\
      --margin 0.005
  another optimizer: is its loss no higher than the control's by more than 1%?
    converge compare --seeds --control adamw-*.csv --test muon-*.csv \\
      --ask "no worse" --margin 0.01
  does it reach a loss of 2.5 in no more than 5% more steps?
    converge compare --seeds --control adamw-*.csv --test muon-*.csv --target loss=2.5 \\
      --margin 0.05
  a submission to MLPerf Training: neither faster nor later than its RCP?
    converge compare --rcp rcps_llama31_8b.json --test result_*.txt --margin 0.05"""
EPILOG = f"{EXAMPLES}\n\n{EXIT_CODES}"
NOT_DONE = ""

PAIRS = "converge compare CONTROL TEST"
SEEDS = "converge compare --seeds --control A1 A2 A3 --test B1 B2 B3"
SUBMISSION = "converge compare --rcp rcps_BENCHMARK.json --test result_*.txt"
"""The three forms."""
OPTIONAL = ("grad_norm", "lr", "tokens")
"""Signals that a comparison of curves can do without."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
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
        help="with --seeds or --rcp: the runs of one test set, one per seed, at least two (may "
        "be repeated for another set)",
    )
    parser.add_argument(
        "--ask",
        choices=[each.value for each in Ask],
        metavar="QUESTION",
        help='what is asked of a test set: the "same" as the control (default), or "no worse": '
        "complete runs, and a loss higher by no more than the margin",
    )
    parser.add_argument(
        "--target",
        metavar="loss=VALUE",
        help="with --seeds: ask whether a loss of VALUE is reached in at most the steps that the "
        "control needs plus --margin, which is then relative to those steps",
    )
    parser.add_argument(
        "--rcp",
        type=Path,
        metavar="TABLE",
        help="compare the MLPerf Training logs of --test with a table of reference convergence "
        "points (RCPs, rcps_BENCHMARK.json): by MLPerf's rule, not significantly faster; with "
        "--margin not later either",
    )
    parser.add_argument(
        "--repeat",
        type=Path,
        action="append",
        default=[],
        metavar="RUN",
        help="an A/A repeat of the control, to learn the envelope from (may be repeated)",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="limits that were learnt earlier from repeats of this control, instead of --repeat: "
        "a file by `converge calibrate --out`, or the calibration.json of a report folder",
    )
    parser.add_argument(
        "--columns",
        action="append",
        nargs="+",
        default=[],
        metavar="SIGNAL=COLUMN",
        help="what the curve files call step, loss, grad_norm, lr …, where the name differs; it "
        "holds for every file that is given (rename a column where two files differ)",
    )
    parser.add_argument(
        "--tolerance",
        action="append",
        default=[],
        metavar="SIGNAL=RELATIVE",
        help="largest allowed relative difference of a signal at any step, as loss=1e-3; it "
        "replaces the limit learnt from repeats",
    )
    parser.add_argument(
        "--margin",
        type=_fraction,
        metavar="RELATIVE",
        help="largest relative difference of the mean loss that still counts as equivalent, as "
        "0.005 for 0.5%% (default: by the precision of the runs); it decides about the mean alone: "
        "without a tolerance, and without repeats or with one or two that differ, a single step "
        "fails only if it is grossly off",
    )
    parser.add_argument(
        "--from",
        dest="since",
        type=_step,
        metavar="STEP",
        help="compare the curves from this step on, for example where one of the runs was resumed "
        "there (default: all steps)",
    )
    parser.add_argument(
        "--count-from-1",
        action="store_true",
        help="add 1 to every step of a curve that begins at step 0, where one log counts its steps "
        "from 0 and another from 1",
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        choices=OPTIONAL,
        metavar="SIGNAL",
        help="leave a signal of the curves out, for example grad_norm if only one side logged it: "
        f"the report says so ({', '.join(OPTIONAL)}; may be repeated)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write reports here as well")


def _step(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a step: write a whole number, such as 51"
        )
    return int(text)


def _fraction(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number: write 0.01 for 1%") from None


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
        reading = Reading(
            _columns_of(arguments), arguments.since, count_from_1=arguments.count_from_1
        )
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
        Reading,
        compare_curves,
        read_control,
        read_tests,
    )

    tolerances = _named_options(arguments.tolerance, "--tolerance", _tolerance)
    reading = Reading(
        _columns_of(arguments), arguments.since, arguments.without, arguments.count_from_1
    )
    if unused := [each for each in arguments.without if each in tolerances]:
        place = f"--tolerance {unused[0]}={tolerances[unused[0]]:g}"
        raise ConfigError(
            Problem(place, f"has no effect beside --without {unused[0]}", "leave one of them out")
        )
    question = CurveQuestion(_ask_of(arguments), _margin_of(arguments), tolerances)
    _require_own_repeats(arguments)
    control = read_control(arguments.control, arguments.tests, reading)
    calibration = _calibration(arguments, control.evidence, reading, console)

    def advise(verdict: Verdict, *, of_run: bool) -> Verdict:
        verdict = _with_own_options(verdict, arguments)
        if of_run and not verdict.not_asked:
            return _with_what_helps(verdict, arguments.out)
        return verdict

    return compare_curves(
        control,
        read_tests(control, arguments.tests, reading),
        question,
        calibration,
        advise,
        here=Path.cwd(),
    )


def _calibration(
    arguments: argparse.Namespace, control: Evidence, reading: Reading, console: Console
) -> Calibration | None:
    """Read from a file, or learnt from ``--repeat``; None when neither is given.

    What is learnt is written beside the reports, for a later ``--calibration``.
    """
    from converge_harness.cli.console import say
    from converge_harness.matrix.calibrate import read_for_curves
    from converge_harness.matrix.compare import learn_from_repeats

    if arguments.calibration is not None:
        if arguments.repeat:
            raise ConfigError(
                Problem(
                    "--calibration and --repeat", "both say where the limits are from: give one"
                )
            )
        read, note = read_for_curves(arguments.calibration, control)
        if note:
            say(console, f"note: {note}", "yellow")
        return read
    if not arguments.repeat:
        return None
    return learn_from_repeats(control, arguments.repeat, reading, arguments.out)


def _require_own_repeats(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for a repeat that is also the control or a test set, or a path given twice.

    A test set from which its own limits are learnt is always inside of them; one repeat counted
    twice makes limits too tight; and a test set that is there twice hides that another is missing.
    """
    from converge_harness.readers import same_path

    judged = {"CONTROL": arguments.control, **{f"TEST {path}": path for path in arguments.tests}}
    problems = [
        Problem(
            f"--repeat {repeat}",
            f"is also {what}",
            "give a separate run of the control",
        )
        for repeat in arguments.repeat
        for what, path in judged.items()
        if same_path(repeat, path)
    ]
    problems += _twice(arguments.repeat, "--repeat ")
    problems += _twice(arguments.tests, "TEST ")
    if problems:
        raise ConfigError(problems)


def _with_what_helps(verdict: Verdict, out: Path | None) -> Verdict:
    """A run folder's next command; this command again only with ``--out``, for a report."""
    if not verdict.next_command.startswith("converge compare "):
        return verdict
    more = "" if out is not None else f"{verdict.next_command} --out report"
    return replace(verdict, next_command=more)


# ------------------------------------------------------------------ forms, and what options say


def _check_form(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for mixed forms, with the form to use."""
    form = _of_submissions if arguments.rcp else _of_seeds if arguments.seeds else _of_pairs
    problems = list(form(arguments))
    if problems:
        raise ConfigError(problems)


def _of_pairs(arguments: argparse.Namespace) -> Iterator[Problem]:
    if arguments.target is not None:
        yield Problem(
            f"--target {arguments.target}", "needs runs of several seeds", f"write {SEEDS}"
        )
    for option, given in (("--control", arguments.control_seeds), ("--test", arguments.test_seeds)):
        if given:
            yield Problem(option, "names runs of several seeds", f"write {SEEDS}")
            return
    if arguments.control is None or not arguments.tests:
        missing = "no CONTROL" if arguments.control is None else "no TEST"
        yield Problem("compare", f"is given {missing}", f"write {PAIRS}, or {SEEDS}")
    if arguments.ask == Ask.NO_WORSE.value:
        asking = f'--ask "{arguments.ask}"'
        yield from _unused(arguments, f"{asking} compares the mean loss only")


def _of_seeds(arguments: argparse.Namespace) -> Iterator[Problem]:
    stray = [path for path in (arguments.control, *arguments.tests) if path is not None]
    if stray:
        which = " ".join(map(str, stray))
        yield Problem(which, "is neither a --control nor a --test of --seeds", f"write {SEEDS}")
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
        yield Problem(which, f"is not a --test: {table} is the control", SUBMISSION)
    if not arguments.test_seeds:
        yield Problem(table, "is given without --test", f"write {SUBMISSION}")
    for option, value in (
        ("--seeds", arguments.seeds),
        ("--target", arguments.target),
        ("--ask", arguments.ask),
        ("--columns", arguments.columns),
        ("--from", arguments.since),
        ("--count-from-1", arguments.count_from_1),
    ):
        if value:
            yield Problem(
                option, f"has no effect: {table} compares when targets are reached", "leave it out"
            )
    yield from _unused(arguments, f"{table} compares when targets are reached")
    yield from _twice([*map(Path, names(arguments.test_seeds))])


def _twice(paths: Sequence[Path], what: str = "") -> Iterator[Problem]:
    """Paths of the same run, with what they are given as."""
    from converge_harness.readers import same_path

    for index, path in enumerate(paths):
        if any(same_path(path, before) for before in paths[:index]):
            yield Problem(f"{what}{path}", "is given twice", "each run counts once, on one side")


def _unused(arguments: argparse.Namespace, why: str) -> Iterator[Problem]:
    """Options that would have no effect."""
    for option, value in (
        ("--repeat", arguments.repeat),
        ("--calibration", arguments.calibration),
        ("--tolerance", arguments.tolerance),
        ("--without", arguments.without),
    ):
        if value:
            yield Problem(option, f"has no effect: {why}", "leave it out; --margin is the limit")


def _target_of(arguments: argparse.Namespace) -> float | None:
    """``--target``; raises ConfigError when it is not a loss, or has no margin."""
    if arguments.target is None:
        return None
    place = f"--target {arguments.target}"
    name, _, value = arguments.target.partition("=")
    try:
        target = float(value) if name == "loss" else math.nan
    except ValueError:
        target = math.nan
    if not math.isfinite(target):
        raise ConfigError(Problem(place, "is not a target loss", "as in loss=2.5"))
    if arguments.margin is None:
        raise ConfigError(
            Problem(place, "needs a margin", "--margin 0.05 allows 5% more steps than the control")
        )
    if arguments.ask == Ask.SAME.value:
        raise ConfigError(
            Problem(
                place,
                "asks for no more steps than the control, not for the same curve",
                'leave --ask "same" out',
            )
        )
    return target


def _margin_of(arguments: argparse.Namespace) -> float | None:
    """``--margin``; raises ConfigError when it is not a margin."""
    margin: float | None = arguments.margin
    if margin is not None and not 0 < margin < 1:
        raise ConfigError(
            Problem(f"--margin {margin}", "is not a relative difference", "as in 0.005 for 0.5%")
        )
    return margin


def _ask_of(arguments: argparse.Namespace) -> Ask | None:
    """``--ask``."""
    return Ask(arguments.ask) if arguments.ask else None


def _columns_of(arguments: argparse.Namespace) -> dict[str, str]:
    """``--columns`` by signal; raises ConfigError for one that is not ``SIGNAL=COLUMN``."""
    return _named_options(names(arguments.columns), "--columns", _column)


def _with_own_options(verdict: Verdict, arguments: argparse.Namespace) -> Verdict:
    """A verdict's next command, with the options its curves were read and judged with."""
    command = verdict.next_command
    if not command.startswith("converge compare "):
        return verdict
    more = [
        *(f" --tolerance {shlex.quote(each)}" for each in arguments.tolerance),
        f" --margin {arguments.margin:g}" if arguments.margin is not None else "",
        f" --from {arguments.since}" if arguments.since is not None else "",
        " --count-from-1" if arguments.count_from_1 else "",
        " --columns " + shlex.join(names(arguments.columns)) if arguments.columns else "",
    ]
    missing = (each for each in more if each and each.split()[0] not in command.split())
    left_out = (f" --without {each}" for each in arguments.without)
    more_left_out = (each for each in left_out if each not in command)
    return replace(verdict, next_command="".join((command, *missing, *more_left_out)))


def _named_options(
    written: Sequence[str], option: str, parse: Callable[[str, str, str], T | Problem]
) -> dict[str, T]:
    """``NAME=VALUE`` arguments by name; all problems in one ConfigError."""
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
    from converge_harness.model import JUDGED_SIGNALS

    if signal not in JUDGED_SIGNALS:
        return Problem(place, f"there is no signal {signal!r}", suggest(signal, JUDGED_SIGNALS))
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not (math.isfinite(limit) and limit >= 0):
        return Problem(place, f"{value!r} is not a relative difference", "as in loss=1e-3")
    return limit
