"""A program that is tied to converge: it ends with it, whenever the signal comes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SIGNALLED_AT_ONCE = """
import os, signal, subprocess, sys
from converge_harness.launch import process_guard

start = subprocess.Popen


def starts_and_is_signalled(*arguments, **options):
    program = start(*arguments, **options)
    if {orphaned}:
        os.getppid = lambda: 1
    os.kill(os.getpid(), signal.SIGTERM)
    return program


process_guard.subprocess.Popen = starts_and_is_signalled
sys.exit(process_guard.main([sys.executable, "-c", "import time; time.sleep(60)"]))
"""


@pytest.mark.parametrize("orphaned", [False, True])
def test_a_signal_before_the_program_is_known_ends_it_too(orphaned):
    mark = f"tied-{os.getpid()}-{orphaned}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TIED_TEST": mark}
    environment.pop("CONVERGE_PARENT", None)
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED_AT_ONCE.format(orphaned=orphaned)],
        env=environment,
        check=False,
        timeout=50,
    )
    assert time.monotonic() - begun < 40
    assert done.returncode == (127 if orphaned else 143)
    left = [each for each in psutil.process_iter() if mark in str(variables(each))]
    assert left == []


def variables(process):
    try:
        return process.environ().get("TIED_TEST")
    except psutil.Error:
        return None
