"""The scripts with which published drafts of issues show a bug with torch alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

UPSTREAM = Path(__file__).parents[2] / "reports" / "upstream"
SCRIPTS = sorted(UPSTREAM.glob("*/plain_torch.py"))
LONGEST = 150
"""Lines."""


def test_there_is_one():
    assert SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parent.name)
def test_it_is_short_and_needs_torch_alone(script):
    text = script.read_text()
    assert len(text.splitlines()) < LONGEST
    imported = set(re.findall(r"(?m)^(?:import|from) (\w+)", text))
    assert imported - set(sys.stdlib_module_names) == {"torch"}


def test_a_fused_reduce_scatter_scatters_samples_where_there_are_several(tmp_path):
    script = UPSTREAM / "float8_async_tp_scatter" / "plain_torch.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    said = re.search(r"relative error (\S+) with one sample, (\S+) with two", done.stdout)
    one, two = map(float, said.groups())
    assert one < 1e-6
    assert two > 0.5
