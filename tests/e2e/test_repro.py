"""``converge repro`` of a program of one's own in its own environment, and its script elsewhere."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from reproducing import expected, require_nobodys, run_script
from warm_converge import warm_python

TRAINERS = Path(__file__).parent / "trainers"
EXPERIMENT = """
schema = 1
name = "curves"
repeats = ["rerun"]
[trainer]
kind = "command"
command = [
    "{python}", "PROGRAM", "--steps", "{steps}", "--seed", "{seed}",
    "--output", "{output}", "--bug", "{config.bug}",
]
launcher = "none"
python = "own/bin/python"
probe = false
curves = "{output}/loss.csv"
columns = { step = "iteration", loss = "train/loss" }
files = ["notes.txt"]
[trainer.config]
bug = "none"
training = { steps = 12, local_batch_size = 1 }
[control]
name = "one"
parallelism = {}
[[test]]
name = "rate"
parallelism = {}
set = { bug = "rate" }
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """A folder in which a set of such a program has failed; its program is elsewhere."""
    folder = tmp_path_factory.mktemp("failed")
    work, program = folder / "work", folder / "source" / "train.py"
    program.parent.mkdir()
    shutil.copy(TRAINERS / "curve_trainer.py", program)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(work / "own")], check=True)
    (work / "notes.txt").write_text("read by the program\n")
    (work / "x.toml").write_text(EXPERIMENT.replace("PROGRAM", str(program)))
    done = converge(work, "run", "x.toml", "--out", "out")
    assert done.returncode == 1, done.stdout + done.stderr
    return work


def converge(work, *words):
    return subprocess.run(
        [warm_python(), "-m", "converge_harness", *words],
        cwd=work,
        env={
            **os.environ,
            "CONVERGE_STORE": str(work / "store"),
            "CONVERGE_HISTORY": str(work / "history.sqlite"),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def repro(work, *more):
    return converge(work, "repro", "out", "--set", "rate", "--out", "folder", *more)


def refused(work):
    done = repro(work)
    assert done.returncode == 2, done.stdout + done.stderr
    assert not (work / "folder").exists()
    return " ".join(done.stderr.split())


def test_a_program_is_shrunk_in_what_its_runs_show(failed):
    done = converge(failed, "shrink", "x.toml", "--set", "rate", "--out", "shrunk")
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "1 2 steps instead of 12: fails the same way" in said
    assert "needs bug = 'rate': without it, it passes" in said
    assert "smallest set-up: one rank against one rank, 2 steps" in said
    again = converge(failed, "run", "shrunk/experiment.toml", "--out", "again")
    assert again.returncode == 1, again.stdout + again.stderr
    assert "FAIL rate: the curves agree until step 2" in again.stdout


def test_a_program_and_its_environment_are_the_same_failure_elsewhere(failed, tmp_path):
    found = failed / "found" / "bisected.json"
    found.parent.mkdir()
    found.write_text(
        '{"schema": 1, "set": "rate", "result": "The first commit that fails that way is c8."}'
    )
    done = repro(failed, "--bisected", "found")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stdout
    folder = failed / "folder"
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*")) == [
        *("ISSUE.md", "code/train.py", "env.txt", "expected.json", "experiment.toml"),
        *("notes.txt", "requirements.txt", "run.sh", "train_config.toml"),
    ]
    require_nobodys(folder, failed.parent, Path(sys.executable).parent, Path(__file__).parents[2])
    issue = (folder / "ISSUE.md").read_text()
    assert "- bug = " in issue
    assert "**Which revision.** The first commit that fails that way is c8." in issue
    assert f"python{sys.version_info[0]}.{sys.version_info[1]} -m venv env" in issue

    theirs = run_script(folder, tmp_path / "theirs", tmp_path / "none")
    assert theirs.code == 1, theirs.said
    wanted = expected(folder)
    assert (theirs.test["verdict"], theirs.test["cause"]) == ("FAIL", wanted["cause"])
    assert theirs.test["onset_step"] == wanted["onset_step"]
    assert (tmp_path / "theirs" / "env" / "bin" / "python").exists()

    # What has changed since is not what failed.
    shutil.rmtree(folder)
    (packages,) = (failed / "own").glob("lib/python3*/site-packages")
    metadata = packages / "new-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: new\nVersion: 1.0\n")
    assert "has other packages than when 'one' was run in it" in refused(failed)
    (failed / "notes.txt").write_text("read by the program, and written again\n")
    said = refused(failed)
    assert "notes.txt: has changed since 'rate' failed, or a file that it imports has" in said
    assert "run it again: converge run x.toml --only rate" in said
    saved = json.loads((failed / "out" / "matrix.json").read_text())
    del saved["code"]
    (failed / "out" / "matrix.json").write_text(json.dumps(saved))
    assert "is code of 'rate', and the report is older than digests of such code" in refused(failed)
