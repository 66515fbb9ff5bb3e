"""``converge run --against REV`` on a program in a git checkout: what a change did to every set."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from own_fork import git
from warm_converge import warm_python

ROOT = Path(__file__).parents[2]
MATRIX = f"""
schema = 1
name = "mine"
repeats = []
[trainer]
kind = "command"
command = ["{{python}}", "train.py", "{{output}}", "{{config.word}}"]
launcher = "none"
python = "{sys.executable}"
probe = false
curves = "{{output}}/loss.csv"
[trainer.config]
word = "a"
training = {{ steps = 20, local_batch_size = 2 }}
[control]
name = "one"
parallelism.dp_replicate = 1
waive = ["control-is-repeated"]
[[test]]
name = "two"
parallelism.dp_replicate = 1
set = {{ word = "b" }}
"""
PROGRAM = """
import sys
from pathlib import Path

from losses import losses

lines = [f"{step},{loss}" for step, loss in enumerate(losses(sys.argv[2]), start=1)]
(Path(sys.argv[1]) / "loss.csv").write_text("\\n".join(["step,loss", *lines]) + "\\n")
"""
LOSSES = """
def losses(word):
    for step in range(1, 21):
        yield 2.0 + 3.0 / step
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "e.toml").write_text(MATRIX)
    (folder / "train.py").write_text(PROGRAM)
    (folder / "losses.py").write_text(LOSSES)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "train")
    return folder


def converge(folder, *options):
    where = ("--store", str(folder.parent / "store"), "--out", str(folder.parent / "out"))
    return subprocess.run(
        [warm_python(), "-m", "converge_harness", "run", "e.toml", *options, *where],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "XDG_CACHE_HOME": str(folder.parent / "cache"),
        },
        capture_output=True,
        text=True,
        check=False,
    )


def against(folder):
    return json.loads((folder.parent / "out" / "report.json").read_text())["against"]


def test_a_change_that_computes_nothing_is_bitwise_identical(checkout):
    (checkout / "losses.py").write_text(LOSSES.replace("step", "number"))
    ended = converge(checkout, "--against", "HEAD")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    commit = git(checkout, "rev-parse", "--short=12", "HEAD")
    says = f"Bitwise identical: 2 sets are the same as at HEAD ({commit}), in every number."
    assert says in ended.stdout
    assert f"with uncommitted changes is tested against HEAD ({commit})" in ended.stdout
    found = against(checkout)
    assert (found["headline"], found["same"], found["commit"]) == (says, True, commit)
    assert [(each["name"], each["change"]) for each in found["sets"]] == [
        ("one", "bitwise the same"),
        ("two", "bitwise the same"),
    ]
    out = checkout.parent / "out"
    assert "bitwise the same" in (out / "report.md").read_text()
    assert "bitwise the same" in (out / "report.html").read_text()
    assert (out / "base" / "report.json").is_file()
    # The revision was checked out beside the working tree, and is gone.
    assert git(checkout, "worktree", "list").count("\n") == 0
    assert not [*(checkout.parent / "cache" / "converge" / "worktrees").glob("mine-*/")]
    report = subprocess.run(
        [warm_python(), "-m", "converge_harness", "report", str(out)],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (report.returncode, says in report.stdout) == (0, True), report.stdout + report.stderr


def test_a_change_of_one_set_is_shown_with_its_verdict_before_and_after(checkout):
    (checkout / "losses.py").write_text(LOSSES.replace("3.0 /", '(3.0 if word == "a" else 4.0) /'))
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "wrong")
    ended = converge(checkout, "--against", "HEAD~1")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    one, two = against(checkout)["sets"]
    assert (one["change"], two["change"]) == ("bitwise the same", "different")
    assert two["verdict_before"] == "PASS"
    assert two["verdict_after"] not in (None, "PASS")
    assert "Of 2 sets against HEAD~1" in ended.stdout
    again = converge(checkout)  # not against anything: the page no longer says so
    assert again.returncode in (1, 3)
    assert "against" not in json.loads((checkout.parent / "out" / "report.json").read_text())


def test_other_rounding_is_not_taken_for_another_training(checkout):
    (checkout / "losses.py").write_text(LOSSES.replace("3.0 / step", "3.0 / step * (1 + 1e-9)"))
    ended = converge(checkout, "--against", "HEAD")
    assert {each["change"] for each in against(checkout)["sets"]} == {"same within rounding"}
    assert ended.returncode == 0


def test_a_control_whose_file_is_new_is_refused_with_the_file(checkout):
    (checkout / "new.txt").write_text("")
    command = '"{config.word}"]\nfiles = ["new.txt"]'
    (checkout / "e.toml").write_text(MATRIX.replace('"{config.word}"]', command))
    ended = converge(checkout, "--against", "HEAD")
    assert ended.returncode == 2
    assert "new.txt, which is not in HEAD" in " ".join(ended.stderr.split())


def test_a_revision_that_is_not_there_is_named_before_anything_runs(checkout):
    ended = converge(checkout, "--against", "nowhere")
    assert ended.returncode == 2
    assert f"{checkout} has no revision 'nowhere'" in " ".join(ended.stderr.split())
    assert not (checkout.parent / "store" / "runs").exists()


def test_code_outside_of_any_checkout_has_no_revisions(checkout):
    (checkout / ".git").rename(checkout / "gone")
    ended = converge(checkout, "--against", "HEAD")
    assert ended.returncode == 2
    assert "none of the code that e.toml trains with is in a git checkout" in " ".join(
        ended.stderr.split()
    )
