"""torchtitan 0.2 (measured with 0.2.2, its last release with TOML job files).

::

    training.py        what a rank does, from job to last step
    config.py          job to torchtitan's JobConfig, with all problems of its keys
    train_spec.py      the job's model shape and loader, by torchtitan's registry of train specs
    hooks.py           where the recorder sits in a trainer
    audit.py           what really ran
    shim.py            decides which of the following a config needs
    ring_attention.py  context parallel
    float8.py          Float8 and its TP styles
    async_tp.py        async tensor parallelism
    fixes.py           the repaired upstream bugs by name (importable without torch)

Nothing is imported here: ``fixes`` must be importable without torch.
"""

from __future__ import annotations


def preload(device: str) -> None:
    """Import what every rank needs; see ``converge_harness.rank.start.entry``."""
    from converge_harness.rank.titan.v0_2 import training

    training.preload(device)
