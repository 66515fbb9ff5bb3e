"""``python -m converge_harness.rank JOB.json`` is a rank.

``--check JOB.json...`` builds configs only; ``--dry-run JOB.json --rank R`` is rank R of a fake
world.
"""

from __future__ import annotations

import argparse
import os
import sys

from converge_harness.rank.start import entry
from converge_harness.run_folder import config_problems
from converge_harness.run_folder.config_problems import ConfigProblemDocument
from converge_harness.run_folder.job import JobError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m converge_harness.rank", description=__doc__)
    parser.add_argument("jobs", nargs="+", metavar="JOB.json")
    parser.add_argument("--check", action="store_true", help="build the configs only")
    parser.add_argument(
        "--segment", type=int, metavar="INDEX", help="which segment of an elastic job to run"
    )
    parser.add_argument("--dry-run", action="store_true", help="build and step on fake tensors")
    parser.add_argument("--rank", type=int, default=0, help="which rank a dry run is")
    options = parser.parse_args(arguments)
    if options.check:
        _check(options.jobs)
    elif len(options.jobs) > 1:
        parser.error("a rank runs one job; several are for --check")
    elif options.dry_run:
        _dry_run(options.jobs[0], options.rank, options.segment)
    else:
        entry.run(options.jobs[0], options.segment)
    return 0


def _dry_run(path: str, rank: int, segment: int | None) -> None:
    """Print the result of the dry run, one JSON object and nothing else, on standard output."""
    from converge_harness.rank.dry_run import run as dry_run
    from converge_harness.rank.start.parent import die_with_parent
    from converge_harness.run_folder import dry_run as contract

    die_with_parent()
    answer = os.dup(1)
    os.dup2(2, 1)
    found = dry_run.run(path, rank, segment)
    with os.fdopen(answer, "w", encoding="utf-8") as stream:
        stream.write(contract.answer(found))


def _check(paths: list[str]) -> None:
    """Print the problems of all jobs, one JSON object and nothing else, on standard output."""
    answer = os.dup(1)
    os.dup2(2, 1)  # torchtitan's log lines go to standard error
    problems: list[ConfigProblemDocument] = []
    for path in paths:
        try:
            found = entry.check(path)
        except JobError as error:
            problems.append({"job": path, "key": "", "message": str(error), "valid": []})
            continue
        problems += [
            {"job": path, "key": each.key, "message": each.message, "valid": list(each.valid)}
            for each in found
        ]
    with os.fdopen(answer, "w", encoding="utf-8") as stream:
        stream.write(config_problems.answer(problems))


if __name__ == "__main__":
    sys.exit(main())
