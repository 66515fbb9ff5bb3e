"""A matrix of real torchtitan through the real command line, for the tests of such matrices."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from two_layers import with_two_layers
from warm_converge import warm_python
from warm_toolchains import TOOLCHAINS

ROOT = Path(__file__).parents[2]
INJECTIONS = Path(__file__).parent / "injections.py"


class Matrix(NamedTuple):
    experiment: Path
    store: Path
    out: Path
    toolchains: Path = TOOLCHAINS

    def converge(self, command: str, *more: str) -> subprocess.CompletedProcess[str]:
        where = {
            "run": (str(self.experiment), "--store", str(self.store), "--out", str(self.out)),
            "report": (str(self.out),),
            "calibrate": (str(self.experiment), "--store", str(self.store)),
        }.get(command, ())
        return subprocess.run(
            [warm_python(), "-m", "converge_harness", command, *where, *more],
            cwd=ROOT,
            env={
                **os.environ,
                "CONVERGE_TOOLCHAINS": str(self.toolchains),
                "CONVERGE_STORE": str(self.store),
            },
            capture_output=True,
            text=True,
            timeout=850,
            check=False,
        )

    def tests(self) -> dict[str, dict]:
        report = json.loads((self.out / "report.json").read_text())
        return {test["name"]: test for test in report["tests"]}


def run(
    folder: Path, text: str, toolchains: Path = TOOLCHAINS, *more: str
) -> tuple[Matrix, subprocess.CompletedProcess[str]]:
    """Run an experiment whose train config is a shipped one, with two of its layers.

    ``more`` are further arguments of ``converge run``.
    """
    names = re.findall(r'^train_config = "train_configs/(\w+)\.toml"', text, re.MULTILINE)
    experiment = with_two_layers(folder, *names) / "matrix.toml"
    experiment.write_text(text)
    matrix = Matrix(experiment, folder / "store", folder / "report", toolchains)
    return matrix, matrix.converge("run", *more)
