"""Which sets run in which regime, and the experiment files for ``converge run``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli
import tomli_w

from converge_harness.errors import ConfigError, Problem
from converge_harness.experiment import load_experiment
from converge_harness.model import TRAINING_STEPS, Experiment
from converge_harness.store import atomic_write
from proof.catalogue import Catalogue, Matrix
from proof.regimes import Regime, home_of, rewritten, why_not

SEEDED = "correct_seeds"
"""Prefix of the names of matrices that are run with every seed of ``SEEDS``."""
SEEDS = (43, 44, 45, 46)
"""The others are run with their own seed, or 42."""
EVERY = 2
"""The nightly part has every second bug and every second correct set-up."""
_TRAINING, _COUNT = TRAINING_STEPS.split(".")
_SETS = ("anchor", "control", "controls", "test")
_REFUSED = ("matrix",)
_PATH_KEYS = ("train_config", "inject")


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of the benchmark to run."""

    steps: int | None = None
    """Optimizer steps, instead of those in the matrices."""
    nightly: bool = False
    """Every second set with one seed; complete ladders."""
    seed: int | None = None
    """Of every matrix, instead of its own; those that are run with several seeds keep them."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A set that a regime does not run."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Part:
    """The part of the benchmark that a regime runs."""

    regime: Regime
    catalogue: Catalogue
    """With the matrices to run: copies, if they differ from the originals."""
    left_out: tuple[LeftOut, ...]
    """What was selected but cannot run in this regime."""


def part_of(catalogue: Catalogue, regime: Regime, folder: Path, extent: Extent) -> Part:
    """The part of a catalogue that a regime runs; copies of matrices are written below a folder.

    Raises ConfigError if a matrix cannot be copied.
    """
    matrices: list[Matrix] = []
    left_out: list[LeftOut] = []
    for matrix in catalogue.matrices:
        experiment = load_experiment(matrix.path)
        reasons = _reasons(catalogue, matrix, experiment, regime)
        left_out += [LeftOut(name, why) for name, why in reasons.items() if why]
        kept = tuple(name for name in matrix.sets if not reasons[name])
        if extent.nightly:
            kept = _thinned(kept, catalogue)
        if kept:
            made = _copies(replace(matrix, sets=kept), experiment, regime, folder, extent)
            matrices += made
    known = {name for matrix in matrices for name in matrix.sets}
    bugs = tuple(bug for bug in catalogue.bugs if bug.id in known)
    return Part(regime, Catalogue(tuple(matrices), bugs), tuple(left_out))


def folder_of(out: Path, regime: Regime) -> Path:
    """Folder with the reports of a regime's matrices."""
    return out / "bugs" / (regime.value if regime is not Regime.FP32 else "")


def _reasons(
    catalogue: Catalogue, matrix: Matrix, experiment: Experiment, regime: Regime
) -> dict[str, str]:
    """By test set, why a regime does not run it; empty if it does."""
    controls = {spec.name: spec for spec in experiment.controls}
    reasons = {}
    for spec in experiment.tests:
        if spec.name not in matrix.sets:
            continue
        why = why_not(spec, controls[spec.control or ""], regime)
        bug = catalogue.bug(spec.name)
        if not why and bug is not None and bug.regimes and regime not in bug.regimes:
            why = bug.elsewhere
        reasons[spec.name] = why
    return reasons


def _thinned(names: Sequence[str], catalogue: Catalogue) -> tuple[str, ...]:
    """Every second set, but all rungs of a ladder: a limit needs all rungs above it."""
    rungs = {bug.id for bug in catalogue.bugs if bug.magnitude is not None}
    others = [name for name in names if name not in rungs][::EVERY]
    return tuple(name for name in names if name in rungs or name in others)


def _copies(
    matrix: Matrix, experiment: Experiment, regime: Regime, folder: Path, extent: Extent
) -> list[Matrix]:
    """The matrix itself if nothing changes, else its copies: one, or one per seed."""
    data = tomli.loads(matrix.path.read_text(encoding="utf-8"))
    if regime is not Regime.FP32:
        _refuse(matrix.path, data, regime)
    controls = {spec.name: spec for spec in experiment.controls}
    homes = {spec.name: home_of(spec, controls[spec.control or ""]) for spec in experiment.tests}
    named = {name for name, home in homes.items() if home is not None}
    others = (*experiment.controls, *([experiment.anchor] if experiment.anchor else []))
    named |= {spec.name for spec in others if home_of(spec, spec) is not None}
    changed = rewritten(data, regime, frozenset(named))
    if extent.steps is not None:
        _shorten(matrix.path, changed, extent.steps)
    if extent.seed is not None:
        changed = {**changed, "seed": extent.seed}
    seeds: Sequence[int | None] = (None,)
    if matrix.name.startswith(SEEDED):
        seeds = SEEDS[: 1 if extent.nightly else None]
    made = []
    for seed in seeds:
        if seed is None and changed == data:
            made.append(matrix)
            continue
        names, copied = _seeded(matrix.sets, changed, seed)
        stem = matrix.name if seed is None else f"{matrix.name}.{seed}"
        path = folder_of(folder, regime) / stem / f"{stem}.toml"
        title = "_".join([experiment.name, *filter(None, (_suffix(regime), seed and str(seed)))])
        _write(path, {**_placed(copied, matrix.path), "name": title}, matrix.path)
        made.append(replace(matrix, path=path, sets=names))
    return made


def _suffix(regime: Regime) -> str:
    return "" if regime is Regime.FP32 else regime.value


def _refuse(path: Path, data: Mapping[str, Any], regime: Regime) -> None:
    """Raise ConfigError for tables in which the precision cannot be set per test set."""
    if found := [key for key in _REFUSED if key in data]:
        raise ConfigError(
            [
                Problem(
                    f"{path}: {key}",
                    f"cannot be put into regime {regime.value}",
                    "write [[test]] sets, or run it with --regime fp32",
                )
                for key in found
            ]
        )


def _seeded(
    names: Iterable[str], data: Mapping[str, Any], seed: int | None
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Add the seed to the names of the sets, to make them unique."""
    if seed is None:
        return tuple(names), dict(data)
    tests = [{**test, "name": _of_seed(test["name"], seed)} for test in data.get("test", [])]
    return tuple(_of_seed(name, seed) for name in names), {**data, "seed": seed, "test": tests}


def _of_seed(name: str, seed: int) -> str:
    return f"{name}_seed{seed}"


def _shorten(path: Path, data: dict[str, Any], steps: int) -> None:
    """Let a parsed matrix train fewer steps; changes it in place.

    Raises ConfigError if it does not set the number of steps.
    """
    common = data.setdefault("trainer", {}).setdefault("set", {})
    tables = [common, *(table.get("set", {}) for table in _set_tables(data))]
    # A dotted key in quotes, or a table.
    found = [(table, TRAINING_STEPS) for table in tables if TRAINING_STEPS in table]
    nested = [table[_TRAINING] for table in tables if isinstance(table.get(_TRAINING), dict)]
    found += [(table, _COUNT) for table in nested if _COUNT in table]
    if not found:
        problem = Problem(
            f"{path}: trainer.set", f"has no {TRAINING_STEPS!r}, so --steps cannot shorten it"
        )
        raise ConfigError([problem])
    for table, key in found:
        table[key] = steps


def _set_tables(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    alone = [data[key] for key in ("anchor", "control") if key in data]
    return [*alone, *data.get("controls", {}).values(), *data.get("test", [])]


def _placed(data: Mapping[str, Any], original: Path) -> dict[str, Any]:
    """The matrix with absolute paths for files next to the original or one folder up."""
    folders = (original.resolve().parent, original.resolve().parent.parent)

    def place(table: Mapping[str, Any]) -> dict[str, Any]:
        placed = dict(table)
        for key in _PATH_KEYS:
            written = placed.get(key)
            if isinstance(written, str):
                placed[key] = _found(written, folders)
        return placed

    result = dict(data)
    if "trainer" in result:
        result["trainer"] = place(result["trainer"])
    for key in ("anchor", "control"):
        if key in result:
            result[key] = place(result[key])
    result["controls"] = {name: place(each) for name, each in result.get("controls", {}).items()}
    result["test"] = [place(test) for test in result.get("test", [])]
    return {key: value for key, value in result.items() if key not in _SETS or value}


def _found(written: str, folders: Iterable[Path]) -> str:
    file, colon, function = written.rpartition(":") if ":" in written else (written, "", "")
    for folder in folders:
        if (folder / file).is_file():
            return f"{folder / file}{colon}{function}"
    return written


def _write(path: Path, data: Mapping[str, Any], original: Path) -> None:
    head = f"# Written by benchmarks/prove.py, from {original}.\n"
    # TOML needs a file's scalars before its tables; tomli_w keeps the given order.
    plain = {key: value for key, value in data.items() if not _is_table(value)}
    tables = {key: value for key, value in data.items() if _is_table(value)}
    atomic_write(path, (head + tomli_w.dumps({**plain, **tables})).encode())


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)
    )
