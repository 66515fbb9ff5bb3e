"""The packages of a Python as lines of a requirements file."""

import json
import os
import subprocess
import sys

import pytest

from converge_harness.errors import ToolchainError
from converge_harness.toolchains.pinned import TORCH_INDEX, pinned


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A Python with packages from an index, git, a folder and a URL, and one that was edited."""
    folder = tmp_path_factory.mktemp("own") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")

    def install(name, version, origin=None):
        metadata = packages / f"{name}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        (packages / f"{name}.py").write_text("")
        (metadata / "RECORD").write_text(f"{name}.py,,\n{metadata.name}/RECORD,,\n")
        if origin:
            (metadata / "direct_url.json").write_text(json.dumps(origin))

    git = {"vcs": "git", "commit_id": "1a2b3c"}
    install("Torch", "2.9.0+cpu")
    install("plain_one", "1.0")
    install("forked", "0.1", {"url": "https://example.org/forked", "vcs_info": git})
    install("archived", "0.1", {"url": "https://example.org/archived-0.1.tar.gz"})
    install("mine", "0.1", {"url": "file:///home/me/mine", "dir_info": {"editable": True}})
    install("edited", "0.1")
    install("pip", "25.0")
    install("converge_harness", "0.1.0")
    os.utime(packages / "edited.py", (2**31, 2**31))
    return folder / "bin" / "python"


def test_everything_is_pinned_that_others_can_install(python, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    found = pinned(python)
    assert found.lines == (
        f"--extra-index-url {TORCH_INDEX}cpu",
        "archived @ https://example.org/archived-0.1.tar.gz",
        "forked @ git+https://example.org/forked@1a2b3c",
        "plain-one==1.0",
        "torch==2.9.0+cpu",
    )
    assert found.lacking == (
        "edited 0.1 was edited where it is installed",
        "mine 0.1 was installed from a folder or file",
    )
    assert "/home/me" not in repr(found)
    assert found.release == ".".join(map(str, sys.version_info[:3]))


def test_a_python_that_does_not_start_is_named(tmp_path):
    with pytest.raises(ToolchainError, match="does not start as a Python"):
        pinned(tmp_path / "python")
