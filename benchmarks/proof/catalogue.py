"""The catalogue of bugs, detection-limit ladders and correct set-ups.

A folder has bugs (``cN_topic.py``, or any file that a matrix injects from), matrices that inject
them, in which each test set is named after its function, and ``correct*.toml`` (test sets that must
pass). Single matrices can be named instead. All inconsistencies are reported together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from converge_harness.errors import ConfigError, Problem, suggest
from converge_harness.experiment import load_experiment
from converge_harness.model import Experiment, SetSpec
from proof.docstrings import Bug, Function, bug_files, functions, read_bug

Target: TypeAlias = tuple[Path, str]
"""File and name of a function that a set injects."""
CORRECT = "correct"
"""Prefix of the names of matrices of correct set-ups."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """One experiment file of the folder."""

    path: Path
    correct: bool
    """Whether its test sets are correct set-ups, not bugs."""
    sets: tuple[str, ...]
    """Names of its test sets, in order."""

    @property
    def name(self) -> str:
        return self.path.stem


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Everything that can be proven, in the order of the files."""

    matrices: tuple[Matrix, ...]
    bugs: tuple[Bug, ...]
    """Includes the rungs of ladders (bugs with a magnitude)."""

    def bug(self, name: str) -> Bug | None:
        return next((bug for bug in self.bugs if bug.id == name), None)

    def select(self, words: Collection[str]) -> Catalogue:
        """The selected part: names of sets, of matrices, or classes (``C3``).

        Raises ConfigError for an unknown word.
        """
        if not words:
            return self
        classes = {bug.kind for bug in self.bugs}
        sets = [name for matrix in self.matrices for name in matrix.sets]
        stems = [matrix.name for matrix in self.matrices]
        known = [*sorted(classes), *stems, *sets]
        if unknown := [word for word in words if word not in known]:
            raise ConfigError(
                [
                    Problem("--only", f"nothing is named {word!r}", suggest(word, known))
                    for word in unknown
                ]
            )
        asked = set(words) | {bug.id for bug in self.bugs if bug.kind in words}
        asked |= {name for m in self.matrices if m.name in words for name in m.sets}
        kept = (
            replace(matrix, sets=tuple(name for name in matrix.sets if name in asked))
            for matrix in self.matrices
        )
        return Catalogue(
            tuple(matrix for matrix in kept if matrix.sets),
            tuple(bug for bug in self.bugs if bug.id in asked),
        )


def read_catalogue(*places: Path, correct: Collection[Path] = ()) -> Catalogue:
    """Parse bugs and matrices.

    Args:
        places: folders of bugs and matrices, or single matrices of bugs.
        correct: further matrices, whose test sets are correct set-ups.

    Raises ConfigError with every problem: an invalid matrix, a set without its function, a function
    without a set, a missing or unknown field, an unknown class of cause, a duplicate name.
    """
    problems: list[Problem] = []
    matrices: list[Matrix] = []
    bugs: list[Bug] = []
    for place in (*places, *correct):
        found = _read_place(place, problems, correct=place in correct)
        matrices += found.matrices
        bugs += found.bugs
    problems += _twice(matrices)
    if problems:
        raise ConfigError(problems)
    return Catalogue(tuple(matrices), tuple(bugs))


def _read_place(place: Path, problems: list[Problem], *, correct: bool) -> Catalogue:
    experiments = dict(_experiments(place, problems))
    if not experiments and not problems:
        problems.append(Problem(str(place), "holds no matrix (*.toml)"))
    matrices = []
    injected: dict[tuple[Path, str], Target | None] = {}
    features: set[Target | None] = set()
    for path, experiment in experiments.items():
        right = correct or path.stem.startswith(CORRECT)
        matrices.append(Matrix(path, right, tuple(spec.name for spec in experiment.tests)))
        others = [*experiment.controls, *([experiment.anchor] if experiment.anchor else [])]
        features |= {_target(spec) for spec in (*others, *(experiment.tests if right else ()))}
        if not right:
            injected |= {(path, spec.name): _target(spec) for spec in experiment.tests}
    found = _functions(place, [target for target in injected.values() if target], problems)
    for (path, name), named in injected.items():
        problems += _mismatches(path, name, named, found)
    bugs = []
    for target, function in found.items():
        if target in injected.values():
            bugs.append(read_bug(function, problems.append))
        elif target not in features and function.means_a_bug:
            where = f"{function.file}:{function.line}"
            problems.append(Problem(where, f"{function.name} is injected by no test set"))
    order = {name: at for at, name in enumerate(n for m in matrices for n in m.sets)}
    whole = sorted((bug for bug in bugs if bug), key=lambda bug: order.get(bug.id, len(order)))
    return Catalogue(tuple(matrices), tuple(whole))


def _functions(
    place: Path, targets: Collection[Target], problems: list[Problem]
) -> dict[Target, Function]:
    """Every function that may be a bug, by its file's name or because a set injects it."""
    files = dict.fromkeys([*bug_files(place), *(file for file, _ in targets)])
    found: dict[Target, Function] = {}
    for path in {path.resolve(): path for path in files}.values():
        try:
            found |= {(path.resolve(), each.name): each for each in functions(path)}
        except SyntaxError as error:
            problems.append(Problem(f"{path}:{error.lineno}", f"is not Python: {error.msg}"))
    return found


def _experiments(place: Path, problems: list[Problem]) -> Iterator[tuple[Path, Experiment]]:
    """The matrix, or those of a folder: bugs first, in order; correct set-ups last."""
    inside = [place] if place.is_file() else place.glob("*.toml")
    paths = sorted(inside, key=lambda p: (p.stem.startswith(CORRECT), p.name))
    for path in paths:
        try:
            yield path, load_experiment(path)
        except ConfigError as error:
            problems.extend(error.problems)


def _mismatches(
    path: Path, name: str, target: Target | None, found: dict[Target, Function]
) -> Iterator[Problem]:
    where = f"{path}:{_line_of(path, name)}"
    if target is None:
        yield Problem(where, f"{name!r} injects nothing", "what must pass is in correct*.toml")
    elif target not in found:
        hint = suggest(target[1], [known for file, known in found if file == target[0]])
        yield Problem(where, f"{name!r} injects {target[1]}, which takes no trainer there", hint)
    elif target[1] != name:
        yield Problem(where, f"{name!r} injects {target[1]}: a set has its function's name")


def _target(spec: SetSpec) -> Target | None:
    if spec.inject is None:
        return None
    file, _, function = spec.inject.rpartition(":")
    return Path(file).resolve(), function


def _line_of(path: Path, name: str) -> int:
    """Line with a set's name; 1 for a set that is generated from a product of lists."""
    pattern = re.compile(rf"""\s*name\s*=\s*["']{re.escape(name)}["']""")
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((at for at, line in enumerate(lines, 1) if pattern.match(line)), 1)


def _twice(matrices: Collection[Matrix]) -> Iterator[Problem]:
    first: dict[str, Path] = {}
    for matrix in matrices:
        for name in matrix.sets:
            if name in first:
                where = f"{matrix.path}:{_line_of(matrix.path, name)}"
                yield Problem(where, f"{name!r} is also a test set of {first[name]}")
            first.setdefault(name, matrix.path)
