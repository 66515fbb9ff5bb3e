"""Runs the jobs of a plan by a scheduler, attached or detached.

::

    backend.py      what a scheduler must do for us: submit, poll, cancel
    slurm.py        Slurm as a backend
    slurm_words.py  what Slurm's commands print, in our words; pure
    batch.py        a job as the script that a scheduler runs; pure
    lives.py        how such a script begins, begins again and ends; pure
    refusals.py     which keys of [cluster] its refusals are about; pure
    submission.py   which scheduler's job a run folder belongs to
    settle.py       what came of a job that is over
    standing.py     where every job of a plan stands, by one query
    lanes.py        at most so many jobs at once, by what they wait for; pure
    opening.py      what there is to do when a plan is begun or gone on with
    submitting.py   gives jobs to a scheduler, each once
    cancelling.py   takes jobs out of its hands, and says why in their folders
    followed.py     one job in a scheduler's hands: its steps and timeouts
    follow.py       attached: rounds of poll, settle, submit what fits
    detached.py     submit, collect, cancel
    status.py       how every job stands, for a person
"""
