"""The command line: the only place that prints and exits."""

from harness.cli.leaving import leaving_when_interrupted

with leaving_when_interrupted():
    from harness.cli.main import main

__all__ = ["main"]
