"""Toolchains that need no torch: their Python is ``tiny_node.py``, whose jobs take no time."""

import sys
from pathlib import Path

NODE = Path(__file__).parent / "tiny_node.py"
VERSIONS = {"torch": "2.13.0", "torchtitan": "0.3.0"}


def light_python(path):
    """Make the Python of such a toolchain."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {NODE} "$@"\n')
    path.chmod(0o755)
    return path


def light_environment(root, name="torchtitan-0.3.0"):
    """Such a toolchain as ``find_toolchain`` finds it."""
    light_python(root / name / "bin" / "python")
    packages = root / name / "lib" / "python3.11" / "site-packages"
    for distribution, version in VERSIONS.items():
        metadata = packages / f"{distribution}-{version}.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
