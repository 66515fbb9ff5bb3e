"""The program that fills an environment: uv where it is there, pip where not.

It needs the standard library alone: the noxfile loads it by its path, before converge is installed.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_SECTIONS = ("global", "install", ":env:")
"""Of pip's settings, in its order of precedence."""


@dataclass(frozen=True)
class Installer:
    """How environments are made and filled."""

    name: str
    _venv: tuple[str, ...]
    """The environment's folder follows."""
    _install: tuple[str, ...]
    """Options for one environment follow."""
    _options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that it needs."""

    def venv(self, folder: Path) -> tuple[str, ...]:
        """The command that makes an empty environment."""
        return (*self._venv, str(folder))

    def install(
        self, python: Path, *what: str, declared: tuple[int, int] = (0, 0)
    ) -> tuple[str, ...]:
        """The command that installs packages in the environment of a Python.

        Args:
            python: of the environment; its version is that of this process.
            what: options and packages.
            declared: the oldest Python that the packages' metadata allow. If this one is older, pip
                installs them and ignores that; uv has no option for it.
        """
        too_old = sys.version_info[:2] < declared
        if self.name == "uv" and not too_old:
            options = ("--quiet", "--python", str(python), *self._options)
            return (*self._install, *options, *what)
        pip = (sys.executable, "-m", "pip") if self.name == "uv" else self._install
        options = ("--python", str(python), "install", "--quiet", "--no-compile")
        return (*pip, *options, *(("--ignore-requires-python",) if too_old else ()), *what)


def find_installer(python: str = sys.executable) -> Installer | None:
    """uv, else the pip of a Python, else None.

    uv and not pip, because toolchains then share files by hard links from its cache: they are of
    several gigabytes each.
    """
    has_pip = importlib.util.find_spec("pip") is not None
    if command := uv_command():
        options, environment = uv_settings(pip_settings(_pip_config(python) if has_pip else ""))
        return Installer(
            "uv",
            (*command, "venv", "--quiet", "--python", python),
            (*command, "pip", "install"),
            tuple(options),
            environment,
        )
    if has_pip:
        return Installer("pip", (python, "-m", "venv", "--without-pip"), (python, "-m", "pip"))
    return None


def uv_command() -> tuple[str, ...] | None:
    """The uv of this Python, else of the PATH."""
    if importlib.util.find_spec("uv") is not None:
        return (sys.executable, "-m", "uv")
    found = shutil.which("uv")
    return (found,) if found else None


def _pip_config(python: str) -> str:
    command = (python, "-m", "pip", "config", "list")
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    return asked.stdout


def pip_settings(listed: str) -> dict[str, str]:
    """The settings of ``pip install`` in the output of ``pip config list``."""
    found: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in found:
            found[section][name] = str(ast.literal_eval(value))
    return {name: value for section in _SECTIONS for name, value in found[section].items()}


def uv_settings(pip: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Options and variables that make uv use pip's indexes; uv does not read pip's settings."""
    options = [
        f"--{name}={value}"
        for name in ("index-url", "extra-index-url", "find-links")
        for value in pip.get(name, "").split()
    ]
    # As pip does: the best version on all indexes, not that of the first index with the package.
    options.append("--index-strategy=unsafe-best-match")
    if pip.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        options.append("--no-index")
    options += [f"--allow-insecure-host={host}" for host in pip.get("trusted-host", "").split()]
    environment = {}
    if "cert" in pip:
        environment["SSL_CERT_FILE"] = pip["cert"]
    if "proxy" in pip:
        environment |= {"HTTP_PROXY": pip["proxy"], "HTTPS_PROXY": pip["proxy"]}
    return options, environment


def first_error(log: str) -> str:
    """The installer's first error with its cause, in one line; else the last line of the log."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if line.lower().startswith("error:"):
            cause = next(iter(lines[number + 1 :]), "")
            return f"{line}: {cause.removeprefix('cause: ')}" if cause[:6] == "cause:" else line
    return lines[-1] if lines else "the installer said nothing"


def run_logged(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> int:
    """Run a command, with what it says added to a log; return its exit status."""
    with log.open("a") as output:
        return subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
            check=False,
        ).returncode
