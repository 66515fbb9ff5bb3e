"""Loads an experiment file as an ``Experiment``, or raises all its problems together."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from converge_harness.errors import MAX_LISTED, ConfigError, Problem, suggest
from converge_harness.experiment import matrix, space_time
from converge_harness.experiment.cluster import PlacedCluster, check_cluster, cluster_of
from converge_harness.experiment.other_trainers import (
    builder_of,
    other_builders,
    trainer_table_problems,
)
from converge_harness.experiment.own_techniques import read_own_techniques
from converge_harness.experiment.sets import CHECKPOINT_EVERY, SetBuilder
from converge_harness.experiment.tables import (
    LARGEST_SEED,
    AnchorTable,
    ControlTable,
    ElasticTable,
    FileTable,
    ProbeTable,
    SpaceTimeTable,
    StopTable,
    TestTable,
    read_test,
)
from converge_harness.model import (
    BASELINES,
    FEWEST_DRAWN,
    Across,
    Cluster,
    Experiment,
    Launcher,
    Repeat,
    SetSpec,
    Stop,
)
from converge_harness.model.plan import other_seed_name
from converge_harness.toml import Table, Where, expanded, find, find_file, read_toml, validate
from converge_harness.trainers import read_trainer, trainer_of_kind

GENERATED = re.compile(r"seed(\.\d+)?")
"""Names that a plan gives to seed-checkpoint jobs."""
_EXTENDS = "extends"


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
        path: the file. launcher: replaces the file's. cluster: the user's own cluster file, over
        which ``[cluster]`` takes precedence; or a complete cluster that replaces both. Used only if
        the launcher needs one.

    Raises:
        ConfigError: with every problem of the file. Rules that need batch sizes and toolchains
            (those of the converging guide) are checked by ``converge_harness.plan.make_plan``.
    """
    data = _read(path)
    problems: list[Problem] = []
    top = validate(FileTable, data, _place(path), problems)
    probe = validate(ProbeTable, _tables_of(data, "probe"), _place(path, "probe"), problems)
    stop = validate(StopTable, _tables_of(data, "stop"), _place(path, "stop"), problems)
    trainer = read_trainer(_tables_of(data, "trainer"), _place(path, "trainer"), problems)
    anchor = _anchor(path, data, problems)
    controls = list(_controls(path, data, problems))
    traded = trainer_of_kind(trainer.kind).accumulated
    tests = list(_tests(path, data, traded, problems))
    if not data.get("test") and "matrix" not in data:
        problems.append(Problem(str(path), "there is no test set", "add a [[test]] or a [matrix]"))
    others = _other_seeds(top, _place(path), problems) if top else ()
    _check_names(controls, anchor, tests, top.repeats if top else [], others, problems)
    launcher = launcher or Launcher(top.launcher if top else Launcher.LOCAL)
    builder = SetBuilder(trainer, _place(path), _place(path, "trainer"), _folders(path), problems)
    of_file, can = builder.of_file, builder.of_file.trainer.can
    # A trainer that cannot run under a scheduler is reported below.
    placed = _cluster(
        path, data, launcher if can.under_scheduler else Launcher.LOCAL, cluster, problems
    )
    # All of these before ``_build``; own techniques last, since they read the builder's overrides.
    builder.cluster = placed
    builder.checkpoint_every = top.checkpoint_every if top else None
    builder.stop = Stop(stop.when) if stop else Stop.NEVER
    techniques = _tables_of(data, "technique")
    builder.technique_names = tuple(techniques)
    builder.own_techniques = read_own_techniques(
        techniques, builder.folders, _place(path, "technique"), problems, builder.overrides_of
    )
    problems += _unknown_techniques(path, data, builder)
    others_by_name = other_builders(_tables_of(data, "trainers"), builder)
    control_specs, test_specs = _build(
        builder, others_by_name, controls, tests, _control_names(data)
    )
    anchor_spec = _build_anchor(builder, anchor, control_specs)
    if top is not None:
        problems += _repeat_problems(_place(path), top, builder, control_specs)
    for each in (builder, *others_by_name.values()):
        problems += _trainer_problems(each, launcher, data, _place(path))
    problems += _unblessable(builder, others_by_name, data, _place(path))
    every_spec = (*control_specs, *test_specs, *([anchor_spec] if anchor_spec else []))
    problems += _unused_toolchain(_tables_of(data, "trainer"), builder, every_spec, _place(path))
    named = [_trainer_named(table) for table, _ in tests]
    problems += trainer_table_problems(builder, others_by_name, named, every_spec)
    _baseline_problems(data, _place(path), problems)
    problems += _seed_problems(data, _place(path), builder, test_specs)
    if top is not None and probe is not None:
        problems += _drawing_problems(path, test_specs, top, probe)
    if problems or top is None or probe is None or stop is None:
        # Sets generated from one table share its problems.
        if extended := read_toml(path).get(_EXTENDS):
            problems.append(Problem(str(path), f"extends {extended}, where keys may be meant"))
        raise ConfigError(list(dict.fromkeys(problems)))
    return Experiment(
        name=top.name or path.stem,
        path=path,
        controls=control_specs,
        tests=test_specs,
        left_out=builder.left_out,
        seed=top.seed,
        other_seeds=others,
        repeats=_repeats_of(top, builder),
        reference=top.reference,
        frozen=probe.frozen,
        calibration=_calibration(top.calibration, builder.folders),
        baseline=_baseline_of(top.baseline, builder.folders),
        baseline_across=tuple(map(Across, top.baseline_across)),
        cadence=probe.cadence,
        stop_after=stop.after,
        waiting_ranks=stop.waiting_ranks,
        anchor=anchor_spec,
        startup_timeout_s=trainer.startup_timeout_s,
        progress_timeout_s=trainer.progress_timeout_s,
        cpu_ranks=trainer.cpu_ranks,
        seed_checkpoint=of_file.seed_checkpoint,
        launcher=launcher,
        cluster=placed.cluster if placed else None,
        tokens_per_gpu_second=of_file.tokens_per_gpu_second,
    )


def _read(path: Path) -> dict[str, Any]:
    """An experiment file, laid over the one that it ``extends``."""
    data = read_toml(path)
    if _EXTENDS not in data:
        return data
    named = data.pop(_EXTENDS)
    place = f"{path}: {_EXTENDS}"
    # In one folder, because paths in a file are resolved from where it lies.
    if not isinstance(named, str) or Path(named).name != named or not named.endswith(".toml"):
        hint = f'as in {_EXTENDS} = "models.toml"'
        raise ConfigError(Problem(place, f"{named!r} is not a file name in {path.parent}", hint))
    base = read_toml(path.with_name(named))
    if _EXTENDS in base:
        message = f"{named} extends {base[_EXTENDS]} itself"
        raise ConfigError(Problem(place, message, "extend a file that stands alone"))
    base.pop("name", None)  # two reports of one name would replace each other
    return _with_named_controls(_laid_over(base, data), data)


def _with_named_controls(merged: dict[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Without the further controls of the base that no set names, if the file has its own sets."""
    tests, own, controls = (data.get("test"), data.get("controls", {}), merged.get("controls"))
    if "control" not in merged or not all(isinstance(each, dict) for each in (own, controls)):
        return merged
    if not isinstance(tests, list):
        return merged
    generated = merged.get("matrix")
    named = [each.get("control") for each in (*tests, generated) if isinstance(each, dict)]
    kept = {
        key: table
        for key, table in merged["controls"].items()
        if key in own or (table.get("name", key) if isinstance(table, dict) else key) in named
    }
    return {**merged, "controls": kept}


def _laid_over(base: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Tables are merged key by key. Other values replace the base's, and so do arrays of tables."""
    merged = dict(base)
    for key, value in data.items():
        below = merged.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            merged[key] = _laid_over(below, value)
        else:
            merged[key] = value
    return merged


def _drawing_problems(
    path: Path, tests: Sequence[SetSpec], top: FileTable, probe: ProbeTable
) -> Iterator[Problem]:
    """Settings that leave a set with ``own_random_numbers`` without enough frozen steps."""
    names = ", ".join(repr(spec.name) for spec in tests if spec.own_random_numbers)
    if not names:
        return
    draw = f"but {names} with own_random_numbers cannot be judged without them"
    if probe.frozen < FEWEST_DRAWN:
        why = f"is {probe.frozen}: too few frozen steps, {draw}"
        yield Problem(
            _place(path, "probe")("frozen"), why, f"use {FEWEST_DRAWN} or more, such as 16"
        )
    if not top.reference:
        why = f"is false, which turns frozen steps off, {draw}"
        yield Problem(_place(path)("reference"), why, "leave it out")


# ------------------------------------------------------------------- the file


def _place(path: Path, prefix: str = "", name: object = None) -> Where:
    """Places such as ``experiments/smoke.toml: test[2].parallelism.tp of 'fsdp2_tp2'``."""

    def where(key: str) -> str:
        dotted = ".".join(part for part in (prefix, key) if part)
        return f"{path}: {dotted}" + (f" of {name!r}" if isinstance(name, str) else "")

    return where


def _folders(path: Path) -> tuple[Path, ...]:
    """Where relative paths are resolved: the file's folder, its parent, the current directory."""
    folder = path.resolve().parent
    return tuple(dict.fromkeys((folder, folder.parent, Path.cwd())))


def _tables_of(data: dict[str, Any], key: str) -> dict[str, Any]:
    """A table of the file; ``FileTable`` reports a value that is not a table."""
    value = data.get(key, {})
    return value if isinstance(value, dict) else {}


def _cluster(
    path: Path,
    data: dict[str, Any],
    launcher: Launcher,
    given: Path | Cluster | None,
    problems: list[Problem],
) -> PlacedCluster | None:
    """The cluster if the launcher needs one; ``[cluster]`` is checked in any case."""
    table, where = _tables_of(data, "cluster"), _place(path, "cluster")
    if launcher is Launcher.LOCAL:
        check_cluster(table, where, problems)
        return None
    if isinstance(given, Cluster):
        return PlacedCluster(given, where)
    return cluster_of(table, where, given, launcher, problems)


def _control_tables(data: dict[str, Any]) -> dict[str, Any]:
    """Every control as written, by place; ``[control]`` first, with names filled in."""
    tables = {"control": data["control"]} if "control" in data else {}
    for name, table in _tables_of(data, "controls").items():
        tables[f"controls.{name}"] = {"name": name, **table} if isinstance(table, dict) else table
    return tables


def _control_names(data: dict[str, Any]) -> list[str]:
    """Names that a test may give as its control, including those of invalid controls."""
    tables = [table for table in _control_tables(data).values() if isinstance(table, dict)]
    return [str(table.get("name", ControlTable.model_fields["name"].default)) for table in tables]


def _controls(path: Path, data: dict[str, Any], problems: list[Problem]) -> Iterator[PlacedControl]:
    """The controls that are valid by themselves, ``[control]`` first."""
    for prefix, table in _control_tables(data).items():
        if isinstance(table, dict):
            where = _place(path, prefix, table.get("name"))
            if control := validate(ControlTable, table, where, problems):
                yield PlacedControl(control, where)


def _anchor(path: Path, data: dict[str, Any], problems: list[Problem]) -> PlacedAnchor | None:
    """``[anchor]``, if there is one and it is valid by itself."""
    table = data.get("anchor")
    if not isinstance(table, dict):
        return None
    where = _place(path, "anchor", table.get("name"))
    anchor = validate(AnchorTable, table, where, problems)
    return PlacedAnchor(anchor, where) if anchor else None


def _tests(
    path: Path, data: dict[str, Any], accumulated: Sequence[str], problems: list[Problem]
) -> Iterator[PlacedTest]:
    """The test sets that are valid by themselves: ``[[test]]`` first, then the matrix.

    ``accumulated``: as ``space_time.expand`` takes it.
    """
    tables = data.get("test", [])
    for index, table in enumerate(tables if isinstance(tables, list) else []):
        if isinstance(table, dict):
            where = _place(path, f"test[{index}]", table.get("name"))
            test = read_test(table, where, problems)
            if isinstance(test, SpaceTimeTable):
                generated = space_time.expand(test, accumulated, where, problems)
                yield from (PlacedTest(each, where) for each in generated)
            elif test is not None:
                yield PlacedTest(test, where)
    if isinstance(data.get("matrix"), dict):
        for test in matrix.expand(data["matrix"], _place(path, "matrix"), problems):
            yield PlacedTest(test, _place(path, "matrix", test.name))


def _unknown_techniques(path: Path, data: dict[str, Any], builder: SetBuilder) -> Iterator[Problem]:
    """Names of techniques that no set may have, also in tables that are invalid otherwise."""
    tests = data.get("test", [])
    numbered = enumerate(tests if isinstance(tests, list) else [])
    tables = {**_control_tables(data), "anchor": data.get("anchor")}
    tables |= {f"test[{index}]": table for index, table in numbered}
    for prefix, table in tables.items():
        names = table.get("techniques") if isinstance(table, dict) else None
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            yield from builder.unknown_techniques(names, _place(path, prefix, table.get("name")))


# ------------------------------------------------- checks across tables


def _check_names(
    controls: list[PlacedControl],
    anchor: PlacedAnchor | None,
    tests: list[PlacedTest],
    repeats: list[Repeat],
    other_seeds: Sequence[int],
    problems: list[Problem],
) -> None:
    """Check that names are unique ignoring case and encoding, including generated names."""
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
            problems.append(Problem(where("name"), "is reserved for the seed checkpoint's job"))
        elif folded in taken:
            problems.append(
                Problem(
                    where("name"),
                    f"is already the name of {taken[folded]}",
                    "names must differ in more than case",
                )
            )
        taken.setdefault(folded, "another set")


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()


def _build(
    builder: SetBuilder,
    others: Mapping[str, SetBuilder],
    controls: list[PlacedControl],
    tests: list[PlacedTest],
    known: list[str],
) -> tuple[tuple[SetSpec, ...], tuple[SetSpec, ...]]:
    """Control and test sets that could be built; ``problems`` has why others could not."""
    named = {table.name: builder.build(table, table.name, where) for table, where in controls}
    built: list[SetSpec] = []
    for table, where in tests:
        name = table.control if table.control is not None else next(iter(known), "")
        control = named.get(name)
        if control is not None:
            own = builder_of(_trainer_named(table), builder, others, where)
            if own is None:
                continue
            other = own is not builder
            spec = own.build(table, table.name, where, control=control, of_other_trainer=other)
            built += [spec] if spec else []
        elif name not in known and known:  # a file without any control has already been reported
            builder.problems.append(
                Problem(where("control"), f"there is no control {name!r}", suggest(name, known))
            )
    builder.problems += _nothing_left(builder, tests, {spec.name for spec in built})
    if not built:
        builder.problems += builder.lacks
    return tuple(spec for spec in named.values() if spec), tuple(built)


def _nothing_left(
    builder: SetBuilder, tests: Sequence[PlacedTest], built: AbstractSet[str]
) -> Iterator[Problem]:
    """Tables of which every generated set is left out."""
    of_tables: dict[Where, list[str]] = {}
    for table, where in tests:
        of_tables.setdefault(where, []).append(table.name)
    for where, names in of_tables.items():
        left_out = [builder.left_out[name] for name in names if name in builder.left_out]
        generated = not any(each.was_asked_for for each in left_out)
        if generated and len(left_out) == len(names) and built.isdisjoint(names):
            whys = dict.fromkeys(each.why for each in left_out)
            yield Problem(
                where("kind"),
                f"leaves no set: {', and '.join(whys)}",
                "pass what sets differ in by placeholders: see docs/any-trainer.md",
            )


def _trainer_named(table: TestTable | ElasticTable) -> str | None:
    """The ``[trainers.NAME]`` that trains a test set; None: ``[trainer]``."""
    return table.trainer if isinstance(table, TestTable) else None


def _build_anchor(
    builder: SetBuilder, anchor: PlacedAnchor | None, controls: tuple[SetSpec, ...]
) -> SetSpec | None:
    """The anchor, with the first control's train config and toolchain."""
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


FEWEST, MOST = 2, 100
SEED = "seed"


class _SeedsTable(Table):
    """``[seeds]``: with how many seeds every control and test set is trained.

    A single seed cannot show whether a change of the loss is larger than that by another seed; this
    is judged over all of them (``docs/judging.md``, "Several seeds").
    """

    count: Annotated[int, Field(ge=FEWEST, le=MOST)]


def _other_seeds(top: FileTable, where: Where, problems: list[Problem]) -> tuple[int, ...]:
    """The seeds after the file's ``seed``; none without ``[seeds]``."""
    if top.seeds is None:
        return ()
    table = validate(_SeedsTable, top.seeds, lambda key: where(f"seeds.{key}"), problems)
    last = top.seed + table.count - 1 if table else top.seed
    if last > LARGEST_SEED:
        problems.append(
            Problem(where("seeds.count"), f"ends at seed {last}; the largest is {LARGEST_SEED}")
        )
    return tuple(range(top.seed + 1, last + 1))


def _seed_problems(
    data: Mapping[str, Any], where: Where, builder: SetBuilder, tests: Sequence[SetSpec]
) -> Iterator[Problem]:
    """What in a file conflicts with ``[seeds]``."""
    if "seeds" not in data:
        return
    if settled := [spec.name for spec in tests if spec.stop is Stop.SETTLED]:
        why = (
            f'cannot be combined with stop = "settled" ({", ".join(settled[:MAX_LISTED])}): all '
            "seeds judge a set, so none of its runs is stopped"
        )
        yield Problem(where("seeds"), why, "leave out one")
    if "baseline" in data:
        why = "cannot be combined with a baseline: a baseline has one seed"
        yield Problem(where("seeds"), why, "leave out one")
    if builder.of_file.names_weights:
        yield Problem(
            where("seeds"),
            "cannot be combined with trainer.seed_checkpoint: every seed would start from it",
            "leave out one",
        )
    if not builder.trainer.takes_seed(builder.of_file.trainer):
        yield Problem(
            where("seeds"),
            "has no effect on a program that does not get the seed: all its runs would be the same",
            'pass it, as in ["train.py", "--seed", "{seed}"]',
        )


def _repeats_of(top: FileTable, builder: SetBuilder) -> tuple[Repeat, ...]:
    """The file's repeats, else those defaults that its trainer can make.

    They leave out by themselves what a loader cannot do (``converge_harness.plan``).
    """
    if "repeats" in top.model_fields_set:
        return tuple(top.repeats)
    made = builder.of_file.trainer
    return tuple(each for each in top.repeats if not builder.trainer.unmakeable(each, made, ())[0])


def _repeat_problems(
    where: Where, top: FileTable, builder: SetBuilder, controls: Sequence[SetSpec]
) -> Iterator[Problem]:
    """Repeats in the file that are not possible."""
    if "repeats" not in top.model_fields_set:
        return
    for index, repeat in enumerate(top.repeats):
        why, hint = builder.trainer.unmakeable(repeat, builder.of_file.trainer, controls)
        if why:
            yield Problem(where(f"repeats[{index}]"), f"'{repeat}' {why}", hint)


def _trainer_problems(
    builder: SetBuilder, launcher: Launcher, data: Mapping[str, object], where: Where
) -> Iterator[Problem]:
    """Top-level settings of a file that its trainer cannot do.

    ``launcher`` is the one in force.
    """
    trainer = builder.of_file.trainer
    why, hint = builder.trainer.why_not_under(launcher, trainer)
    if why:
        elsewhere = "--launcher slurm" if launcher is Launcher.LOCAL else "--launcher local"
        hints = (hint or "leave it out", f"or {elsewhere}")
        yield Problem(where("launcher"), f"is {launcher.value!r}, {why}", ", ".join(hints))
    set_at = [CHECKPOINT_EVERY] if CHECKPOINT_EVERY in data else []
    cluster = data.get("cluster")
    if isinstance(cluster, Mapping) and CHECKPOINT_EVERY in cluster:
        set_at.append(f"cluster.{CHECKPOINT_EVERY}")
    for key in set_at if not trainer.can.continues else ():
        why, hint = builder.trainer.why_not_continued(trainer)
        hint = f"{hint}, or " if hint else ""
        hint += "leave it out: an interrupted run starts over"
        yield Problem(where(key), f"is set, but {why}", hint)
    yield from builder.trainer.file_problems(trainer, data, where)


def _unblessable(
    builder: SetBuilder,
    others: Mapping[str, SetBuilder],
    data: Mapping[str, object],
    where: Where,
) -> Iterator[Problem]:
    """A baseline in place of controls that cannot be blessed."""
    trainer = builder.of_file.trainer
    who = f"a {trainer.kind} trainer"
    if "baseline" in data and not trainer.can.baselines:
        yield Problem(
            where("baseline"),
            f"is not possible: {who}'s control cannot be blessed, because not all files of its "
            "program are known",
            "leave it out: then the control is run",
        )
    if "baseline" in data and others:
        yield Problem(
            where("baseline"),
            f"has no weights for the sets of [trainers.{next(iter(others))}] to start from",
            "leave it out: then the control is run",
        )


def _unused_toolchain(
    table: Mapping[str, Any], builder: SetBuilder, specs: Sequence[SetSpec], where: Where
) -> Iterator[Problem]:
    """A toolchain of ``[trainer]`` in which no set trains: somebody meant that one should."""
    name = builder.of_file.toolchain
    if "toolchain" not in table or not specs or any(spec.toolchain == name for spec in specs):
        return
    yield Problem(
        where("trainer.toolchain"),
        f"no set trains in {name!r}: every control names its own, and a test set that names none "
        "has its control's",
        f'add toolchain = "{name}" to the sets that should, or leave it out',
    )


def _baseline_of(written: str | None, folders: tuple[Path, ...]) -> Path | None:
    """The baseline's folder: ``baselines/NAME``, else the path, even if it does not exist.

    ``folders`` are those in which relative paths are resolved.
    """
    if written is None:
        return None
    named = find(f"{BASELINES}/{written}", folders, Path.is_dir) if "/" not in written else None
    found = named or find(written, folders, Path.is_dir)
    if found is not None:
        return found
    return folders[0] / (expanded(written) if "/" in written else Path(BASELINES) / written)


def _baseline_problems(data: dict[str, Any], where: Where, problems: list[Problem]) -> None:
    """What in a file conflicts with ``baseline``."""
    if "baseline" not in data:
        if "baseline_across" in data:
            problems.append(
                Problem(
                    where("baseline_across"), "has no effect without a baseline", "leave it out"
                )
            )
        return
    reasons = {
        "calibration": "the baseline contains what was learnt from its repeats",
        "controls": "a baseline replaces the only control of a file",
        "anchor": "the control is not run, so it cannot be judged",
    }
    problems += [
        Problem(
            where(key), f"cannot be combined with a baseline: {why}", f"leave out {key} or baseline"
        )
        for key, why in reasons.items()
        if key in data
    ]
