"""Converge's run folders as evidence; their file formats are defined in ``harness/run_folder``.

::

    run.py         read_run: all evidence of a run; read_spec: the set that its job.json describes
    documents.py   job.json, in_force.json and faults
    metrics.py     metrics.jsonl
    arrays.py      the .npz files: samples of tensors, frozen steps, checkpoints
    operations.py  the operations of one module
    passes.py      the passes of a resumed run, merged into one curve
    starts.py      the same of a program without the probe, by the curve of each start
"""
