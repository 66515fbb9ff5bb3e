"""Builds, checks and removes toolchains, and says which are up to date.

Environments cannot be moved, so one is built in its place. A file beside it says so meanwhile
(``find.unfinished``), and nothing uses a toolchain that has one. The environment that it replaces
is kept until the new one is finished, and comes back if that fails. A lock keeps a second builder
waiting.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from converge_harness.errors import ToolchainError
from converge_harness.shipped import CONSTRAINTS, shipped
from converge_harness.toolchains import this_package
from converge_harness.toolchains.find import (
    STAMP,
    available_toolchains,
    build_hint,
    python_of,
    toolchain_root,
    unfinished,
)
from converge_harness.toolchains.installer import (
    Installer,
    find_installer,
    first_error,
    run_logged,
)
from converge_harness.toolchains.recipes import (
    RECIPES,
    TRAIN,
    Recipe,
    Upstream,
    at_revision,
    checkouts,
    constraints_of,
    has_recipe,
    pinned_by,
    purpose,
    recipe_of,
    upstream_of,
    without,
)

_IMPORTS = """
import importlib, json, sys
found = {}
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    found[name] = str(getattr(module, "__version__", ""))
print("\\n" + json.dumps(found))
"""
_IMPORT_TIMEOUT_S = 300.0
_FIRST_IMPORT_TIMEOUT_S = 3600.0
"""Of thousands of modules that are compiled meanwhile, perhaps on a network's disk."""
_DO_NOT_COMPILE = "PYTHONDONTWRITEBYTECODE"


class State(StrEnum):
    """What a toolchain under the root is."""

    READY = "ready"
    STALE = "stale"
    """It can be used, but is not what `build` would make now."""
    HALF_BUILT = "half built"
    MISSING = "not built"
    FOREIGN = "not by converge"
    """An environment that somebody made without `build`."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A toolchain, as it is on disk."""

    name: str
    folder: Path
    state: State
    why: str = ""
    """What is out of date in a stale one."""


class Doing(NamedTuple):
    """What a builder begins to do."""

    name: str
    step: int
    steps: int
    """Both 0 while it waits for another builder."""
    says: str


Observer = Callable[[Doing], None]


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a toolchain was built of."""

    recipe: str
    """A digest of all versions and of the recipe."""
    source: str
    """What its upstream was installed from, as the installer was given it; empty: as pinned."""
    extra: tuple[str, ...]
    """Packages that were asked for besides."""
    converge: str
    """``this_package.code_version``."""


class _Step(NamedTuple):
    says: str
    what: tuple[str, ...]
    """Options and packages for the installer."""
    python: tuple[int, int] = (0, 0)
    """The Python that these packages declare to need."""


# ------------------------------------------------------------------ what is there


def conditions(root: Path | None = None) -> tuple[Condition, ...]:
    """Every toolchain that has a recipe or is there."""
    folder = root or toolchain_root()
    marks = folder.glob(unfinished(folder / "*").name)
    halves = (path.name[1:].removesuffix(".building") for path in marks)
    others = sorted({*available_toolchains(folder), *halves} - RECIPES.keys())
    return tuple(condition(name, folder) for name in (*RECIPES, *others))


def condition(name: str, root: Path | None = None) -> Condition:
    """What a toolchain is; nothing is started."""
    folder = (root or toolchain_root()) / name
    if Path(name).is_absolute():  # somebody's Python
        return Condition(name, folder, State.FOREIGN if folder.exists() else State.MISSING)
    if unfinished(folder).exists():
        return Condition(name, folder, State.HALF_BUILT)
    if not os.access(folder / "bin" / "python", os.X_OK):
        return Condition(name, folder, State.MISSING)
    if not (folder / STAMP).is_file():
        return Condition(name, folder, State.FOREIGN)
    why = _out_of_date(name, folder)
    return Condition(name, folder, State.STALE if why else State.READY, why)


def _out_of_date(name: str, folder: Path) -> str:
    """What in a toolchain is not as `build` would make it now; empty if all is."""
    found = _read_stamp(folder)
    if found is None:
        return "an older converge built it"
    if not has_recipe(name):
        return "this converge has no recipe for it"
    wanted = _stamp(name, found.extra, asked_before=found.source)
    reasons = {
        "its recipe or pinned versions are others now": wanted.recipe != found.recipe,
        f"it has another converge ({found.converge})": wanted.converge != found.converge,
    }
    return "; ".join(words for words, differs in reasons.items() if differs)


def disk_use(folder: Path) -> int:
    """Bytes of a toolchain's files, a file with several names once."""
    sizes: dict[tuple[int, int], int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            found = os.lstat(f"{place}/{name}")
            sizes[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())


def _read_stamp(folder: Path) -> Stamp | None:
    try:
        document: dict[str, Any] = json.loads((folder / STAMP).read_text())
        if "torchtitan" in document:  # its name until there were commits of Megatron-LM
            document["source"] = document.pop("torchtitan")
        return Stamp(**{**document, "extra": tuple(document["extra"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _stamp(name: str, extra: Sequence[str], *, asked_before: str = "") -> Stamp:
    """What `build` would make now.

    Without a checkout that has it, a toolchain of a revision counts as that of which it was built.
    """
    recipe, revision = recipe_of(name)
    upstream, clones = upstream_of(name), checkouts()
    source = f"torchtitan=={recipe.torchtitan}" if recipe.torchtitan else ""
    if upstream is not None and revision:
        source = _source(upstream, revision, clones, asked_before)
    parts = [repr(recipe), _constraints(name), *(TRAIN if recipe.torchtitan else ()), source]
    if recipe.modules:
        parts += [path.read_text() for path in _modules(recipe.modules)]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return Stamp(digest, source, tuple(sorted(set(extra))), this_package.code_version())


def _source(upstream: Upstream, revision: str, clones: Sequence[Path], asked_before: str) -> str:
    try:
        return at_revision(upstream, revision, clones)
    except ToolchainError:
        if asked_before:
            return asked_before
        raise


def _constraints(name: str) -> str:
    recipe, revision = recipe_of(name)
    instead = dict(recipe.instead)
    if recipe.torchtitan:
        instead["torchtitan"] = recipe.torchtitan
    if revision and (upstream := upstream_of(name)) is not None:
        instead[upstream.package] = None
    return constraints_of(shipped(CONSTRAINTS).read_text(), instead)


def _modules(folder: str) -> list[Path]:
    return sorted(shipped(folder).glob("*.py"))


# ------------------------------------------------------------------ building


def build(
    name: str,
    root: Path | None = None,
    *,
    extra: Sequence[str] = (),
    fresh: bool = False,
    observer: Observer = lambda _: None,
) -> bool:
    """Make a toolchain, or bring it up to date; return False if there was nothing to do.

    Args:
        name: of a recipe; ``torchtitan-0.3.0@REVISION`` has that release's packages, but
            torchtitan from a git checkout, and is built again when the revision has moved;
            ``torchtitan-main`` is built from one, too. Those of Megatron-Core likewise.
        root: the folder of toolchains.
        extra: more packages to install, by names that pip understands.
        fresh: build it anew, even if it is up to date.
        observer: called at the start of every step.

    Raises:
        ToolchainError: there is no such recipe, no installer, or it could not install something;
            what was there before still is.
    """
    folder = (root or toolchain_root()) / name
    recipe_of(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder, name, observer):
        found = None if unfinished(folder).exists() or fresh else _read_stamp(folder)
        if not os.access(folder / "bin" / "python", os.X_OK):
            found = None
        kept = found.extra if found else ()
        wanted = _stamp(name, (*extra, *kept))
        if found == wanted:
            return False
        if condition(name, root).state is State.FOREIGN:
            raise ToolchainError(
                f"{folder} is an environment that converge did not build, and is left alone: "
                "remove it or rename it first"
            )
        installer = _installer()
        again = found is not None and found.recipe == wanted.recipe
        _build(folder, wanted, installer, observer, refill=again)
    return True


def install_here(python: Path) -> None:
    """Install this converge in somebody's own Python, without what it depends on.

    The probe needs no more. Raises ToolchainError if there is no such Python, no installer, or it
    could not install it.
    """
    if not os.access(python, os.X_OK):
        raise ToolchainError(
            f"there is no Python {python}: name that of an environment, such as env/bin/python"
        )
    installer = _installer()
    with tempfile.TemporaryDirectory(prefix="converge-install-") as made:
        what = ("--no-deps", *this_package.requirement(Path(made)))
        log = Path(made, "install.log")
        if run_logged(installer.install(python, *what), log, installer.environment):
            raise ToolchainError(
                f"converge could not be installed in {python}: {first_error(log.read_text())}"
            )


def _installer() -> Installer:
    found = find_installer()
    if found is None:
        raise ToolchainError(
            f"there is neither uv nor pip in {sys.executable} to build toolchains with: "
            "install uv, https://docs.astral.sh/uv"
        )
    return found


def _build(
    folder: Path, wanted: Stamp, installer: Installer, observer: Observer, *, refill: bool
) -> None:
    """Fill a toolchain; ``refill``: only what may differ though its recipe is the same."""
    name = folder.name
    recipe, _ = recipe_of(name)
    log = folder.with_name(f"{name}.log")
    wheels = folder.with_name(f".{name}.wheel")
    if not refill:
        _require_pip(name, recipe.python)
    log.write_text("")
    with _replacing(folder, keep=refill):
        constraints = wheels / "constraints.txt"
        wheels.mkdir(exist_ok=True)
        constraints.write_text(without(_constraints(name), pinned_by(wanted.source)))
        steps = _steps(name, wanted, this_package.requirement(wheels), refill=refill)
        total = len(steps) + (not refill) + 1
        environment = {**installer.environment, **recipe.environment}
        try:
            if not refill:
                observer(Doing(name, 1, total, "making an empty environment"))
                _run(name, installer.venv(folder), log, environment)
            python = folder / "bin" / "python"
            for number, step in enumerate(steps, 1 + (not refill)):
                observer(Doing(name, number, total, step.says))
                what = ("-c", str(constraints), *step.what)
                command = installer.install(python, *what, declared=step.python)
                _run(name, command, log, environment)
            if recipe.modules:
                (packages,) = folder.glob("lib/python*/site-packages")
                for module in _modules(recipe.modules):
                    shutil.copy(module, packages)
            # Python compiles what it imports. Ranks would all do that at once, and may not write
            # there; an installer would compile three times as many modules.
            observer(Doing(name, total, total, "importing it"))
            _share_compiled(folder)
            _import_first(name, python, (*purpose(name), *_used_by_ranks(recipe)), log)
        finally:
            shutil.rmtree(wheels, ignore_errors=True)
        (folder / STAMP).write_text(json.dumps(asdict(wanted)))
    log.unlink()


def _share_compiled(folder: Path) -> None:
    """Link what other toolchains have compiled of the very same files.

    uv makes one file on the disk of a package that several have, and to compile torch takes
    longer than all the rest of a build. Python looks at a source's size and time, which are those
    of that file; it puts the paths right when it loads what is linked (``_fix_co_filename``).
    """
    for packages in folder.glob("lib/python*/site-packages"):
        for other in folder.parent.glob(f"*/{packages.relative_to(folder)}"):
            if other == packages or unfinished(folder.parent / other.parts[-4]).exists():
                continue
            with suppress(OSError):  # another process removes it
                for compiled in other.rglob("__pycache__/*.pyc"):
                    _link_if_same(compiled, packages / compiled.relative_to(other))


def _link_if_same(compiled: Path, mine: Path) -> None:
    """Link a compiled module if its source is the same file in both places."""
    source = f"{compiled.name.partition('.')[0]}.py"
    with suppress(OSError):  # it is compiled here, then
        same = (compiled.parent.parent / source).samefile(mine.parent.parent / source)
        if same and not mine.exists():
            mine.parent.mkdir(exist_ok=True)
            os.link(compiled, mine)


def _steps(name: str, wanted: Stamp, converge: Sequence[str], *, refill: bool) -> tuple[_Step, ...]:
    """What is installed, in this order."""
    recipe, _ = recipe_of(name)
    titan = (*TRAIN, wanted.source) if recipe.torchtitan else ()
    upstream = upstream_of(name)
    alone = (
        wanted.source if wanted.source and upstream and each == upstream.package else each
        for each in recipe.alone
    )
    release = f"torchtitan {recipe.torchtitan}" if titan else ""
    contents = ", ".join(filter(None, (release, *recipe.packages)))
    steps = (
        # torch first and alone: resolved as a dependency, another build of it might be picked.
        _Step("installing torch", ("torch",)),
        _Step(f"installing {contents}", (*titan, *recipe.packages)),
        _Step(
            f"building {', '.join(recipe.built)}",
            ("--no-build-isolation", *recipe.built) if recipe.built else (),
        ),
        _Step(
            f"installing {', '.join(recipe.alone)}",
            ("--no-deps", *alone) if recipe.alone else (),
            recipe.python,
        ),
    )
    last = (
        _Step(f"installing {', '.join(wanted.extra)}", wanted.extra),
        # Always anew: its version stays while its code changes.
        _Step("installing converge", ("--no-deps", "--force-reinstall", *converge)),
    )
    return tuple(step for step in (*(() if refill else steps), *last) if step.what)


def _require_pip(name: str, declared: tuple[int, int]) -> None:
    """Refuse what only pip can install (``Installer.install``) where there is none."""
    if sys.version_info[:2] < declared and importlib.util.find_spec("pip") is None:
        needed, here = (".".join(map(str, each)) for each in (declared, sys.version_info[:2]))
        raise ToolchainError(
            f"toolchain {name}: its packages declare to need Python {needed}, and only pip "
            f"installs them in {here}: install pip into {sys.executable}"
        )


def _run(name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
    try:
        status = run_logged(command, log, environment)
    except OSError as error:
        raise ToolchainError(f"toolchain {name} could not be built: {error}") from None
    if status:
        raise ToolchainError(
            f"toolchain {name} could not be built: {first_error(log.read_text())} (full log: {log})"
        )


@contextmanager
def _replacing(folder: Path, *, keep: bool) -> Iterator[None]:
    """Mark a toolchain as unfinished until the block ends; ``keep``: it is changed in its place.

    An environment that is replaced comes back if the block fails. One that was changed in its place
    stays marked as unfinished, because something may be missing in it.
    """
    marker, before = unfinished(folder), folder.with_name(f".{folder.name}.before")
    if marker.exists():  # a builder was killed
        shutil.rmtree(folder, ignore_errors=True)
    marker.touch()
    if not keep and folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
    try:
        yield
    except BaseException:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
            if before.exists():
                before.rename(folder)
            marker.unlink()
        raise
    shutil.rmtree(before, ignore_errors=True)
    marker.unlink()


@contextmanager
def _locked(folder: Path, name: str, observer: Observer) -> Iterator[None]:
    """Keep other builders of a toolchain waiting; the lock of one that was killed is free."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        observer(Doing(name, 0, 0, "waiting for another process that builds or removes it"))
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


# ------------------------------------------------------------------ looking and removing


def imported(name: str, root: Path | None = None, also: Sequence[str] = ()) -> dict[str, str]:
    """Import in its Python what a toolchain is for; return versions, by module.

    Args:
        name: of a toolchain, or the absolute path of a Python.
        root: the folder of toolchains.
        also: more modules to import. Only its recipe, if there is one, says what it is for.

    Raises:
        ToolchainError: with the reason, when something cannot be imported.
    """
    folder = (root or toolchain_root()) / name
    python = folder if Path(name).is_absolute() else python_of(name, folder)
    modules = tuple(dict.fromkeys((*purpose(name), *also)))
    asked = _import(name, python, modules, _IMPORT_TIMEOUT_S)
    if asked.returncode:
        again = f"; {build_hint(name)} --fresh" if has_recipe(name) else ""
        raise ToolchainError(
            f"toolchain {name} cannot import what it is for: {_last_line(asked)}{again}"
        )
    found: dict[str, str] = json.loads(asked.stdout.strip().rpartition("\n")[2])
    return found


def _used_by_ranks(recipe: Recipe) -> tuple[str, ...]:
    """What else a rank imports: torchrun, the compiler, what trains, and converge's own code."""
    titan = ("torchtitan.train",) if recipe.torchtitan else ()
    ours = ("converge_harness.rank.start.entry", "converge_harness.probe")
    return ("torch.distributed.run", "torch._inductor.compile_fx", *titan, *ours)


def _import_first(name: str, python: Path, modules: Sequence[str], log: Path) -> None:
    """Import modules, so that they are compiled; what they say is added to a log."""
    # Images of containers often tell Python not to compile.
    environment = {key: value for key, value in os.environ.items() if key != _DO_NOT_COMPILE}
    asked = _import(name, python, modules, _FIRST_IMPORT_TIMEOUT_S, environment)
    if asked.returncode:
        with log.open("a") as output:
            output.write(asked.stderr)
        raise ToolchainError(
            f"toolchain {name} cannot import what it is for: {_last_line(asked)} (full log: {log})"
        )


def _import(
    name: str,
    python: Path,
    modules: Sequence[str],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Ask a toolchain's Python to import modules; raises ToolchainError where it does not start."""
    try:
        return subprocess.run(
            [python.absolute(), "-c", _IMPORTS, *modules],
            # Python looks for modules in the current folder first: a user's may be torchtitan's.
            cwd=python.parent,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"toolchain {name} does not start: {error}") from None


def _last_line(asked: subprocess.CompletedProcess[str]) -> str:
    return asked.stderr.strip().rpartition("\n")[2] or f"exit code {asked.returncode}"


def remove(name: str, root: Path | None = None, observer: Observer = lambda _: None) -> None:
    """Remove a toolchain, finished or not.

    Raises ToolchainError where there is none of that name, or converge did not build it.
    """
    root = root or toolchain_root()
    there = {each.name: each for each in conditions(root) if each.state is not State.MISSING}
    if name not in there:
        listed = ", ".join(there) or "none"
        raise ToolchainError(f"there is no toolchain {name!r} in {root} (there: {listed})")
    folder = there[name].folder
    if there[name].state is State.FOREIGN:
        raise ToolchainError(
            f"{folder} is an environment that converge did not build, and is left alone: remove it "
            "yourself if it is not needed"
        )
    with _locked(folder, name, observer):
        unfinished(folder).touch()  # nothing starts to use it
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(folder.with_name(f".{folder.name}.before"), ignore_errors=True)
        folder.with_name(f"{folder.name}.log").unlink(missing_ok=True)
        if folder.exists():
            raise ToolchainError(f"{folder} could not be removed as a whole: who owns its files?")
        unfinished(folder).unlink()
