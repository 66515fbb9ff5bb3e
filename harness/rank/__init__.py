"""What runs inside a rank, in a toolchain's Python. Imports nothing of the rest of ``harness``.

::

    __main__.py       python -m harness.rank JOB.json | --check JOB.json ...
    entry.py          preload (for a warm-start fork server), run, check
    job.py            job.json as a frozen value
    parent.py         a rank dies with the process that started it
    settings.py       dotted keys applied to nested dataclasses, with errors that list valid keys
    samples.py        which sample is where: the data order, free of the dp degree
    probe.py          the evidence of a step; told by a dialect where things are
    trainer_view.py   where things are, as a dialect or a program's probe tells it
    step_line.py      its line of metrics.jsonl, from what every rank saw
    cross_entropy.py  float64 loss from the logits, vocabulary shards included
    grad_norm.py      float64 gradient norm over the unique shards
    clipping.py       sees gradients before they are clipped, by whatever function
    whole_gradients.py  gradients that are partial sums, whole for as long as one looks
    rows.py           what has a row in samples: parameters, and the matrices in fused ones
    tensors.py        those rows at a sampled step
    placement.py      which entries of a whole tensor a rank holds
    flat_shard.py     a shard that is a run of the flattened tensor (FSDP 1, ZeRO)
    world.py          what ranks do together, and one process without a process group alone
    sketch.py         signed sums of a tensor's entries, shard by shard; hashing.py its hashes
    after_update.py   what clipping and the optimizer left; buffers.py what buffers hold
    replicas.py       whether copies of a shard are the same bits (bits.py), and if not,
    disagreement.py   which ranks hold which
    digest.py         order-independent fingerprint of a global batch
    audit.py          what is really in force, as far as all releases are alike
    writer.py         metrics.jsonl and in_force.json
    imported.py       files that a rank's code came from, besides toolchain and ours
    passes.py         one life of a run's ranks; torn.py: checkpoints that a dead one left
    fusion.py         fused async-TP operators, counted in Inductor's graphs
    rotation.py       rotations of keys and values that context parallelism really uses
    cpu.py            what torchtitan assumes of a GPU and a CPU with gloo lacks
    pipelining.py     what torch's pipeline schedules do besides training
    ulp.py            weights moved by one unit in the last place (A/A repeat)
    inject.py         calls a test set's ``inject`` function
    warm.py           the fork server; stub.py and agent.py are how torchrun reaches it
    memory.py         peak memory
    names.py          canonical names of parameters
    dry_run.py        a job built and stepped without its GPUs, on a fake process group;
    dry_run_meter.py  its memory, dry_run_sharding.py whether parameters are sharded as the
                      degrees say, dry_run_errors.py which key an error speaks of
    checks.py         names that torchtitan's config classes would take without a look
    titan_0_3/        torchtitan 0.3: CPU shim, config, data, hooks, audit
    titan_0_2/        torchtitan 0.2: the same
"""
