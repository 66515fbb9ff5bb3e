"""Any program, by an argv template (docs/any-trainer.md): ``[trainer] kind = "command"``.

::

    argv.py          argv under each launcher, environment
    called.py        what of a job reaches the program
    failure.py       why one failed, by what its ranks printed
"""

from harness.trainers.command.trainer import TRAINER, trained_by

__all__ = ["TRAINER", "trained_by"]
