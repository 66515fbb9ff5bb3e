"""How long ``converge plan`` takes for many sets."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from harness.cli import matrix
from harness.toolchain import assume_toolchain
from scaling.experiments import ROOT, write_experiment
from scaling.row import Row

SETS = 10_000
GOAL_S = 5.0


def planning(scratch: Path) -> Iterator[Row]:
    """The whole command in a process of its own, and its parts in this one."""
    file = write_experiment(scratch, SETS)
    yield Row(f"`converge plan --json` of {SETS:,} sets", _command(file), "s", GOAL_S)
    began = time.perf_counter()
    loaded = matrix.load(file)
    read = time.perf_counter()
    plan = matrix.plan_experiment(loaded, on_gpu=False, find=assume_toolchain)
    ended = time.perf_counter()
    if len({job.identity for job in plan.jobs}) != len(plan.jobs):
        raise SystemExit("two sets have one identity: this measures less than it says")
    yield Row("  of it, reading and validating the file", read - began, "s")
    yield Row(f"  of it, rules and identities of {len(plan.jobs):,} jobs", ended - read, "s")


def _command(file: Path) -> float:
    """Seconds of the whole command.

    Raises SystemExit with what it printed when it planned something else.
    """
    argv = [sys.executable, "-m", "harness", "plan", str(file), "--json"]
    began = time.perf_counter()
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode != 0 or len(json.loads(done.stdout)["sets"]) != SETS + 1:
        raise SystemExit(f"{' '.join(argv)} failed:\n{done.stdout[-4000:]}{done.stderr}")
    return seconds
