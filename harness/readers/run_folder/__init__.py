"""Run folders of ours as evidence; their file contract is in ``harness/run_folder``.

::

    run.py         read_run: all that a run left; read_spec: what it was told to be
    documents.py   job.json, in_force.json and faults
    metrics.py     metrics.jsonl
    arrays.py      the .npz files: samples of tensors, frozen steps, checkpoints
    passes.py      the passes of a resumed run, and the one curve that they make
"""
