"""The published folders of ``converge repro``: whole, loadable, and of nobody's machine."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from converge_harness.experiment import load_experiment

ROOT = Path(__file__).parents[2]
ABSOLUTE = re.compile(r"(?<![\w.:/<])/(?:[\w.-]+/)+[\w.-]*")
FOLDERS = sorted((ROOT / "reports" / "upstream").iterdir())
SHRUNK = [folder for folder in FOLDERS if (folder / "experiment.toml").exists()]
"""Written by ``converge repro``; the others are a script alone, without converge."""


def test_there_are_some():
    assert SHRUNK
    assert set(FOLDERS) > set(SHRUNK)
    assert ABSOLUTE.findall('path = "/data/mine/w.ckpt"') == ["/data/mine/w.ckpt"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_published_folder_names_nobodys_machine(folder):
    for path in folder.rglob("*"):
        if path.is_file():
            text = path.read_text().removeprefix("#!/usr/bin/env bash")
            assert not ABSOLUTE.findall(text), path


@pytest.mark.parametrize(
    "folder", sorted(set(FOLDERS) - set(SHRUNK)), ids=lambda folder: folder.name
)
def test_a_script_has_its_draft_and_the_versions_that_it_ran_with(folder):
    assert {path.name for path in folder.iterdir()} == {
        "ISSUE.md",
        "reproduce.py",
        "requirements.txt",
    }
    issue = (folder / "ISSUE.md").read_text()
    for line in (folder / "requirements.txt").read_text().split():
        assert f"- {line.replace('==', ' ')}" in issue or line.startswith("torchao")


@pytest.mark.parametrize("folder", SHRUNK, ids=lambda folder: folder.name)
def test_a_published_folder_stands_alone(folder):
    experiment = load_experiment(folder / "experiment.toml")
    assert [spec.name for spec in experiment.tests] == [folder.name]
    assert json.loads((folder / "expected.json").read_text())["verdict"] == "FAIL"
    script = folder / "run.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    issue = (folder / "ISSUE.md").read_text()
    for line in script.read_text().splitlines()[3:]:  # after set and cd
        assert line in issue
