"""docs/rl.md by real runs: what is right passes, published mistakes fail by their cause."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from warm_converge import warm_python
from warm_toolchains import TOOLCHAINS, warm_torch

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"
RIGHT = ("one_rank", "padded_to_the_longest")
WRONG = {
    "microbatch_mean": "the objective differs: the trainer's loss is ",
    "not_times_ranks": "which equals 1 / the replicate degree (2)",
    "kl_without_gradient": "the backward pass differs: 24 of 24 gradients are wrong in direction",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_right_updates_pass_and_mistakes_fail_by_their_cause(tmp_path):
    """The sets of both files together, with fewer repeats: they share their control."""
    shutil.copytree(EXPERIMENTS / "rl", tmp_path / "rl")
    right, wrong = ((EXPERIMENTS / f"{name}.toml").read_text() for name in ("rl", "rl_mistakes"))
    sets = wrong.split("[[test]]\n", 1)[1]
    file = tmp_path / "both.toml"
    repeats = 'name = "rl"\nrepeats = ["rerun", "ulp", "ulp.2"]'
    file.write_text(right.replace('name = "rl"', repeats, 1) + "\n[[test]]\n" + sets)
    command = [warm_python(), "-m", "converge_harness", "run", str(file), "--only"]
    where = ["--store", str(tmp_path / "store"), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [*command, *RIGHT, *WRONG, *where],
        cwd=ROOT,
        env={
            **os.environ,
            "CONVERGE_TOOLCHAINS": str(warm_torch()),
            "CONVERGE_HISTORY": str(tmp_path / "history.sqlite"),
        },
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    report = tmp_path / "out" / "report.json"
    assert report.is_file(), done.stdout + done.stderr
    tests = {test["name"]: test for test in json.loads(report.read_text())["tests"]}
    verdicts = {name: test["verdict"] for name, test in tests.items()}
    assert verdicts == {**dict.fromkeys(RIGHT, "PASS"), **dict.fromkeys(WRONG, "FAIL")}, {
        name: test["cause"] for name, test in tests.items()
    }
    for name in RIGHT:
        outcomes = {check["name"]: check["outcome"] for check in tests[name]["checks"]}
        for check in ("same-data", "gradients-first-steps", "updates-first-steps"):
            assert outcomes[check] == "PASS"
    for name, words in WRONG.items():
        assert words in tests[name]["cause"]
        assert tests[name]["onset_step"] == 1


@pytest.mark.slow
def test_scores_of_the_same_tokens_pass_in_right_layouts_and_fail_in_wrong_ones(tmp_path):
    """By the commands of the page."""
    digest = tomllib.loads((EXPERIMENTS / "rl.toml").read_text())["trainer"]["config"]["rollouts"]
    page = (ROOT / "docs" / "rl.md").read_text()
    block = re.search(r"```console\n(\$ \S+python experiments/rl/score.*?)```", page, re.DOTALL)
    assert block is not None
    assert digest["sha256"] in block[1]
    score, compare = block[1].replace("\\\n", " ").replace("$ ", "").splitlines()
    python = score.split(" ", 1)[0]
    score = score.replace(python, str(TOOLCHAINS / "torchtitan-0.3.0" / "bin" / "python"), 1)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    codes = []
    for command in (score, compare):
        done = subprocess.run(
            ["bash", "-c", command.replace("reports/rl_scores", str(tmp_path / "scores"))],
            cwd=ROOT,
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        codes.append(done.returncode)
    assert codes == [0, 1], done.stdout + done.stderr
    found = json.loads((tmp_path / "scores" / "report" / "report.json").read_text())["tests"]
    verdicts = {test["name"]: test["verdict"] for test in found}
    assert len(verdicts) == 12
    for name, verdict in verdicts.items():
        wrong = "INVALID" if name == "wrong_end_dropped" else "FAIL"
        assert verdict == (wrong if name.startswith("wrong_") else "PASS"), name
