"""Megatron-Core: a GPT of its own layers, trained as Megatron-LM's ``train_step`` does.

::

    cpu.py              stand-ins for what it assumes of a GPU
    config.py           a job as its dataclasses, and which keys the job declared
    model.py            process groups, model parts, DDP, optimizer and schedule
    parameters.py       canonical names, and which entries a rank holds
    trainer.py          the training loop
    view.py             what the recorder needs of a model, whoever trains it
    hooks.py            the recorder's places in our training loop
    audit.py            what is really in force, read from the live objects
    training.py         one rank of a job, from config to the last step

This file imports nothing of Megatron-Core: ``preload`` must patch torch first.
"""

from __future__ import annotations


def preload(device: str) -> None:
    """Import Megatron-Core and everything of it that a rank uses, fit to fork afterwards."""
    if device == "cpu":
        from converge_harness.rank.megatron.cpu import prepare_torch

        prepare_torch()
    import converge_harness.rank.megatron.training  # noqa: F401 - imports all of it

    if device == "cpu":
        from converge_harness.rank.megatron.cpu import prepare_megatron

        prepare_megatron()
