"""A torchtitan of the user's own: which dialect it speaks, what identifies it, what is refused."""

import ast
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from own_fork import git, install_editable, write_hooked

from converge_harness.errors import ToolchainError
from converge_harness.model import CHECKOUT, Parallelism, SetSpec, Surroundings, TrainConfig
from converge_harness.plan.identity import seed_identity
from converge_harness.trainers import find_toolchain
from converge_harness.trainers.torchtitan import TORCHTITAN
from converge_harness.trainers.torchtitan.dialect import (
    HOOKED,
    TITAN_02,
    TITAN_03,
    TITAN_MAIN,
    dialect_of,
    missing,
)
from converge_harness.trainers.torchtitan.user_python import toolchain_of_python

ROOT = Path(__file__).parents[2]
PACKAGES = {TITAN_02: "v0_2", TITAN_03: "v0_3", TITAN_MAIN: "v0_3"}
OPTIONAL = ("dry_run.py", "streaming_data.py", "streaming_package.py")


@pytest.mark.parametrize("dialect", [TITAN_02, TITAN_03, TITAN_MAIN])
def test_a_dialect_is_found_by_what_it_hooks_whatever_the_version_says(tmp_path, dialect):
    assert dialect_of(write_hooked(tmp_path, dialect), "0.0.1.dev0") == dialect


def test_grain_with_sizes_in_samples_is_main_of_two_days(tmp_path):
    package = write_hooked(tmp_path / "main", TITAN_MAIN)
    of_03 = write_hooked(tmp_path / "0.3", TITAN_03) / "config" / "configs.py"
    (package / "config" / "configs.py").write_text(of_03.read_text())
    assert dialect_of(package, "0.0.1.dev0") == TITAN_MAIN
    (package / "components" / "data" / "loader.py").unlink()
    with pytest.raises(ToolchainError, match="cannot be driven"):
        dialect_of(package, "0.0.1.dev0")


@pytest.mark.parametrize(
    ("toolchain", "dialect"),
    [
        ("torchtitan-0.2.2", TITAN_02),
        ("torchtitan-0.3.0", TITAN_03),
        ("torchtitan-0.3.0-torch-2.13", TITAN_03),
        ("torchtitan-main", TITAN_MAIN),
    ],
)
def test_the_releases_themselves_have_what_is_hooked(toolchain, dialect):
    root = Path(os.environ.get("CONVERGE_TOOLCHAINS") or ROOT / ".toolchains")
    found = [*(root / toolchain).glob("lib/python3*/site-packages/torchtitan")]
    if not found:
        pytest.skip(f"needs toolchain {toolchain}")
    assert dialect_of(found[0], "unknown") == dialect


def test_what_is_missing_is_named_with_the_file_where_it_was_looked_for(tmp_path):
    package = write_hooked(tmp_path, TITAN_03)
    file = package / "trainer.py"
    text = file.read_text().replace("self.loss_fn", "self.criterion")
    annotated = text.replace("class Trainer:", "class Trainer:\n    loss_fn: object")
    file.write_text(annotated)  # which sets nothing
    with pytest.raises(ToolchainError) as caught:
        dialect_of(package, "0.0.1.dev0")
    message = str(caught.value)
    assert f"it lacks Trainer.loss_fn (looked in {file})" in message
    assert message.startswith(f"torchtitan 0.0.1.dev0 in {package} cannot be driven by converge")
    assert "\n" not in message


def test_a_file_that_is_gone_and_one_that_is_no_python_are_named(tmp_path):
    package = write_hooked(tmp_path, TITAN_03)
    (package / "components" / "loss.py").rename(package / "components" / "losses.py")
    assert [str(each) for each in missing(package, TITAN_03)] == [
        str(package / "components" / "loss.py")
    ]
    (package / "trainer.py").write_text("class Trainer(:\n")
    with pytest.raises(ToolchainError, match=r"trainer\.py is not valid Python"):
        dialect_of(package, "1")


def test_members_of_bases_and_of_moved_classes_are_found(tmp_path):
    package = write_hooked(tmp_path, TITAN_03)
    file = package / "trainer.py"
    (package / "base_trainer.py").write_text(file.read_text().replace("Trainer", "Base"))
    file.write_text(
        "from torchtitan.base_trainer import Base as Common\nclass Trainer(Common): ...\n"
    )
    assert dialect_of(package, "1") == TITAN_03
    file.write_text("from .base_trainer import Base as Trainer\n")
    assert dialect_of(package, "1") == TITAN_03
    file.write_text("from .trainer import Trainer\n")
    with pytest.raises(ToolchainError, match=r"it lacks Trainer\.batch_generator"):
        dialect_of(package, "1")


@pytest.mark.parametrize("dialect", [TITAN_02, TITAN_03, TITAN_MAIN])
def test_everything_that_a_dialect_imports_at_once_is_looked_for(dialect):
    """A new import in the rank code is a new entry in the table."""
    looked_for = {(module, name) for module, names in HOOKED[dialect].items() for name in names}
    modules = set(HOOKED[dialect])
    for path in sorted((ROOT / "harness/rank/titan" / PACKAGES[dialect]).glob("*.py")):
        if path.name in OPTIONAL:
            continue
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                "torchtitan."
            ):
                continue
            module = node.module.removeprefix("torchtitan.")
            for alias in node.names:
                known = (module, alias.name) in looked_for or f"{module}.{alias.name}" in modules
                assert known, f"{path}: {node.module}.{alias.name}"


# --------------------------------------------------------------- a Python that has it


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A Python of the user's own, without torch: packages that are folders, and a fork."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    packages = tmp_path / "lib" / "site-packages"
    for name in ("torch", "numpy"):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").write_text("")
    fork = tmp_path / "fork"
    write_hooked(fork, TITAN_03)
    install_editable(packages, fork)
    python = tmp_path / "python"
    paths = os.pathsep.join((str(fork), str(packages)))
    python.write_text(
        f'#!/bin/sh\nexport PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{paths}"\n'
        f'exec {sys.executable} -S "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return python


def fork_of(python):
    return python.parent / "fork"


def test_an_editable_fork_is_identified_by_its_tree(own):
    found = find_toolchain(str(own))
    assert found.dialect == TITAN_03
    assert found.versions["torchtitan"].startswith("0.0.1.dev0+tree.")
    assert fork_of(own) in found.sources
    assert "torchtitan/trainer.py" in found.code
    (fork_of(own) / "torchtitan" / "components" / "loss.py").write_text(
        "class ChunkedLossWrapper: ...  # edited\n"
    )
    edited = find_toolchain(str(own))
    assert edited.versions["torchtitan"] != found.versions["torchtitan"]
    assert edited.code != found.code


def test_what_git_says_of_it_is_shown_and_is_no_part_of_the_identity(own):
    spec = SetSpec("a", Parallelism(), TrainConfig("a.toml", {}), str(own), trainer=TORCHTITAN)
    surroundings = Surroundings("cpu", "code")
    bare = find_toolchain(str(own))
    assert CHECKOUT not in bare.versions
    fork = fork_of(own)
    git(fork, "init", "-q")
    git(fork, "add", ".")
    git(fork, "commit", "-q", "-m", "one")
    git(fork, "tag", "v1")
    found = find_toolchain(str(own))
    assert found.versions[CHECKOUT] == f"v1 ({fork})"
    identities = {seed_identity(spec, each, 1, surroundings) for each in (bare, found)}
    assert len(identities) == 1
    (fork / "torchtitan" / "new.py").write_text("")
    dirty = find_toolchain(str(own))
    assert dirty.versions[CHECKOUT] == f"v1, with uncommitted changes ({fork})"
    assert seed_identity(spec, dirty, 1, surroundings) not in identities
    assert seed_identity(spec, replace(dirty, name="other"), 1, surroundings) not in identities


def test_one_from_an_index_is_identified_by_its_version(own, tmp_path):
    packages = tmp_path / "lib" / "site-packages"
    (fork_of(own) / "torchtitan").rename(packages / "torchtitan")
    metadata = next(packages.glob("torchtitan-*.dist-info"))
    (metadata / "RECORD").write_text("torchtitan/__init__.py,,\n")
    assert "+tree." in find_toolchain(str(own)).versions["torchtitan"]  # from a folder
    (metadata / "direct_url.json").unlink()
    found = find_toolchain(str(own))
    assert (found.versions["torchtitan"], dict(found.code)) == ("0.0.1.dev0", {})


def test_a_python_without_converge_gets_it_and_nothing_else(own):
    (folder,) = find_toolchain(str(own)).paths
    assert [each.name for each in folder.iterdir()] == ["converge_harness"]


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_a_package_that_is_missing_is_named_with_the_command(own, name):
    packages = own.parent / "lib" / "site-packages"
    (packages / name / "__init__.py").unlink()
    with pytest.raises(ToolchainError, match=f"^{own} has no {name} \\(.*has no __init__.py\\); "):
        find_toolchain(str(own))
    (packages / name).rmdir()
    with pytest.raises(ToolchainError, match=f"^{own} has no {name}; "):
        find_toolchain(str(own))


def test_a_python_without_torchtitan_says_how_to_install_a_fork(own):
    (fork_of(own) / "torchtitan").rename(fork_of(own) / "gone")
    with pytest.raises(ToolchainError) as caught:
        find_toolchain(str(own))
    install = f"{own} -m pip install -e FORK"
    assert str(caught.value) == f"{own} has no torchtitan; install your fork there: {install}"


def test_two_torchtitans_are_both_named(own, tmp_path):
    write_hooked(tmp_path / "lib" / "site-packages", TITAN_03)
    with pytest.raises(ToolchainError) as caught:
        find_toolchain(str(own))
    first = fork_of(own) / "torchtitan"
    second = tmp_path / "lib" / "site-packages" / "torchtitan"
    assert f"has two torchtitans, {first}, which it would import, and {second}" in str(caught.value)


def test_a_python_that_is_too_old_says_so(own, tmp_path):
    text = own.read_text()
    faked = "sed s/3[.]1[0-9]*[.][0-9]*/3.9.1/"
    own.write_text(text.replace("exec ", "").rstrip() + f" | {faked}\n")
    with pytest.raises(ToolchainError, match=r"is Python 3\.9\.1, and .* needs 3\.11 or newer"):
        find_toolchain(str(own))


def test_code_of_another_folder_is_what_it_then_imports_or_it_is_refused(own, tmp_path):
    write_hooked(tmp_path / "base", TITAN_02)
    found = toolchain_of_python(str(own), (tmp_path / "base",))
    assert found.dialect == TITAN_02
    assert found.paths[0] == tmp_path / "base"
    (tmp_path / "base" / "torchtitan").rename(tmp_path / "base" / "other")
    with pytest.raises(ToolchainError, match="editable_mode=compat"):
        toolchain_of_python(str(own), (tmp_path / "base",))


def test_the_metadata_of_an_editable_install_is_that_of_pip(own):
    told = next((own.parent / "lib" / "site-packages").glob("torchtitan-*/direct_url.json"))
    assert json.loads(told.read_text())["dir_info"] == {"editable": True}
