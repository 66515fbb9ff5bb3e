"""How long ``converge plan`` takes for many sets."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from converge_harness.matrix.load import load_with_cluster, plan_experiment
from converge_harness.trainers import assume_toolchain
from scaling.experiments import ROOT, write_experiment
from scaling.row import Row

SETS = 10_000
GOAL_S = 5.0


def planning(scratch: Path) -> Iterator[Row]:
    """The whole command in its own process, and its parts in this one."""
    file = write_experiment(scratch, SETS)
    seconds, cpu_s = _command(file)
    yield Row(f"`converge plan --json` of {SETS:,} sets", seconds, "s", GOAL_S)
    yield Row("  time of the processor in it", cpu_s, "s")
    began = time.perf_counter()
    loaded = load_with_cluster(file)
    read = time.perf_counter()
    plan = plan_experiment(loaded, on_gpu=False, find=assume_toolchain)
    ended = time.perf_counter()
    if len({job.identity for job in plan.jobs}) != len(plan.jobs):
        raise SystemExit("two sets have one identity: this measures less than it says")
    yield Row("  of it, reading and validating the file", read - began, "s")
    yield Row(f"  of it, rules and identities of {len(plan.jobs):,} jobs", ended - read, "s")


def _command(file: Path) -> tuple[float, float]:
    """Wall and CPU seconds of the whole command.

    Raises SystemExit with its output if it did not plan as expected.
    """
    argv = [sys.executable, "-m", "converge_harness", "plan", str(file), "--json"]
    began, cpu_began = time.perf_counter(), _of_children()
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds, cpu_s = time.perf_counter() - began, _of_children() - cpu_began
    if done.returncode != 0 or len(json.loads(done.stdout)["sets"]) != SETS + 1:
        raise SystemExit(f"{' '.join(argv)} failed:\n{done.stdout[-4000:]}{done.stderr}")
    return seconds, cpu_s


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
