"""A matrix of real torchtitan through the real command line, for the tests of such matrices."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from forking_python import forking_python

ROOT = Path(__file__).parents[2]
INJECTIONS = Path(__file__).parent / "injections.py"
TOOLCHAINS = Path(os.environ.get("CONVERGE_TOOLCHAINS", ROOT / ".toolchains"))


class Matrix(NamedTuple):
    experiment: Path
    store: Path
    out: Path

    def converge(self, command: str, *more: str) -> subprocess.CompletedProcess[str]:
        where = {
            "run": (str(self.experiment), "--store", str(self.store), "--out", str(self.out)),
            "report": (str(self.out),),
            "calibrate": (str(self.experiment), "--store", str(self.store)),
        }.get(command, ())
        return subprocess.run(
            [sys.executable, "-m", "converge_harness", command, *where, *more],
            cwd=ROOT,
            env={
                **os.environ,
                "CONVERGE_TOOLCHAINS": str(TOOLCHAINS),
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


def run(folder: Path, text: str) -> tuple[Matrix, subprocess.CompletedProcess[str]]:
    experiment = folder / "matrix.toml"
    experiment.write_text(text)
    matrix = Matrix(experiment, folder / "store", folder / "report")
    return matrix, matrix.converge("run")


@contextmanager
def warm_toolchains(folder: Path, name: str = "torchtitan-0.3.0") -> Iterator[Path]:
    """A folder of toolchains with one whose programs are forks of a server, imports done.

    For clusters on this machine, where each rank would import torch and torchtitan by itself.
    """
    if not (TOOLCHAINS / name).is_dir():
        raise FileNotFoundError(f"{TOOLCHAINS / name}: converge toolchain build {name}")
    real = (TOOLCHAINS / name).absolute()
    with forking_python(real / "bin" / "python", dialect="titan_0_3") as python:
        (folder / name / "bin").mkdir(parents=True)
        (folder / name / "bin" / "python").symlink_to(python)
        (folder / name / "lib").symlink_to(real / "lib")
        yield folder
