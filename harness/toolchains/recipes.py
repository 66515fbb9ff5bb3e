"""What each toolchain contains. Versions are in ``constraints.txt``, and nowhere else but here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import tomli
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from converge_harness.checkout import commit_of, has_path, is_repository, require_git, text_of
from converge_harness.errors import CheckoutError, ToolchainError, suggest

CHECKOUT_VARIABLE = "CONVERGE_CHECKOUT"
"""Names clones of upstream repositories, for toolchains of their revisions; ``:`` between them."""
TRAIN = (
    *("datasets<4.8", "numpy>=2.0", "tensorboard", "tokenizers>=0.20", "torch", "torchao"),
    "triton; sys_platform == 'linux'",
)
"""What torchtitan needs here besides itself: the extra ``train`` of pyproject.toml."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """A package of whose git commits toolchains are made."""

    package: str
    """The name of its distribution, with which the names of its toolchains begin."""
    repository: str
    url: str
    holds: str
    """A file that its commits have."""
    python: tuple[int, int] = (0, 0)
    """The Python that its newer versions declare to need, though they have files for older ones."""


UPSTREAMS = (
    Upstream(
        "torchtitan",
        "torchtitan",
        "https://github.com/pytorch/torchtitan",
        "torchtitan/__init__.py",
    ),
    Upstream(
        "megatron-core",
        "Megatron-LM",
        "https://github.com/NVIDIA/Megatron-LM",
        "megatron/core/__init__.py",
        python=(3, 12),
    ),
)


def upstream_of(name: str) -> Upstream | None:
    """The package after which a toolchain is named, if toolchains are made of its commits."""
    return next((each for each in UPSTREAMS if name.startswith(f"{each.package}-")), None)


@dataclass(frozen=True)
class Recipe:
    """What a toolchain contains besides torch, which is always installed first, and converge."""

    what: str
    """One line for people."""
    torchtitan: str | None = None
    """The release of torchtitan, or a branch, with its requirements; None: no torchtitan."""
    branch: str = field(default="", repr=False)
    """Its upstream's branch, which is installed from a git checkout; empty: a release. (Digests of
    recipes, which say whether a toolchain is up to date, are of what is installed.)"""
    instead: Mapping[str, str | None] = field(default_factory=dict)
    """Versions that replace those in constraints.txt, by package; None: any version."""
    packages: tuple[str, ...] = ()
    built: tuple[str, ...] = ()
    """Packages built from source, with what is installed by then."""
    alone: tuple[str, ...] = ()
    """Packages installed without their declared dependencies; the needed ones are in `packages`."""
    python: tuple[int, int] = field(default=(0, 0), repr=False)
    """The Python that those in `alone` declare to need, though they have files for older ones."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for building packages."""
    modules: str | None = None
    """A folder of this repository whose modules are copied into the environment."""
    imports: tuple[str, ...] = ()
    """What must be importable in it besides torch and torchtitan."""


OLDER_TORCH: Mapping[str, str | None] = {"torch": "2.13.0", "triton": "3.7.1"}
"""The older torch, with the triton that its CUDA build pins."""
_MEGATRON = Recipe(
    "Megatron-Core",
    instead=OLDER_TORCH,
    # Of its declared dependencies it imports only numpy and packaging, but its modules for
    # inference, which all others import, define kernels of triton, and Megatron-FSDP has einops
    # arrange its ranks. Its CUDA kernels are those of Transformer Engine and Apex, without which it
    # falls back to torch.
    packages=("numpy", "packaging", "einops", "triton; sys_platform == 'linux'"),
    alone=("megatron-core",),
    python=(3, 12),
    imports=("megatron.core",),
)
"""Its metadata ask for Python 3.12 since 0.17, and it has wheels for 3.11."""
RECIPES = {
    "torchtitan-0.3.0": Recipe("torchtitan 0.3.0 on torch 2.15", "0.3.0"),
    "torchtitan-0.3.0-torch-2.13": Recipe(
        "torchtitan 0.3.0 on torch 2.13", "0.3.0", instead=OLDER_TORCH
    ),
    # What a commit of it needs beyond torch (Grain, in the version that it pins) comes with it.
    "torchtitan-main": Recipe(
        "torchtitan's main branch on torch 2.15, from a git checkout", "main", branch="main"
    ),
    "torchtitan-0.2.2": Recipe("torchtitan 0.2.2 on torch 2.13", "0.2.2", instead=OLDER_TORCH),
    # What MosaicML Streaming pins (numpy < 2.2, transformers < 5, a torchvision that PyPI has for
    # CUDA only, clients of six clouds) clashes with torch and torchtitan.
    "torchtitan-0.3.0-streaming": Recipe(
        "torchtitan 0.3.0 with MosaicML Streaming",
        "0.3.0",
        instead=OLDER_TORCH,
        packages=("cramjam", "transformers"),
        alone=("mosaicml-streaming", "python-snappy", "brotli", "catalogue", "zstd"),
    ),
    # torchtitan is here for its model and its sharding, with which ZeRO is compared. DeepSpeed's
    # kernels are not built; it falls back to its torch implementations.
    "deepspeed-0.19.8": Recipe(
        "DeepSpeed, and torchtitan 0.3.0 to compare it with",
        "0.3.0",
        instead=OLDER_TORCH,
        packages=("setuptools", "wheel", "ninja"),
        built=("deepspeed",),
        environment={"DS_BUILD_OPS": "0"},
        imports=("deepspeed",),
    ),
    # Composer pins torch < 2.7.1 and an older numpy. It imports torchvision (see Streaming) and a
    # cloud client, neither of which is used here: two stub modules replace them.
    "composer-0.32.1": Recipe(
        "MosaicML Composer and Streaming",
        instead=OLDER_TORCH,
        packages=(
            *("numpy", "requests", "pyyaml", "tqdm", "psutil", "py-cpuinfo", "packaging"),
            *("importlib-metadata", "lightning-utilities", "pillow"),
            *("cramjam", "transformers", "xxhash"),
        ),
        alone=(
            *("mosaicml", "torchmetrics", "coolname"),
            *("mosaicml-streaming", "python-snappy", "brotli", "catalogue", "zstd"),
        ),
        modules="experiments/trainers/stand_ins",
        imports=("composer", "streaming"),
    ),
    "transformers-5.23.0": Recipe(
        "Hugging Face transformers and accelerate",
        instead=OLDER_TORCH,
        packages=("numpy", "transformers", "accelerate"),
        imports=("transformers", "accelerate"),
    ),
    "megatron-core-0.19.2": _MEGATRON,
    "megatron-core-0.16.1": replace(
        _MEGATRON, instead={**OLDER_TORCH, "megatron-core": "0.16.1"}, python=(3, 10)
    ),
    "megatron-core-main": replace(
        _MEGATRON, what="Megatron-LM's main branch, from a git checkout", branch="main"
    ),
}
"""Name to recipe; versions are in constraints.txt, and those of the older torch above."""


class Wanted(NamedTuple):
    """A toolchain by its name: the recipe, and the revision of its upstream after an ``@``.

    A branch without a revision means its newest commit in the checkout.
    """

    recipe: Recipe
    revision: str


class NameParts(NamedTuple):
    """``RELEASE+PACKAGE-VERSION@REVISION``, a toolchain's name; the others are empty if missing."""

    release: str
    package: str
    version: str
    revision: str

    @classmethod
    def of(cls, name: str) -> NameParts:
        others, _, revision = name.partition("@")
        release, _, pin = others.partition("+")
        package, _, version = pin.rpartition("-")
        return cls(release, package, version, revision)


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def has_recipe(name: str) -> bool:
    """Whether converge knows how to build a toolchain of that name."""
    release, package, version, revision = NameParts.of(name)
    if release not in RECIPES:
        return False
    if "+" in name.partition("@")[0] and not (package and _is_version(version)):
        return False
    if _is_upstream(package, release) and (revision or RECIPES[release].branch):
        return False  # which of them?
    return "@" not in name or (_has_revisions(release) and bool(revision) and "/" not in revision)


def has_revisions(name: str) -> bool:
    """Whether converge builds a toolchain of that name at any revision: ``NAME@REVISION``."""
    return has_recipe(name) and _has_revisions(NameParts.of(name).release)


def _has_revisions(release: str) -> bool:
    return upstream_of(release) is not None


def _is_upstream(package: str, release: str) -> bool:
    upstream = upstream_of(release)
    return upstream is not None and canonicalize_name(package) == upstream.package


def recipe_of(name: str) -> Wanted:
    """What a toolchain of that name is made of; raises ToolchainError where nobody knows."""
    release, package, version, revision = NameParts.of(name)
    if not has_recipe(name):
        raise ToolchainError(
            f"there is no recipe for a toolchain {name!r}; {suggest(release, list(RECIPES))}; for "
            "a git revision, NAME@REVISION, such as torchtitan-main@REVISION; "
            "for another version of a package, NAME+PACKAGE-VERSION, such as "
            "torchtitan-0.3.0+torchao-0.17.0"
        )
    recipe = RECIPES[release]
    if package == "torchtitan":
        recipe = replace(recipe, torchtitan=version)
    elif package:
        # Every torch has its own triton.
        beside = {"triton": None} if package == "torch" else {}
        recipe = replace(recipe, instead={**recipe.instead, **beside, package: version})
    upstream = upstream_of(release)
    if upstream is not None and (revision or _is_upstream(package, release)):
        recipe = replace(recipe, python=upstream.python)  # it may be a newer version
    return Wanted(recipe, revision or recipe.branch)


def purpose(name: str) -> tuple[str, ...]:
    """The modules that a toolchain is for by its recipe; empty if it has none."""
    if not has_recipe(name):
        return ()
    recipe = recipe_of(name).recipe
    titan = ("torchtitan",) if recipe.torchtitan else ()
    return ("torch", *titan, *recipe.imports, "converge_harness")


def constraints_of(text: str, instead: Mapping[str, str | None]) -> str:
    """constraints.txt with some versions replaced; None removes the line."""
    for package, version in instead.items():
        line = f"{package}=={version}" if version else ""
        text, replaced = re.subn(rf"(?m)^{re.escape(package)}==.*$", line, text)
        if not replaced:
            raise ToolchainError(
                f"{package}: not a package of converge's toolchains (constraints.txt pins no such)"
            )
    return text


def _name_a_checkout(upstream: Upstream) -> str:
    return f"set {CHECKOUT_VARIABLE}=FOLDER, a clone of {upstream.url}"


def checkouts() -> tuple[Path, ...]:
    """The clones that the environment names."""
    named = os.environ.get(CHECKOUT_VARIABLE, "").split(os.pathsep)
    return tuple(Path(each).expanduser().resolve() for each in named if each)


def require_checkout(upstream: Upstream) -> Path:
    """The clone of a repository that the environment names.

    The first whose HEAD has the package. Raises ToolchainError if there is none; what is no
    checkout is returned, for what is asked of it says so.
    """
    named = checkouts()
    if not named:
        raise ToolchainError(
            f"commits of which {upstream.repository}? {_name_a_checkout(upstream)}"
        )
    for each in named:
        if has_path(each, "HEAD", upstream.holds) or not is_repository(each):
            return each
    raise ToolchainError(
        f"{CHECKOUT_VARIABLE}={_listed(named)}: no clone of {upstream.repository} by its HEAD; "
        f"{_name_a_checkout(upstream)}"
    )


def _listed(clones: Sequence[Path]) -> str:
    return os.pathsep.join(map(str, clones))


def at_revision(upstream: Upstream, revision: str, clones: Sequence[Path]) -> str:
    """What an installer is given: a commit of the first clone that has the revision.

    Raises ToolchainError where none has it.
    """
    if not clones:
        raise ToolchainError(
            f"{upstream.repository} at {revision} of which checkout? {_name_a_checkout(upstream)}"
        )
    try:
        require_git(revision)
    except CheckoutError as error:
        raise ToolchainError(str(error)) from None
    for folder in clones:
        try:
            commit = commit_of(folder, revision)
        except CheckoutError:
            continue
        if has_path(folder, commit, upstream.holds):
            return f"git+{folder.as_uri()}@{commit}"
    raise ToolchainError(
        f"{CHECKOUT_VARIABLE}={_listed(clones)}: no clone of {upstream.repository} that has "
        f"{revision} (its branches and tags: git branch --all, git tag; git fetch brings new ones)"
    )


def pinned_by(source: str) -> tuple[str, ...]:
    """Packages that a commit pins itself, in the form that PyPI gives their names.

    Args:
        source: as ``at_revision`` returns it. Nothing for a release: constraints.txt has what
            releases pin.
    """
    found = re.fullmatch(r"git\+file://(.+)@([0-9a-f]+)", source)
    if found is None:
        return ()
    text = text_of(Path(unquote(found[1])), found[2], "pyproject.toml")
    try:
        needed = tomli.loads(text).get("project", {}).get("dependencies", ())
    except tomli.TOMLDecodeError:
        return ()
    wanted = (Requirement(each) for each in needed)
    return tuple(
        canonicalize_name(each.name)
        for each in wanted
        if any(clause.operator == "==" for clause in each.specifier)
    )


def without(constraints: str, packages: Collection[str]) -> str:
    """Constraints that say nothing of some packages."""
    lines = constraints.splitlines(keepends=True)
    return "".join(line for line in lines if line.partition("==")[0] not in packages)


def released_versions(package: str) -> tuple[str, ...]:
    """All versions of a package that pip's indexes have, oldest first.

    Of 2.13.0 and 2.13.0+cpu only the first is listed: the installer chooses between them. Raises
    ToolchainError if pip finds none.
    """
    command = (sys.executable, "-m", "pip", "index", "versions", "--pre", package)
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    form = "Available versions:"
    listed = [line for line in asked.stdout.splitlines() if line.startswith(form)]
    if not listed:
        said = asked.stderr.strip().rpartition("\n")[2]
        without_pip = (
            f" (install pip into {sys.executable})" if "No module named pip" in said else ""
        )
        raise ToolchainError(f"pip finds no versions of {package}: {said}{without_pip}")
    found = (each.strip() for each in listed[0].removeprefix(form).split(","))
    return tuple(sorted((each for each in found if "+" not in each), key=Version))
