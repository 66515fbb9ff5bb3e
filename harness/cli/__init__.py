"""The command line: the only place that prints and exits.

::

    main.py        arguments to a command, errors to an exit code
    parser.py      the list of commands, and the parser built from them
    commands/      one file per command: its arguments and its run
    options.py     options that several commands take, and what their values mean
    exit_codes.py  verdicts to an exit code
    console.py     consoles, and printing a line to them
    building.py    what a user sees while a toolchain is built
    progress.py    what a user sees while jobs run
    verdicts.py    … and once they are judged
    plan_table.py, dry_run.py, cover.py    what `converge plan` shows, and with --dry-run, --cover
    quiet.py       what a user sees of a search, which runs many matrices in a row
    shrinking.py   the search for the smallest set-up that fails
    scheduled.py   what the commands for jobs of a scheduler share
    leaving.py     Ctrl-C while modules are imported

The work itself is done by ``converge_harness.matrix``.
"""

from converge_harness.cli.leaving import leaving_when_interrupted

with leaving_when_interrupted():
    from converge_harness.cli.main import main

__all__ = ["main"]
