"""Whose revisions are searched, and what is planned at one.

Real runs: ``tests/cli/test_bisect_command.py``, and of torchtitan by hand (docs/bisect.md).
"""

from dataclasses import replace
from pathlib import Path

import pytest
from own_fork import git

from converge_harness.errors import CheckoutError, ConfigError, ToolchainError
from converge_harness.experiment import load_experiment
from converge_harness.matrix.bisect import (
    Releases,
    Revision,
    UpstreamCommits,
    alone,
    asked_for,
)
from converge_harness.trainers import assume_toolchain

ROOT = Path(__file__).parents[2]
SMOKE = ROOT / "experiments" / "smoke.toml"
WHEELS = ("0.9", "0.10", "1.0rc1", "1.0", "1.0+cpu", "1.1")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index with the files of one package."""
    folder = tmp_path / "simple" / "mine"
    folder.mkdir(parents=True)
    links = (f'<a href="mine-{each}-py3-none-any.whl">.</a>' for each in WHEELS)
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", folder.parent.as_uri())


@pytest.fixture
def clone(tmp_path, monkeypatch):
    folder = tmp_path / "titan"
    (folder / "torchtitan").mkdir(parents=True)
    (folder / "torchtitan" / "__init__.py").write_text("")
    git(folder, "init", "-q", "-b", "main")
    for number in range(3):
        (folder / "code.py").write_text(f"{number}")
        git(folder, "add", ".")
        git(folder, "commit", "-q", "-m", f"change\t{number} (#{number})")
    monkeypatch.setenv("CONVERGE_CHECKOUT", str(folder))
    return folder


@pytest.fixture
def pair(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVERGE_TOOLCHAINS", str(tmp_path / "toolchains"))  # none is built
    return alone(load_experiment(SMOKE), "fsdp2_tp2")


def toolchains(subject, pair, at):
    with subject.planned(pair, at) as planned:
        return {job.toolchain.name for job in planned.plan.jobs}


def test_versions_are_those_that_the_index_has_in_their_order(index, pair):
    subject = Releases("mine", pair, assume_toolchain)
    asked = asked_for(subject, "1.1", "0.9")
    assert asked.common == asked.bad
    line = subject.line(asked.bad, asked.good)
    assert [each.name for each in line] == ["0.9", "0.10", "1.0", "1.1"]
    assert str(subject.changes(line[2])) == "https://pypi.org/project/mine/1.0"
    # An end may be no final release.
    asked = asked_for(subject, "0.10", "1.0rc1")
    assert [each.name for each in subject.line(asked.good, asked.bad)] == ["0.10", "1.0rc1"]


@pytest.mark.parametrize(
    ("package", "version", "says"),
    [
        ("mine", "1.2", "mine has no version 1.2; the last: 0.9, 0.10, 1.0rc1, 1.0, 1.1"),
        ("mine", "newest", "'newest' is not a version, such as"),
        ("nobody", "1.0", "pip finds no versions of nobody"),
    ],
)
def test_a_version_that_is_not_there_is_named(index, pair, package, version, says):
    with pytest.raises(ToolchainError, match=says):
        Releases(package, pair, assume_toolchain).revision(version)


def test_control_and_test_set_train_with_the_version(pair):
    subject = Releases("torchao", pair, assume_toolchain)
    names = toolchains(subject, pair, Revision("0.17.0", ""))
    assert names == {"torchtitan-0.3.0+torchao-0.17.0"}


def test_commits_are_those_of_the_clone_that_the_environment_names(clone, pair):
    subject = UpstreamCommits(pair, assume_toolchain)
    asked = asked_for(subject, "main~2", "main")
    line = subject.line(asked.good, asked.bad)
    subjects = [each.title.partition(" ")[2].partition(" ")[2] for each in line]
    assert subjects == [f"change\t{number} (#{number})" for number in range(3)]
    assert "code.py | 2 +-" in subject.changes(asked.bad)
    assert subject.what == f"torchtitan in {clone}, on the packages of torchtitan-0.3.0"
    commit = git(clone, "rev-parse", "--short=12", "main")
    assert toolchains(subject, pair, asked.bad) == {f"torchtitan-0.3.0@{commit}"}


def test_a_control_in_another_toolchain_keeps_it(clone, tmp_path, monkeypatch):
    monkeypatch.setenv("CONVERGE_TOOLCHAINS", str(tmp_path / "toolchains"))
    pair = alone(load_experiment(ROOT / "experiments" / "upgrade_torch.toml"), "fsdp2_tp2")
    subject = UpstreamCommits(pair, assume_toolchain)
    names = toolchains(subject, pair, subject.revision("main"))
    assert pair.controls[0].toolchain in names
    assert len(names) == 2


def test_what_has_no_revisions_to_build_is_refused(clone, pair, monkeypatch):
    monkeypatch.delenv("CONVERGE_CHECKOUT")
    with pytest.raises(ToolchainError, match="set CONVERGE_CHECKOUT=FOLDER"):
        UpstreamCommits(pair, assume_toolchain)
    zero = alone(load_experiment(ROOT / "experiments" / "hf.toml"), "ddp2_accumulate2")
    # A package of its toolchain may be another one; torchtitan is not in it.
    assert toolchains(Releases("transformers", zero, assume_toolchain), zero, Revision("5.22", ""))
    monkeypatch.setenv("CONVERGE_CHECKOUT", str(clone))
    with pytest.raises(ConfigError, match="--of code"):
        UpstreamCommits(zero, assume_toolchain)
    own = replace(pair, tests=(replace(pair.tests[0], toolchain="mine"),))
    with pytest.raises(ConfigError, match="needs a toolchain that converge builds"):
        Releases("torch", own, assume_toolchain)
    monkeypatch.setenv("CONVERGE_CHECKOUT", str(clone.parent))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(clone.parents[1]))
    with pytest.raises(CheckoutError, match="is not a git checkout, so it has no revision 'main'"):
        UpstreamCommits(pair, assume_toolchain).revision("main")
    with pytest.raises(ConfigError, match="is not a single test set"):
        alone(load_experiment(SMOKE), "fsdp2")
