"""A fork of torchtitan in a git checkout, and a Python in which it is installed editable.

Made from a toolchain: torch and the rest are links to its packages, so that it takes a second.
"""

import os
import subprocess
import sys
from pathlib import Path

from converge_harness.trainers.torchtitan.dialect import HOOKED

PROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "torchtitan"
version = "0.0.1.dev0"

[tool.setuptools.packages.find]
include = ["torchtitan*"]
"""
AUTHOR = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
NOT_LINKED = ("torchtitan", "converge_harness", "_converge_harness", "__pycache__")


def write_hooked(folder, dialect):
    """A torchtitan with all that a dialect hooks, and no torch; the folder of its package."""
    for module, names in HOOKED[dialect].items():
        path = folder.joinpath("torchtitan", *module.split("."))
        is_package = any(each.startswith(f"{module}.") for each in HOOKED[dialect])
        file = path / "__init__.py" if is_package else path.with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        classes = {name.partition(".")[0] for name in names if "." in name}
        lines = [f"{name} = None" for name in names if "." not in name and name not in classes]
        for owner in sorted(classes):
            members = [name.partition(".")[2] for name in names if name.startswith(f"{owner}.")]
            lines += [f"class {owner}:", "    def __init__(self):"]
            lines += [f"        self.{name} = None" for name in members]
        file.write_text("\n".join(lines) + "\n")
    for each in (folder / "torchtitan").rglob("*"):
        if each.is_dir() and not (each / "__init__.py").exists():
            (each / "__init__.py").write_text("")
    (folder / "torchtitan" / "__init__.py").write_text("import torch\n")
    return folder / "torchtitan"


def git(folder, *arguments):
    asked = ["git", *AUTHOR, *arguments]
    done = subprocess.run(asked, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def packages_of(environment):
    (folder,) = Path(environment).glob("lib/python3*/site-packages")
    return folder


def make_fork(folder, torchtitan):
    """A checkout with a copy of a torchtitan, committed."""
    folder.mkdir(parents=True)
    # Not copytree: the toolchain's files have the times at which they were installed.
    subprocess.run(["cp", "-R", str(torchtitan), str(folder / "torchtitan")], check=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / ".gitignore").write_text("__pycache__/\n*.egg-info/\n/venv/\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "fork torchtitan")
    git(folder, "tag", "v0")
    return folder


def make_python(folder, toolchain, fork):
    """A virtual environment with a toolchain's packages but its torchtitan, and the fork."""
    packages = packages_of(toolchain)
    base = os.path.realpath(toolchain / "bin" / "python")
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True)
    own = packages_of(folder)
    for each in packages.iterdir():
        if not each.name.startswith(NOT_LINKED) and each.suffix != ".pth":
            (own / each.name).symlink_to(each)
    install_editable(own, fork)
    return folder / "bin" / "python"


def install_editable(packages, fork, version="0.0.1.dev0"):
    """What ``pip install -e`` leaves."""
    (packages / f"__editable__.torchtitan-{version}.pth").write_text(f"{fork}\n")
    metadata = packages / f"torchtitan-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torchtitan\nVersion: {version}\n"
    )
    (metadata / "direct_url.json").write_text(
        f'{{"dir_info": {{"editable": true}}, "url": "file://{fork}"}}'
    )
    left = fork / "torchtitan.egg-info"
    left.mkdir()
    (left / "PKG-INFO").write_text((metadata / "METADATA").read_text())
    (left / "SOURCES.txt").write_text("pyproject.toml\ntorchtitan/__init__.py\n")
    (metadata / "RECORD").write_text(
        f"__editable__.torchtitan-{version}.pth,,\ntorchtitan-{version}.dist-info/METADATA,,\n"
        f"torchtitan-{version}.dist-info/RECORD,,\n"
    )


def main():
    """``python tests/own_fork.py FOLDER TOOLCHAIN``: a fork to try things with."""
    folder, toolchain = Path(sys.argv[1]), Path(sys.argv[2])
    fork = make_fork(folder / "fork", packages_of(toolchain) / "torchtitan")
    sys.stdout.write(f"{make_python(folder / 'venv', toolchain, fork)}\n")


if __name__ == "__main__":
    main()
