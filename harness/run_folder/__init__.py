"""The file formats of a run folder, which converge and the ranks share.

converge and the ranks (in a toolchain's Python) communicate by files only. Both import this
package, so it needs only the standard library and numpy. Like rank code, it is part of a job's
identity. ``docs/architecture.md`` describes the files.

::

    layout.py       names of files and folders, and which of them are evidence
    launcher_variables.py  environment variables of launchers, which no job inherits
    documents.py    JSON files: the schema version and its upgrades, NaN and infinities
    shapes.py       types of values in JSON files
    job.py          job.json: the job, as ranks read it
    weight_mapping.py  its part on names of parameters in another trainer's checkpoint
    metrics.py      metrics.jsonl: its lines, and how the file grows
    arrays.py       .npz files (tensors/, frozen.npz and state/): names of their arrays
    operations.py   operations/: the operations of one module, which only reruns record
    in_force.py     in_force.json: what really ran
    passes.py       passes/NNN of a resumed run, and who may write there
    starts.py       start.json: a start of a program without the probe
    checkpoints.py  which checkpoints are complete; sets torn ones aside
    faults.py       faults/: which faults happened, and when
    waits.py        wait.json: the steps after which ranks wait
    imported.py     imported/: files that ranks imported from outside of the toolchain
    corpus.py       the files of a corpus that ranks read
    failures.py     failures.json: the ranks that failed under torchrun
    ended.py        ended.json: how the script of a scheduler's job ended
    config_problems.py  what a rank prints that checks configs
    dry_run.py      what a rank of a dry run prints
    records.py      record.json and submission.json, which only converge uses
"""
