"""Code that runs inside a rank, in a toolchain's Python.

Of the rest of ``harness`` it imports only the file formats (``converge_harness.run_folder``).

::

    __main__.py   python -m converge_harness.rank JOB.json
    start/        starts ranks and their agents: entry, agent, node, warm start
    recorder/     records the evidence of every step, for any trainer
    titan/        torchtitan: common/, v0_2/, v0_3/
    megatron/     Megatron-Core
    data_order.py  which sample is where: the data order, free of the dp degree
    seed_checkpoint.py  initial weights: whole tensors by name, taken apart for every layout
    dry_run/      builds and steps a job without its GPUs, on a fake process group
    faults.py     the faults of a job's script
    waiting.py    waits between two steps until converge lets a run train on
    repeats.py    the perturbations of A/A repeats, no larger than rounding
    silenced.py   methods that do nothing for a while, for frozen steps
    inject.py     calls a test set's ``inject`` function
    own_techniques.py  applies the experiment file's own techniques, and sees what they changed
    marks.py      whether a config, a model or a trainer was changed by a call
    cpu.py        training on a CPU: processes that can be forked, products of bf16
    job_checks.py  names in a job that no framework checks: fixes, repeats, loaders
    settings.py   dotted keys applied to nested dataclasses, with errors that list valid keys
"""
