"""Runs the jobs of a plan on this machine.

::

    supervisor.py   run_plan: reuse, warm start and checks, then the loop that starts jobs in
                    slots, follows them and ends them
    run.py          one job while its processes run, and each of its calls
    memory.py       how much memory there is, and how many ranks that wait fit into it
    curve_steps.py  which steps the curve of a program without the probe has so far
    agents.py       starts the agents of a call, and causes faults that ranks cannot cause
"""
