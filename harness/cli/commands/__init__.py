"""A module for every command: its line in the help, its arguments, and its run.

See ``harness.cli.parser.Command`` for what such a module holds, and ``COMMANDS`` there, in which a
new one is named.
"""
