"""Runs the jobs of a plan, and reports to an observer what happens.

::

    local/              on this machine
    slurm/              by a scheduler, attached or detached
    options.py          how a plan is to be run
    events.py           what an observer is told
    check.py            before any rank starts: configs against the installed torchtitan
    dry_run.py          jobs built and stepped here without their GPUs
    next_call.py        what comes after a torchrun call, and which faults are due
    progress.py         steps as they end, growing output, forecasts
    processes.py        starting and ending processes
    process_guard.py    runs a user's program that has to end with the harness
    warm.py             servers that fork ranks with their imports done
    private_folder.py   folders that only this user can enter
    interruption.py     Ctrl-C and signals
"""

from harness.launch.events import (
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
    Started,
    Step,
    Waiting,
)
from harness.launch.local.supervisor import finished_runs, run_plan
from harness.launch.options import RunOptions

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
    "Started",
    "Step",
    "Waiting",
    "finished_runs",
    "run_plan",
]
