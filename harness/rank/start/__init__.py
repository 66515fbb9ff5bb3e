"""Starts ranks and their agents, and ends them.

::

    entry.py      preload (for a warm-start fork server), run, check; dialects by name
    agent.py      torchrun's agent, which ends with the harness
    node.py       one node of a Slurm job, which then is an agent
    newest.py     the checkpoint from which a requeued program goes on
    warm.py       the fork server; stub.py: how torchrun reaches it
    loopback.py   stores of ranks on one machine; on_loopback/: the same for any program
    parent.py     a rank dies with the process that started it
"""
