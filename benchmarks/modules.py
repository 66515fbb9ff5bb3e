"""Is the right module named? Grades the modules in reports of the benchmark of bugs.

``nox -s bench -- modules`` runs ``benchmarks/prove.py`` for two steps on the bugs of the forward
and backward pass and on correct set-ups, in fp32 and bf16 mixed precision. For every caught bug it
prints the module that its verdict names beside the one that its docstring says; for correct set-ups
it prints how far their modules are from the control's, in multiples of the noise.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from proof.catalogue import read_catalogue
from proof.docstrings import Bug
from proof.parts import folder_of
from proof.regimes import Regime

from converge_harness.store import atomic_write

ROOT = Path(__file__).parent.parent
REGIMES = (Regime.FP32, Regime.MIXED)
RIGHT = ("correct", "correct_settings", "correct_moe")
"""Matrices of correct set-ups."""
MODEL = "the model"
NONE = "none"
LOSS = "loss"
AROUND, RIGHTLY, WRONGLY, SILENT = "its parent, child or sibling", "right", "wrong", "none"


@dataclass(frozen=True, slots=True)
class Named:
    """A caught bug, and the module that its verdict names."""

    bug: Bug
    module: str
    sentence: str

    @property
    def grade(self) -> str:
        """Whether that is the module of the bug, one around it, another, or none."""
        if any(_matches(self.module, self.sentence, each) for each in self.bug.modules):
            return RIGHTLY
        if not self.module:
            return SILENT
        return AROUND if any(_around(self.module, each) for each in self.bug.modules) else WRONGLY


def _matches(module: str, sentence: str, pattern: str) -> bool:
    if pattern == NONE:
        return not module
    if pattern == LOSS:
        return module == MODEL and "of the loss" in sentence
    return _is(module.split("."), pattern.split("."))


def _is(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _around(module: str, pattern: str) -> bool:
    """Whether a module contains the bug's, is in it, or is beside it in the same parent."""
    if module == MODEL or pattern in (NONE, LOSS, MODEL):
        return module == MODEL
    parts, patterns = module.split("."), pattern.split(".")
    shorter = min(len(parts), len(patterns))
    beside = len(parts) == len(patterns) and _is(parts[:-1], patterns[:-1])
    return beside or _is(parts[:shorter], patterns[:shorter])


def main() -> int:
    arguments = _arguments()
    command = [sys.executable, "benchmarks/prove.py", "--steps", "2", "--out", str(arguments.out)]
    command += [part for regime in REGIMES for part in ("--regime", regime.value)]
    command += ["--only", "C2", "C4", *RIGHT]
    command += ["--store", str(arguments.store)] if arguments.store else []
    command += [part for folder in arguments.held_out for part in ("--held-out", str(folder))]
    if not arguments.graded:
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code not in (0, 1):  # 1: with two steps, late bugs are missed
            return code
    bugs = {
        matrix.name: {bug.id: bug for bug in catalogue.bugs}
        for folder in (Path("benchmarks/bugs"), *arguments.held_out)
        for catalogue in [read_catalogue(ROOT / folder)]
        for matrix in catalogue.matrices
    }
    lines = [line for regime in REGIMES for line in _of_regime(regime, arguments.out, bugs)]
    print(*lines, sep="\n")
    atomic_write(arguments.out / "modules.md", ("\n".join(lines) + "\n").encode())
    return 0


def _of_regime(regime: Regime, out: Path, bugs: Mapping[str, Mapping[str, Bug]]) -> Iterator[str]:
    """The page's section on a regime; ``bugs`` are by matrix and test set."""
    tests = [
        (test, bugs.get(path.parent.name, {}).get(test["name"]))
        for path in sorted(folder_of(out, regime).glob("*/report.json"))
        for test in json.loads(path.read_text(encoding="utf-8"))["tests"]
    ]
    named = [
        Named(bug, test["module"], test["first_wrong"])
        for test, bug in tests
        if bug and bug.modules and test["verdict"] == "FAIL"
    ]
    right = [test for test, bug in tests if bug is None and test.get("modules")]
    grades = [each.grade for each in named]
    yield f"## {regime.title}"
    yield ""
    counted = ", ".join(
        f"{grades.count(grade)} {grade}" for grade in (RIGHTLY, AROUND, WRONGLY, SILENT)
    )
    yield f"{len(named)} bugs caught at the first step: module named {counted}."
    yield ""
    yield "| bug | where it is | named | grade |"
    yield "|---|---|---|---|"
    for each in sorted(named, key=lambda one: (one.grade != WRONGLY, one.grade == RIGHTLY)):
        where = " or ".join(each.bug.modules)
        yield f"| {each.bug.id} | {where} | {each.module or NONE} | {each.grade} |"
    yield ""
    yield from _furthest(right)


def _furthest(right: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """How far modules of correct set-ups are off, in multiples of the noise."""
    multiples = sorted(
        (_multiple(test["modules"]["furthest"]), test["name"], test["modules"]["furthest"])
        for test in right
    )
    if not multiples:
        return
    worst = ", ".join(
        f"{name} {multiple:.2g} ({furthest['module']})"
        for multiple, name, furthest in reversed(multiples[-5:])
    )
    yield f"{len(multiples)} correct set-ups; furthest off, in multiples of the noise: {worst}."
    yield ""


def _multiple(furthest: Mapping[str, Any]) -> float:
    difference = furthest["difference"]
    return math.inf if isinstance(difference, str) else difference / furthest["noise"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("reports/benchmark/modules"))
    parser.add_argument("--store", type=Path, help="where runs are kept")
    parser.add_argument("--held-out", type=Path, action="append", default=[], metavar="FOLDER")
    parser.add_argument("--graded", action="store_true", help="grade the reports in --out again")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
