"""An experiment of another framework, whole or cut down, through the real command line."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from warm_converge import warm_python
from warm_toolchains import TOOLCHAINS

ROOT = Path(__file__).parents[2]


def need(toolchain: str) -> None:
    """Skips where the toolchain was not built, or could not be."""
    if not (TOOLCHAINS / toolchain / "converge.stamp").is_file():
        pytest.skip(f"needs toolchain {toolchain}: converge toolchain build {toolchain}")


def run_some(folder: Path, name: str, *only: str) -> dict[str, dict]:
    """Run some sets of ``experiments/NAME.toml`` for 6 steps; what report.json says of each.

    Runs of one folder share a store. Two repeats stand for the usual ones.
    """
    experiment = _cut_down(folder, name)
    beside = (ROOT / "experiments" / "trainers", *(ROOT / "experiments").glob("*.py"))
    for named in beside:
        if not (folder / named.name).exists():
            (folder / named.name).symlink_to(named)
    return _run(experiment, folder, only, 850, TOOLCHAINS)


def run_whole(
    folder: Path, name: str, *only: str, toolchains: Path = TOOLCHAINS
) -> dict[str, dict]:
    """Run ``experiments/NAME.toml`` as it is, or some of its sets, as ``run_some`` does."""
    return _run(ROOT / "experiments" / f"{name}.toml", folder, only, 1400, toolchains)


def _run(
    experiment: Path, folder: Path, only: tuple[str, ...], timeout_s: float, toolchains: Path
) -> dict[str, dict]:
    out = folder / experiment.stem
    where = ("--store", str(folder / "store"), "--out", str(out))
    chosen = ("--only", *only) if only else ()
    words = ("run", experiment, *where, *chosen)
    result = converge(folder, *words, toolchains=toolchains, timeout_s=timeout_s)
    assert (out / "report.json").is_file(), result.stdout + result.stderr
    return {test["name"]: test for test in json.loads((out / "report.json").read_text())["tests"]}


def converge(
    folder: Path, *words: object, toolchains: Path = TOOLCHAINS, timeout_s: float = 850
) -> subprocess.CompletedProcess[str]:
    """The command line, with the history of a folder."""
    return subprocess.run(
        [warm_python(), "-m", "converge_harness", *map(str, words)],
        cwd=ROOT,
        env={
            **os.environ,
            "CONVERGE_TOOLCHAINS": str(toolchains),
            "CONVERGE_HISTORY": str(folder / "history.sqlite"),
        },
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def _cut_down(folder: Path, name: str) -> Path:
    """Write the experiment, and the one that it extends; returns its path."""
    text = (ROOT / "experiments" / f"{name}.toml").read_text()
    repeats = ["rerun"] if "probe = false" in text else ["rerun", "ulp"]
    text = re.sub(r"\bsteps = \d+", "steps = 6", text)
    text = re.sub(r"\bcadence = \[.*\]", "cadence = [0, 1, 2, 5]", text)
    text = text.replace("\n[trainer]\n", f"\nrepeats = {json.dumps(repeats)}\n\n[trainer]\n", 1)
    if extended := re.search(r'(?m)^extends = "(.*)\.toml"$', text):
        _cut_down(folder, extended[1])
    experiment = folder / f"{name}.toml"
    experiment.write_text(text)
    return experiment


def verdicts(tests: dict[str, dict]) -> dict[str, str]:
    return {name: test["verdict"] for name, test in tests.items()}


def outcomes(test: dict) -> dict[str, str]:
    """By check, its outcome."""
    return {check["name"]: check["outcome"] for check in test["checks"]}
