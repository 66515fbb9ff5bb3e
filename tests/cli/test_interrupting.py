"""Ctrl-C before a command has begun: exit code 130 and no word, least of all a traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", ["argparse", "rich.console", "harness.cli.parser", "pydantic"])
def test_an_interruption_while_modules_are_imported(module):
    process = subprocess.Popen(
        # Writes a line to standard error as each import ends.
        [sys.executable, "-X", "importtime", "-m", "harness", "plan", "experiments/smoke.toml"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        for line in process.stderr:
            if line.rpartition("|")[2].strip() == module:
                break
        else:
            pytest.fail(f"{module} was not imported")
        process.send_signal(signal.SIGINT)
        told = process.stderr.read()
    said = [line for line in told.splitlines() if not line.startswith("import time:")]
    assert process.returncode == 130
    assert said in ([], ["interrupted; finished runs are kept: the same command goes on from here"])
