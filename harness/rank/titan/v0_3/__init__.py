"""torchtitan 0.3 and its main branch: the config is built in Python, the trainer is only watched.

::

    series.py       0.3 and main, and what they call differently
    sizes.py        the sizes of a job, by the same keys for both
    patches.py      torch APIs newer than 2.13 that it calls, and what it assumes of a GPU
    attention.py    FlexAttention with a dense mask, for the CPU
    base_config.py  the config function that a job names, torchtitan's or one of the person's own
    config.py       a job as torchtitan's own Trainer.Config, and which keys the job declared
    shape.py        the model's shape and its Float8 layers
    loaders.py      which dataloader reads the corpus, by the job's word
    streaming_data.py, streaming_package.py
                    MosaicML Streaming's as one, and the package in a rank
    hooks.py        the recorder's places in a built trainer
    audit.py        what is really in force, read from the live objects
    dry_run.py      two steps on fake tensors, with stand-ins for what is not there
    training.py     one rank of a job, from config to the last step

This file imports nothing of torchtitan: ``preload`` must patch torch first.
"""

from __future__ import annotations


def preload(device: str) -> None:
    """Import torchtitan and everything of it that a rank uses, fit to fork afterwards."""
    if device == "cpu":
        from converge_harness.rank.titan.common.cpu import prepare_torch

        prepare_torch()
    from converge_harness.rank.titan.v0_3 import patches

    patches.complete_torch()
    with patches.unknown_autotune_keys_ignored():
        # The first line imports torchtitan already.
        from converge_harness.rank.titan.v0_3 import training

        training.preload()
    if device == "cpu":
        from converge_harness.rank.titan.v0_3.patches import prepare_torchtitan

        prepare_torchtitan()
