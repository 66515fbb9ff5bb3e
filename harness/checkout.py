"""Git checkouts: which one a folder is in, what git calls it, and another revision beside it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from converge_harness.errors import CheckoutError

_TIMEOUT_S = 60.0
_ADDING_TIMEOUT_S = 600.0
"""A checkout of a large repository on a slow file system takes minutes."""
_OF_ANOTHER = frozenset(
    f"GIT_{name}" for name in ("DIR", "WORK_TREE", "INDEX_FILE", "OBJECT_DIRECTORY", "COMMON_DIR")
)
"""Variables by which git, inside of a hook, names the repository of the hook."""
SHORT = 12
"""Digits of a commit that people are shown."""


def require_git(what: str) -> None:
    """Raises CheckoutError where there is no git to find something."""
    if shutil.which("git") is None:
        raise CheckoutError(f"there is no git on the PATH, to find {what}")


def checkout_commit(folder: Path) -> str:
    """The commit of the git checkout that a folder is in, with ``-dirty`` if files were changed.

    Empty outside of a checkout, or without git.
    """
    # "--exclude *": print the commit, not a tag.
    return _answer(folder, "describe", "--always", "--exclude", "*", "--abbrev=40", "--dirty")


def described(folder: Path) -> str:
    """``v0.3.0-2-g1a2b3c4``, and whether its tree is dirty, in words; empty outside of a checkout.

    New files in the folder count as changes too: Python imports them all the same.
    """
    name = _answer(folder, "describe", "--tags", "--always", f"--abbrev={SHORT}")
    return f"{name}, with uncommitted changes" if name and is_dirty(folder) else name


def is_dirty(folder: Path) -> bool:
    """Whether a checkout has changes that are not committed, or the folder has new files.

    What Python compiled while it ran is no change, also where no ``.gitignore`` says so.
    """
    changed = _answer(folder, "status", "--porcelain", "--untracked-files=no")
    ignored = ("--exclude-standard", "--exclude=__pycache__")
    return bool(changed or _answer(folder, "ls-files", "--others", *ignored, "--", "."))


def checkout_of(path: Path) -> Path | None:
    """The root of the git checkout that a file or folder is in; None outside of one."""
    folder = path if path.is_dir() else path.parent
    found = _answer(folder, "rev-parse", "--show-toplevel")
    return Path(found) if found else None


def commit_of(checkout: Path, revision: str) -> str:
    """The commit that a revision means in a checkout; raises CheckoutError if it means none."""
    named = f"{revision}^{{commit}}"
    commit = _answer(checkout, "rev-parse", "--verify", "--quiet", "--end-of-options", named)
    if commit:
        return commit
    require_git(revision)
    if not is_repository(checkout):
        raise CheckoutError(f"{checkout} is not a git checkout, so it has no revision {revision!r}")
    hint = _if_shallow(checkout) or f"list what there is: git -C {checkout} log --oneline --all"
    raise CheckoutError(f"{checkout} has no revision {revision!r}; {hint}")


def is_repository(folder: Path) -> bool:
    """Whether a folder is in a git repository, which may be bare."""
    return bool(_answer(folder, "rev-parse", "--git-dir"))


def has_path(checkout: Path, commit: str, path: str) -> bool:
    """Whether a commit has a file or folder."""
    return bool(_answer(checkout, "rev-parse", "--verify", "--quiet", f"{commit}:{path}"))


def text_of(checkout: Path, commit: str, path: str) -> str:
    """A file of a commit, without white space at its ends; empty if there is none."""
    return _answer(checkout, "show", f"{commit}:{path}")


def _if_shallow(checkout: Path) -> str:
    """How to get the commits that a shallow clone lacks; empty if it is none."""
    if _answer(checkout, "rev-parse", "--is-shallow-repository") != "true":
        return ""
    return "it is a shallow clone: fetch more of it by git fetch --unshallow (fetch-depth: 0 in CI)"


def unignored_files(checkout: Path) -> frozenset[str]:
    """Paths of a checkout's files, but those that git ignores."""
    found = _answer(
        checkout, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "."
    )
    return frozenset(filter(None, found.split("\0")))


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit, as people know it."""

    name: str
    """Its full hash."""
    date: str
    """Of the commit, as ``2026-04-16``."""
    subject: str

    def __str__(self) -> str:
        return f"{self.name[:SHORT]} {self.date} {self.subject}"


def common_ancestor(checkout: Path, one: str, other: str) -> str:
    """The newest commit that both commits come from; raises CheckoutError if there is none."""
    if found := _answer(checkout, "merge-base", one, other):
        return found
    hint = _if_shallow(checkout) or "so no commit between them can be the one"
    raise CheckoutError(
        f"{checkout}: {one[:SHORT]} and {other[:SHORT]} come from no common commit; {hint}"
    )


def commits_between(checkout: Path, old: str, new: str) -> tuple[Commit, ...]:
    """The commits after one and up to another that comes from it, oldest first, with both ends.

    Of a merge only the first parent is followed: a branch that was merged counts as one commit.
    Commits that do not come from the old one are left out, too. Raises CheckoutError if git fails.
    """
    rest = ("--reverse", "--first-parent", "--ancestry-path", f"{old}..{new}")
    return (*_commits(checkout, "--max-count=1", old), *_commits(checkout, *rest))


def _commits(checkout: Path, *which: str) -> tuple[Commit, ...]:
    # NUL ends every commit, whatever is in its subject.
    form = ("log", "-z", "--no-show-signature", "--no-color", "--format=%H%x09%cs%x09%s")
    asked = _git(checkout, *form, *which)
    if asked is None or asked.returncode:
        said = asked.stderr.strip().rpartition("\n")[2] if asked else "git did not answer"
        raise CheckoutError(f"the commits of {checkout} cannot be listed: {said}")
    return tuple(Commit(*each.split("\t", 2)) for each in asked.stdout.split("\0") if each)


def changes_of(checkout: Path, commit: str) -> str:
    """The files that a commit changed, as ``git diff --stat`` prints them."""
    return _answer(checkout, "diff", "--stat=100", f"{commit}^1", commit)


@contextmanager
def beside(checkout: Path, commit: str, cache: Path) -> Iterator[Path]:
    """A worktree of a commit in a cache folder, removed when nobody uses it any more.

    Its path follows from checkout and commit: what remembers paths finds the same files there
    again. Raises CheckoutError if git cannot make it.
    """
    digest = hashlib.sha256(os.fsencode(checkout.resolve())).hexdigest()[:SHORT]
    folder = cache / f"{checkout.name}-{digest}-{commit[:SHORT]}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / f"{folder.name}.lock").open("w")
    except OSError as error:
        raise CheckoutError(f"{cache} cannot be written: {error.strerror}") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            # Whoever is alone makes it, also when a killed process left half of it.
            if _alone(lock):
                _add(checkout, commit, folder)
            # Also where it could not be made exclusive: a failed attempt loses the lock.
            fcntl.flock(lock, fcntl.LOCK_SH)
            if not (folder / ".git").exists():
                raise CheckoutError(f"another converge has just removed {folder}; try again")
            yield folder
        finally:
            if _alone(lock):
                _remove(checkout, folder)


def _alone(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _add(checkout: Path, commit: str, folder: Path) -> None:
    if folder.exists():
        if _answer(folder, "rev-parse", "HEAD") == commit and not _answer(
            folder, "status", "--porcelain", "--untracked-files=no"
        ):
            return
        _remove(checkout, folder)
    # A folder that was deleted by hand is still registered.
    _git(checkout, "worktree", "prune")
    made = _git(
        checkout,
        *("-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false"),
        *("worktree", "add", "--detach", "--force", str(folder), commit),
        timeout=_ADDING_TIMEOUT_S,
    )
    if made is None or made.returncode:
        said = made.stderr.strip().rpartition("\n")[2] if made else "git did not answer"
        raise CheckoutError(f"no worktree of {commit[:SHORT]} could be made in {folder}: {said}")


def _remove(checkout: Path, folder: Path) -> None:
    _git(checkout, "worktree", "remove", "--force", str(folder))
    # What a killed git left is no worktree yet.
    shutil.rmtree(folder, ignore_errors=True)


def _answer(folder: Path, *arguments: str) -> str:
    """What git prints; empty outside of a checkout, without git, or if it fails."""
    asked = _git(folder, *arguments)
    return asked.stdout.strip() if asked is not None and asked.returncode == 0 else ""


def _git(
    folder: Path, *arguments: str, timeout: float = _TIMEOUT_S
) -> subprocess.CompletedProcess[str] | None:
    kept = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER}
    # Looking at a tree must not take the lock of somebody who commits to it.
    kept["GIT_OPTIONAL_LOCKS"] = "0"
    try:
        return subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=kept,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
    except (OSError, subprocess.SubprocessError):
        return None
