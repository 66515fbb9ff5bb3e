"""Slurm as a backend of ``launch/scheduler/``.

::

    commands.py      its commands and their output; why a job failed; the keys of
                     ``[cluster]`` behind a refusal
    batch_script.py  a job as a batch script; pure
"""
