"""The command line: the only place that prints and exits."""

from harness.cli.main import main

__all__ = ["main"]
