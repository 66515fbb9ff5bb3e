"""Megatron-Core 0.16: a GPT of its own layers, trained as Megatron-LM's ``train_step`` does.

::

    cpu.py              stand-ins for what it assumes of a GPU
    config.py           a job as its dataclasses, and which keys the job declared
    model.py            process groups, model parts, DDP, optimizer and schedule
    parameters.py       canonical names, and which entries a rank holds
    seed_checkpoint.py  whole tensors by canonical names, for every layout
    trainer.py          the training loop
    hooks.py            the recorder's places in it
    frozen_steps.py     forward and backward passes at the initial weights
    audit.py            what is really in force, read from the live objects
    training.py         one rank of a job, from config to the last step

This file imports nothing of Megatron-Core: ``preload`` must patch torch first.
"""

from __future__ import annotations

from converge_harness.rank.settings import KeyProblem, SettingError
from converge_harness.run_folder.job import RankJob


def preload(device: str) -> None:
    """Import Megatron-Core and everything of it that a rank uses, fit to fork afterwards."""
    if device == "cpu":
        from converge_harness.rank.megatron.cpu import prepare_torch

        prepare_torch()
    import converge_harness.rank.megatron.training  # noqa: F401 - imports all of it

    if device == "cpu":
        from converge_harness.rank.megatron.cpu import prepare_megatron

        prepare_megatron()


def run(job: RankJob) -> None:
    """Be one rank of the job: train, or write the seed checkpoint."""
    from converge_harness.rank.megatron import training

    training.run(job)


def check(job: RankJob) -> list[KeyProblem]:
    """What is wrong with the job's config; empty when Megatron-Core takes it."""
    from converge_harness.rank.megatron.config import build_config

    try:
        build_config(job)
    except SettingError as error:
        return list(error.problems)
    return []
