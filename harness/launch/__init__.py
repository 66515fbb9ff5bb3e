"""Runs the jobs of a plan, and reports events to an observer.

::

    local/              on this machine
    scheduler/          under any scheduler, attached or detached
    slurm/              what differs under Slurm
    kubernetes/         what differs on Kubernetes: JobSets, which somebody else creates
    backends.py         which of these schedulers a cluster has
    options.py          options of a run
    events.py           events for an observer
    check.py            before any rank starts: checks configs with the toolchain's trainer
    dry_run.py          builds and steps jobs on this machine without their GPUs
    stopping.py         which failing test sets end early, and when to look
    waiting_groups.py   how many runs may wait for each other in memory
    continuing.py       whether a run continues from a checkpoint of an earlier start
    next_call.py        what follows a call, and which faults are due
    progress.py         finished steps, growing output, time left
    processes.py        starting and ending processes
    process_guard.py    runs a user's program that has to end with converge
    warm.py             servers that fork ranks with imports already done
    private_folder.py   folders that only this user can enter
    interruption.py     Ctrl-C and signals
"""

from converge_harness.launch.events import (
    Ended,
    Event,
    GoingOn,
    Notice,
    Observer,
    Overview,
    Preparing,
    Queued,
    Retrying,
    Reused,
    RunsElsewhere,
    Started,
    Step,
    Waiting,
)
from converge_harness.launch.local.supervisor import run_plan
from converge_harness.launch.options import RunOptions

__all__ = [
    "Ended",
    "Event",
    "GoingOn",
    "Notice",
    "Observer",
    "Overview",
    "Preparing",
    "Queued",
    "Retrying",
    "Reused",
    "RunOptions",
    "RunsElsewhere",
    "Started",
    "Step",
    "Waiting",
    "run_plan",
]
