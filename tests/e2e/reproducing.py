"""Folders of ``converge repro``, and their scripts as somebody else runs them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

BUILD = "converge toolchain build"


class Theirs(NamedTuple):
    """What somebody else sees of a folder's script."""

    code: int
    said: str
    test: dict
    """Of ``report.json``, the only test set."""


def run_script(folder: Path, elsewhere: Path, toolchains: Path) -> Theirs:
    """Copy the folder, and run its script there with an empty store.

    Toolchains are not built: that takes minutes and the network, and has its own tests.
    """
    shutil.copytree(folder, elsewhere)
    script = elsewhere / "run.sh"
    lines = script.read_text().splitlines(keepends=True)
    script.write_text("".join(line for line in lines if not line.startswith(BUILD)))
    done = subprocess.run(
        ["bash", str(script)],
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "CONVERGE_TOOLCHAINS": str(toolchains),
            "CONVERGE_STORE": str(elsewhere / ".converge"),
            "CONVERGE_HISTORY": str(elsewhere / "history.sqlite"),
        },
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    said = done.stdout + done.stderr
    (report,) = elsewhere.glob("reports/*/report.json")
    (test,) = json.loads(report.read_text())["tests"]
    return Theirs(done.returncode, said, test)


def expected(folder: Path) -> dict:
    """What the folder says that they will see."""
    return json.loads((folder / "expected.json").read_text())


def require_nobodys(folder: Path, *places: Path) -> None:
    """No file of the folder names one of these places."""
    for path in folder.rglob("*"):
        if path.is_file():
            text = path.read_text()
            assert not [place for place in places if str(place) in text], path
