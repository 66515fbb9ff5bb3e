"""Records the evidence of every step in a rank, for any trainer, by torch alone.

::

    step_recorder.py     StepRecorder: what a dialect, or a program's probe, calls in a step
    trainer_view.py      TrainerView: where they say that things are
    cross_entropy.py     loss in float64 from the logits, also from vocabulary shards
    grad_norm.py         gradient norm in float64 over the unique shards
    digest.py            order-independent fingerprint of a global batch
    rows.py              rows of samples: parameters, and the matrices in fused ones
    tensor_samples.py    measures those rows at sampled and frozen steps
    post_step_state.py   clipped gradients and optimizer state; buffers.py: buffers
    activations.py       what every module gets and returns, and the gradients of that
    operations.py        every operation in the first call of one module, where that is asked for
    random_states.py     which random generators a step draws from, and in which states
    dropout_masks.py     which units dropout keeps, by sums over its masks
    objective_terms.py   what an objective is made of, token by token, where a program shows it
    checkpoint_state.py  the content of checkpoints
    sketch.py            signed sums of a tensor's entries, shard by shard
    replicas.py          whether copies of a shard are bit-identical (bits.py), else which differ
    placement.py         which entries of a whole tensor a rank holds
    fetched_shard.py     shards in buffers of a framework's own, fetched when they are looked at:
                         flat_shard.py: a run of the flattened tensor (FSDP 1, ZeRO)
                         block_shard.py: a block of it (Megatron-Core)
    names.py             canonical names of parameters
    world.py             collectives, which also work without a process group
    imported.py          files that a rank imported, besides the toolchain's packages and ours
"""
