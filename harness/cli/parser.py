"""What the command line takes, and the help that teaches it."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness import __version__
from harness.cli.blessing_options import add_bless
from harness.cli.compare_options import add_compare
from harness.cli.detached_options import ONLY_JOBS, add_detached
from harness.cli.dry_run_options import add_dry_run
from harness.cli.export_options import add_export
from harness.cli.guide_options import PLAN_EXAMPLES, add_cover, add_init
from harness.cli.history_options import add_history, add_history_file
from harness.cli.notify_options import add_notify
from harness.errors import suggest
from harness.model import Launcher

DESCRIPTION = """\
Does the model still learn the same thing? converge runs an experiment matrix (one control set,
believed correct, and test sets: other parallelisms, techniques, releases), judges every test set
against the control, names the likely cause of a difference, and writes reports."""

CALIBRATE = """\
Run every control of an experiment and its A/A repeats (plain reruns, initial weights moved by one
ulp, batches dealt out in another order), learn how far right runs of it lie apart at every step,
and keep that. `converge run` does the same by itself; a calibration kept in a file saves the
repeats of later runs, and is refused as soon as it no longer fits the control."""

ONLY_SETS = """\
only these test sets (and the controls they need); the name of a space_time set, or the start of its
sets' names up to an underscore, means all of them"""

EXIT_CODES = """\
exit codes: 0 every test set PASS; 1 at least one FAIL; 2 usage or configuration error, nothing was
launched; 3 no FAIL, but something INVALID, INCONCLUSIVE or ERROR, or cut off once jobs ran (a full
disk); 130 interrupted."""


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
        help="where the reports go (default: reports/NAME of the experiment, and of a part of it "
        "reports/NAME/only/SETS: a part does not overwrite the whole)",
    )
    run.add_argument(
        "--explain",
        action="store_true",
        help="run what failed in less than float32 again in float32, and say whether the "
        "difference is made by rounding",
    )
    add_history_file(run)
    _cluster_arguments(run)
    _calibration_argument(run)
    _running_arguments(run)

    add_detached(commands, _plan_arguments, EXIT_CODES)

    calibrate = commands.add_parser(
        "calibrate",
        help="repeat the controls and learn how far right runs lie apart",
        description=CALIBRATE,
        epilog="examples:\n  converge calibrate experiments/smoke.toml\n"
        "  converge calibrate experiments/llama3_8b.toml --out calibrations/llama3_8b.json\n"
        "  converge run experiments/llama3_8b.toml --calibration calibrations/llama3_8b.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _experiment_arguments(calibrate, only="only these controls")
    _slots_argument(calibrate)
    _cluster_arguments(calibrate)
    calibrate.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="one file for all controls (default: the experiment's `calibration`, else "
        "STORE/calibrations/IDENTITY.json for each)",
    )
    _running_arguments(calibrate)

    add_bless(commands, _blessing_arguments)

    plan = commands.add_parser(
        "plan",
        help="show what an experiment would run, without running it",
        description="Print, per set: degrees, world size, tokens per step, the rule of the "
        "converging guide that it serves, and the exact torchrun command.",
        epilog=PLAN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _experiment_arguments(plan, may_miss=True)
    _slots_argument(plan)
    _cluster_arguments(plan)
    _calibration_argument(plan)
    plan.add_argument(
        "--ranks-per-node",
        type=_positive,
        metavar="N",
        help="ranks (GPUs) on a node: larger sets print a torchrun command over several nodes",
    )
    plan.add_argument(
        "--script",
        metavar="NAME",
        help="print the batch script of this job instead, as a scheduler would be given it",
    )
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    add_dry_run(plan)
    add_cover(plan, _positive)
    add_init(commands, _positive)

    add_compare(commands, EXIT_CODES)

    report = commands.add_parser(
        "report",
        help="judge and write the reports of a finished matrix again",
        description="Judge a finished matrix again and rewrite its reports, without training.",
    )
    report.add_argument("folder", type=Path, metavar="DIR", help="the --out folder of a run")

    add_export(commands)

    add_history(commands, _store_argument, _positive)

    add_notify(commands, _store_argument, add_history_file)

    toolchains = commands.add_parser(
        "toolchains",
        help="list the toolchains that an experiment needs",
        description="Print the toolchains (Python environments) that an experiment needs, one a "
        "line. Build a missing one with: nox -s toolchain -- NAME",
    )
    toolchains.add_argument("experiment", type=Path, metavar="EXPERIMENT")
    return parser


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    """What names a plan of jobs that a scheduler has: given alike, it is found from any shell."""
    is_cancel = parser.prog.endswith("cancel")
    _experiment_arguments(parser, only=ONLY_JOBS if is_cancel else ONLY_SETS)
    _cluster_arguments(parser)
    _calibration_argument(parser)


def _blessing_arguments(parser: argparse.ArgumentParser) -> None:
    _store_argument(parser)
    _slots_argument(parser)
    _cluster_arguments(parser)
    _running_arguments(parser)


def _calibration_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="judge by this file of `converge calibrate --out` instead of repeating the controls; "
        "`converge run` refuses one that was learnt from anything else than these very controls",
    )


def _running_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="run everything again, even what has finished with the same identity",
    )
    parser.add_argument(
        "--cold",
        action="store_true",
        help="start every rank from scratch instead of forking one that has its imports done",
    )


def _slots_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--slots",
        type=_positive,
        metavar="N",
        help="how many ranks may run side by side on the CPU; a set with more is refused",
    )


def _cluster_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--launcher",
        type=_launcher,
        metavar="{local,slurm}",
        help="who starts the jobs: torchrun on this machine, or Slurm (default: the experiment's "
        "`launcher`)",
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="your own cluster file, with keys that the experiment's [cluster] lacks (default: "
        "$CONVERGE_CLUSTER, else ~/.config/converge/cluster.toml)",
    )


def _launcher(text: str) -> Launcher:
    if text not in list(Launcher):
        hint = suggest(text, [each.value for each in Launcher])
        raise argparse.ArgumentTypeError(f"{text!r} is not known; {hint}")
    return Launcher(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _experiment_arguments(
    parser: argparse.ArgumentParser, only: str = ONLY_SETS, *, may_miss: bool = False
) -> None:
    parser.add_argument(
        "experiment",
        type=Path,
        nargs="?" if may_miss else None,
        metavar="EXPERIMENT",
        help="a TOML matrix",
    )
    parser.add_argument(
        "--only",
        action="append",
        nargs="+",
        default=[],
        metavar="NAME",
        help=only,
    )
    _store_argument(parser)


def _store_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store",
        type=Path,
        metavar="DIR",
        help="where runs are kept and found again (default: $CONVERGE_STORE or .converge)",
    )
