"""Finds toolchains on disk and reads their versions without starting them.

A toolchain is a virtual environment ``<root>/<name>`` with one trainer in it, made by ``converge
toolchain build NAME``. A suffix of the name says what else is in it
(``torchtitan-0.3.0-streaming``). With ``@REVISION`` what it is named after is that commit of a git
checkout (``torchtitan-main@b5bcd76c6``, ``megatron-core-main@d98e8a64d``), which is part of its
version.
The root is ``$CONVERGE_TOOLCHAINS``, else ``.toolchains`` in the current directory if it is there,
else a folder in the user's cache.

Other trainers need no torchtitan, and may use any Python by its path; it is started once to ask
what is installed. Each trainer says itself what its toolchain needs (``harness/trainers``).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path

from platformdirs import user_cache_path

from converge_harness import DISTRIBUTION
from converge_harness.errors import ToolchainError
from converge_harness.model import Toolchain
from converge_harness.toolchains.recipes import has_recipe, recipe_of
from converge_harness.toolchains.this_package import code_version, is_imported_by_path
from converge_harness.toolchains.user_python import ask

ROOT_VARIABLE = "CONVERGE_TOOLCHAINS"
LOCAL_ROOT = ".toolchains"
STAMP = "converge.stamp"
"""In a toolchain that converge built: what of (``build.Stamp``)."""
DISTRIBUTIONS = (
    *("torch", "torchtitan", "torchao", "triton", "numpy"),
    *("accelerate", "causal-conv1d", "datasets", "deepspeed", "flash-attn", "flashinfer-python"),
    *("jax", "jaxlib", "kernels", "liger-kernel", "lightning", "mamba-ssm", "megatron-core"),
    *("mosaicml", "mosaicml-streaming", "peft", "pytorch-lightning", "safetensors", "tokenizers"),
    *("torchdata", "torchvision", "transformer-engine", "transformers", "trl", "xformers"),
    DISTRIBUTION,
)
"""Packages that can change a job's numbers, or that decide which rank code runs."""
PACKAGES = "packages"
"""Key among the versions for a digest of all distributions: any may change the numbers."""
_CODE = (".py", ".so", ".pyd", ".dylib")
_NAME_AND_VERSION = re.compile(r"^(Name|Version):[ \t]*(\S+)", re.MULTILINE | re.IGNORECASE)
_INSTALLING_S = 2.0
"""Installers may still write files this long after the ``RECORD``; also covers coarse clocks."""


def toolchain_root() -> Path:
    """The folder that holds toolchains."""
    if named := os.environ.get(ROOT_VARIABLE):
        return Path(named).absolute()
    here = Path(LOCAL_ROOT).absolute()
    return here if here.is_dir() else user_cache_path("converge") / "toolchains"


def available_toolchains(root: Path | None = None) -> tuple[str, ...]:
    """Names of the finished environments under the root, sorted."""
    folder = root or toolchain_root()
    names = (python.parent.parent.name for python in folder.glob("*/bin/python"))
    return tuple(sorted(name for name in names if not unfinished(folder / name).exists()))


def unfinished(folder: Path) -> Path:
    """A file that is there while a toolchain is built, and stays if its builder is killed."""
    return folder.with_name(f".{folder.name}.building")


def python_of(name: str, folder: Path) -> Path:
    """The Python of a toolchain; raises ToolchainError where there is none that can be started."""
    python = folder / "bin" / "python"
    if unfinished(folder).exists():
        raise ToolchainError(
            f"toolchain {name!r} in {folder.parent} is half built: it is being built right now, or "
            f"that was interrupted; {build_hint(name)}"
        )
    if not os.access(python, os.X_OK):
        there = ", ".join(available_toolchains(folder.parent)) or "none"
        raise ToolchainError(
            f"no toolchain {name!r} in {folder.parent} (there: {there}); {build_hint(name)}"
            f"{' (`converge run --build` does so first)' if has_recipe(name) else ''}, or say with "
            "CONVERGE_TOOLCHAINS=FOLDER where toolchains are"
        )
    return python


def build_hint(name: str) -> str:
    """The command that builds a toolchain; one of a revision needs a clone that has it."""
    if not has_recipe(name):
        return "see those that converge can build with: converge toolchain list"
    checkout = "CONVERGE_CHECKOUT=FOLDER " if recipe_of(name).revision else ""
    return f"build it with: {checkout}converge toolchain build {name}"


def find_environment(
    name: str, root: Path | None, dialect: str, first: tuple[Path, ...] = ()
) -> Toolchain:
    """A Python environment, by its name under the root or by the absolute path of its Python.

    ``first`` are folders that it searches before all others. Raises ToolchainError if it does not
    exist or does not start.
    """
    if Path(name).is_absolute():
        answer = ask(Path(name), first=first)
        python, paths, sources = answer.python, list(answer.paths), answer.sources
        found = {"python": answer.release, **versions(paths, DISTRIBUTIONS)}
    else:
        folder = (root or toolchain_root()) / name
        python, paths, sources = python_of(name, folder), site_packages(folder), ()
        found = versions(paths, DISTRIBUTIONS)
    found[PACKAGES] = all_packages(paths)
    return Toolchain(name, python, dialect, found, first, sources)


def require_same_converge(name: str, root: Path | None = None) -> None:
    """Raise ToolchainError where ranks would import another converge than plans their runs.

    Of an environment that converge did not build, nobody knows.
    """
    folder = (root or toolchain_root()) / name
    try:
        built = json.loads((folder / STAMP).read_text())["converge"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if built != code_version() and not is_imported_by_path():
        raise ToolchainError(
            f"toolchain {name!r} in {folder.parent} has another converge in it ({built}) than this "
            f"one ({code_version()}); bring it up to date with: converge toolchain build {name}"
        )


def assume_environment(name: str, root: Path | None, dialect: str) -> Toolchain:
    """The same, or if it is not built yet, what it will be, without versions."""
    folder = (root or toolchain_root()) / name
    if folder.exists():  # or a Python by its path
        return find_environment(name, root, dialect)
    return Toolchain(name, folder / "bin" / "python", dialect, {})


def site_packages(environment: Path) -> list[str]:
    return [str(folder) for folder in environment.glob("lib/python3*/site-packages")]


def versions(paths: list[str], names: Iterable[str]) -> dict[str, str]:
    """Versions from the distributions' metadata: nothing is imported, no process started."""
    found: dict[str, str] = {}
    for name in names:
        for distribution in distributions(name=name, path=paths):
            found.setdefault(name, _version(distribution, _headers(distribution)))
    return found


def all_packages(paths: list[str]) -> str:
    """A digest of the names and versions of all distributions except converge itself."""
    found: dict[str, str] = {}
    for distribution in distributions(path=paths):
        headers = _headers(distribution)
        name = re.sub(r"[-_.]+", "-", headers.get("Name", "")).lower()
        if name not in ("", DISTRIBUTION):
            found.setdefault(name, _version(distribution, headers))
    listed = "".join(f"{name}=={version}\n" for name, version in sorted(found.items()))
    return hashlib.sha256(listed.encode()).hexdigest()[:16]


def _version(distribution: Distribution, headers: Mapping[str, str]) -> str:
    """The version, plus the commit of a package built from a git checkout: ``0.3.0+g1a2b3c…``.

    Two commits of one version are different code: a run of one must not be reused for the other.
    pip records the commit in ``direct_url.json`` (PEP 610). An installed package that was edited in
    place gets a digest of the edited files: ``2.15.0+edited.1a2b3c4d``.
    """
    version = headers.get("Version", "")
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        version = marked(version, f"g{str(origin['vcs_info']['commit_id'])[:12]}")
    except (KeyError, TypeError, ValueError):
        pass
    edited = _edited(distribution)
    return marked(version, f"edited.{edited}") if edited else version


def _headers(distribution: Distribution) -> dict[str, str]:
    """The headers Name and Version, which never have a second line; a missing one is left out.

    The parser of e-mails, which metadata is written for, takes ten times as long.
    """
    # Its third place: an .egg-info that is a file.
    places = map(distribution.read_text, ("METADATA", "PKG-INFO", ""))
    text = next(filter(None, places), "")
    found = _NAME_AND_VERSION.findall(text.partition("\n\n")[0])
    return {name.title(): value for name, value in reversed(found)}


def is_local(distribution: Distribution) -> bool:
    """Whether a package was installed from a folder or a file: others may have its version."""
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        return bool(origin) and "vcs_info" not in origin
    except ValueError:
        return True


def is_edited(distribution: Distribution) -> bool:
    """Whether a package's code was changed after it had been installed."""
    return bool(_edited(distribution))


def marked(version: str, local: str) -> str:
    """A version with a further part of its local version."""
    return f"{version}{'.' if '+' in version else '+'}{local}"


def _edited(distribution: Distribution) -> str:
    """A digest of the code that changed after the installer wrote ``RECORD``; empty if none did."""
    lines = (distribution.read_text("RECORD") or "").splitlines()
    names = sorted(line.partition(",")[0] for line in lines)
    record = next((name for name in names if name.endswith(".dist-info/RECORD")), None)
    if record is None:
        return ""
    # torch lists 10,000 files; strings take a third of the time of Path objects.
    base = str(distribution.locate_file(""))
    installed = _written(f"{base}/{record}") + _INSTALLING_S
    code = (name for name in names if name.endswith(_CODE))
    edited = [name for name in code if _written(f"{base}/{name}") > installed]
    digest = hashlib.sha256()
    for name in edited:
        digest.update(f"{name}\0".encode() + Path(base, name).read_bytes())
    return digest.hexdigest()[:8] if edited else ""


def _written(path: str) -> float:
    """When a file was last written, in seconds since 1970; -inf if it does not exist."""
    try:
        return os.stat(path).st_mtime  # noqa: PTH116
    except OSError:
        return -math.inf
