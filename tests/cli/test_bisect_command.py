"""``converge bisect`` on a program in a git checkout.

Commits of torchtitan and versions of a package: ``tests/matrix/test_bisecting.py``."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from own_fork import git
from test_against import LOSSES, MATRIX, PROGRAM

from converge_harness.cli.main import main
from converge_harness.matrix import bisect as matrix_bisect

REPEATED = MATRIX.replace("repeats = []", 'repeats = ["rerun"]')
WRONG = LOSSES.replace("3.0 /", '(3.0 if word == "a" else 4.0) /')
OTHER = LOSSES.replace("def losses(word):", 'def losses(word):\n    assert word == "a"')
ONCE = """
from pathlib import Path

DONE = Path(__file__).resolve().parents[4] / "once"


def losses(word):
    wrong = word == "b" and DONE.exists()
    if word == "b":
        DONE.write_text("")
    for step in range(1, 21):
        yield 2.0 + (4.0 if wrong else 3.0) / step
"""
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
    assert "fails (the curves differ: loss 6 (control: 5) at step 1" in done.stdout
    assert "looking among 6 commits for the first at which it fails" in done.stdout
    assert "c3: cannot be judged (INVALID: the control one crashed" in done.stdout
    says = "the first commit that fails that way is one of these 2 (those between are skipped)"
    assert says in done.stdout
    assert subjects(checkout, result(checkout)["candidates"]) == ["c3", "c4"]
    assert result(checkout)["result"] == ""

    done = bisect("c0", "c6", "--trials", "1")  # what it has run is reused
    assert done.returncode == 3
    assert "is one of these 6 (the search was cut short)" in done.stdout
    commits(checkout, LOSSES, WRONG, WRONG, first=7)
    done = bisect("c7", "c9")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "running both sides of the change again, from scratch" in done.stdout
    assert "first commit that fails that way: " in done.stdout
    assert "losses.py | " in done.stdout
    left = result(checkout)
    assert (subjects(checkout, left["candidates"]), left["done"]) == (["c8"], True)
    assert re.fullmatch(
        r"The first commit that fails that way is \w+ \d{4}-\d\d-\d\d c8; the one before it is "
        r"\w+ \d{4}-\d\d-\d\d c7\.",
        left["result"],
    )
    reports = [checkout.parent / "out" / side / "report.json" for side in ("before", "after")]
    verdicts = [json.loads(path.read_text())["tests"][0]["verdict"] for path in reports]
    assert verdicts == ["PASS", "FAIL"]
    # No worktree is left.
    assert git(checkout, "worktree", "list").count("\n") == 0


def test_where_the_good_commit_is_newer_the_mending_one_is_found(checkout, bisect):
    commits(checkout, WRONG, WRONG, LOSSES, LOSSES)
    done = bisect("main", "main~3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "looking among 3 commits for the first at which it does not fail" in done.stdout
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


def test_code_outside_of_git_has_no_commits(checkout, bisect, monkeypatch):
    (checkout / ".git").rename(checkout / "gone")
    done = bisect("c0", "c1")
    assert done.returncode == 2
    said = "commits of your own code: none of the code that e.toml trains with is in a git checkout"
    assert said in " ".join(done.stderr.split())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "no git on the PATH, to find commits of your own code" in " ".join(
        bisect("c0", "c1").stderr.split()
    )


def test_commits_without_a_common_one_are_refused(checkout, bisect):
    commits(checkout, LOSSES)
    git(checkout, "checkout", "-q", "--orphan", "other")
    commits(checkout, WRONG, first=1)
    done = bisect("c0", "c1")
    assert done.returncode == 2
    assert "come from no common commit" in done.stderr


def test_a_set_that_fails_only_now_and_then_is_said_to(checkout, bisect):
    # Right once, then wrong: what was found is not so in a second run.
    commits(checkout, LOSSES, ONCE, WRONG)
    done = bisect("c0", "c2")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "a second run gave another result: " in done.stdout
    assert "it fails in 1 of 2 runs there, so nothing found here is certain" in done.stdout


def test_a_bad_end_that_fails_only_now_and_then_says_how_often(checkout, bisect):
    # Right in its first run, wrong in the others.
    commits(checkout, LOSSES, ONCE)
    done = bisect("c0", "c1")
    assert done.returncode == 2
    assert "does not fail at the bad commit" in done.stderr
    assert "PASS; it failed in 2 of 3 runs" in done.stderr


@pytest.mark.parametrize("trials", [0, 1, 2])
def test_interrupted_it_names_what_is_left(checkout, bisect, monkeypatch, trials):
    commits(checkout, *[LOSSES] * 3, *[WRONG] * 3)
    judge, ends = matrix_bisect.verdict_alone, 2
    judged = []

    def interrupted(plan, ran):
        if len(judged) == ends + trials:
            raise KeyboardInterrupt
        judged.append(plan)
        return judge(plan, ran)

    monkeypatch.setattr(matrix_bisect, "verdict_alone", interrupted)
    done = bisect("c0", "c5")
    assert done.returncode == 130, done.stdout + done.stderr
    left = {0: ["c1", "c2", "c3", "c4", "c5"], 1: ["c3", "c4", "c5"], 2: ["c3"]}
    assert subjects(checkout, result(checkout)["candidates"]) == left[trials]
    monkeypatch.undo()


def test_an_end_on_a_merged_branch_leaves_out_what_does_not_come_from_it(checkout, bisect):
    commits(checkout, LOSSES)
    git(checkout, "checkout", "-q", "-b", "side")
    commits(checkout, WRONG, first=1)
    git(checkout, "checkout", "-q", "main")
    (checkout / "notes").write_text("")
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "never wrong")
    git(checkout, "merge", "-q", "--no-ff", "-m", "merge", "side")
    commits(checkout, LOSSES, first=2)
    done = bisect("c2", "c1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert subjects(checkout, result(checkout)["candidates"]) == ["c2"]


def test_a_set_that_a_revision_broke_has_the_search_as_its_next_command(checkout, converge):
    commits(checkout, LOSSES, LOSSES, WRONG, WRONG)
    done = converge("run", "--against", "c0")
    assert done.returncode == 1, done.stdout + done.stderr
    ends = [git(checkout, "rev-parse", "--short=12", name) for name in ("c0", "c3")]
    command = "next: converge bisect e.toml --set two --good {} --bad {} --of code".format(*ends)
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
    assert converge("run", "--onyl", "two", "--git-bisect").returncode == 125
