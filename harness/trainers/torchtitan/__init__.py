"""torchtitan under torchrun, with converge's rank code: ``[trainer] kind = "torchtitan"``.

::

    trainer.py    Torchtitan, and how torchrun is called for it
    table.py      its part of an experiment file: [trainer], train configs, checkpoint keys
    releases.py   differences and known bugs of releases; its toolchains
"""

from converge_harness.trainers.torchtitan.trainer import TRAINER

__all__ = ["TRAINER"]
