"""Finding toolchains: versions are read from metadata, nothing is started."""

import json
import os
import platform
import re
import sys
import time
from collections import Counter
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from own_fork import write_hooked

import converge_harness
from converge_harness.errors import ToolchainError
from converge_harness.toolchains.find import (
    all_packages,
    available_toolchains,
    toolchain_root,
    unfinished,
    versions,
)
from converge_harness.toolchains.this_package import code_version
from converge_harness.trainers import assume_toolchain, find_toolchain
from converge_harness.trainers.command import trained_by
from converge_harness.trainers.command.settings import Command


def build(root: Path, name: str, **versions: str) -> Path:
    """An environment as pip leaves it, with a Python that fails when started."""
    python = root / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    packages = root / name / "lib" / "python3.11" / "site-packages"
    for distribution, version in versions.items():
        metadata = packages / f"{distribution}-{version}.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
    return python


@pytest.mark.parametrize(
    ("metadata", "found"),
    [
        ("Name: numpy\nVersion: 1.0\n", "1.0"),
        ("name: numpy\nversion:\t1.0\n", "1.0"),
        ("Name: numpy\nVersion: 1.0\nVersion: 2.0\n", "1.0"),
        ("Name: numpy\nVersion: 1.0\n\nVersion: 2.0 is in the description\n", "1.0"),
        ("Name: numpy\n", ""),
        ("Name: numpy\nVersion:\n", ""),
        ("", ""),
    ],
)
def test_a_package_without_a_version_has_none(tmp_path, metadata, found):
    info = tmp_path / "numpy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(metadata)
    assert versions([str(tmp_path)], ["numpy"]) == {"numpy": found}
    assert len(all_packages([str(tmp_path)])) == 16


@pytest.mark.parametrize(("version", "dialect"), [("0.2.2", "titan_0_2"), ("0.3.0", "titan_0_3")])
def test_a_toolchain_is_read_from_its_metadata(tmp_path, version, dialect):
    python = build(
        tmp_path, "mine", torch="2.13.0+cpu", torchtitan=version, numpy="2.4.6", rich="14.0"
    )
    toolchain = find_toolchain("mine", tmp_path)
    assert (toolchain.name, toolchain.python, toolchain.dialect) == ("mine", python, dialect)
    assert toolchain.versions == {"torch": "2.13.0+cpu", "torchtitan": version, "numpy": "2.4.6"}


def test_finding_reads_every_package_a_few_times_however_many_there_are(tmp_path, monkeypatch):
    """All of them for the digest, and those that change numbers by name. ``plan`` waits for it."""
    reads = Counter()
    read_text = metadata.PathDistribution.read_text

    def counted(distribution, name):
        reads[str(distribution.locate_file(""))] += 1
        return read_text(distribution, name)

    monkeypatch.setattr(metadata.PathDistribution, "read_text", counted)
    for root, packages in ((tmp_path / "few", 20), (tmp_path / "many", 200)):
        many = {f"package{index}": "1.0" for index in range(packages)}
        build(root, "mine", torch="2.13.0", torchtitan="0.3.0", **many)
        find_toolchain("mine", root)
    few, many = reads.values()
    assert (many - few) / 180 <= 3  # METADATA, direct_url.json, RECORD


def test_a_missing_toolchain_names_those_there_and_the_command(tmp_path):
    build(tmp_path, "torchtitan-0.2.2")
    build(tmp_path, "other")
    with pytest.raises(ToolchainError) as caught:
        find_toolchain("torchtitan-0.3.0", tmp_path)
    message = str(caught.value)
    assert "(there: other, torchtitan-0.2.2)" in message
    assert "converge toolchain build torchtitan-0.3.0" in message


def test_an_environment_without_torchtitan_is_refused(tmp_path):
    build(tmp_path, "half", torch="2.13.0")
    with pytest.raises(ToolchainError, match="has no torchtitan; see those that converge can"):
        find_toolchain("half", tmp_path)


def test_an_unknown_series_lists_the_supported_ones(tmp_path):
    build(tmp_path, "new", torch="3.0", torchtitan="0.10.1")
    with pytest.raises(ToolchainError, match=r"torchtitan 0\.10\.1; supported: 0\.2\.x, 0\.3\.x"):
        find_toolchain("new", tmp_path)


def test_a_python_that_cannot_be_run_is_no_toolchain(tmp_path):
    build(tmp_path, "mine", torch="1", torchtitan="0.3.0").chmod(0o644)
    with pytest.raises(ToolchainError, match="no toolchain 'mine'"):
        find_toolchain("mine", tmp_path)


def test_a_half_built_toolchain_is_not_used(tmp_path):
    build(tmp_path, "torchtitan-0.3.0", torch="2.15.0", torchtitan="0.3.0")
    unfinished(tmp_path / "torchtitan-0.3.0").touch()
    assert available_toolchains(tmp_path) == ()
    with pytest.raises(ToolchainError, match=r"is half built.*: converge toolchain build torchti"):
        find_toolchain("torchtitan-0.3.0", tmp_path)


def test_the_root_is_the_variable_or_here_or_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CONVERGE_TOOLCHAINS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert toolchain_root() == tmp_path / "cache" / "converge" / "toolchains"
    assert available_toolchains() == ()
    (tmp_path / ".toolchains").mkdir()
    assert toolchain_root() == tmp_path / ".toolchains"
    build(tmp_path / "elsewhere", "b")
    build(tmp_path / "elsewhere", "a")
    monkeypatch.setenv("CONVERGE_TOOLCHAINS", "elsewhere")
    assert toolchain_root() == tmp_path / "elsewhere"
    assert available_toolchains() == ("a", "b")


@pytest.mark.parametrize("name", ["torchtitan-0.3.0", "torchtitan-0.3.0-streaming"])
def test_a_plan_may_assume_a_toolchain_that_is_not_built_yet(tmp_path, name):
    assumed = assume_toolchain(name, tmp_path)
    assert assumed.name == name
    assert (assumed.dialect, assumed.versions) == ("titan_0_3", {"torchtitan": "0.3.0"})


@pytest.mark.parametrize("name", ["torchtitan-9.9.9", "mine", "torchtitan"])
def test_only_a_known_release_is_assumed(tmp_path, name):
    with pytest.raises(ToolchainError, match=r"converge toolchain (build|list)"):
        assume_toolchain(name, tmp_path)


def built_from(root: Path, commit: str) -> Path:
    """What pip leaves of a torchtitan that was built from a commit (PEP 610)."""
    (found,) = root.glob("*/lib/python3.11/site-packages/torchtitan-*.dist-info")
    url = {"url": "file:///checkout", "vcs_info": {"vcs": "git", "commit_id": commit}}
    (found / "direct_url.json").write_text(json.dumps(url))
    return found


def test_two_commits_of_one_version_are_two_toolchains(tmp_path):
    build(tmp_path, "torchtitan-0.3.0@main", torch="2.13.0", torchtitan="0.3.0")
    built_from(tmp_path, "0123456789abcdef")
    before = find_toolchain("torchtitan-0.3.0@main", tmp_path)
    built_from(tmp_path, "fedcba9876543210")
    after = find_toolchain("torchtitan-0.3.0@main", tmp_path)
    assert before.versions["torchtitan"] == "0.3.0+g0123456789ab"
    assert after.versions["torchtitan"] == "0.3.0+gfedcba987654"
    assert before.dialect == after.dialect == "titan_0_3"


def test_a_commit_is_spoken_to_as_the_release_that_is_named(tmp_path):
    build(tmp_path, "torchtitan-0.3.0@main", torch="2.13.0", torchtitan="0.2.2")  # as main says
    assert find_toolchain("torchtitan-0.3.0@main", tmp_path).dialect == "titan_0_3"


def titan(root: Path, name: str, dialect: str) -> Path:
    """The package of a toolchain, with all that a dialect hooks."""
    packages = root / name / "lib" / "python3.11" / "site-packages"
    return write_hooked(packages, dialect)


@pytest.mark.parametrize("name", ["torchtitan-0.3.0@main", "torchtitan-main", "torchtitan-main@x"])
@pytest.mark.parametrize("dialect", ["titan_0_3", "titan_main"])
def test_a_commit_is_spoken_to_as_its_code_asks_for(tmp_path, name, dialect):
    build(tmp_path, name, torch="2.15.0", torchtitan="0.2.2")
    titan(tmp_path, name, dialect)
    assert find_toolchain(name, tmp_path).dialect == dialect


def test_a_commit_with_names_that_nobody_knows_is_refused(tmp_path):
    name = "torchtitan-main@next"
    build(tmp_path, name, torch="2.15.0", torchtitan="0.2.2")
    file = titan(tmp_path, name, "titan_main") / "config" / "configs.py"
    file.write_text(file.read_text().replace("max_context_length", "longest_context"))
    with pytest.raises(ToolchainError) as caught:
        find_toolchain(name, tmp_path)
    says = str(caught.value)
    assert "compared with main it lacks TrainingConfig.max_context_length (looked in" in says
    assert "written for 0.2.x, 0.3.x and main as of b5bcd76c6" in says
    assert "\n" not in says


def test_a_release_is_known_by_its_version_whatever_its_toolchain_is_called(tmp_path):
    build(tmp_path, "mine", torch="2.15.0", torchtitan="0.4.0")
    with pytest.raises(
        ToolchainError, match=r"has torchtitan 0\.4\.0; supported: 0\.2\.x, 0\.3\.x"
    ):
        find_toolchain("mine", tmp_path)


@pytest.mark.parametrize("name", ["torchtitan-main", "torchtitan-main@b5bcd76c6"])
def test_the_main_branch_is_assumed_before_it_is_built(tmp_path, name):
    assert assume_toolchain(name, tmp_path).dialect == "titan_main"
    command = f"CONVERGE_CHECKOUT=FOLDER converge toolchain build {name}"
    with pytest.raises(ToolchainError, match=command):
        find_toolchain(name, tmp_path)


def test_a_commit_that_is_not_built_yet_is_assumed_of_its_release(tmp_path):
    assumed = assume_toolchain("torchtitan-0.2.2@main", tmp_path)
    assert (assumed.dialect, assumed.versions) == ("titan_0_2", {"torchtitan": "0.2.2@main"})


def test_a_commit_that_is_not_built_is_built_from_a_checkout(tmp_path):
    command = "CONVERGE_CHECKOUT=FOLDER converge toolchain build torchtitan-0.3.0@main"
    with pytest.raises(ToolchainError, match=command):
        find_toolchain("torchtitan-0.3.0@main", tmp_path)


def test_a_local_folder_is_no_commit(tmp_path):
    build(tmp_path, "mine", torch="2.13.0", torchtitan="0.3.0")
    found = built_from(tmp_path, "0123")
    (found / "direct_url.json").write_text('{"url": "file:///x", "dir_info": {"editable": true}}')
    assert find_toolchain("mine", tmp_path).versions["torchtitan"] == "0.3.0"


def test_a_package_that_was_edited_where_it_lies_is_not_the_released_one(tmp_path):
    build(tmp_path, "mine", torch="2.13.0+cpu", torchtitan="0.3.0")
    (packages,) = tmp_path.glob("mine/lib/python3.11/site-packages")
    for name, version in (("torch", "2.13.0+cpu"), ("torchtitan", "0.3.0")):
        (packages / f"{name}.py").write_text("x = 1\n")
        (packages / "readme.txt").write_text("")
        record = packages / f"{name}-{version}.dist-info" / "RECORD"
        own = f"{record.parent.name}/RECORD,,"
        record.write_text(f"{name}.py,sha256=x,6\nreadme.txt,,\ngone.py,,\n{own}\n")
    installed = find_toolchain("mine", tmp_path)
    assert installed.versions == {"torch": "2.13.0+cpu", "torchtitan": "0.3.0"}
    found = []
    for source in ("x = 2\n", "x = 3\n", "x = 2\n"):
        for name in ("torch.py", "torchtitan.py", "readme.txt"):
            (packages / name).write_text(source)
            os.utime(packages / name, (time.time() + 60,) * 2)
        found.append(find_toolchain("mine", tmp_path).versions)
    assert found[0] == found[2] != found[1]
    assert re.fullmatch(r"2\.13\.0\+cpu\.edited\.[0-9a-f]{8}", found[0]["torch"])
    assert re.fullmatch(r"0\.3\.0\+edited\.[0-9a-f]{8}", found[0]["torchtitan"])


PROGRAM = Command(argv=("train.py",), folder=Path("/x"))
PROBED = trained_by(PROGRAM)
CURVES = trained_by(replace(PROGRAM, probed=False, curves="{output}/loss.csv"))


@pytest.mark.parametrize("trainer", [None, CURVES])
def test_a_toolchain_with_another_converge_is_refused_unless_ranks_import_this_one(
    tmp_path, monkeypatch, trainer
):
    build(tmp_path, "torchtitan-0.3.0", torch="2.15.0", torchtitan="0.3.0")
    stamp = tmp_path / "torchtitan-0.3.0" / "converge.stamp"
    stamp.write_text(json.dumps({"converge": "0.0.9 abc"}))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(ToolchainError, match=r"has another converge in it \(0.0.9 abc\)") as caught:
        find_toolchain("torchtitan-0.3.0", tmp_path, trainer)
    assert str(caught.value).endswith("with: converge toolchain build torchtitan-0.3.0")
    # A plan launches nothing.
    assert assume_toolchain("torchtitan-0.3.0", tmp_path, trainer).versions["torch"] == "2.15.0"
    monkeypatch.setenv("PYTHONPATH", str(Path(converge_harness.__file__).parents[1]))
    assert find_toolchain("torchtitan-0.3.0", tmp_path, trainer).versions["torch"] == "2.15.0"
    monkeypatch.delenv("PYTHONPATH")
    for content in (json.dumps({"converge": code_version()}), "a stamp of an older converge"):
        stamp.write_text(content)
        assert find_toolchain("torchtitan-0.3.0", tmp_path, trainer).versions["torch"] == "2.15.0"


def test_a_program_needs_no_torchtitan(tmp_path):
    build(tmp_path, "mine", torch="2.13.0", deepspeed="0.19.8", rich="14.0")
    found = find_toolchain("mine", tmp_path, CURVES)
    assert found.dialect == "command"
    assert found.versions.keys() == {"torch", "deepspeed", "packages"}
    assert (found.versions["torch"], found.versions["deepspeed"]) == ("2.13.0", "0.19.8")


def test_every_package_of_a_programs_environment_counts_but_this_one(tmp_path):
    def packages(name, **versions):
        build(tmp_path, name, torch="2.13.0", **versions)
        return find_toolchain(name, tmp_path, CURVES).versions["packages"]

    first = packages("a", my_kernels="1.0", converge_harness="0.1.0")
    assert packages("b", my_kernels="1.0") == first
    assert packages("c", my_kernels="1.1") != first
    assert packages("d", my_kernels="1.0", more="1.0") != first


def test_a_probed_program_needs_this_package_and_the_error_installs_it(tmp_path):
    python = build(tmp_path, "mine", torch="2.13.0")
    with pytest.raises(ToolchainError) as caught:
        find_toolchain("mine", tmp_path, PROBED)
    assert f"install it with: converge toolchain install {python}, or" in str(caught.value)
    build(tmp_path, "both", torch="2.13.0", converge_harness="0.1.0")
    assert find_toolchain("both", tmp_path, PROBED).versions["converge-harness"] == "0.1.0"
    build(tmp_path, "older", torch="2.13.0", converge_harness="0.0.9")
    with pytest.raises(ToolchainError, match=r"has converge 0\.0\.9, .*: install this one with: "):
        find_toolchain("older", tmp_path, PROBED)
    assert assume_toolchain("older", tmp_path, PROBED).versions["converge-harness"] == "0.0.9"
    build(tmp_path, "neither")
    with pytest.raises(ToolchainError, match="has no torch, so its program cannot be probed"):
        find_toolchain("neither", tmp_path, PROBED)
    assert find_toolchain("neither", tmp_path, CURVES).versions.keys() == {"packages"}


def test_a_python_by_its_path_is_asked_what_it_has(tmp_path):
    stand_in = tmp_path / "python"
    stand_in.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    stand_in.chmod(0o755)
    found = find_toolchain(str(stand_in), trainer=CURVES)
    assert found.name == str(stand_in)
    assert found.python == Path(sys.executable)
    assert found.versions["python"] == platform.python_version()
    assert found.versions["numpy"] == metadata.version("numpy")


@pytest.mark.parametrize("script", ["exit 3", "echo hello", "echo '[1]'"])
def test_a_path_that_is_no_python_is_refused(tmp_path, script):
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/sh\n{script}\n")
    stand_in.chmod(0o755)
    with pytest.raises(ToolchainError, match="does not start as a Python"):
        find_toolchain(str(stand_in), trainer=CURVES)
    with pytest.raises(ToolchainError, match="does not start as a Python: No such file"):
        find_toolchain(str(tmp_path / "gone"), trainer=CURVES)


def test_a_plan_may_assume_the_environment_of_a_program(tmp_path):
    assumed = assume_toolchain("deepspeed-0.19.8", tmp_path, PROBED)
    assert (assumed.dialect, assumed.versions) == ("command", {})
    build(tmp_path, "deepspeed-0.19.8", torch="2.13.0")
    with pytest.raises(ToolchainError, match="has no converge"):
        assume_toolchain("deepspeed-0.19.8", tmp_path, PROBED)
