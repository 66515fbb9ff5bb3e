"""What git says of the checkout that a folder is in, and another revision beside it."""

import subprocess

import pytest

from converge_harness.checkout import (
    beside,
    checkout_commit,
    checkout_of,
    commit_of,
    commits_between,
    described,
    unignored_files,
)
from converge_harness.errors import CheckoutError


def test_a_commit_is_that_of_the_checkout_and_says_when_files_were_changed(tmp_path, monkeypatch):
    # pytest's folder may lie in a checkout: .ci/run's does.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert checkout_commit(tmp_path) == ""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    (tmp_path / "file").write_text("one")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "one"], ["tag", "v1"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout.strip()
    assert checkout_commit(tmp_path) == head
    (tmp_path / "file").write_text("two")
    assert checkout_commit(tmp_path) == f"{head}-dirty"
    assert checkout_commit(tmp_path / "missing") == ""


def git(folder, *arguments):
    named = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    asked = ["git", *named, *arguments]
    return subprocess.run(
        asked, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def fork(tmp_path):
    """A checkout with two commits: ``code.py`` says 1, then 2."""
    folder = tmp_path / "fork"
    (folder / "package").mkdir(parents=True)
    git(folder, "init", "-q")
    for number in (1, 2):
        (folder / "package" / "code.py").write_text(f"number = {number}\n")
        git(folder, "add", ".")
        git(folder, "commit", "-q", "-m", f"say {number}")
    return folder


def test_a_checkout_is_described_by_tag_and_commit_and_says_whether_its_tree_is_dirty(fork):
    commit = git(fork, "rev-parse", "--short=12", "HEAD")
    assert described(fork / "package") == commit
    git(fork, "tag", "v1", "HEAD~1")
    assert described(fork / "package") == f"v1-1-g{commit}"
    (fork / "package" / "new.py").write_text("")
    assert described(fork / "package") == f"v1-1-g{commit}, with uncommitted changes"
    (fork / "package" / "new.py").unlink()
    (fork / "notes.txt").write_text("not imported, not known to git")
    assert described(fork / "package") == f"v1-1-g{commit}"


def test_outside_of_a_checkout_there_is_nothing_to_say(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert described(tmp_path) == ""
    assert checkout_of(tmp_path) is None


def test_another_revision_is_beside_it_while_it_is_used(fork, tmp_path):
    assert checkout_of(fork / "package" / "code.py") == fork
    commit = commit_of(fork, "HEAD~1")
    with beside(fork, commit, tmp_path / "cache") as folder:
        assert (folder / "package" / "code.py").read_text() == "number = 1\n"
        with beside(fork, commit, tmp_path / "cache") as again:
            assert again == folder  # what remembers paths finds the same files there again
        assert (folder / "package" / "code.py").is_file()  # the first one still uses it
    assert not folder.exists()
    assert git(fork, "worktree", "list").count("\n") == 0
    assert (fork / "package" / "code.py").read_text() == "number = 2\n"


def test_what_a_killed_run_left_beside_it_is_made_anew(fork, tmp_path):
    commit = commit_of(fork, "HEAD~1")
    with beside(fork, commit, tmp_path / "cache") as folder:
        pass
    folder.mkdir()
    (folder / "package").mkdir()
    with beside(fork, commit, tmp_path / "cache") as again:
        assert again == folder
        (folder / "package" / "code.py").write_text("edited\n")
    with beside(fork, commit, tmp_path / "cache"):
        assert (folder / "package" / "code.py").read_text() == "number = 1\n"


@pytest.mark.parametrize("revision", ["nowhere", "--help", "HEAD~9", ""])
def test_a_revision_that_is_not_there_is_named_with_the_checkout(fork, revision):
    with pytest.raises(CheckoutError) as caught:
        commit_of(fork, revision)
    assert f"has no revision {revision!r}" in str(caught.value)
    assert "log --oneline" in str(caught.value)


def test_a_shallow_clone_says_how_to_fetch_more(fork, tmp_path):
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{fork}", "shallow")
    with pytest.raises(CheckoutError, match="fetch --unshallow"):
        commit_of(tmp_path / "shallow", "HEAD~1")


def test_files_are_those_that_git_knows_or_does_not_ignore(fork):
    (fork / ".gitignore").write_text("*.log\n")
    (fork / "new.py").write_text("")
    (fork / "run.log").write_text("")
    assert unignored_files(fork) == {".gitignore", "new.py", "package/code.py"}


def test_commits_are_listed_whatever_their_subjects_and_the_users_settings(tmp_path):
    git(tmp_path, "init", "-q")
    git(tmp_path, "config", "log.showSignature", "true")
    git(tmp_path, "config", "color.ui", "always")
    for subject in ("one", "tab\t and \u2028 and \f in it"):
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", subject)
    git(tmp_path, "commit", "-q", "--allow-empty", "--allow-empty-message", "-m", "")
    first, last = commit_of(tmp_path, "HEAD~2"), commit_of(tmp_path, "HEAD")
    found = commits_between(tmp_path, first, last)
    assert [each.name for each in (found[0], found[-1])] == [first, last]
    assert [each.subject for each in found] == ["one", "tab\t and \u2028 and \f in it", ""]
    assert all(len(each.date) == len("2026-04-16") for each in found)
    assert commits_between(tmp_path, last, last) == (found[-1],)
    with pytest.raises(CheckoutError, match="cannot be listed"):
        commits_between(tmp_path, first, "0" * 40)
