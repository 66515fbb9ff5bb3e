"""A harness process that runs a plan of tiny jobs and can be killed.

``tiny_harness.py STORE PYTHON warm|cold|nodes NAME:RANKS:STEPS:SECONDS…``; ``nodes``: in several
passes, on two nodes.
"""

import sys
from dataclasses import replace
from pathlib import Path

from launch_jobs import TOOLCHAIN, plan_of, tiny_job

from converge_harness.errors import Interrupted
from converge_harness.launch import RunOptions, run_plan
from converge_harness.model import Recovery, Toolchain
from converge_harness.store import Store


def main(store, python, start, *described):
    toolchain = Toolchain(TOOLCHAIN, Path(python), "titan_0_3", {})
    jobs = []
    for text in described:
        name, ranks, steps, seconds = text.split(":")
        job = tiny_job(name, ranks=int(ranks), steps=int(steps), seconds=float(seconds))
        if start == "nodes":
            recovery = Recovery(faults=(), checkpoint_every=10, nodes=(1, 2))
            job = replace(job, spec=replace(job.spec, recovery=recovery))
        jobs.append(replace(job, toolchain=toolchain))
    module = "tiny_passes" if start == "nodes" else "tiny_rank"
    options = RunOptions(warm=start == "warm", check=False, rank_module=module, grace_s=2.0)

    def tell(event):
        job, step = getattr(event, "job", None), getattr(event, "step", "")
        sys.stdout.write(f"{type(event).__name__} {job.name if job else ''} {step}\n")
        sys.stdout.flush()

    try:
        run_plan(plan_of(*jobs, cpu_ranks=4), Store(Path(store)), options, tell)
    except Interrupted:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
