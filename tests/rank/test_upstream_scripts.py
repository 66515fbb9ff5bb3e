"""The scripts with which published drafts of issues show a bug without converge.

Each runs in the toolchain of the release that has the bug (torchtitan 0.3, torchtitan 0.2, or
Hugging Face's), and is skipped in others.
"""

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

UPSTREAM = Path(__file__).parents[2] / "reports" / "upstream"
SCRIPTS = {
    "float8_async_tp_scatter/plain_torch.py": ("torch", ""),
    "torchrun_torn_error_file/reproduce.py": ("torch", ""),
    "torchtitan_tokens_seen_of_one_rank/reproduce.py": ("torchtitan", "0.3.0"),
    "torchtitan_torn_first_checkpoint/reproduce.py": ("torchtitan", "0.2.2"),
    "accelerate_no_fsdp_on_cpu/reproduce.py": ("accelerate", "1.15.0"),
}
"""Beside torch, the one package that each needs, and the release that has the bug."""
LONGEST = 150
"""Lines."""


def test_every_script_is_here():
    found = {str(path.relative_to(UPSTREAM)) for path in UPSTREAM.glob("*/*.py")}
    assert found == set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_is_short_and_needs_little(script):
    text = (UPSTREAM / script).read_text()
    assert len(text.splitlines()) < LONGEST
    imported = set(re.findall(r"(?m)^ *(?:import|from) (\w+)", text))
    assert imported - set(sys.stdlib_module_names) == {"torch", SCRIPTS[script][0]}


def said_by(script, folder):
    """The last line of a script's output, on a release that has its bug: it says that it has."""
    package, release = SCRIPTS[script]
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "none"
    if not found.startswith(release):
        pytest.skip(f"needs toolchain with {package} {release}, found {found}")
    done = subprocess.run(
        [sys.executable, str(UPSTREAM / script)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_a_fused_reduce_scatter_scatters_samples_where_there_are_several(tmp_path):
    line = said_by("float8_async_tp_scatter/plain_torch.py", tmp_path)
    said = re.search(r"relative error (\S+) with one sample, (\S+) with two", line)
    one, two = map(float, said.groups())
    assert one < 1e-6
    assert two > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("script", [each for each in SCRIPTS if each.endswith("reproduce.py")])
def test_a_script_says_what_its_issue_quotes(script, tmp_path):
    issue = (UPSTREAM / script).with_name("ISSUE.md").read_text()
    assert said_by(script, tmp_path) in issue
