"""Starts ranks and their agents, and ends them.

::

    entry.py      what a rank does first: finds the code of its dialect, then trains or checks
    agent.py      torchrun, made to end with converge
    node.py       one node of a Slurm job: asks Slurm which, then is ``agent.py``
    newest.py     finds the checkpoint from which a requeued program goes on
    warm.py       the fork server: a process with torch imported, from which ranks are forked
    stub.py       what torchrun starts instead of Python, to reach the fork server
    loopback.py   lets the ranks of one machine meet on loopback only
    on_loopback/  does the same in any program, before it imports torch
    parent.py     ends a rank with the process that started it
"""
