"""``converge bisect`` on a program in a git checkout; commits of torchtitan: ``tests/e2e``."""

import json
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from own_fork import git
from test_against import LOSSES, MATRIX, PROGRAM

from converge_harness.cli.main import main

REPEATED = MATRIX.replace("repeats = []", 'repeats = ["rerun"]')
WRONG = LOSSES.replace("3.0 /", '(3.0 if word == "a" else 4.0) /')
OTHER = LOSSES.replace("def losses(word):", 'def losses(word):\n    assert word == "a"')
BISECTED = Path("reports/bisected/two/bisected.json")
BROKEN = "this is no Python"


def commit(folder, text, subject):
    (folder / "losses.py").write_text(f"{text}\n# {subject}\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", subject)
    git(folder, "tag", subject)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "e.toml").write_text(REPEATED)
    (folder / "train.py").write_text(PROGRAM)
    git(folder, "init", "-q", "-b", "main")
    return folder


def commits(folder, *texts, first=0):
    for number, text in enumerate(texts, first):
        commit(folder, text, f"c{number}")


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def converge(checkout, monkeypatch, capsys):
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("XDG_CACHE_HOME", str(checkout.parent / "cache"))

    def run(command, *options):
        where = ("--store", str(checkout.parent / "store"), "--out", str(checkout.parent / "out"))
        code = main([command, "e.toml", *options, *where])
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def bisect(converge):
    def run(good, bad, *more):
        return converge("bisect", "--set", "two", "--good", good, "--bad", bad, *more)

    return run


def result(folder):
    return json.loads((folder.parent / "out" / "bisected.json").read_text())


def subjects(folder, names):
    return [git(folder, "show", "-s", "--format=%s", name) for name in names]


def test_the_first_bad_commit_is_found_around_one_that_does_not_run(checkout, bisect):
    commits(checkout, LOSSES, LOSSES, LOSSES, BROKEN, WRONG, WRONG, WRONG)
    done = bisect("c0", "c6")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "fails (the curves differ: loss 6 for 5 at step 1" in done.stdout
    assert "looking for the first of 6 commits that fails" in done.stdout
    assert "c3: cannot be judged (INVALID: the control one crashed" in done.stdout
    says = "the first commit that fails that way is one of these 2 (those between are skipped)"
    assert says in done.stdout
    assert subjects(checkout, result(checkout)["candidates"]) == ["c3", "c4"]

    done = bisect("c0", "c6", "--trials", "1")  # what it has run is reused
    assert done.returncode == 3
    assert "is one of these 6 (the search did not end)" in done.stdout
    commits(checkout, LOSSES, WRONG, WRONG, first=7)
    done = bisect("c7", "c9")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "both sides of it again, from nothing" in done.stdout
    assert "first commit that fails that way: " in done.stdout
    assert "losses.py | " in done.stdout
    left = result(checkout)
    assert (subjects(checkout, left["candidates"]), left["done"]) == (["c8"], True)
    reports = [checkout.parent / "out" / side / "report.json" for side in ("before", "after")]
    verdicts = [json.loads(path.read_text())["tests"][0]["verdict"] for path in reports]
    assert verdicts == ["PASS", "FAIL"]
    # No worktree is left.
    assert git(checkout, "worktree", "list").count("\n") == 0


def test_where_the_good_commit_is_newer_the_mending_one_is_found(checkout, bisect):
    commits(checkout, WRONG, WRONG, LOSSES, LOSSES)
    done = bisect("main", "main~3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "looking for the first of 3 commits that no longer fails" in done.stdout
    assert subjects(checkout, result(checkout)["candidates"]) == ["c2"]


def test_of_a_merge_only_the_first_parent_is_followed(checkout, bisect):
    commits(checkout, LOSSES, LOSSES)
    git(checkout, "checkout", "-q", "-b", "side", "c0")
    commits(checkout, WRONG, WRONG, first=2)
    git(checkout, "checkout", "-q", "main")
    git(checkout, "merge", "-q", "--no-ff", "-X", "theirs", "-m", "merge", "side")
    done = bisect("c0", "main")
    assert done.returncode == 0, done.stdout + done.stderr
    assert subjects(checkout, result(checkout)["candidates"]) == ["merge"]
    # On two branches, what both come from tells on which of them it changed.
    done = bisect("c1", "side")
    assert done.returncode == 0, done.stdout + done.stderr
    assert subjects(checkout, result(checkout)["candidates"]) == ["c2"]


def test_another_failure_is_not_followed(checkout, bisect):
    commits(checkout, LOSSES, OTHER, OTHER, WRONG)
    done = bisect("c0", "c3")
    assert done.returncode == 3, done.stdout + done.stderr
    assert subjects(checkout, result(checkout)["candidates"]) == ["c1", "c2", "c3"]


@pytest.mark.parametrize(
    ("good", "bad", "says"),
    [
        ("c0", "c1", "'two' does not fail at the bad commit"),
        ("c2", "c3", "is bad: the set fails the same way"),
        ("c3", "c3", "both are "),
        ("nowhere", "c3", "has no revision 'nowhere'"),
        ("c4", "c3", "the set cannot be judged (INVALID: the control one crashed"),
    ],
)
def test_revisions_that_are_not_what_they_are_said_to_be(checkout, bisect, good, bad, says):
    commits(checkout, LOSSES, LOSSES, WRONG, WRONG, BROKEN)
    done = bisect(good, bad)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not (checkout.parent / "out" / "bisected.json").exists()


def test_commits_without_a_common_one_are_refused(checkout, bisect):
    commits(checkout, LOSSES)
    git(checkout, "checkout", "-q", "--orphan", "other")
    commits(checkout, WRONG, first=1)
    done = bisect("c0", "c1")
    assert done.returncode == 2
    assert "come from no common commit" in done.stderr


def test_a_set_that_fails_only_now_and_then_is_said_to(checkout, bisect):
    # Right once, then wrong: what was found is not so in a second run.
    once = (
        "from pathlib import Path\nDONE = Path(__file__).resolve().parents[4] / 'once'\n"
        'def losses(word):\n    wrong = word == "b" and DONE.exists()\n'
        '    DONE.write_text("") if word == "b" else None\n'
        "    for step in range(1, 21):\n        yield 2.0 + (4.0 if wrong else 3.0) / step\n"
    )
    commits(checkout, LOSSES, once, WRONG)
    done = bisect("c0", "c2")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "in a second run, other than before: " in done.stdout
    assert "it fails only now and then" in done.stdout


def test_a_set_that_a_revision_broke_has_the_search_as_its_next_command(checkout, converge):
    commits(checkout, LOSSES, LOSSES, WRONG, WRONG)
    done = converge("run", "--against", "c0")
    assert done.returncode == 1, done.stdout + done.stderr
    command = "next: converge bisect e.toml --set two --good c0 --bad HEAD --of code"
    assert command in done.stdout
    report = json.loads((checkout.parent / "out" / "report.json").read_text())
    assert "converge bisect" in report["tests"][0]["next_command"]
    assert main(shlex.split(command)[2:]) == 0
    assert subjects(checkout, json.loads(BISECTED.read_text())["candidates"]) == ["c2"]
    # It finds commits: what is not committed is in none.
    (checkout / "losses.py").write_text(f"{WRONG}\n# changed")
    assert "converge bisect" not in converge("run", "--against", "c0").stdout


def test_git_bisect_can_ask_converge_itself(checkout, converge):
    commits(checkout, LOSSES, LOSSES, BROKEN, LOSSES, WRONG, WRONG)
    codes = {}
    for name in ("c1", "c2", "c4"):
        git(checkout, "checkout", "-q", name)
        codes[name] = converge("run", "--only", "two", "--git-bisect").returncode
    assert codes == {"c1": 0, "c2": 125, "c4": 1}
    git(checkout, "checkout", "-q", "main")
    (checkout / "e.toml").write_text("nothing")
    assert converge("run", "--git-bisect").returncode == 125
