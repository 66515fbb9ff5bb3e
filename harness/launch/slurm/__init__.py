"""Slurm as a backend of ``launch/scheduler/``.

::

    commands.py      its commands and their output; the keys of ``[cluster]`` behind a refusal
    batch_script.py  a job as a batch script; pure
    failed.py        the error of a job that failed
"""
