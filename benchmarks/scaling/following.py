"""Memory needed to follow a hundred running jobs while their metrics files grow."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from converge_harness.launch.events import Overview
from converge_harness.model import Cluster
from scaling.clusters import DEVICE, Enough, follow, queue
from scaling.row import Row

JOBS = 100
WARM_UP, ROUNDS = 30, 120
GOAL_MB = 2.0
MB = 1e6
_PROGRAM = f"""\
#!{sys.executable} -IS
import os, sys, time
folder = os.path.dirname(sys.argv[-1])
if os.path.basename(folder).startswith("seed-"):
    os.makedirs(os.path.join(folder, "checkpoint", "step-0"))
    open(os.path.join(folder, "checkpoint", "step-0", ".metadata"), "w").close()
    sys.exit()
LINE = (
    '{{"kind": "step", "step": %d, "loss": 6.25, "grad_norm": 1.5, "loss_recomputed": 6.25, '
    '"grad_norm_recomputed": 1.5, "lr": 0.0004, "tokens": 2031, '
    '"batch_digest": "00ff00ff00ff00ff", "batch_agrees": true, "grads_missing": 0, '
    '"seconds": 0.025, "memory_bytes": 812345344}}\\n'
)
with open(os.path.join(folder, "metrics.jsonl.part"), "a") as out:
    for first in range(1, 100_000, 10):
        out.write("".join(LINE % step for step in range(first, first + 10)))
        out.flush()
        time.sleep(0.25)
"""
"""Used as the container: it gets the ranks' command, and writes what ranks would."""


def following(scratch: Path) -> Iterator[Row]:
    """Follow jobs under Slurm, and measure this process's memory at the end of every round."""
    program = scratch / "writes_steps"
    program.write_text(_PROGRAM)
    program.chmod(0o755)
    running = Cluster(
        ranks_per_node=4,
        device=DEVICE,
        gpus_per_node=False,
        container=(str(program),),
        poll_s=0.2,
    )
    me = psutil.Process()
    weights: list[int] = []
    written: list[int] = []
    with queue(scratch, JOBS + 1, running) as queued:  # the seed checkpoint is over soon

        def at_round(_number: int, overview: Overview) -> None:
            if overview.done > 1:
                raise SystemExit(f"{overview.done} jobs are over: nothing measured")
            if len(overview.running) == JOBS:
                weights.append(me.memory_info().rss)
                if len(weights) in (WARM_UP, WARM_UP + ROUNDS):
                    written.append(_lines(queued.site.store.root / "runs"))
            if len(weights) == WARM_UP + ROUNDS:
                raise Enough

        follow(queued, at_round)
    before, after = max(weights[:WARM_UP]), max(weights[WARM_UP:])
    yield Row(f"memory after {WARM_UP} rounds of following {JOBS} running jobs", before / MB, "MB")
    what = f"growth in {ROUNDS} more, in which {written[1] - written[0]:,} steps ended"
    yield Row(what, (after - before) / MB, "MB", GOAL_MB)


def _lines(runs: Path) -> int:
    files = runs.glob("*/metrics.jsonl.part")
    return sum(file.read_bytes().count(b"\n") for file in files)
