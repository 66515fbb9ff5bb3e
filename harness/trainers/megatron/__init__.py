"""Megatron-Core under torchrun, with converge's rank code: ``[trainer] kind = "megatron"``.

::

    trainer.py    Megatron
    table.py      its part of an experiment file, and what is refused by name
    mapping.py    names of its parameters in the checkpoint of another trainer
"""

from converge_harness.trainers.megatron.trainer import TRAINER

__all__ = ["TRAINER"]
