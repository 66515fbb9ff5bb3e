"""torchtitan under torchrun, with converge's rank code: ``[trainer] kind = "torchtitan"``.

::

    trainer.py     Torchtitan, and how torchrun is called for it
    table.py       its part of an experiment file: [trainer], train configs, checkpoint keys
    audit.py       what of a set was not in force, and what ran unnamed
    releases.py    differences and known bugs of releases; its toolchains
    stages.py      how it cuts a model into pipeline stages
    user_python.py  the user's Python, often with a fork of torchtitan
    dialect.py     which dialect can drive a torchtitan, found in its source
    user_module.py  the user's model module, read without importing it
"""

from converge_harness.trainers.torchtitan.trainer import TORCHTITAN, TRAINER

__all__ = ["TORCHTITAN", "TRAINER"]
