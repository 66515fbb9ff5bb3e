"""A run of the base that imported the working tree's code is no run of the base."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from own_fork import git

from converge_harness.checkout import beside, commit_of
from converge_harness.matrix.against import Fork, changed_paths, of_other_code
from converge_harness.model import RunRecord, RunStatus


def sha(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def fork(tmp_path):
    """A checkout whose working tree says 2 where HEAD says 1, and has a new file."""
    folder = tmp_path / "fork"
    folder.mkdir()
    (folder / "code.py").write_text("number = 1\n")
    (folder / "same.py").write_text("")
    (folder / ".gitignore").write_text("venv/\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    (folder / "code.py").write_text("number = 2\n")
    (folder / "new.py").write_text("")
    (folder / "venv").mkdir()
    (folder / "venv" / "finder.py").write_text("")
    return folder


@pytest.mark.parametrize(
    ("tree", "imported", "named"),
    [
        ("base", ("code.py", "same.py"), ""),
        ("working", ("same.py",), ""),  # the same file in both
        ("working", ("same.py", "code.py"), "code.py"),
        ("working", ("new.py",), "new.py"),
        ("working", ("venv/finder.py",), ""),  # not of the fork's code
    ],
)
def test_files_are_held_against_the_revision(fork, tmp_path, tree, imported, named):
    commit = commit_of(fork, "HEAD")
    with beside(fork, commit, tmp_path / "cache") as base:
        folder = base if tree == "base" else fork
        sources = {str(folder / name): sha(folder / name) for name in imported}
        record = RunRecord(
            name="tp2",
            identity="0123",
            folder=Path("/run"),
            status=RunStatus.FINISHED,
            wall_s=1.0,
            argv=(),
            sources=sources,
        )
        found = of_other_code(Fork(fork, "HEAD", commit), base, record)
    assert (f"{fork / named}, which differs from HEAD" in found) if named else not found


@dataclass(frozen=True)
class Technique:
    """As ``OwnTechnique``: where it was found does not count when it is compared."""

    apply: str | None
    files: tuple[Path, ...]
    keys: Mapping[str, str]
    folder: str = field(default="", compare=False)


def test_places_of_code_are_changed_wherever_a_set_has_them(tmp_path):
    (tmp_path / "mine.py").write_text("")
    moved = tmp_path / "base"

    def change(path):
        return moved / path.relative_to(tmp_path) if path.is_relative_to(tmp_path) else path

    long = f"/{'x' * 5000}"
    written = Technique(f"{tmp_path}/mine.py:fuse", (tmp_path / "a",), {"a": "b"}, str(tmp_path))
    assert changed_paths(written, change).apply == f"{moved}/mine.py:fuse"
    assert changed_paths(written, change).files == (moved / "a",)
    only_folder = Technique(None, (Path("/elsewhere"),), {"a": long}, str(tmp_path))
    assert changed_paths(only_folder, change).folder == str(moved)
    assert changed_paths(only_folder, change).keys == {"a": long}
    untouched = Technique("relative.py:f", (Path("relative"),), {"a": "/nowhere.py"})
    assert changed_paths(untouched, change) is untouched
