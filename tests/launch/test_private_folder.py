"""Private folders: what a killed harness left goes, and nothing else does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from converge_harness.launch.private_folder import LOCK, private_folder, remove_left_behind

ROOT = Path(__file__).parents[2]
HOLDER = """
import sys, time
from converge_harness.launch.private_folder import private_folder

with private_folder() as folder:
    (folder / "socket").touch()
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files of this process and of those that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


@pytest.fixture
def holder(temporary):
    """A process with a private folder, and the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_a_folder_is_its_owners_alone_and_goes_at_the_end(temporary):
    before = os.umask(0)
    try:
        with private_folder() as folder:
            assert folder.parent == temporary
            assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
    assert not folder.exists()


def test_what_a_killed_harness_left_is_removed(holder):
    process, folder = holder
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (folder / "socket").exists()
    remove_left_behind()
    assert not folder.exists()


def test_the_folder_of_a_harness_that_lives_stays(holder):
    _, folder = holder
    remove_left_behind()
    assert (folder / "socket").exists()


def test_folders_of_others_stay(temporary):
    results = temporary / "converge-results"
    results.mkdir()
    (results / "report.html").touch()
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK).touch()
    (temporary / "converge-link").symlink_to(elsewhere)
    remove_left_behind()
    assert (results / "report.html").exists()
    assert (elsewhere / LOCK).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_folders_of_another_user_stay(temporary):
    theirs = temporary / "converge-theirs"
    theirs.mkdir()
    (theirs / LOCK).touch()
    os.chown(theirs, 65534, 65534)
    remove_left_behind()
    assert (theirs / LOCK).exists()
