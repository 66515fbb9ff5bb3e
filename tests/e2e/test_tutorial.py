"""docs/tutorial.md, command by command."""

import difflib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from warm_toolchains import TOOLCHAINS, warm_torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
SCRIPTS = ROOT / "experiments" / "tutorial"


def commands():
    """Those of the page, continued lines joined."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines]


def test_the_page_shows_all_that_the_probed_script_has_more():
    plain, probed = (
        (SCRIPTS / name).read_text().split('"""', 2)[2] for name in ("train.py", "train_probed.py")
    )
    changes = [
        line
        for line in difflib.unified_diff(plain.splitlines(), probed.splitlines(), n=0, lineterm="")
        if not line.startswith(("---", "+++", "@@"))
    ]
    added = [line[1:].strip() for line in changes if line[1:].strip()]
    assert all(line.startswith("+") for line in changes)
    assert added[0] == "from converge_harness.probe import Probe"
    calls = added[1:]
    assert len(calls) == 3
    assert all(call in PAGE for call in calls)


@pytest.mark.slow
def test_its_script_ends_gloos_threads_before_the_interpreter(tmp_path):
    code = (
        "import runpy, sys; from pathlib import Path; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__'); "
        "print([(task / 'comm').read_text() for task in Path('/proc/self/task').iterdir()])"
    )
    program = (SCRIPTS / "train.py", "--steps", "1", "--out", tmp_path)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [TOOLCHAINS / "torchtitan-0.3.0" / "bin" / "python", "-c", code, *program],
        env={**os.environ, **alone, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert (tmp_path / "loss.csv").is_file()
    assert "python" in done.stdout
    assert "gloo" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_commands_of_the_page_do_what_it_says(tmp_path):
    shutil.copytree(SCRIPTS, tmp_path / "experiments" / "tutorial")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "CONVERGE_TOOLCHAINS": str(warm_torch())}
    install, build, *rest = commands()
    assert install == "python3 -m pip install ."
    assert build == "converge toolchain build torchtitan-0.3.0"
    said = {}
    for command in rest:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        name = re.sub(r".*/(\w+)\.\w+$", r"\1", command)
        said[name] = done.returncode, " ".join(done.stdout.split())
    assert {name: code for name, (code, _) in said.items()} == {
        "curves": 0,
        "probed": 0,
        "train_broken": 0,
        "broken": 1,
    }, said
    assert "so only the loss and grad norm of" in said["curves"][1]
    assert "so only the loss" not in said["probed"][1]
    why = "gradients are scaled by 2, which equals gradient accumulation steps (2)"
    assert why in said["broken"][1]
    assert why in PAGE
    assert "would pass" in said["broken"][1]
