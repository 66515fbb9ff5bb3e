"""Runs the jobs of a plan under Slurm, attached or detached; Kubernetes uses some of it, too.

::

    backend.py       the interface of a scheduler: submit, poll, cancel
    commands.py      Slurm as a backend: its commands and their output
    batch_script.py  a job as a batch script; pure
    submission.py    the scheduler's job of a run folder
    submit.py        what has to be done for a plan; submits each job once; cancels jobs
    job_status.py    the status of every job of a plan, with one query; writes records
    result.py        the result of a finished job
    follow.py        attached: rounds of poll, record, submit what fits
    detached.py      without a process that stays: submit, status, collect, cancel
"""
