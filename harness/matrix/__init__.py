"""The application: an experiment file becomes a plan, runs, verdicts and files. It prints nothing.

In the order of a matrix's life::

    load.py        experiment file (and golden) to plan
    run.py         a plan's jobs to their records, here or by a scheduler
    submit.py      the same without waiting: submit, status, collect, cancel
    calibrate.py   which calibration a control is judged by: learnt, or read and found current
    judge.py       evidence to verdicts, and what to type next
    conclude.py    all of that after the runs, its files, and its night in the history
    save.py        matrix.json: which runs a report folder judges

and what does not judge a matrix, or judges something else::

    dry_run.py     every job built without its GPUs: memory, GPU-hours
    against.py     the same matrix with the code of an earlier revision, set beside set
    explain.py     failures of low precision again, in float32
    bless.py       a control that somebody takes for right becomes golden
    compare.py     finished runs, or curves from anywhere

What people see while it works they see through observers (``launch.events``), and afterwards from
the values that come back: the command line prints both, benchmarks and notebooks neither.
"""
