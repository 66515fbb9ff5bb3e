"""``converge toolchain`` and ``init --example``, as people call them."""

import os
import sys
from pathlib import Path

import pytest
from light_toolchain import light_environment
from rich.console import Console

from converge_harness import __version__
from converge_harness.cli import building, main
from converge_harness.toolchains.build import Doing
from converge_harness.toolchains.find import unfinished
from converge_harness.toolchains.recipes import RECIPES

NAME = "torchtitan-0.3.0"


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONVERGE_TOOLCHAINS", str(tmp_path / "chains"))
    return tmp_path / "chains"


@pytest.fixture
def built(root, monkeypatch):
    """A builder that makes a toolchain without torch; returns the names that it was given."""
    names = []

    def build(name, *, extra=(), fresh=False, observer):
        observer(Doing(name, 1, 2, "installing torch"))
        names.append(name)
        light_environment(root, name)
        return True

    monkeypatch.setattr(building, "build", build)
    return names


def test_the_list_says_what_there_is_and_the_next_command(root, capsys):
    assert main(["toolchain", "list"]) == 0
    said = capsys.readouterr().out
    assert str(root) in said
    assert all(name in said for name in RECIPES)
    assert said.splitlines()[-1] == f"build one with: converge toolchain build {NAME}"
    light_environment(root, "mine")
    unfinished(root / NAME).touch()
    assert main(["toolchain", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("mine ") and "not by converge" in line for line in lines)
    assert any(line.startswith(f"{NAME} ") and "half built" in line for line in lines)
    assert lines[-1] == f"bring up to date with: converge toolchain build {NAME}"


def test_names_are_those_of_an_experiment_or_of_all_recipes(root, capsys):
    assert main(["init", "--example", "elastic"]) == 0
    capsys.readouterr()
    assert main(["toolchain", "list", "elastic.toml", "--names"]) == 0
    assert capsys.readouterr().out.split() == [NAME, "torchtitan-0.2.2"]
    assert main(["toolchain", "list", "--names"]) == 0
    assert capsys.readouterr().out.split() == list(RECIPES)


def test_what_an_experiment_needs_is_built_with_a_line_for_every_step(built, capsys):
    assert main(["init", "--example", "elastic"]) == 0
    assert main(["toolchain", "build", "--for", "elastic.toml"]) == 0
    assert built == [NAME, "torchtitan-0.2.2"]
    said = capsys.readouterr().out
    assert f"{NAME} 1/2: installing torch\n" in said
    assert f"{NAME} built in 0 s: " in said


def test_a_run_builds_first_what_is_missing_where_it_is_told_to(built):
    find = building.building(Console(quiet=True))
    assert find(NAME).dialect == "titan_0_3"
    assert built == [NAME]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["build"], "names no toolchain"),
        (["build", NAME, "mine"], "there is no recipe for a toolchain 'mine'"),
        (["check", NAME], f"build it with: converge toolchain build {NAME}"),
        (["check", "mine"], "see those that converge can build with: converge toolchain list"),
        (["remove", "mine"], "there is no toolchain 'mine'"),
        (["remove", ".."], "there is no toolchain '..'"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_built(built, capsys, arguments, words):
    assert main(["toolchain", *arguments]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert "Traceback" not in said.err
    assert built == []


def importing(root, name, distributions):
    """A toolchain of these distributions, by name and version, whose Python imports anything."""
    python = root / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        "print(json.dumps(dict.fromkeys(sys.argv[3:], '9')))\n"
    )
    python.chmod(0o755)
    for distribution, version in distributions.items():
        metadata = root / name / f"lib/python3.11/site-packages/{distribution}-{version}.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Name: {distribution}\nVersion: {version}\n")


OURS = {"torch": "2.13.0", "converge_harness": __version__}


@pytest.mark.parametrize(
    ("name", "distributions", "trainers", "imports", "refused"),
    [
        (
            NAME,
            {"torchtitan": "0.3.0"},
            {"torchtitan (titan_0_3)", "command"},
            "torchtitan",
            "megatron",
        ),
        (
            "megatron-core-0.16.1",
            {"megatron_core": "0.16.1"},
            {"command", "megatron (megatron_0_16)"},
            "megatron.core",
            "torchtitan",
        ),
        ("composer-0.32.1", {"mosaicml": "0.32.1"}, {"command"}, "composer", "torchtitan"),
        ("mine", {}, {"command"}, "torch", "megatron"),
    ],
)
def test_a_check_asks_every_trainer_what_it_needs(
    root, capsys, name, distributions, trainers, imports, refused
):
    importing(root, name, OURS | distributions)
    assert main(["toolchain", "check", name]) == 0
    said = capsys.readouterr().out
    (imported,) = (line for line in said.splitlines() if line.startswith("  imports: "))
    (line,) = (line for line in said.splitlines() if line.startswith("  trainers: "))
    assert set(line.removeprefix("  trainers: ").split(", ")) - {"tiny"} == trainers
    assert f"{imports} 9" in imported
    assert ("torchtitan" in imported) is ("torchtitan (titan_0_3)" in trainers)
    assert f"  not for {refused}: " in said
    assert f"build it with: converge toolchain build {name}" not in said


def test_a_check_of_a_toolchain_for_no_trainer_says_what_each_misses(root, capsys, monkeypatch):
    # Another test may have registered a trainer that needs nothing.
    ours = ("torchtitan", "command", "megatron")
    monkeypatch.setattr("converge_harness.trainers.jobs.kinds", lambda: ours)
    importing(root, "mine", {"numpy": "2.0"})
    assert main(["toolchain", "check", "mine"]) == 2
    said = capsys.readouterr().err.replace("\n", " ")
    told = "no trainer can use toolchain 'mine', but programs with trainer.probe = false can: "
    assert f"{told}torchtitan: " in said
    assert "has no torch and no torchtitan" in said
    assert "; command: " in said
    assert "has no megatron-core" in said


def test_a_check_takes_the_relative_path_of_a_python_and_says_what_can_use_it(
    root, capsys, monkeypatch
):
    monkeypatch.setattr("converge_harness.trainers.jobs.kinds", lambda: ("torchtitan", "command"))
    path = Path(os.path.relpath(sys.executable))
    assert main(["toolchain", "check", str(path)]) == 2
    said = capsys.readouterr().err.replace("\n", " ")
    told = "no trainer can use toolchain "
    assert f"{told}'{path.absolute()}', but programs with trainer.probe = false can: " in said
    assert "has no torch, so its program cannot be probed" in said


def test_a_check_of_a_release_that_no_trainer_drives_is_no_check_of_something_else(root, capsys):
    importing(root, NAME, OURS | {"torchtitan": "0.9.0"})
    assert main(["toolchain", "check", NAME]) == 2
    assert "has torchtitan 0.9.0; supported: " in capsys.readouterr().err.replace("\n", " ")


def test_an_example_is_written_with_what_it_names_and_the_next_command(root, capsys):
    assert main(["init", "--example", "smoke"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "wrote",
        "  smoke.toml",
        "  train_configs/llama3_debug.toml",
        "run it: converge run smoke.toml --build",
    ]
    assert main(["init", "--example", "list"]) == 0
    assert "smoke: The main job: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--example", "smok"], "did you mean 'smoke'?"),
        (["--example", "smoke", "--dp", "2"], "is written as it is, without --dp"),
        (["--dp", "2"], "needs --technique, --base (or --example NAME"),
    ],
)
def test_what_init_cannot_do_it_says(root, capsys, arguments, words):
    assert main(["init", *arguments]) == 2
    assert words in capsys.readouterr().err
