"""Building, checking and removing toolchains, by an installer that notes what it is asked."""

import importlib.util
import json
import os
import py_compile
import subprocess
import sys
import threading
import zipfile
from importlib import metadata

import pytest
from filelock import FileLock
from own_fork import git

from converge_harness.errors import ToolchainError
from converge_harness.toolchains import build as building
from converge_harness.toolchains.build import (
    State,
    build,
    condition,
    conditions,
    disk_use,
    imported,
    install_here,
    remove,
)
from converge_harness.toolchains.find import STAMP, available_toolchains, unfinished
from converge_harness.toolchains.installer import Installer
from converge_harness.toolchains.this_package import make_wheel

NAME = "torchtitan-0.3.0"
STUB = """
import os, sys
asked = sys.argv[1:]
with open({noted!r}, "a") as notes:
    notes.write(" ".join(asked) + "\\n")
if asked[0] == "venv":
    os.makedirs(asked[1] + "/bin")
    os.makedirs(asked[1] + "/lib/python3.11/site-packages")
    with open(asked[1] + "/bin/python", "w") as python:
        python.write({python!r})
    os.chmod(asked[1] + "/bin/python", 0o755)
elif {failing!r} in asked:
    print("error: No solution found\\n  cause: there is no such version")
    sys.exit(1)
"""

PYTHON = """#!/bin/sh
shift 2
echo "import $*" >> {noted}
[ -z "$PYTHONDONTWRITEBYTECODE" ] || echo "compiles nothing" >> {noted}
case " $* " in
  *" {failing} "*) echo "Traceback\nImportError: {failing} lacks a symbol" >&2; exit 1 ;;
esac
echo '{{"torch": "2.15.0"}}'
"""
"""That of a toolchain; it notes what it is to import."""


@pytest.fixture
def installer(tmp_path, monkeypatch):
    """Make such an installer, which fails at a package; return what it has been asked, by lines."""
    noted = tmp_path / "asked"

    def make(failing="nothing"):
        stub = tmp_path / "stub.py"
        python = PYTHON.format(noted=noted, failing=failing)
        stub.write_text(STUB.format(noted=str(noted), failing=failing, python=python))
        noted.write_text("")
        called = (sys.executable, str(stub))
        made = Installer("pip", (*called, "venv"), called)
        monkeypatch.setattr(building, "find_installer", lambda: made)
        return lambda: noted.read_text().splitlines()

    return make


@pytest.fixture
def root(tmp_path):
    return tmp_path / "chains"


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_a_toolchain_is_built_in_steps_torch_first_and_converge_last(installer, root):
    asked, seen = installer(), []
    assert build(NAME, root, observer=seen.append)
    venv, torch, titan, converge, imports = asked()
    assert venv == f"venv {root / NAME}"
    assert torch.split()[-1] == "torch"
    assert titan.endswith(" torchtitan==0.3.0")
    assert "--no-deps --force-reinstall -e" in converge
    assert imports.startswith("import torch torchtitan converge_harness torch.distributed.run ")
    assert [(each.step, each.steps) for each in seen] == [(step, 5) for step in range(1, 6)]
    assert seen[2].says == "installing torchtitan 0.3.0"
    assert condition(NAME, root).state is State.READY
    assert names(root) == [f".{NAME}.lock", NAME]  # no log, no mark, no wheel
    assert not build(NAME, root)
    assert len(asked()) == 5


def test_more_packages_are_added_and_kept_without_building_it_anew(installer, root):
    asked = installer()
    build(NAME, root)
    assert build(NAME, root, extra=["pytest"])
    assert asked()[5].split()[-1] == "pytest"
    assert len(asked()) == 8
    assert not build(NAME, root)
    assert not build(NAME, root, extra=["pytest"])


def test_what_another_toolchain_compiled_of_the_same_file_is_shared(root):
    places = [root / name / "lib" / "python3.11" / "site-packages" for name in (NAME, "a", "b")]
    for place in places:
        place.mkdir(parents=True)
    mine, finished, half = places
    for name, of in (("same", finished), ("other", finished), ("from_half", half)):
        (of / f"{name}.py").write_text("def where(): ...\n")
        py_compile.compile(str(of / f"{name}.py"))
        if name == "other":  # the same text, but a file of its own
            (mine / "other.py").write_text("def where(): ...\n")
        else:
            os.link(of / f"{name}.py", mine / f"{name}.py")
    unfinished(root / "b").touch()
    building._share_compiled(root / NAME)
    (shared,) = mine.rglob("*.pyc")
    assert shared.samefile(finished / shared.relative_to(mine))
    asked = "import same; print(same.__cached__, same.where.__code__.co_filename)"
    said = subprocess.check_output([sys.executable, "-c", asked], cwd=mine, text=True)
    assert said.split() == [str(shared), str(mine / "same.py")]
    assert shared.samefile(finished / shared.relative_to(mine))  # Python took it as it was


def test_a_stamp_of_when_only_torchtitan_had_commits_is_read(installer, root):
    installer()
    build(NAME, root)
    stamp = root / NAME / STAMP
    old = json.loads(stamp.read_text())
    old["torchtitan"] = old.pop("source")
    stamp.write_text(json.dumps(old))
    assert condition(NAME, root).state is State.READY


def test_a_commit_of_megatron_lm_replaces_its_release(installer, root, tmp_path, monkeypatch):
    asked, clone = installer(), tmp_path / "clone"
    core = clone / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("")
    git(clone, "init", "-q", "-b", "main")
    git(clone, "add", ".")
    git(clone, "commit", "-q", "-m", "one")
    monkeypatch.setenv("CONVERGE_CHECKOUT", str(clone))
    commit = git(clone, "rev-parse", "main")
    monkeypatch.setattr(sys, "version_info", (3, 12))  # which its metadata ask for
    build("megatron-core-main", root)
    (alone,) = (line for line in asked() if "--no-deps" in line and "git+" in line)
    assert alone.endswith(f" --no-deps git+{clone.as_uri()}@{commit}")
    monkeypatch.delenv("CONVERGE_CHECKOUT")
    assert condition("megatron-core-main", root).state is State.READY
    monkeypatch.setenv("CONVERGE_CHECKOUT", str(tmp_path))  # of something else
    assert condition("megatron-core-main", root).state is State.READY
    with pytest.raises(ToolchainError, match="no clone of Megatron-LM that has main"):
        build("megatron-core-main", root)
    before = len(asked())
    monkeypatch.setattr(sys, "version_info", (3, 11))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolchainError, match=r"need Python 3.12, and only pip installs .* 3.11"):
        build("megatron-core-0.19.2", root)
    assert len(asked()) == before  # nothing was installed that would have to be thrown away


def test_a_toolchain_with_another_converge_gets_this_one(installer, root):
    asked = installer()
    build(NAME, root)
    stamp = root / NAME / STAMP
    stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "converge": "0.0.9 abc"}))
    found = condition(NAME, root)
    assert (found.state, found.why) == (State.STALE, "it has another converge (0.0.9 abc)")
    assert build(NAME, root)
    assert len(asked()) == 7
    assert condition(NAME, root).state is State.READY


@pytest.mark.parametrize("old", ["0123abcd", '{"recipe": "another"}'])
def test_a_toolchain_of_an_older_converge_is_built_anew(installer, root, old):
    asked = installer()
    build(NAME, root)
    (root / NAME / "bin" / "left").touch()
    (root / NAME / STAMP).write_text(old)
    assert condition(NAME, root).why == "an older converge built it"
    assert build(NAME, root)
    assert len(asked()) == 10
    assert not (root / NAME / "bin" / "left").exists()


def test_one_of_other_versions_is_out_of_date(installer, root, monkeypatch):
    installer()
    build(NAME, root)
    monkeypatch.setitem(building.RECIPES, NAME, building.RECIPES["torchtitan-0.2.2"])
    assert condition(NAME, root).why == "its recipe or pinned versions are others now"


def test_a_build_that_fails_says_why_and_leaves_nothing_but_its_log(installer, root):
    installer(failing="torchtitan==0.3.0")
    with pytest.raises(ToolchainError) as caught:
        build(NAME, root)
    log = root / f"{NAME}.log"
    assert str(caught.value) == (
        f"toolchain {NAME} could not be built: error: No solution found: there is no such version "
        f"(full log: {log})"
    )
    assert "No solution found" in log.read_text()
    assert names(root) == [f".{NAME}.lock", log.name]


def test_a_toolchain_that_cannot_be_imported_is_not_kept(installer, root):
    installer(failing="torchtitan.train")
    with pytest.raises(ToolchainError) as caught:
        build(NAME, root)
    assert str(caught.value) == (
        f"toolchain {NAME} cannot import what it is for: "
        f"ImportError: torchtitan.train lacks a symbol (full log: {root / NAME}.log)"
    )
    assert "Traceback" in (root / f"{NAME}.log").read_text()
    assert NAME not in names(root)


def test_a_toolchain_that_a_package_breaks_is_not_used(installer, root):
    installer()
    build(NAME, root)
    python = root / NAME / "bin" / "python"
    python.write_text(python.read_text().replace("nothing", "torchtitan.train"))
    with pytest.raises(ToolchainError, match=r"torchtitan\.train lacks a symbol"):
        build(NAME, root, extra=["pytest"])
    assert condition(NAME, root).state is State.HALF_BUILT


def test_what_it_imports_is_compiled_even_where_the_shell_says_otherwise(
    installer, root, monkeypatch
):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    asked = installer()
    build(NAME, root)
    assert asked()[-1].startswith("import ")


def test_what_was_there_comes_back_when_a_build_fails(installer, root):
    installer()
    build(NAME, root)
    (root / NAME / "bin" / "mine").touch()
    installer(failing="torch")
    with pytest.raises(ToolchainError):
        build(NAME, root, fresh=True)
    assert (root / NAME / "bin" / "mine").exists()
    assert condition(NAME, root).state is State.READY


def test_a_change_in_place_that_fails_leaves_a_toolchain_that_is_not_used(installer, root):
    installer()
    build(NAME, root)
    installer(failing="pytest")
    with pytest.raises(ToolchainError):
        build(NAME, root, extra=["pytest"])
    assert condition(NAME, root).state is State.HALF_BUILT
    assert available_toolchains(root) == ()
    asked = installer()
    assert build(NAME, root)
    assert len(asked()) == 5


def test_what_a_killed_builder_left_is_built_anew(installer, root):
    asked = installer()
    (root / NAME / "bin").mkdir(parents=True)
    (root / NAME / "bin" / "left").touch()
    unfinished(root / NAME).touch()
    assert [each.state for each in conditions(root) if each.name == NAME] == [State.HALF_BUILT]
    assert build(NAME, root)
    assert len(asked()) == 5
    assert not (root / NAME / "bin" / "left").exists()


def test_a_second_builder_waits_and_has_nothing_left_to_do(installer, root):
    installer()
    build(NAME, root)
    lock, seen = FileLock(root / f".{NAME}.lock"), []
    waits = threading.Event()

    def observe(doing):
        seen.append(doing)
        waits.set()

    built = []
    with lock:
        second = threading.Thread(target=lambda: built.append(build(NAME, root, observer=observe)))
        second.start()
        assert waits.wait(10)
    second.join(10)
    assert built == [False]
    assert [each.says for each in seen] == ["waiting for another process that builds or removes it"]


def test_modules_that_stand_in_for_others_are_copied(installer, root):
    installer()
    build("composer-0.32.1", root)
    packages = root / "composer-0.32.1" / "lib" / "python3.11" / "site-packages"
    assert sorted(path.name for path in packages.iterdir()) == ["mcli.py", "torchvision.py"]


def test_without_an_installer_the_message_says_which_to_install(root, monkeypatch):
    monkeypatch.setattr(building, "find_installer", lambda: None)
    with pytest.raises(ToolchainError, match=r"neither uv nor pip in .*: install uv"):
        build(NAME, root)


def test_an_environment_of_ones_own_is_left_alone(installer, root):
    installer()
    python = root / NAME / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert condition(NAME, root).state is State.FOREIGN
    for change in (build, remove):
        with pytest.raises(ToolchainError, match="did not build, and is left alone"):
            change(NAME, root)
    assert python.exists()


@pytest.mark.parametrize("name", ["elsewhere", "..", "../chains", ".", "torchtitan-0.2.2"])
def test_only_a_toolchain_is_removed(installer, root, name):
    installer()
    build(NAME, root)
    (root / "elsewhere").mkdir()
    with pytest.raises(ToolchainError, match=rf"no toolchain .* \(there: {NAME}\)"):
        remove(name, root)
    assert (root / "elsewhere").exists()
    assert condition(NAME, root).state is State.READY


def test_a_toolchain_is_removed_whole_finished_or_not(installer, root):
    installer()
    build(NAME, root)
    assert disk_use(root / NAME) > 0
    remove(NAME, root)
    unfinished(root / NAME).touch()
    remove(NAME, root)
    assert names(root) == [f".{NAME}.lock"]


def importing(root, script):
    python = root / NAME / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)


def test_a_check_imports_what_a_toolchain_is_for(root):
    importing(root, 'echo "a library talks"; echo \'{"torch": "2.15.0"}\'')
    assert imported(NAME, root) == {"torch": "2.15.0"}


def test_a_check_says_what_cannot_be_imported_and_how_to_build_it_again(root):
    importing(root, "echo 'ImportError: libcudart.so.13 is missing' >&2; exit 1")
    with pytest.raises(ToolchainError) as caught:
        imported(NAME, root)
    assert str(caught.value) == (
        f"toolchain {NAME} cannot import what it is for: ImportError: libcudart.so.13 is missing; "
        f"build it with: converge toolchain build {NAME} --fresh"
    )


def test_nothing_is_left_unexplained_in_the_list(root):
    found = conditions(root)
    assert {each.state for each in found} == {State.MISSING}
    assert NAME in {each.name for each in found}


def test_a_wheel_of_an_installed_package_has_its_files_again(tmp_path):
    distribution = metadata.distribution("iniconfig")
    first = make_wheel(distribution, tmp_path / "a").read_bytes()
    path = make_wheel(distribution, tmp_path / "b")
    assert path.read_bytes() == first
    with zipfile.ZipFile(path) as wheel:
        found = set(wheel.namelist())
        record = wheel.read(f"iniconfig-{distribution.version}.dist-info/RECORD").decode()
    assert {line.partition(",")[0] for line in record.splitlines()} == found
    assert "iniconfig/__init__.py" in found
    assert f"iniconfig-{distribution.version}.dist-info/METADATA" in found
    assert not any(name.endswith((".pyc", "INSTALLER")) for name in found)


def test_this_converge_is_installed_in_a_python_of_ones_own(installer, tmp_path):
    installer(failing="--no-deps")
    python = tmp_path / "env" / "bin" / "python"
    with pytest.raises(ToolchainError, match=r"there is no Python .*: name that of an environment"):
        install_here(python)
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    with pytest.raises(ToolchainError, match=r"could not be installed in .*: .*no such version"):
        install_here(python)
    asked = installer()
    install_here(python)
    (line,) = asked()
    assert line.startswith(f"--python {python} install ")
    assert " --no-deps -e " in line
