"""What runs inside a rank, in a toolchain's Python.

Of the rest of ``harness`` it imports the file contract (``converge_harness.run_folder``) alone.

::

    __main__.py   python -m converge_harness.rank JOB.json
    start/        how a rank, and what starts it, comes to life: entry, agent, node, warm start
    recorder/     the evidence of every step, whatever trains
    titan/        torchtitan: common/, v0_2/, v0_3/
    dry_run/      a job built and stepped without its GPUs, on a fake process group
    faults.py     the faults of a job's script
    repeats.py    a control moved by as much as rounding may move it (A/A repeats)
    inject.py     calls a test set's ``inject`` function
    own_techniques.py  applies the experiment file's own techniques, and sees what they changed
    marks.py      whether a config, a model or a trainer was changed by a call
    settings.py   dotted keys applied to nested dataclasses, with errors that list valid keys
"""
