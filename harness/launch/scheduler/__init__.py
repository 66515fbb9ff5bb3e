"""What jobs of all schedulers share: submit each once, follow, collect, cancel, and their results.

::

    backend.py     the interface of a scheduler, and what it says of a job
    submission.py  the scheduler's job of a run folder
    submit.py      what has to be done for a plan; submits each job once; cancels jobs
    job_status.py  the status of every job of a plan, with one query; writes records
    result.py      the result of a finished job
    follow.py      attached: rounds of poll, record, submit what fits
    detached.py    without a process that stays: submit, status, collect, cancel
    batch_step.py  what scripts for all schedulers share
    script_end.py  how a script of a scheduler's job ended

What differs is in ``slurm/`` and ``kubernetes/`` beside it, which import this package. It imports
neither of them: it is given a ``Backend``, which ``launch/backends.py`` chooses.
"""
