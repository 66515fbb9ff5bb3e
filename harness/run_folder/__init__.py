"""The contract of the two Pythons: what lies in a run folder, under which names, in which form.

The harness and the ranks, which run in a toolchain's Python, share nothing but files. Both import
this package, so it needs the standard library and numpy only. It counts to the identity of a job as
rank code does. ``docs/architecture.md`` describes the files for readers of them.

::

    layout.py       names of files and folders, and which of them are evidence
    documents.py    JSON files: the schema version and its upgrades, NaN and infinities
    shapes.py       what a value of a JSON file has to be
    job.py          job.json: what ranks are told
    metrics.py      metrics.jsonl: lines, and how the file grows
    arrays.py       .npz files: tensors/, frozen.npz and state/, by the names of their arrays
    in_force.py     in_force.json: what really ran
    passes.py       passes/NNN of a run that is resumed, and who may write there
    checkpoints.py  which checkpoints are whole, and torn ones set aside
    faults.py       faults/: what was made to happen, and when
    records.py      record.json and submission.json, which the harness keeps beside all that
"""
