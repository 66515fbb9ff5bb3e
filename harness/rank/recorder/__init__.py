"""The recorder in a rank: the evidence of every step, whatever trains. Imports torch alone.

::

    step_recorder.py     what a dialect, or a program's probe, calls in a step
    trainer_view.py      where things are, as they tell it
    cross_entropy.py     float64 loss from the logits, vocabulary shards included
    grad_norm.py         float64 gradient norm over the unique shards
    digest.py            order-independent fingerprint of a global batch
    rows.py              what has a row in samples: parameters, and the matrices in fused ones
    tensor_samples.py    those rows at a sampled step, and of frozen steps
    post_step_state.py   what clipping and the optimizer left; buffers.py: what buffers hold
    checkpoint_state.py  all that a checkpoint holds
    sketch.py            signed sums of a tensor's entries, shard by shard
    replicas.py          whether copies of a shard are the same bits (bits.py), and if not, which
    placement.py         which entries of a whole tensor a rank holds
    flat_shard.py        a shard that is a run of the flattened tensor (FSDP 1, ZeRO)
    names.py             canonical names of parameters
    world.py             what ranks do together, and one process without a process group alone
    imported.py          files that a rank's code came from, besides toolchain and ours
"""
