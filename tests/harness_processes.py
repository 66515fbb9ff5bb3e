"""Harnesses in processes of their own, to be watched and killed."""

import subprocess
import sys
from contextlib import contextmanager

import pytest


@contextmanager
def harness_processes(program, *arguments, **options):
    """A function that starts ``program`` with the arguments and its own; all end with the block."""
    started = []

    def start(*more):
        process = subprocess.Popen(
            [sys.executable, program, *arguments, *more],
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.wait()
            process.stdout.close()


def read_until(process, wanted):
    """Read what a harness prints up to a line that begins so."""
    for line in process.stdout:
        if line.startswith(wanted):
            return
    pytest.fail(f"converge ended without {wanted!r}")
