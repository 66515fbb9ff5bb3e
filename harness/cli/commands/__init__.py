"""One module per command: its line in the help, its arguments, and its run.

::

    init.py plan.py toolchain.py                   before anything runs
    run.py calibrate.py bless.py                   run jobs and judge
    submit.py status.py collect.py cancel.py       the same without waiting for the jobs
    compare.py report.py                           judge finished runs or curves
    shrink.py bisect.py repro.py                   what a failure needs, which commit brought it, an
                                                   issue about it
    history.py notify.py export.py                 results over nights, messages, other tools

``converge_harness.cli.parser.CommandModule`` says what such a module has; a new one is named in
``COMMANDS`` there.
"""
