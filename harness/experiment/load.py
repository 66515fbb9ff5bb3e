"""An experiment file as an ``Experiment``: all its problems at once, or none."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import ConfigError, Problem, suggest
from harness.experiment import matrix, space_time
from harness.experiment.baseline import baseline_of, baseline_problems
from harness.experiment.cluster import PlacedCluster, check_cluster, cluster_of
from harness.experiment.command import file_problems
from harness.experiment.kinds import ElasticTable, SpaceTimeTable, read_test
from harness.experiment.paths import expanded, find_file
from harness.experiment.read import read_toml
from harness.experiment.repeats import repeat_problems, repeats_of
from harness.experiment.seed_checkpoint import find_seed_checkpoint
from harness.experiment.seeds import other_seeds, seed_problems
from harness.experiment.sets import SetBuilder, Where
from harness.experiment.tables import (
    AnchorTable,
    ControlTable,
    FileTable,
    ProbeTable,
    TestTable,
    validate,
)
from harness.experiment.trainer import CommandTable, TitanTable, read_trainer
from harness.model import (
    FEWEST_DRAWN,
    Across,
    Cluster,
    Experiment,
    Launcher,
    Repeat,
    SetSpec,
)
from harness.model.plan import other_seed_name

GENERATED = re.compile(r"seed(\.\d+)?")
"""Names that the plan gives to seed-checkpoint jobs."""


class PlacedControl(NamedTuple):
    table: ControlTable
    where: Where


class PlacedAnchor(NamedTuple):
    table: AnchorTable
    where: Where


class PlacedTest(NamedTuple):
    table: TestTable | ElasticTable
    where: Where


def load_experiment(
    path: Path, *, launcher: Launcher | None = None, cluster: Path | Cluster | None = None
) -> Experiment:
    """Read and validate an experiment file.

    Args:
        path: the file.
        launcher: replaces the file's.
        cluster: the user's own cluster file, whose keys those of ``[cluster]`` replace; or a whole
            cluster that replaces both. Looked at only where the launcher needs one.

    Raises:
        ConfigError: with every problem of the file. Rules that need batch sizes and toolchains
            (those of the converging guide) are checked by ``harness.plan.make_plan``.
    """
    data = read_toml(path)
    problems: list[Problem] = []
    top = validate(FileTable, data, _place(path), problems)
    probe = validate(ProbeTable, _tables_of(data, "probe"), _place(path, "probe"), problems)
    trainer = read_trainer(_tables_of(data, "trainer"), _place(path, "trainer"), problems)
    anchor = _anchor(path, data, problems)
    controls = list(_controls(path, data, problems))
    tests = list(_tests(path, data, problems))
    if not data.get("test") and "matrix" not in data:
        problems.append(Problem(str(path), "there is no test set", "add a [[test]] or a [matrix]"))
    others = other_seeds(top, _place(path), problems) if top else ()
    _check_names(controls, anchor, tests, top.repeats if top else [], others, problems)
    launcher = launcher or Launcher(top.launcher if top else Launcher.LOCAL)
    of_command = isinstance(trainer, CommandTable)  # which no cluster runs: said below
    placed = _cluster(path, data, Launcher.LOCAL if of_command else launcher, cluster, problems)
    builder = SetBuilder(trainer, _place(path, "trainer"), _folders(path), problems, placed)
    control_specs, test_specs = _build(builder, controls, tests, _control_names(data))
    anchor_spec = _build_anchor(builder, anchor, control_specs)
    if top is not None:
        problems += repeat_problems(_place(path), top, trainer, control_specs)
    if isinstance(trainer, CommandTable):
        problems += file_problems(trainer, launcher, data, _place(path))
    baseline_problems(data, _place(path), problems)
    given = trainer.seed_checkpoint if isinstance(trainer, TitanTable) else None
    problems += seed_problems(
        data, _place(path), given_weights=given is not None, command=builder.trained_by.settings
    )
    of_titan = trainer if isinstance(trainer, TitanTable) else TitanTable()
    seed_checkpoint = find_seed_checkpoint(
        of_titan.seed_checkpoint, builder.folders, _place(path, "trainer"), problems
    )
    if top is not None and probe is not None:
        problems += _drawing_problems(path, test_specs, top, probe)
    if problems or top is None or probe is None:
        # Sets generated from one table share what is wrong with it.
        raise ConfigError(list(dict.fromkeys(problems)))
    return Experiment(
        name=top.name or path.stem,
        path=path,
        controls=control_specs,
        tests=test_specs,
        seed=top.seed,
        other_seeds=others,
        repeats=repeats_of(top, trainer),
        reference=top.reference,
        frozen=probe.frozen,
        calibration=_calibration(top.calibration, builder.folders),
        baseline=baseline_of(top.baseline, builder.folders),
        baseline_across=tuple(map(Across, top.baseline_across)),
        cadence=probe.cadence,
        anchor=anchor_spec,
        startup_timeout_s=trainer.startup_timeout_s,
        progress_timeout_s=trainer.progress_timeout_s,
        cpu_ranks=trainer.cpu_ranks,
        seed_checkpoint=seed_checkpoint,
        launcher=launcher,
        cluster=placed.cluster if placed else None,
        tokens_per_gpu_second=of_titan.tokens_per_gpu_second,
    )


def _drawing_problems(
    path: Path, tests: Sequence[SetSpec], top: FileTable, probe: ProbeTable
) -> Iterator[Problem]:
    """What the file says that leaves a set with random numbers of its own without frozen steps."""
    names = ", ".join(repr(spec.name) for spec in tests if spec.own_random_numbers)
    if not names:
        return
    draw = f"which {names} with own_random_numbers cannot be judged without"
    if probe.frozen < FEWEST_DRAWN:
        why = f"is {probe.frozen}: that many frozen steps, {draw}"
        yield Problem(_place(path, "probe")("frozen"), why, f"use {FEWEST_DRAWN} or more, as 16")
    if not top.reference:
        why = f"is false: it switches frozen steps off, {draw}"
        yield Problem(_place(path)("reference"), why, "leave it out")


# ------------------------------------------------------------------- the file


def _place(path: Path, prefix: str = "", name: object = None) -> Where:
    """Places read ``experiments/smoke.toml: test[2].parallelism.tp of 'fsdp2_tp2'``."""

    def where(key: str) -> str:
        dotted = ".".join(part for part in (prefix, key) if part)
        return f"{path}: {dotted}" + (f" of {name!r}" if isinstance(name, str) else "")

    return where


def _folders(path: Path) -> tuple[Path, ...]:
    """Where the file's relative paths are looked up: beside it, one up, the current directory."""
    folder = path.resolve().parent
    return tuple(dict.fromkeys((folder, folder.parent, Path.cwd())))


def _tables_of(data: dict[str, Any], key: str) -> dict[str, Any]:
    """A table of the file; what is no table is reported by ``FileTable``."""
    value = data.get(key, {})
    return value if isinstance(value, dict) else {}


def _cluster(
    path: Path,
    data: dict[str, Any],
    launcher: Launcher,
    given: Path | Cluster | None,
    problems: list[Problem],
) -> PlacedCluster | None:
    """The cluster that the launcher needs, if it does; ``[cluster]`` is looked at in any case."""
    table, where = _tables_of(data, "cluster"), _place(path, "cluster")
    if launcher is Launcher.LOCAL:
        check_cluster(table, where, problems)
        return None
    if isinstance(given, Cluster):
        return PlacedCluster(given, where)
    return cluster_of(table, where, given, problems)


def _control_tables(data: dict[str, Any]) -> dict[str, Any]:
    """Every control as written, by its place; ``[control]`` first, names filled in."""
    tables = {"control": data["control"]} if "control" in data else {}
    for name, table in _tables_of(data, "controls").items():
        tables[f"controls.{name}"] = {"name": name, **table} if isinstance(table, dict) else table
    return tables


def _control_names(data: dict[str, Any]) -> list[str]:
    """Names that a test may give as its control, those of broken controls included."""
    tables = [table for table in _control_tables(data).values() if isinstance(table, dict)]
    return [str(table.get("name", ControlTable.model_fields["name"].default)) for table in tables]


def _controls(path: Path, data: dict[str, Any], problems: list[Problem]) -> Iterator[PlacedControl]:
    """The controls that are right in themselves, ``[control]`` first."""
    for prefix, table in _control_tables(data).items():
        if isinstance(table, dict):
            where = _place(path, prefix, table.get("name"))
            if control := validate(ControlTable, table, where, problems):
                yield PlacedControl(control, where)


def _anchor(path: Path, data: dict[str, Any], problems: list[Problem]) -> PlacedAnchor | None:
    """``[anchor]``, if there is one and it is right in itself."""
    table = data.get("anchor")
    if not isinstance(table, dict):
        return None
    where = _place(path, "anchor", table.get("name"))
    anchor = validate(AnchorTable, table, where, problems)
    return PlacedAnchor(anchor, where) if anchor else None


def _tests(path: Path, data: dict[str, Any], problems: list[Problem]) -> Iterator[PlacedTest]:
    """The test sets that are right in themselves: ``[[test]]`` first, then the matrix."""
    tables = data.get("test", [])
    for index, table in enumerate(tables if isinstance(tables, list) else []):
        if isinstance(table, dict):
            where = _place(path, f"test[{index}]", table.get("name"))
            test = read_test(table, where, problems)
            if isinstance(test, SpaceTimeTable):
                generated = space_time.expand(test, where, problems)
                yield from (PlacedTest(each, where) for each in generated)
            elif test is not None:
                yield PlacedTest(test, where)
    if isinstance(data.get("matrix"), dict):
        for test in matrix.expand(data["matrix"], _place(path, "matrix"), problems):
            yield PlacedTest(test, _place(path, "matrix", test.name))


# ------------------------------------------------- what tables mean together


def _check_names(
    controls: list[PlacedControl],
    anchor: PlacedAnchor | None,
    tests: list[PlacedTest],
    repeats: list[Repeat],
    other_seeds: Sequence[int],
    problems: list[Problem],
) -> None:
    """Names are unique in any case and encoding, generated names included."""
    placed: list[PlacedControl | PlacedAnchor | PlacedTest] = [*controls, *tests]
    taken = {
        _folded(other_seed_name(each.table.name, seed)): f"{each.table.name!r} by seed {seed}"
        for each in placed
        for seed in other_seeds
    }
    taken |= {
        _folded(f"{control.table.name}.{repeat}"): f"a repeat of {control.table.name!r}"
        for control in controls
        for asked in repeats
        for repeat in {asked, asked.in_low_precision}
    }
    placed += [anchor] if anchor else []
    for table, where in placed:
        folded = _folded(table.name)
        if GENERATED.fullmatch(folded):
            problems.append(Problem(where("name"), "is kept for the seed checkpoint's job"))
        elif folded in taken:
            problems.append(
                Problem(
                    where("name"),
                    f"is already the name of {taken[folded]}",
                    "names must differ in more than upper and lower case",
                )
            )
        taken.setdefault(folded, "another set")


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()


def _build(
    builder: SetBuilder,
    controls: list[PlacedControl],
    tests: list[PlacedTest],
    known: list[str],
) -> tuple[tuple[SetSpec, ...], tuple[SetSpec, ...]]:
    """Control and test sets that could be built; why others could not is in the problems."""
    named = {table.name: builder.build(table, table.name, where) for table, where in controls}
    built: list[SetSpec] = []
    for table, where in tests:
        name = table.control if table.control is not None else next(iter(known), "")
        control = named.get(name)
        if control is not None:
            spec = builder.build(table, table.name, where, control=control)
            built += [spec] if spec else []
        elif name not in known and known:  # no control at all has been reported already
            builder.problems.append(
                Problem(where("control"), f"there is no control {name!r}", suggest(name, known))
            )
    return tuple(spec for spec in named.values() if spec), tuple(built)


def _build_anchor(
    builder: SetBuilder, anchor: PlacedAnchor | None, controls: tuple[SetSpec, ...]
) -> SetSpec | None:
    """The anchor, with the train config and toolchain of the control that it is to challenge."""
    if anchor is None or not controls:  # why there is no control has been reported already
        return None
    table, where = anchor
    spec = builder.build(table, table.name, where, control=controls[0])
    return None if spec is None else replace(spec, control=None)


def _calibration(written: str | None, folders: tuple[Path, ...]) -> Path | None:
    """The file, if it is there; else where it should be, for `converge calibrate` to write."""
    if written is None:
        return None
    return find_file(written, folders) or folders[0] / expanded(written)
