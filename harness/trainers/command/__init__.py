"""Any program, by an argv template (docs/any-trainer.md): ``[trainer] kind = "command"``.

::

    trainer.py    CommandTrainer
    table.py      [trainer], and what is wrong with its templates
    settings.py   the Command that it means; templates with placeholders
    program.py    the files of the program, found in its template
    argv.py       argv under each launcher, environment; what of a job reaches the program
    failure.py    why a program failed, by what its ranks printed
"""

from harness.trainers.command.trainer import TRAINER, trained_by

__all__ = ["TRAINER", "trained_by"]
