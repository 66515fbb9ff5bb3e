"""The options of ``converge submit``, ``status``, ``collect`` and ``cancel``, with their help."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from harness.cli.history_options import add_history_file

SUBMIT = """\
Give every job of an experiment to Slurm and return: the shell may end. Jobs that have finished are
not run again, and jobs in the queue are not submitted again, so the same command may be given as
often as you like; a job that has failed is. Test sets wait for the seed checkpoint that they start
from, and for nothing else. All that is needed to find them stands in their run folders."""

STATUS = """\
Show how every job of an experiment stands: what Slurm says of it and why it waits, how many steps
it has ended, and its loss. Nothing is written. It may be asked from any shell, whoever submitted
the jobs, and whether a harness follows them or not."""

COLLECT = """\
Take up what has come of an experiment that was submitted: write the records of the jobs that are
over, and, when all of them are, calibrate, judge and report as `converge run` does, with the same
exit codes. Otherwise say which are not over, judge nothing, and exit with 3."""

CANCEL = """\
Take the jobs of an experiment out of Slurm's hands, whether they run or wait. What they have done
so far stays in their run folders; `converge submit` runs them again."""

EXAMPLES = """\
examples:
  converge plan experiments/llama3_8b.toml --dry-run
  converge submit experiments/llama3_8b.toml --launcher slurm
  converge status experiments/llama3_8b.toml --launcher slurm
  converge collect experiments/llama3_8b.toml --launcher slurm --out reports/llama3_8b
  converge cancel experiments/llama3_8b.toml --launcher slurm --only fsdp8_tp2_pp2"""

ONLY_JOBS = """\
only the jobs of these sets: test sets, or jobs by the names that `converge status` shows"""


def add_detached(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    common: Callable[[argparse.ArgumentParser], None],
    exit_codes: str,
) -> None:
    """The four commands; ``common`` adds what names a plan: experiment, store, cluster."""
    submit = _command(commands, "submit", "give an experiment's jobs to Slurm", SUBMIT)
    common(submit)
    submit.add_argument(
        "--fresh",
        action="store_true",
        help="run everything again, even what has finished with the same identity; jobs in the "
        "queue are left alone",
    )
    common(_command(commands, "status", "show how the jobs of an experiment stand", STATUS))
    collect = _command(
        commands, "collect", "judge an experiment that was submitted", COLLECT, exit_codes
    )
    common(collect)
    collect.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where the reports go (default: reports/NAME of the experiment, and of a part of it "
        "reports/NAME/only/SETS: a part does not overwrite the whole)",
    )
    add_history_file(collect)
    collect.add_argument(
        "--partial",
        action="store_true",
        help="judge what is over already; a set without its jobs has no verdict, and the exit code "
        "is 1 or 3",
    )
    common(_command(commands, "cancel", "take an experiment's jobs out of the queue", CANCEL))


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    description: str,
    exit_codes: str = "",
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog="\n\n".join(filter(None, (EXAMPLES, exit_codes))),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
