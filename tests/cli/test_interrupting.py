"""Ctrl-C before a command has begun: exit code 130 and no word, least of all a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INTERRUPTING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it


class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)


sys.meta_path.insert(0, Interrupting())
"""


@pytest.mark.parametrize(
    "module", ["threading", "argparse", "rich.console", "converge_harness.cli.parser", "pydantic"]
)
def test_an_interruption_while_modules_are_imported(module, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING)
    found = subprocess.run(
        [sys.executable, "-m", "converge_harness", "plan", "experiments/smoke.toml"],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}",
            "INTERRUPT_AT": module,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 130
    assert found.stderr.splitlines() in (
        [],
        ["interrupted; finished runs are kept: run the same command again to continue"],
    )
