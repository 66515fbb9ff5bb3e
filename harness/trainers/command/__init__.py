"""Any program, by an argv template (docs/any-trainer.md): ``[trainer] kind = "command"``.

::

    trainer.py    CommandTrainer
    table.py      [trainer], and the checks of its templates
    settings.py   Command, the validated settings; templates with placeholders
    program.py    the files of the program, found in its template
    written.py    settings as a [trainer] table, for a file in another folder
    argv.py       argv under each launcher, environment; which settings reach the program
    on_nodes.py   what srun starts on the nodes of a scheduler's job
    audit.py      what of a set's degrees and sizes was not in force
    failure.py    why a program failed, from its ranks' output
"""

from converge_harness.trainers.command.trainer import TRAINER, trained_by

__all__ = ["TRAINER", "trained_by"]
