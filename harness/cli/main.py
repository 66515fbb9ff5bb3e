"""Arguments to a command, errors to an exit code."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console

from harness import __version__
from harness.errors import ConfigError, ConvergeError, Interrupted
from harness.gate import ExitCode

DESCRIPTION = """\
Does the model still learn the same thing? converge runs an experiment matrix (one control set,
believed correct, and test sets: other parallelisms, techniques, releases), judges every test set
against the control, names the likely cause of a difference, and writes reports."""

EXIT_CODES = """\
exit codes: 0 every test set PASS; 1 at least one FAIL; 2 usage or configuration error, nothing was
launched; 3 no FAIL, but something INVALID, INCONCLUSIVE or ERROR; 130 interrupted."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="converge",
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"converge {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        help="run an experiment matrix and judge it",
        description="Run every job of an experiment that has not run yet, judge, and report.",
        epilog="example: converge run experiments/smoke.toml --only fsdp2_tp2\n\n" + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _experiment_arguments(run)
    _slots_argument(run)
    run.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where the reports go (default: reports/NAME of the experiment)",
    )
    run.add_argument(
        "--fresh",
        action="store_true",
        help="run everything again, even what has finished with the same identity",
    )
    run.add_argument(
        "--cold",
        action="store_true",
        help="start every rank from scratch instead of forking one that has its imports done",
    )

    plan = commands.add_parser(
        "plan",
        help="show what an experiment would run, without running it",
        description="Print, per set: degrees, world size, tokens per step, the rule of the "
        "converging guide that it serves, and the exact torchrun command.",
        epilog="example: converge plan experiments/llama3_8b.toml --ranks-per-node 8",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _experiment_arguments(plan)
    _slots_argument(plan)
    plan.add_argument(
        "--ranks-per-node",
        type=_positive,
        metavar="N",
        help="ranks (GPUs) on a node: larger sets print a torchrun command over several nodes",
    )
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")

    compare = commands.add_parser(
        "compare",
        help="judge finished runs, or curves from anywhere, against a control",
        description="Judge finished run folders, or curves from anywhere (TensorBoard folders, "
        "JSONL, CSV, console logs), against a control, without training.",
        epilog="example: converge compare .converge/runs/fsdp2-… .converge/runs/ddp2-…\n\n"
        + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    compare.add_argument("control", type=Path, metavar="CONTROL", help="run folder or curve file")
    compare.add_argument("tests", type=Path, nargs="+", metavar="TEST")
    compare.add_argument(
        "--repeat",
        type=Path,
        action="append",
        default=[],
        metavar="RUN",
        help="an A/A repeat of the control, to learn the envelope from (may be given again)",
    )
    compare.add_argument(
        "--tolerance",
        action="append",
        default=[],
        metavar="SIGNAL=RELATIVE",
        help="largest allowed relative difference of a signal, as loss=1e-3",
    )
    compare.add_argument("--out", type=Path, metavar="DIR", help="write reports here as well")

    report = commands.add_parser(
        "report",
        help="judge and write the reports of a finished matrix again",
        description="Judge a finished matrix again and rewrite its reports, without training.",
    )
    report.add_argument("folder", type=Path, metavar="DIR", help="the --out folder of a run")

    toolchains = commands.add_parser(
        "toolchains",
        help="list the toolchains that an experiment needs",
        description="Print the toolchains (Python environments) that an experiment needs, one a "
        "line. Build a missing one with: nox -s toolchain -- NAME",
    )
    toolchains.add_argument("experiment", type=Path, metavar="EXPERIMENT")
    return parser


def _slots_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--slots",
        type=_positive,
        metavar="N",
        help="how many ranks may run side by side on the CPU; a set with more is refused",
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def _experiment_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", type=Path, metavar="EXPERIMENT", help="a TOML matrix")
    parser.add_argument(
        "--only",
        action="append",
        nargs="+",
        default=[],
        metavar="NAME",
        help="only these test sets (and the controls they need)",
    )
    parser.add_argument(
        "--store",
        type=Path,
        metavar="DIR",
        help="where runs are kept and found again (default: $CONVERGE_STORE or .converge)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code (:class:`harness.gate.ExitCode`)."""
    arguments = build_parser().parse_args(argv)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return int(_dispatch(arguments))
    except ConfigError as error:
        count = len(error.problems)
        errors.print(f"{count} problem{'s' * (count > 1)}, nothing was launched:", style="bold red")
        for problem in error.problems:
            errors.print(f"  {problem}", markup=False)
        return ExitCode.USAGE
    except (KeyboardInterrupt, Interrupted):
        errors.print("interrupted; finished runs are kept: the same command goes on from here")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # `converge plan … | head` closed our output: nothing is wrong, and nobody reads a message.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.PASS
    except (ConvergeError, OSError) as error:
        # What the file system says is no bug of ours: a name too long, a folder that is a file.
        errors.print("error: ", style="bold red", end="")
        errors.print(str(error), markup=False)
        return ExitCode.USAGE
    except Exception:  # noqa: BLE001 - a gate must not read our bug as a FAIL of the training
        errors.print_exception()
        errors.print("this is a bug in converge, no verdict; please report it", style="bold red")
        return ExitCode.UNDECIDED


def _dispatch(arguments: argparse.Namespace) -> ExitCode:
    # Imported on use: `converge --help` and a usage error should not pay for pandas and plotly.
    from harness.cli import commands, planning  # noqa: PLC0415

    command = {
        "run": commands.run,
        "plan": planning.plan,
        "compare": commands.compare,
        "report": commands.report,
        "toolchains": commands.toolchains,
    }[arguments.command]
    return command(arguments)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
