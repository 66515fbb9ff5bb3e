"""Slurm as a backend of ``launch/scheduler/``.

::

    commands.py      its commands and their output
    batch_script.py  a job as a batch script; pure
"""
