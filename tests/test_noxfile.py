"""What sessions of the noxfile run."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from converge_harness.toolchains.recipes import RECIPES

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def noxfile():
    made = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module


def test_the_tests_toolchains_are_two_torches_and_two_torchtitans(noxfile):
    """The default is the newest of both; each other one differs from another in one of them."""
    text = (ROOT / "constraints.txt").read_text()
    pins = dict(re.findall(r"(?m)^([a-z0-9-]+)==(.*)$", text))
    found = {
        name: ({**pins, **recipe.instead}["torch"], recipe.torchtitan)
        for name in noxfile.TOOLCHAINS
        if (recipe := RECIPES[name])
    }
    assert found == {
        "torchtitan-0.3.0": ("2.15.0", "0.3.0"),
        "torchtitan-0.3.0-torch-2.13": ("2.13.0", "0.3.0"),
        "torchtitan-0.2.2": ("2.13.0", "0.2.2"),
    }


def test_hidden_programs_are_not_found_and_all_others_are(noxfile, tmp_path):
    for place, names in {"a": ("squeue", "sh"), "b": ("sh", "sbatch", "ls")}.items():
        (tmp_path / place).mkdir()
        for name in names:
            program = tmp_path / place / name
            program.write_text(f"#!/bin/sh\necho {place}\n")
            program.chmod(0o755)
    path = os.pathsep.join(str(tmp_path / place) for place in ("a", "nowhere", "b"))
    links = tmp_path / "links"
    for _ in range(2):  # the second time over what the first has left
        noxfile.link_all_but({"squeue", "sbatch"}, path, links)
    assert sorted(each.name for each in links.iterdir()) == ["ls", "sh"]
    assert shutil.which("sbatch", path=str(links)) is None
    assert subprocess.check_output([str(links / "sh")], text=True) == "a\n"  # the first on the PATH


def test_tests_that_may_use_slurm_a_browser_or_shellcheck_are_found(noxfile):
    found = noxfile.tests_naming(ROOT / "tests", noxfile.OPTIONAL_TESTS)
    names = {str(Path(each).relative_to(ROOT / "tests")) for each in found}
    assert {
        "e2e/test_slurm_runs.py",
        "history/test_history_page.py",
        "launch/slurm/test_batch_script.py",
        "launch/slurm/test_slurm_backend.py",
        "night/test_workflows.py",
        "report/test_browser.py",
    } <= names
    assert not any(each.startswith("rank/") or "judge" in each for each in names)


def test_rank_tests_that_know_no_torchtitan_are_found(noxfile):
    """The older torchtitan's toolchain leaves them to session e2e."""
    rank = ROOT / "tests" / "rank"
    found = {Path(each).name for each in noxfile.tests_naming(rank, noxfile.RELEASES)}
    assert {
        "test_titan_0_2_runs.py",
        "test_titan_0_2_shim.py",
        "test_permuted_runs.py",  # by the jobs of whichever release there is
        "test_corpus_in_torchtitan.py",
    } <= found
    assert found.isdisjoint({"test_digest.py", "test_replicas.py", "test_data_order.py"})
    real = {path.name for path in rank.glob("test_*.py") if "_jobs" in path.read_text()}
    assert real <= found


def test_rank_tests_of_other_frameworks_run_in_their_toolchains(noxfile):
    """Elsewhere they are skipped."""
    named = {
        "deepspeed-0.19.8": r"import deepspeed",
        noxfile.MEGATRON_TOOLCHAIN: r"from (megatron_models|megatron\.core)",
        noxfile.OLDER_MEGATRON_TOOLCHAIN: r"from (megatron_models|megatron\.core)",
    }
    only_older = {"tests/rank/test_megatron_lm_probe.py"}
    for toolchain, framework in named.items():
        found = {
            str(path.relative_to(ROOT))
            for path in (ROOT / "tests" / "rank").glob("test_*.py")
            if re.search(rf"(?m)^ *{framework}", path.read_text())
        }
        assert found, framework
        if toolchain == noxfile.MEGATRON_TOOLCHAIN:
            found -= only_older
        assert found <= set(noxfile.FRAMEWORKS[toolchain]), toolchain


class Asked:
    """A session that notes what it is asked to run."""

    def __init__(self, *posargs):
        self.posargs = list(posargs)
        self.ran = []

    def run(self, *command, **_options):
        self.ran.append(command)


@pytest.fixture
def asked(noxfile, monkeypatch):
    """Commands of the session of the tests, by their Pythons."""

    def ask(*posargs):
        session = Asked(*posargs)
        monkeypatch.setattr(noxfile, "install_light", lambda *_: None)
        monkeypatch.setattr(noxfile, "build_toolchain", lambda _, name: name)
        noxfile.tests.func(session)
        return {python: command for python, *command in session.ran}

    return ask


def test_only_the_gate_waits_for_slow_tests(noxfile, asked):
    quick, gate = asked(), asked("--slow")
    assert list(quick) == list(gate) == [*noxfile.TOOLCHAINS, "python"]
    assert all("not slow" in command for command in quick.values())
    assert not any("-m" in command[2:] for command in gate.values())
    for path in noxfile.UNHURRIED:
        file, _, test = path.partition("::")  # session e2e runs them
        assert f"--{'deselect' if test else 'ignore'}={path}" in gate["python"]
        assert f"def {test}" in (ROOT / file).read_text()


def test_rank_code_that_knows_no_torchtitan_runs_on_the_newest_torch_only(noxfile, asked):
    gate = asked("--slow")
    assert "tests/rank" in gate[noxfile.DEFAULT_TOOLCHAIN]
    older = {Path(each).name for each in gate[noxfile.OLDER_TOOLCHAIN]}
    assert "rank" not in older
    assert {"test_titan_0_2_runs.py", "test_permuted_runs.py"} <= older
