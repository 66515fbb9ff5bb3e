"""Runs the jobs of a plan by a scheduler, attached or detached.

::

    backend.py       what a scheduler must do for us: submit, poll, cancel
    commands.py      Slurm as a backend: its commands and what they print
    batch_script.py  a job as the script that a scheduler runs; pure
    submission.py    which scheduler's job a run folder belongs to
    submit.py        what there is to do for a plan; submits its jobs, each once; cancels jobs
    job_status.py    the status of every job of a plan, by one query; writes records
    settle.py        what came of a job that is over
    follow.py        attached: rounds of poll, settle, submit what fits
    detached.py      without a harness that stays: submit, status, collect, cancel
"""
