"""docs/any-trainer.md by real runs: transformers.Trainer resumed on other ranks, and killed."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from cut_down import need, verdicts
from warm_converge import warm_python
from warm_toolchains import TOOLCHAINS

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """What report.json says of some sets of an experiment; both share their controls."""
    need("transformers-5.23.0")
    folder = tmp_path_factory.mktemp("hugging_face_resumes")

    def judged(name, *only):
        out = folder / name
        where = ("--store", str(folder / "store"), "--out", str(out), "--only", *only)
        experiment = f"experiments/{name}.toml"
        done = subprocess.run(
            [warm_python(), "-m", "converge_harness", "run", experiment, *where],
            cwd=ROOT,
            env={
                **os.environ,
                "CONVERGE_TOOLCHAINS": str(TOOLCHAINS),
                "CONVERGE_HISTORY": str(folder / "history.sqlite"),
            },
            capture_output=True,
            text=True,
            timeout=1400,
            check=False,
        )
        report = out / "report.json"
        assert report.is_file(), done.stdout + done.stderr
        return {test["name"]: test for test in json.loads(report.read_text())["tests"]}

    return judged
