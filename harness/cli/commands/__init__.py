"""A module for every command: its line in the help, its arguments, and its run.

``converge_harness.cli.parser.CommandModule`` says what such a module holds; a new one is named in
``COMMANDS`` there.
"""
