"""A harness process that follows a plan of jobs without torch and can be killed.

``tiny_follower.py FOLDER NAME:STEPS:SECONDS[:MODE]…``; the folder has the store and the toolchain.
"""

import os
import sys
from pathlib import Path

from cluster_jobs import light_job, light_toolchain, site_of
from launch_jobs import plan_of

from converge_harness.errors import Interrupted
from converge_harness.launch.scheduler.follow import follow_plan


def main(folder, *described):
    toolchain, jobs = light_toolchain(Path(folder)), []
    for text in described:
        name, steps, seconds, *mode = text.split(":")
        wrong = {"mode": mode[0]} if mode else {}
        jobs.append(light_job(toolchain, name, steps=int(steps), seconds=float(seconds), **wrong))

    def tell(event):
        job, step = getattr(event, "job", None), getattr(event, "step", "")
        sys.stdout.write(f"{type(event).__name__} {job.name if job else ''} {step}\n")
        sys.stdout.flush()

    try:
        follow_plan(plan_of(*jobs), site_of(Path(folder) / "a store", dict(os.environ)), tell)
    except Interrupted:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
