"""TOML to ``Experiment``: all mistakes in a file are found here, before anything else runs.

::

    load.py            a file as an ``Experiment``, or all its problems
    tables.py          its tables as pydantic models
    sets.py            a set's table as a ``SetSpec``
    matrix.py          ``[matrix]``: sets by product
    space_time.py      ``kind = "space_time"``: sets of equal product
    recovery.py        the faults of a fault set
    own_techniques.py  ``[technique.NAME]``
    other_trainers.py  ``[trainers.NAME]``
    cluster.py         ``[cluster]``, and the user's own cluster file

An experiment file (``schema = 1``)::

    schema = 1
    name = "smoke"                  # default: the file's stem
    extends = "models.toml"         # a file beside this one, which this one is laid over
    seed = 42
    repeats = ["rerun", "ulp", "ulp.2", "permute"]  # A/A repeats made of every control: KIND.SEED
    calibration = "smoke.json"      # judge by this file of `converge calibrate`; then no repeats
    baseline = "smoke"              # a stored control by `converge bless`: no control runs
    baseline_across = ["hardware"]  # in what it may differ: "hardware", "dtype"

    [seeds]                         # train every control and test set by more than one seed:
    count = 3                       # 42, 43 and 44

    [probe]
    cadence = "powers of two"       # when per-tensor evidence is taken: steps 0, 1, 2, 4, 8, …;
                                    # or "off", every N steps, or a list of steps

    [stop]                          # a test set whose verdict is known ends early
    when = "fail"                   # the default; also `stop = "never"` in a test set
    after = 16                      # but not before it has trained as many steps
    waiting_ranks = 16              # in memory while runs wait for each other; default: by memory

    [trainer]                       # torchtitan's; the others': harness/trainers/KIND/table.py
    kind = "torchtitan"             # the default; or "command", "megatron"
    train_config = "train_configs/llama3_debug.toml"
    toolchain = "torchtitan-0.3.0"  # the default
    spmd_backend = "spmd_types"     # the default on torch 2.15; also a key of controls and tests
    deterministic = true            # the default; false: all kernels, as in production
    startup_timeout_s = 600         # launch to first finished step
    progress_timeout_s = 300        # between two finished steps
    cpu_ranks = 4                   # ranks at the same time on a CPU; default: the launcher decides
    seed_checkpoint = "step-0"      # a distributed checkpoint to start from; default: one is made
    [trainer.set]                   # train config keys for all sets, dotted or quoted
    "training.steps" = 20

    [trainers.megatron]             # another trainer for test sets, which starts from the control's
    kind = "megatron"               # checkpoint: harness/experiment/other_trainers.py
    weights = "to_megatron.toml"

    [technique.fused_norm]          # your own: harness/experiment/own_techniques.py
    what = "RMSNorm by our Triton kernel"
    apply = "my_features.py:use_fused_norm"

    [control]
    name = "fsdp2"                  # default: "control"
    parallelism = { dp_shard = 2 }  # dp_replicate dp_shard tp cp pp ep; each is 1 by default

    [anchor]                        # a set against which the control is judged: same keys; train
    parallelism = {}                # config and toolchain are the control's unless named

    [controls.float8]               # further controls: same keys, own train_config or toolchain
    parallelism = { dp_shard = 2 }
    techniques = ["float8"]
    waive = ["control-is-1d-fsdp"]

    [[test]]
    name = "fsdp2_tp2"
    parallelism = { dp_shard = 2, tp = 2 }
    techniques = ["compile", "async_tp"]
    pipeline_schedule = "1F1B"      # when pp > 1; the default
    cp_rotation = "alltoall"        # or "allgather", when cp > 1
    set = { "training.local_batch_size" = 2 }
    tolerance = { loss = 1e-3, grad_norm = 1e-2 }   # relative; replaces the learnt envelope
    margin = 0.005                  # largest relative difference of the mean loss on long runs
    control = "float8"              # default: the [control]
    trainer = "megatron"            # a [trainers.NAME]; default: [trainer]
    train_config = "…"              # default: its control's, as for toolchain
    inject = "path/to/file.py:function"
    without_fixes = ["act-grad"]    # fixes of the CPU shim to leave out
    waive = ["same-dp-degree"]      # rules of the guide (harness/plan/rules) that it may break
    note = "why this set is there"
    kind = "parallel"               # the default; others: see harness/experiment/tables.py

    [matrix]                        # test sets by product: see harness/experiment/matrix.py

Relative paths are resolved in the folder of the experiment file, in its parent, and in the current
directory; the first match wins. A set's degrees and techniques are its own: a test inherits only
its control's train config and toolchain, unless it names a trainer, and ``[trainer.set]``.

Places in messages are dotted keys with indices from 0, and the set's name if it has one:
``experiments/smoke.toml: test[2].parallelism.tp of 'fsdp2_tp2'``.
"""

from converge_harness.experiment.load import load_experiment

__all__ = ["load_experiment"]
