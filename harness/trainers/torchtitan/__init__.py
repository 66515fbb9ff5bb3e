"""torchtitan under torchrun, by rank code of ours: ``[trainer] kind = "torchtitan"``.

::

    launching.py     argv
    releases.py      what differs between releases, and what is known to go wrong in them
"""

from harness.trainers.torchtitan.trainer import TRAINER

__all__ = ["TRAINER"]
