"""docs/rl.md by real runs: what is right passes, published mistakes fail by their cause."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rl_runs import EXPERIMENTS, ROOT, judged, require_told
from warm_toolchains import TOOLCHAINS


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_right_updates_pass_and_mistakes_fail_by_their_cause(tmp_path):
    """Some of the sets; ``test_rl_sets.py`` has all, for which no gate waits."""
    names = ("one_rank", "padded_to_the_longest")
    mistakes = ("microbatch_mean", "not_times_ranks", "kl_without_gradient")
    tests = judged(tmp_path, *names, *mistakes, timeout_s=850)
    assert set(tests) == {*names, *mistakes}
    require_told(tests)


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
    launched = "-m torch.distributed.run --nproc-per-node 2"
    assert f"`{launched}` before" in page
    split = score.replace(" experiments/", f" {launched} experiments/", 1)
    for command, code in ((score, 0), (split, 0), (compare, 1)):
        done = subprocess.run(
            ["bash", "-c", command.replace("reports/rl_scores", str(tmp_path / "scores"))],
            cwd=ROOT,
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == code, command + done.stdout + done.stderr
    found = json.loads((tmp_path / "scores" / "report" / "report.json").read_text())["tests"]
    verdicts = {test["name"]: test["verdict"] for test in found}
    assert len(verdicts) == 13
    assert "right_tensor_parallel" in verdicts  # of the second command
    for name, verdict in verdicts.items():
        wrong = "INVALID" if name == "wrong_end_dropped" else "FAIL"
        assert verdict == (wrong if name.startswith("wrong_") else "PASS"), name
