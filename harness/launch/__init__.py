"""Runs the jobs of a plan on this machine, and tells an observer what happens.

::

    local.py         run_plan: reuse, warm start, check, supervision
    options.py       how a plan is to be run here
    events.py        what an observer is told
    supervisor.py    the loop: start what fits, follow, end
    start.py         the processes of one job
    run.py           one job while they run
    call.py          one of its torchrun calls
    script.py        what comes after a call, and which faults are due
    strike.py        faults that the harness makes
    torn.py          torn checkpoints
    slots.py         packing ranks into slots
    progress.py      steps as they end, and forecasts
    growth.py        whether a program that tells no steps goes on
    failure.py       why a run failed
    program_failure.py  why a program of the user's failed
    tied.py          a program of the user's and all that it starts, tied to the harness
    processes.py     starting and ending processes
    warm.py          servers that fork ranks with their imports done
    check.py         configs against the installed torchtitan, before any rank starts
    interruption.py  Ctrl-C and signals
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
from harness.launch.local import finished_runs, run_plan
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
