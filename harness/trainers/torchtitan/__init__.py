"""torchtitan under torchrun, by rank code of ours: ``[trainer] kind = "torchtitan"``.

::

    trainer.py    Torchtitan, and how torchrun is called for it
    table.py      what an experiment file says to it: [trainer], train configs, checkpoint keys
    releases.py   what differs between releases and is known to go wrong in them; its toolchains
"""

from harness.trainers.torchtitan.trainer import TRAINER

__all__ = ["TRAINER"]
