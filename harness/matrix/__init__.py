"""The application: an experiment file becomes a plan, runs, verdicts and files. It prints nothing.

In the order in which a matrix runs::

    load.py        experiment file (and baseline) to plan
    run.py         runs a plan's jobs, on this machine or under a scheduler
    stop.py        judges a test set while it trains: whether its verdict is known
    submit.py      the same without waiting: submit, status, collect, cancel
    calibrate.py   the calibration by which a control is judged: learnt, or read and checked
    judge.py       evidence to verdicts, and the next command
    conclude.py    everything after the runs: verdicts, files, and a night in the history
    save.py        matrix.json: the runs that a report folder judges

and other tasks::

    cost.py        what a plan costs at most, and with test sets that are stopped early
    dry_run.py     builds every job without its GPUs: memory, GPU-hours
    recommend.py   an experiment file for some techniques, or the fewest jobs for all pairs
    against.py     the same matrix with the code of an earlier revision, compared set by set
    explain.py     runs failures in low precision again in float32
    operations.py  which operation of a failed set's first wrong module is to blame
    failure.py     how a set fails, and whether another run of it fails the same way
    shrink.py      the smallest set-up that fails the same way
    bisect.py      the first revision at which it does
    repro.py       a failed set as a folder for others
    environment_files.py  a Python that converge cannot build, as files that make its like
    pair_files.py  a control and a test set as files that stand alone
    bless.py       stores a control that somebody vouches for as a baseline
    compare.py     judges finished runs, or curves from anywhere

Progress is reported to observers (``launch.events``), results are returned: the command line prints
both, benchmarks and notebooks neither.
"""
